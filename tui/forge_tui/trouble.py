"""The screen that stands for the whole dashboard while the server cannot be watched: why, and what to do."""

from typing import ClassVar, Literal

from textual.app import ComposeResult
from textual.binding import Binding
from textual.screen import Screen

from forge_tui import ink
from forge_tui.ink import Line
from forge_tui.sheet import Sheet

Trouble = Literal["gone", "denied", "other", "version"]

_TITLES = {
    "gone": ("✖ The server does not answer", "bad"),
    "denied": ("✖ The server does not accept this key", "bad"),
    "other": ("✖ This is no forge-server that the dashboard understands", "bad"),
    "version": ("▲ Server and dashboard are of different versions", "warn"),
}
_MENDS = {
    "gone": [
        "It is tried again by itself, and the dashboard goes on where it was.",
        "Start the server with `forge-server up`; another address goes with --url.",
    ],
    "denied": [
        "Give the key of DATA_DIR/admin.key with --key or FORGE_KEY,",
        "or start the dashboard in the folder of the server's forge.toml.",
    ],
    "other": [
        "Check --url: it is the control address, as DATA_DIR/control.url has it.",
        "If it is right, the server is of another version: use the dashboard that came with it.",
    ],
    "version": [
        "What is shown may be wrong or missing. Use the dashboard that came with the server:",
        "install forge-server in the server's version.",
    ],
}


class TroubleScreen(Screen[None]):
    """``tell`` changes what is told."""

    BINDINGS: ClassVar = [
        Binding("r", "app.again", "Try again"),
        Binding("c", "app.go_on", "Go on anyway"),
        Binding("q", "app.quit", "Quit"),
    ]

    def __init__(self, trouble: Trouble, reason: str, url: str, seen: str) -> None:
        super().__init__()
        self.trouble: Trouble = trouble
        self._reason, self._url, self._seen = reason, url, seen

    def compose(self) -> ComposeResult:
        from textual.widgets import Footer

        yield Sheet(id="trouble")
        yield Footer(compact=True)

    def on_mount(self) -> None:
        self.query_one(Sheet).put(self._draw)

    def tell(self, trouble: Trouble, reason: str, seen: str) -> None:
        if (trouble, reason, seen) != (self.trouble, self._reason, self._seen):
            self.trouble, self._reason, self._seen = trouble, reason, seen
            if self.is_mounted:
                self.query_one(Sheet).redraw()
                self.refresh_bindings()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return self.trouble == "version" if action == "app.go_on" else True

    def _draw(self, width: int, height: int) -> list[Line]:
        title, style = _TITLES[self.trouble]
        inner = min(width - 4, 96)
        body: list[Line] = [[(title, f"{style} bold")], []]
        body += [[(row, "text")] for row in ink.wrap(self._reason, inner)] if self._reason else []
        body += [[("server     ", "muted"), (self._url, "info")]]
        if self._seen:
            body += [[("last seen  ", "muted"), (self._seen, "text")]]
        body += [[]]
        body += [[(row, "muted")] for mend in _MENDS[self.trouble] for row in ink.wrap(mend, inner)]
        above = max(0, (height - len(body)) // 3)
        return [[]] * above + [[("  ", ""), *row] for row in body]
