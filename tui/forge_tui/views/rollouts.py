"""Which rollouts? Filter, sort, search and group; the server does the work, a page is shown and follows live."""

from collections.abc import Sequence
from typing import Any, ClassVar

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding
from textual.widgets import Input

from forge_server.client.schemas import Comparison, EventView, RolloutView
from forge_tui import words
from forge_tui.grid import Column, Grid, Row
from forge_tui.ink import Line, Span
from forge_tui.plot import number
from forge_tui.sheet import Sheet
from forge_tui.views import compare
from forge_tui.views.base import View

PAGE = 200
MOST = 2000
RELOAD_S = 2.0
"""At most so often is the list read again because new rollouts have come."""

COLUMNS = (
    Column("rollout", 8),
    Column("state", 16),
    Column("kind", 16, priority=4),
    Column("task", 14, grow=True),
    Column("harness", 12, priority=2),
    Column("reward", 7, "right", sort="reward"),
    Column("calls", 5, "right", priority=3),
    Column("tokens", 7, "right", priority=5),
    Column("time", 7, "right", sort="ended"),
    Column("try", 4, "right", priority=6, sort="attempts"),
    Column("pol", 4, "right", priority=7),
    Column("mode", 6, priority=8),
    Column("not trained", 16, priority=9),
)
STATES = (None, "active", "pending", "ended")
OUTCOMES = (None, *words.OUTCOMES)
SORTS = ("created", "ended", "reward", "attempts")
GROUPS = (None, "task", "harness")
KEYS = ("task", "harness", "kind", "outcome", "state", "mode")


