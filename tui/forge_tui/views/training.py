"""Is it learning? Curves of the update, where each step's time went, and the versions with their lineage."""

from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding

from forge_server.client.schemas import PolicyView
from forge_tui import ink, plot, words
from forge_tui.curves import GAP, of_run, sheet
from forge_tui.ink import Line
from forge_tui.model import Model
from forge_tui.sheet import Sheet
from forge_tui.views.base import View

PHASES = (
    ("generate", "info", "█"),
    ("assemble", "good", "░"),
    ("wait_trainer", "muted", "·"),
    ("train", "accent", "▓"),
    ("swap", "warn", "▒"),
)


class TrainingView(View):
    TITLE = "Training"
    PERIOD = 10.0

    BINDINGS: ClassVar = [
        Binding("c", "part('curves')", "Curves"),
        Binding("t", "part('timeline')", "Timeline"),
        Binding("v", "part('versions')", "Versions"),
    ]

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.part = "curves"

    def compose(self) -> ComposeResult:
        yield Sheet(id="training")

    def on_mount(self) -> None:
        self.query_one(Sheet).put(lambda width, height: draw(self.forge.model, self.part, width, height))

    def begin(self) -> None:
        self.query_one(Sheet).focus()

    async def load(self) -> None:
        forge = self.forge
        await forge.load_metrics()
        forge.model.policies = await forge.ask(forge.client.policies)
        self.show()

    def show(self) -> None:
        self.query_one(Sheet).redraw()

    def action_part(self, part: str) -> None:
        self.part = part
        self.query_one(Sheet).scroll_to(y=0, animate=False)
        self.show()


def draw(model: Model, part: str, width: int, height: int) -> list[Line]:
    """Part of the screen; a wide one has room for all."""
    if not model.metrics and not model.policies:
        return [[], [("  No step has been trained yet: curves begin with the first batch.", "muted")]]
    if width >= 140 and height >= 30:
        side = 52
        left = _curves(model, width - side - GAP, height)
        right = [
            *_versions(model.policies, side, height // 2 - 2),
            [],
            *_timeline(model, side, height // 2 - 2),
        ]
        return ink.beside([(left, width - side - GAP), (right, side)], GAP)
    if part == "timeline":
        return _timeline(model, width, 200)
    if part == "versions":
        return _versions(model.policies, width, 500)
    return _curves(model, width, height)


def _curves(model: Model, width: int, height: int) -> list[Line]:
    return sheet(of_run(model.series), width, height)


def _timeline(model: Model, width: int, most: int) -> list[Line]:
    rows = model.of("controller")[-most:][::-1]
    out: list[Line] = [ink.rule("Where each step's time went", width)]
    if not rows:
        return [*out, [("no steps yet", "muted")]]
    totals = [sum(row.metrics.get(f"seconds/{name}") or 0.0 for name, _, _ in PHASES) for row in rows]
    longest = max(totals)
    out.append([(f"{fill} {name.replace('_', ' ')}  ", style) for name, style, fill in PHASES])
    for row, total in zip(rows, totals, strict=True):
        parts = [(row.metrics.get(f"seconds/{name}") or 0.0, style, fill) for name, style, fill in PHASES]
        out.append(
            [
                (f"{row.step:>5} ", "text bold"),
                (words.span_of(total).rjust(7) + " ", "muted"),
                *plot.stacked(parts, max(8, width - 14), longest),
            ]
        )
    return out


def _versions(policies: Sequence[PolicyView], width: int, most: int) -> list[Line]:
    out: list[Line] = [ink.rule("Versions, newest first", width)]
    newest = sorted(policies, key=lambda p: (p.name, -p.version))
    for found in newest[:most]:
        from_ = f"from v{found.parent_version}" if found.parent_version is not None else "the beginning"
        line: Line = [
            (f"v{found.version:<5}", "text bold"),
            (ink.fit(words.told(found.state)[0], 12), words.told(found.state)[1]),
            (f"step {found.step}  " if found.step is not None else "", "text"),
            (f"{from_}  ", "muted"),
            (words.clock_of(found.live_at), "muted"),
        ]
        if found.parent_version is not None and found.parent_version != found.version - 1:
            line.append(("  ⑂", "warn"))
        if found.reason:
            line.append((f"  {found.reason}", "warn"))
        out.append(line)
    if len(newest) > most:
        out.append([(f"and {len(newest) - most} more (v shows all in a narrow window)", "muted")])
    return out
