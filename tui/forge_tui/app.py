"""The dashboard: one window of seven screens, one that opens over it for a rollout, and what is asked before something
is done.

It watches by one event stream and one small poll of the overview; a screen reads more only while it is open. Time
comes from ``clock`` (what is shown) and ``monotonic`` (what is due), so that tests can hold it still.
"""

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from itertools import zip_longest
from typing import Any, ClassVar

from textual import work
from textual.app import ComposeResult, ScreenStackError, SystemCommand
from textual.binding import Binding
from textual.css.query import NoMatches
from textual.screen import Screen
from textual.widgets import ContentSwitcher, Footer

from forge_server import __version__
from forge_server.client.http import ApiError, ForgeClient, ServerUnreachable, WrongServer
from forge_server.client.schemas import EventView
from forge_server.domain.errors import ForgeError, Unauthorized
from forge_tui import ending, palette, words
from forge_tui.dialogs import Help, Pick
from forge_tui.feed import Asker, Feed
from forge_tui.grid import Grid
from forge_tui.ink import Line
from forge_tui.model import Model
from forge_tui.sheet import Sheet
from forge_tui.steering import Steering
from forge_tui.trouble import Trouble, TroubleScreen
from forge_tui.views.base import View
from forge_tui.views.compare import HarnessesView, TasksView
from forge_tui.views.cost import CostView
from forge_tui.views.events import EventsView
from forge_tui.views.overview import OverviewView, tells
from forge_tui.views.rollout import RolloutScreen
from forge_tui.views.rollouts import RolloutsView
from forge_tui.views.training import TrainingView

FLUSH_S = 0.25
OVERVIEW_S = 2.0
RECENT = 100
VIEWS: dict[str, type[View]] = {
    "overview": OverviewView,
    "rollouts": RolloutsView,
    "training": TrainingView,
    "harnesses": HarnessesView,
    "tasks": TasksView,
    "cost": CostView,
    "events": EventsView,
}