class RolloutsView(View):
    TITLE = "Rollouts"
    PERIOD = 10.0

    BINDINGS: ClassVar = [
        Binding("slash", "search", "Search", key_display="/"),
        Binding("f", "next('state')", "State"),
        Binding("o", "next('outcome')", "Outcome"),
        Binding("s", "next('sort')", "Sort"),
        Binding("r", "reverse", "Reverse", show=False),
        Binding("g", "next('group')", "Group"),
        Binding("m", "more", "More", show=False),
        Binding("c", "steer('cancel')", "Cancel"),
        Binding("t", "steer('retry')", "Retry"),
        Binding("escape", "clear", "Clear", show=False),
    ]

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.filters: dict[str, str | None] = {}
        self.sort, self.ascending = "created", False
        self.group: str | None = None
        self._grouped: list[Comparison] = []
        self._rows: dict[str, RolloutView] = {}
        self._cursor: str | None = None
        self._new = False
        self._read_at = 0.0

    def compose(self) -> ComposeResult:
        yield Sheet(id="rollouts-head", classes="head")
        yield Grid(COLUMNS, id="rollouts-grid", empty="reading…")
        found = Input(
            placeholder="text, or task:NAME harness:NAME kind:KIND outcome:… state:… mode:…", compact=True
        )
        found.display = False
        yield found

    def on_mount(self) -> None:
        self.query_one(Sheet).put(lambda width, height: [self._head(width)])

    def begin(self) -> None:
        self.query_one(Grid).focus()

    # --- reading

    def _parameters(self) -> dict[str, Any]:
        order = "asc" if self.ascending else "desc"
        return {"run": self.forge.model.run, "sort": self.sort, "order": order, **self.filters}

    async def load(self) -> None:
        forge, self._read_at, self._new = self.forge, self.forge.monotonic(), False
        if self.group is not None:
            run, by, mode = forge.model.run, self.group, self.filters.get("mode")
            if run is not None:
                self._grouped = await forge.ask(lambda: forge.client.compare(run, by, mode))  # type: ignore[arg-type]
            self.show()
            return
        limit = max(PAGE, min(len(self._rows), 1000))
        asked = self._parameters()
        found = await forge.ask(lambda: forge.client.rollout_page(limit=limit, **asked))
        if asked != self._parameters():
            return
        self._rows = {row.id: row for row in found.items}
        self._cursor = found.next_cursor
        self.show()

    async def _read_on(self) -> None:
        forge, cursor = self.forge, self._cursor
        if cursor is None or len(self._rows) >= MOST:
            return
        asked = self._parameters()
        found = await forge.ask(lambda: forge.client.rollout_page(cursor, PAGE, **asked))
        if self._cursor == cursor:
            self._rows |= {row.id: row for row in found.items}
            self._cursor = found.next_cursor
            self.show()

    def heard(self, events: Sequence[EventView]) -> None:
        """Change what is shown without a question to the server, where the event says it all."""
        changed = set()
        for event in events:
            if event.kind in ("rollout_created", "group_created"):
                self._new = True
            row = self._rows.get(event.rollout_id or "")
            if row is not None and self._follow(row, event):
                changed.add(row.id)
        if self.group is None and changed:
            grid = self.query_one(Grid)
            for id in changed:
                grid.change(id, self._cells(self._rows[id]))
        if self._new and self.forge.monotonic() - self._read_at > RELOAD_S:
            self.stale = True

    def _follow(self, row: RolloutView, event: EventView) -> bool:
        kind, data = event.kind, event.data
        if kind == "rollout_ended":
            row.state, row.ended_at = "ended", event.at
            row.outcome, row.kind, row.reward = data.get("outcome"), data.get("kind"), data.get("reward")
        elif kind == "rollout_pending":
            row.state, row.phase = "pending", None
        elif kind == "attempt_queued":
            row.state, row.phase, row.attempts = "active", "queued", int(data.get("number") or row.attempts)
        elif kind == "attempt_ended":
            row.phase, row.not_trained = "ended", str(data.get("not_trained") or "")
        elif kind.removeprefix("attempt_") in words.LIVE:
            row.phase = kind.removeprefix("attempt_")
        else:
            return False
        return True

    def forget(self) -> None:
        super().forget()
        self._rows, self._cursor, self._grouped = {}, None, []

    # --- painting

    def show(self) -> None:
        grid = self.query_one(Grid)
        if self.group is None:
            rows = [Row(row.id, self._cells(row)) for row in self._rows.values()]
            grid.put(rows, empty="no rollout is like this" if self._narrowed else "no rollouts yet")
            grid.heading(self.sort, not self.ascending)
        else:
            rows = [Row(f"{self.group}:{each.name}", compare.cells(each)) for each in self._grouped]
            grid.put(rows, empty="no rollouts yet")
            grid.heading("name", False)
        self.query_one(Sheet).redraw()

    def tick(self) -> None:
        """Times of what goes on grow by themselves."""
        if self.group is None:
            grid = self.query_one(Grid)
            top = grid.scroll_offset.y
            for row in grid.rows[top : top + grid.size.height]:
                found = self._rows.get(row.key)
                if found is not None and found.ended_at is None:
                    grid.change(found.id, self._cells(found))

    def _cells(self, row: RolloutView) -> tuple[Span, ...]:
        state = row.outcome if row.state == "ended" else row.phase if row.state == "active" else row.state
        kind = "" if row.kind in (None, "ok", row.outcome) else str(row.kind).replace("_", " ")
        end = row.ended_at if row.ended_at is not None else self.forge.now()
        return (
            (words.short(row.id), "info"),
            words.told(state),
            (kind, "muted"),
            (row.task or "-", "text"),
            (row.harness, "text"),
            words.reward(row.reward),
            (str(row.calls), "text"),
            (number(row.tokens), "text"),
            (words.span_of(end - row.created_at), "text" if row.ended_at is not None else "info"),
            (str(row.attempts), "warn" if row.attempts > 1 else "muted"),
            (f"v{row.policy_version}", "muted"),
            (row.mode, "muted"),
            (row.not_trained.replace("_", " "), "warn"),
        )

    @property
    def _narrowed(self) -> bool:
        return any(self.filters.values())

    def _head(self, width: int) -> Line:
        if self.group is not None:
            return [
                ("by ", "muted"),
                (self.group, "info bold"),
                ("   enter shows its rollouts, g goes on", "muted"),
            ]
        more = "+" if self._cursor is not None else ""
        line: Line = [(f"{len(self._rows)}{more} ", "text bold"), ("rollouts  ", "muted")]
        for key, value in self.filters.items():
            if value:
                line += [(f"{key}:", "muted"), (f"{value} ", "warn bold")]
        line += [("  sorted by ", "muted"), (f"{self.sort} {'▲' if self.ascending else '▼'}", "text")]
        if self._narrowed:
            line += [("   esc clears", "muted")]
        return line

    # --- keys

    def action_next(self, what: str) -> None:
        if what == "group":
            self._by(GROUPS[(GROUPS.index(self.group) + 1) % len(GROUPS)])
        elif what == "sort":
            self.sort = SORTS[(SORTS.index(self.sort) + 1) % len(SORTS)]
        else:
            options = STATES if what == "state" else OUTCOMES
            now = self.filters.get(what)
            self.filters[what] = options[(options.index(now) + 1) % len(options)] if now in options else None
        self._anew()

    def action_reverse(self) -> None:
        self.ascending = not self.ascending
        self._anew()

    def action_clear(self) -> None:
        box = self.query_one(Input)
        if box.display:
            box.display = False
            self.begin()
        elif self.group is not None or self._narrowed:
            self._by(None)
            self.filters = {}
            self._anew()

    def action_search(self) -> None:
        box = self.query_one(Input)
        box.value = self._query()
        box.display = True
        box.focus()

    def _query(self) -> str:
        words_ = [f"{key}:{value}" for key, value in self.filters.items() if key != "text" and value]
        return " ".join([*words_, self.filters.get("text") or ""]).strip()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self.filters = parsed(event.value)
        event.input.display = False
        self.begin()
        self._anew()

    def act(self, **filters: Any) -> None:
        self.filters = dict(filters)
        self._by(None)
        self._anew()

    def _by(self, group: str | None) -> None:
        if group != self.group:
            self.group = group
            self.query_one(Grid).use(COLUMNS if group is None else compare.columns(group))

    def _anew(self) -> None:
        self._rows, self._cursor, self._grouped = {}, None, []
        self.query_one(Grid).put([], empty="reading…")
        self.stale = True
        self.query_one(Sheet).redraw()
        self.forge.hurry()

    def action_more(self) -> None:
        self._more()

    def on_grid_moved(self, event: Grid.Moved) -> None:
        if event.index >= event.count - 3:
            self._more()

    def on_grid_sorted(self, event: Grid.Sorted) -> None:
        if self.group is not None:
            return
        self.ascending = not self.ascending if event.sort == self.sort else False
        self.sort = event.sort
        self._anew()

    @work(exclusive=True, group="more")
    async def _more(self) -> None:
        if self.group is None:
            await self.forge.trying(self._read_on())

    def on_grid_chosen(self, event: Grid.Chosen) -> None:
        if self.group is not None:
            by, _, name = event.key.partition(":")
            self.act(**{by: name})
        else:
            self.forge.open_rollout(event.key)

    def action_steer(self, action: str) -> None:
        key = self.query_one(Grid).key
        if key is not None and self.group is None:
            self.forge.steer_rollout(key, action)


def parsed(query: str) -> dict[str, str | None]:
    """``task:a kind:b words`` as filters."""
    filters: dict[str, str | None] = {}
    rest = []
    for word in query.split():
        key, mark, value = word.partition(":")
        if mark and key in KEYS and value:
            filters[key] = value
        else:
            rest.append(word)
    if rest:
        filters["text"] = " ".join(rest)
    return filters
