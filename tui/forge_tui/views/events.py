"""What happened? Every event, newest first, live; older ones by page."""

from collections import deque
from collections.abc import Sequence
from typing import ClassVar

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding
from textual.widgets import Input

from forge_server.client.schemas import EventView
from forge_tui import words
from forge_tui.grid import Column, Grid, Row
from forge_tui.ink import Line, Span
from forge_tui.sheet import Sheet
from forge_tui.views.base import View

PAGE = 200
KEPT = 1000
COLUMNS = (
    Column("time", 8),
    Column("event", 20),
    Column("rollout", 8, priority=1),
    Column("what", 20, grow=True),
    Column("number", 8, "right", priority=2),
)
FILTERS: dict[str, str] = {
    "all": "",
    "runs and policies": "run_created,run_paused,run_resumed,run_ended,mixture_set,batch_assembled,"
    "evaluation_asked,evaluation_done,evaluation_failed,save_asked,state_saved,checkpoint_reported,"
    "policy_exported,policy_loading,policy_live,policy_rejected,policy_retired,hold_began,hold_ended",
    "ends": "attempt_ended,rollout_ended,group_complete,group_dropped,run_ended,task_failed",
}


class EventsView(View):
    TITLE = "Events"
    PERIOD = 60.0

    BINDINGS: ClassVar = [
        Binding("slash", "search", "Search", key_display="/"),
        Binding("f", "next", "Filter"),
        Binding("space", "halt", "Halt"),
        Binding("m", "more", "Older", show=False),
        Binding("escape", "clear", "Clear", show=False),
    ]

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._events: deque[EventView] = deque(maxlen=KEPT)  # newest first
        self._cursor: str | None = None
        self.only, self.text, self.halted = "all", "", False
        self._missed = 0

    def compose(self) -> ComposeResult:
        yield Sheet(id="events-head", classes="head")
        yield Grid(COLUMNS, id="events-grid", empty="reading…")
        found = Input(placeholder="text in kind, id or data", compact=True)
        found.display = False
        yield found

    def on_mount(self) -> None:
        self.query_one(Sheet).put(lambda width, height: [self._head()])

    def begin(self) -> None:
        self.query_one(Grid).focus()

    async def load(self) -> None:
        forge, kinds = self.forge, FILTERS[self.only] or None
        if self.halted:
            return
        found = await forge.ask(lambda: forge.client.history(limit=PAGE, kinds=kinds))
        known = {event.id for event in found.items}
        newer = [e for e in self._events if found.items and e.id > found.items[0].id and e.id not in known]
        self._events = deque([*newer, *found.items], maxlen=KEPT)
        self._cursor = found.next_cursor
        self.show()

    def heard(self, events: Sequence[EventView]) -> None:
        kinds = frozenset(FILTERS[self.only].split(",")) if FILTERS[self.only] else None
        newest = self._events[0].id if self._events else 0
        fresh = [e for e in events if e.id > newest and (kinds is None or e.kind in kinds)]
        if self.halted:
            self._missed += len(fresh)
            self.query_one(Sheet).redraw()
        elif fresh:
            if len(self._events) + len(fresh) > KEPT:
                self._cursor = None
            self._events.extendleft(fresh)
            self.show()

    def forget(self) -> None:
        super().forget()
        self._events.clear()

    def show(self) -> None:
        text = self.text.lower()
        rows = [
            Row(str(event.id), _cells(event))
            for event in self._events
            if not text or text in _haystack(event)
        ]
        self.query_one(Grid).put(rows, empty="no event is like this" if text else "no events yet")
        self.query_one(Sheet).redraw()

    def _head(self) -> Line:
        line: Line = [("showing ", "muted"), (self.only, "info bold")]
        if self.text:
            line += [("  with ", "muted"), (self.text, "warn bold")]
        if self.halted:
            line += [(f"   ‖ halted, {self._missed} more since; space goes on", "warn")]
        return line

    def action_next(self) -> None:
        options = list(FILTERS)
        self.only = options[(options.index(self.only) + 1) % len(options)]
        self._events.clear()
        self.stale = True
        self.query_one(Grid).go(0)
        self.forge.hurry()

    def action_halt(self) -> None:
        self.halted, self._missed = not self.halted, 0
        self.stale = not self.halted
        self.query_one(Sheet).redraw()
        self.forge.hurry()

    def action_search(self) -> None:
        box = self.query_one(Input)
        box.value, box.display = self.text, True
        box.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        if event.input.display:
            self.text = event.value
            self.show()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.input.display = False
        self.begin()

    def action_clear(self) -> None:
        box = self.query_one(Input)
        box.display, self.text = False, ""
        self.begin()
        self.show()

    def on_grid_chosen(self, event: Grid.Chosen) -> None:
        found = next((e for e in self._events if str(e.id) == event.key), None)
        if found is not None and found.rollout_id is not None:
            self.forge.open_rollout(found.rollout_id)

    def on_grid_moved(self, event: Grid.Moved) -> None:
        if event.index >= event.count - 3:
            self.action_more()

    @work(exclusive=True, group="more")
    async def action_more(self) -> None:
        await self.forge.trying(self._older())

    async def _older(self) -> None:
        forge, cursor, kinds = self.forge, self._cursor, FILTERS[self.only] or None
        if cursor is None or len(self._events) >= KEPT:
            return
        found = await forge.ask(lambda: forge.client.history(cursor, PAGE, kinds=kinds))
        if cursor == self._cursor:
            self._events.extend(found.items)
            self._cursor = found.next_cursor
            self.show()


def _haystack(event: EventView) -> str:
    ids = f"{event.kind} {event.rollout_id} {event.attempt_id} {event.run_id}"
    return f"{ids} {words.data(event.data)}".lower()


def _cells(event: EventView) -> tuple[Span, ...]:
    state = event.data.get("outcome") or event.kind.partition("_")[2]
    mark, style = words.symbol(str(state))
    return (
        (words.clock_of(event.at), "muted"),
        (f"{mark} {event.kind.replace('_', ' ')}", style if style != "muted" else "text"),
        (words.short(event.rollout_id), "info"),
        (words.data(event.data), "muted"),
        (str(event.id), "muted"),
    )