class ForgeApp(Steering):
    """Watches the server that ``client`` talks to. ``events``: follow the stream (tests may want none)."""

    TITLE = "forge-server"
    CSS_PATH = "forge.tcss"
    ENABLE_COMMAND_PALETTE = True
    BINDINGS: ClassVar = [
        *(
            Binding(str(i + 1), f"view('{name}')", view.TITLE, show=False)
            for i, (name, view) in enumerate(VIEWS.items())
        ),
        Binding("question_mark", "help", "Keys", key_display="?"),
        Binding("p", "pause", "Pause"),
        Binding("i", "in_flight", "In flight"),
        Binding("u", "run", "Run"),
        Binding("x", "cancel_run", "End run", show=False),
        Binding("H", "mixture", "Harness mixture", show=False),
        Binding("E", "evaluate", "Evaluate now", show=False),
        Binding("S", "checkpoint", "Save checkpoint now", show=False),
        Binding("d", "light", "Light", show=False),
        Binding("ctrl+r", "reload", "Read again", show=False),
        Binding("q", "quit", "Quit"),
    ]

    def __init__(
        self,
        client: ForgeClient,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        events: bool = True,
        theme: str = "forge-dark",
        animated: bool = True,
    ) -> None:
        super().__init__()
        self.client, self.now, self.monotonic = client, clock, monotonic
        self.model, self.feed, self.ask = Model(), Feed(client), Asker()
        self.recent: deque[EventView] = deque(maxlen=RECENT)
        self.chosen: str | None = None
        self._events, self._first_theme, self._animated = events, theme, animated
        self._seen = 0.0
        self._overview_at = self._view_at = float("-inf")
        self._overview_trouble: tuple[Trouble, str] | None = None
        self._accepted = False
        self._lost = 0
        self._loading: set[str] = set()

    # --- life

    def compose(self) -> ComposeResult:
        yield Sheet(id="banner", classes="head")
        yield Sheet(id="tabs", classes="head")
        with ContentSwitcher(initial="overview"):
            for name, view in VIEWS.items():
                yield view(id=name)
        yield Footer(compact=True, show_command_palette=False)

    def on_mount(self) -> None:
        for name in palette.THEMES:
            self.register_theme(palette.theme(name))
        self.theme = self._first_theme
        for id, draw in (("banner", self._banner), ("tabs", self._tabs)):
            sheet = self.query_one(f"#{id}", Sheet)
            sheet.can_focus = False
            sheet.put(draw)
        self.view.begin()
        self.set_interval(FLUSH_S, self.flush)
        self.flush()

    def on_unmount(self) -> None:
        self.feed.stop()
        self.ask.close()

    def get_theme_variable_defaults(self) -> dict[str, str]:
        return {}

    @property
    def idle(self) -> bool:
        """Nothing is being read or asked."""
        return not self._loading and all(
            worker.is_finished or worker.group == "steer" for worker in self.workers
        )

    @property
    def leaving(self) -> bool:
        """What was asked may be answered when nothing is there any more to show it."""
        return not self.is_running or not self.screen_stack or not self.screen_stack[0].query(ContentSwitcher)

    @property
    def view(self) -> View:
        """The screen that is open in the main window."""
        switcher = self.screen_stack[0].query_one(ContentSwitcher)
        return switcher.query_one(f"#{switcher.current}", View)

    @property
    def wide(self) -> bool:
        return self.size.width >= 120

    @property
    def connected(self) -> bool:
        return self._overview_trouble is None and self.feed.state in ("live", "connecting")

    # --- four times a second

    def flush(self) -> None:
        """Hand on what has happened, read what is due, paint what changed."""
        if self.leaving:
            return
        events = self.feed.drain()
        self.recent.extend(event for event in events if tells(event))
        if self.feed.lost != self._lost:
            self._lost = self.feed.lost
            self.forget()
        for screen in self.screen_stack:
            if isinstance(screen, RolloutScreen):
                screen.heard(events)
        if events:
            self.view.heard(events)
        self._watch()
        now = self.monotonic()
        due = now - self._overview_at >= OVERVIEW_S
        if due and self._start("overview", self._read_overview()):
            self._overview_at = now
        if self.model.overview is not None and self.connected:
            self._read_due(now)
        if isinstance(self.view, RolloutsView) and self.screen is self.screen_stack[0]:
            self.view.tick()
        self._header("banner")

    def _read_due(self, now: float) -> None:
        top = self.screen
        if isinstance(top, RolloutScreen):
            if top.due(now):
                self._start("rollout", top.load())
            return
        view = self.view
        due = view.stale or now - self._view_at >= view.PERIOD
        if due and self._start(f"view {view.id}", view.load()):
            view.stale, self._view_at = False, now

    def _start(self, name: str, work: Coroutine[Any, Any, None]) -> bool:
        """Begin to read unless it is being read already."""
        if name in self._loading:
            work.close()
            return False
        self._loading.add(name)

        async def run() -> None:
            try:
                await self.trying(work)
            finally:
                self._loading.discard(name)

        self.run_worker(run(), group=name)
        return True

    async def trying(self, work: Coroutine[Any, Any, None]) -> None:
        """Errors of the server are told, not raised."""
        try:
            await work
        except (NoMatches, ScreenStackError):
            if not self.leaving:
                raise
        except (ServerUnreachable, Unauthorized) as error:
            self._blame(error)
        except ForgeError as error:
            self.notify(str(error), severity="error", title="The server refused", markup=False)

    def hurry(self) -> None:
        """Read the open screen at once."""
        self._view_at = float("-inf")
        self.flush()

    def forget(self) -> None:
        """Everything must be read again."""
        for view in self.screen_stack[0].query(View):
            view.forget()
        self._view_at = self._overview_at = float("-inf")

    async def _read_overview(self) -> None:
        try:
            found = await self.ask(lambda: self.client.overview(self.chosen))
        except ApiError as error:
            if self.chosen is not None:  # of another database
                self.chosen = None
            self._overview_trouble = ("other", str(error))
            return
        if self.leaving:
            return
        first = self.model.overview is None
        before = self.model.run
        self.model.take(found)
        self._seen, self._overview_trouble = self.now(), None
        if _line(found.version) != _line(__version__) and not self._accepted:
            self._overview_trouble = (
                "version",
                f"The server is {found.version}, the dashboard {__version__}.",
            )
        if first and self._events:
            self.feed.start(found.last_event)
        if not first and before != self.model.run:
            self.forget()
        self.view.show() if isinstance(self.view, OverviewView) else None
        self._header("banner")
        self.refresh_bindings()

    async def load_metrics(self) -> None:
        """Figures of steps that are not known yet, and of the last ones, which may grow."""
        run = self.model.run
        if run is not None:
            since = max(0, self.model.last_step - 1)
            self.model.add(await self.ask(lambda: self.client.metrics(run, since)))
        self.view.show()

    # --- trouble

    def _blame(self, error: ForgeError) -> None:
        trouble: Trouble = "gone"
        if isinstance(error, WrongServer):
            trouble = "other"
        elif isinstance(error, Unauthorized):
            trouble = "denied"
        self._overview_trouble = (trouble, str(error))
        if not self.leaving:
            self._watch()

    def _watch(self) -> None:
        """Cover the dashboard while the server cannot be watched, uncover it when it can."""
        trouble = self._overview_trouble
        top = next((s for s in self.screen_stack if isinstance(s, TroubleScreen)), None)
        if trouble is None:
            if top is not None:
                top.dismiss(None)
                self.feed.hurry()
                self.forget()
            return
        kind, reason = trouble
        seen = words.clock_of(self._seen) if self._seen else ""
        if top is None:
            self.push_screen(TroubleScreen(kind, reason, self.client.url, seen))
        else:
            top.tell(kind, reason, seen)

    def action_again(self) -> None:
        self._overview_at = float("-inf")
        self.feed.hurry()
        self.flush()

    def action_go_on(self) -> None:
        self._accepted, self._overview_trouble = True, None
        self._watch()

    # --- head

    def _header(self, id: str) -> None:
        for sheet in self.screen_stack[0].query(f"#{id}").results(Sheet):
            sheet.redraw()

    def _banner(self, width: int, height: int) -> list[Line]:
        found = self.model.overview
        right: Line = [
            (f"{self._link()}  ", "good" if self.connected else "bad"),
            (words.clock_of(self.now()), "muted"),
        ]
        left: Line = [(" forge-server ", "info bold")]
        if found is not None and found.run is not None:
            mark, style = words.symbol(found.run.state)
            left += [(f" {found.run.name} ", "text bold"), (f"{mark} {found.run.state} ", style)]
            count = sum(found.attempts.values())
            left += [(f" {count}/{found.in_flight} in flight ", "muted")]
            if found.policy is not None:
                left.append((f" v{found.policy.version} ", "muted"))
        if found is not None and found.alarms:
            bad = any(alarm.level == "error" for alarm in found.alarms)
            left.append((f" {'✖' if bad else '▲'} {len(found.alarms)}", "bad bold" if bad else "warn bold"))
        room = width - sum(len(text) for text, _ in left) - sum(len(text) for text, _ in right)
        return [[*left, (" " * max(1, room), ""), *right]]

    def _link(self) -> str:
        if not self._events:
            return "◌ polled"
        return {"live": "● live", "connecting": "◌ connecting"}.get(self.feed.state, "✖ away")

    def _tabs(self, width: int, height: int) -> list[Line]:
        current = self.view.id
        line: Line = []
        for i, (name, view) in enumerate(VIEWS.items()):
            line.append((f" {i + 1} {view.TITLE} ", "text bold on chosen" if name == current else "muted"))
        return [line]

    def on_sheet_clicked(self, event: Sheet.Clicked) -> None:
        if event.sheet.id == "tabs":
            x = 0
            for i, (name, view) in enumerate(VIEWS.items()):
                x += len(f" {i + 1} {view.TITLE} ")
                if event.column < x:
                    self.go(name)
                    return

    # --- ways

    def action_view(self, name: str) -> None:
        self.go(name)

    def go(self, name: str, **filters: Any) -> None:
        """Open a screen of the main window, perhaps on something in particular."""
        while isinstance(self.screen, RolloutScreen):
            self.pop_screen()
        self.screen_stack[0].query_one(ContentSwitcher).current = name
        view = self.view
        self._view_at = float("-inf")
        if filters:
            view.act(**filters)
        view.begin()
        view.show()
        self._header("tabs")
        self.refresh_bindings()
        self.flush()

    def open_rollout(self, rollout_id: str) -> None:
        if not isinstance(self.screen, RolloutScreen):
            self.push_screen(RolloutScreen(rollout_id))
            self.call_later(self.flush)

    def action_light(self) -> None:
        self.theme = "forge-light" if self.theme == "forge-dark" else "forge-dark"
        for sheet in self.screen.query(Sheet):
            sheet.refresh()

    def action_reload(self) -> None:
        self.forget()
        self.flush()

    def action_help(self) -> None:
        self.push_screen(Help(self._keys()))

    def _keys(self) -> str:
        """Those of the open screen, then those that go everywhere; in two columns."""
        here = self.screen if isinstance(self.screen, RolloutScreen) else self.view
        rows = [
            f"{binding.key_display or SPELLED.get(binding.key, binding.key):>9}  {binding.description}"
            for holder in (type(here), Grid, ForgeApp)
            for binding in own_bindings(holder)
        ]
        half = -(-len(rows) // 2)
        return "\n".join(f"{a:<30}{b}" for a, b in zip_longest(rows[:half], rows[half:], fillvalue=""))

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        for name, view in VIEWS.items():
            yield SystemCommand(f"Go to {view.TITLE}", "", partial(self.go, name))
        yield SystemCommand("Pause or resume the run", "", self.action_pause)
        yield SystemCommand("Set the number in flight", "N of the whole server", self.action_in_flight)
        yield SystemCommand("End the run", "and everything in it", self.action_cancel_run)
        yield SystemCommand("Set the mixture", "harnesses that groups are drawn in", self.action_mixture)
        yield SystemCommand("Evaluate now", "the live policy", self.action_evaluate)
        yield SystemCommand("Save a checkpoint now", "the trainer's full state", self.action_checkpoint)
        yield SystemCommand("Look at another run", "", self.action_run)
        yield SystemCommand("Light or dark", "", self.action_light)
        yield SystemCommand("Read everything again", "", self.action_reload)
        yield SystemCommand("Keys", "", self.action_help)
        yield SystemCommand(
            "Save a picture", "SVG in the working folder", lambda: self.save_screenshot() and None
        )
        yield SystemCommand("Quit", "the server goes on", self.action_quit)

    @work(group="steer", exclusive=True)
    async def action_run(self) -> None:
        runs = await self._do("Runs", self.client.runs)
        if not runs:
            self.notify("There is no run yet.", severity="warning")
            return
        options = [(run.id, f"{run.name}  {run.kind}  {run.state}  step {run.step}") for run in runs]
        found = await self.push_screen_wait(Pick("Look at which run?", options))
        if found is not None:
            self.chosen = found
            self.forget()
            self.flush()

    def changed(self) -> None:
        self._overview_at = float("-inf")
        self.view.stale = True


def _line(version: str) -> tuple[str, ...]:
    """Versions of one line understand each other: before 1.0 the second number, after it the first."""
    parts = version.split(".")
    return tuple(parts[:2] if parts[0] == "0" else parts[:1])


SPELLED = {"escape": "esc", "escape,backspace": "esc", "up,k": "↑", "down,j": "↓"}


def own_bindings(holder: type) -> list[Binding]:
    """The keys that a class of ours brings, its bases of ours included."""
    ours = [base for base in holder.__mro__ if base.__module__.startswith("forge_tui")]
    return [b for base in ours for b in vars(base).get("BINDINGS", ()) if isinstance(b, Binding)]


def main(
    url: str | None, key: str | None, *, light: bool = False, abandon: Callable[[], None] = lambda: None
) -> None:
    """Run the dashboard in this terminal until it is left. Raises ConfigError, and SystemExit when it failed or had to
    end. ``abandon`` is called when the process has to end without any more ado."""
    os.environ.setdefault("COLORTERM", "truecolor")
    with ForgeClient(url, key, timeout_s=20.0) as client:
        app = ForgeApp(client, theme="forge-light" if light else "forge-dark")
        with ending.watched(lambda code: app.exit(return_code=code), abandon):
            app.run()
    if app.return_code:
        sys.exit(app.return_code)
