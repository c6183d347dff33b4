"""What happened in one rollout? Its conversations, calls, tokens, segments and logs; its reward and the evidence; and
why it is trained or not."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, cast

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical
from textual.screen import Screen
from textual.widgets import ContentSwitcher, Footer

from forge_server.client import schemas as s
from forge_tui import ink, words
from forge_tui.grid import Column, Grid, Row
from forge_tui.ink import Line, Span
from forge_tui.plot import number
from forge_tui.sheet import Sheet
from forge_tui.views import talk, tokens
from forge_tui.views.explain import summary

if TYPE_CHECKING:
    from forge_tui.app import ForgeApp

WIDE = 120
SIDE = 46
PERIOD = 3.0
TURNS = 200
PARTS = ("summary", "conversation", "calls", "tokens", "segments", "logs")
Part = Literal["summary", "conversation", "calls", "tokens", "segments", "logs"]

CALLS = (
    Column("seq", 4, "right"),
    Column("agent", 10, priority=1),
    Column("end", 16),
    Column("began", 8, "right", priority=3),
    Column("took", 7, "right"),
    Column("engine", 7, "right", priority=4),
    Column("held", 6, "right", priority=6),
    Column("prompt", 7, "right"),
    Column("answer", 6, "right"),
    Column("finish", 10, priority=5),
    Column("pol", 4, "right", priority=2),
    Column("trained", 16),
    Column("when", 12, priority=7),
    Column("dialect", 9, priority=8),
    Column("mode", 6, priority=9),
)
SEGMENTS = (
    Column("#", 4, "right"),
    Column("begins as", 18),
    Column("tokens", 7, "right"),
    Column("trained", 7, "right"),
    Column("prompt", 7, "right", priority=2),
    Column("policy", 9, "right", priority=3),
    Column("calls", 8, grow=True),
)


class RolloutScreen(Screen[None]):
    BINDINGS: ClassVar = [
        Binding("escape,backspace", "back", "Back"),
        *(
            Binding(str(i + 1), f"part('{part}')", part.capitalize(), show=False)
            for i, part in enumerate(PARTS)
        ),
        Binding("tab,right_square_bracket", "turn(1)", "Next part", key_display="tab", priority=True),
        Binding("shift+tab,left_square_bracket", "turn(-1)", "Part before", show=False, priority=True),
        Binding("e", "unfold", "Unfold"),
        Binding("a", "agent", "Agent"),
        Binding("m", "mode", "Colour"),
        Binding("n", "segment(1)", "Next segment", show=False),
        Binding("b", "segment(-1)", "Segment before", show=False),
        Binding("right", "token(1)", "Next token", show=False),
        Binding("left", "token(-1)", "Token before", show=False),
        Binding("c", "steer('cancel')", "Cancel"),
        Binding("t", "steer('retry')", "Retry"),
    ]

    def __init__(self, rollout_id: str) -> None:
        super().__init__()
        self.rollout_id = rollout_id
        self.part: Part = "summary"
        self.detail: s.RolloutDetail | None = None
        self.calls: dict[int, s.CallView] = {}
        self.turns: dict[int, s.Turn] = {}
        self.segments: s.SegmentsView | None = None
        self.tokens: s.TokensView | None = None
        self.logs: list[s.LogView] = []
        self.whole = False
        self.agent: str | None = None
        self.mode: tokens.Mode = "mask"
        self.at_segment, self.at_token = 0, 0
        self._attempt: str | None = None
        self._stale, self._asked_at = True, 0.0
        self._places: list[int] = []

    @property
    def forge(self) -> "ForgeApp":
        return cast("ForgeApp", self.app)

    def compose(self) -> ComposeResult:
        yield Sheet(id="rollout-head", classes="head two")
        with Horizontal():
            yield Sheet(id="side")
            with ContentSwitcher(initial="summary"):
                yield Sheet(id="summary")
                yield Sheet(id="conversation")
                yield Grid(CALLS, id="calls", empty="it made no call yet")
                with Vertical(id="tokens"):
                    yield Sheet(id="tokens-head", classes="head two")
                    yield Sheet(id="tokens-text")
                yield Grid(SEGMENTS, id="segments", empty="nothing to cut yet")
                yield Sheet(id="logs")
        yield Footer(compact=True, show_command_palette=False)

    def on_mount(self) -> None:
        self._sheet("rollout-head").put(lambda width, height: self._head(width))
        self._sheet("side").put(lambda width, height: self._summary(width))
        self._sheet("summary").put(lambda width, height: self._summary(width))
        self._sheet("conversation").put(lambda width, height: self._conversation(width))
        self._sheet("tokens-head").put(lambda width, height: self._tokens_head())
        self._sheet("tokens-text").put(lambda width, height: self._tokens_text(width))
        self._sheet("logs").put(lambda width, height: self._logs(width))
        self._fit(self.app.size.width)
        if self.app.size.width >= WIDE:
            self.part = "conversation"
        self._open()

    def on_resize(self) -> None:
        self._fit(self.app.size.width)

    def _fit(self, width: int) -> None:
        self._sheet("side").display = width >= WIDE

    def _sheet(self, id: str) -> Sheet:
        return self.query_one(f"#{id}", Sheet)

    # --- reading

    def heard(self, events: Sequence[s.EventView]) -> None:
        if any(event.rollout_id == self.rollout_id for event in events):
            self._stale = True

    def due(self, now: float) -> bool:
        """Whether it should be read again."""
        going = self.detail is None or self.detail.rollout.state != "ended"
        return (now - self._asked_at > PERIOD and (going or self._stale)) or (
            self._stale and self.detail is None
        )

    async def load(self) -> None:
        """Raises ForgeError."""
        forge, id = self.forge, self.rollout_id
        self._asked_at, self._stale = forge.monotonic(), False
        self.detail = await forge.ask(lambda: forge.client.rollout(id))
        newest = self.detail.attempts[-1].id if self.detail.attempts else None
        if newest != self._attempt:
            self._attempt = newest
            self.turns, self.segments, self.tokens = {}, None, None
            self.at_segment = self.at_token = 0
        self.calls = {call.id: call for call in await forge.ask(lambda: forge.client.calls(id))}
        if newest is not None:
            await self._load_part()
        self.show()

    async def _load_part(self) -> None:
        forge, id = self.forge, self.rollout_id
        self.segments = await forge.ask(lambda: forge.client.segments(id))
        since = min((turn.seq for turn in self.turns.values() if turn.end is None), default=len(self.turns))
        while True:
            found = await forge.ask(lambda since=since: forge.client.turns(id, since, TURNS))  # type: ignore[misc]
            self.turns |= {turn.seq: turn for turn in found}
            if len(found) < TURNS:
                break
            since = found[-1].seq + 1
        if self.part == "logs":
            self.logs = await forge.ask(lambda: forge.client.logs(id))
        if self.part == "tokens":
            await self._load_tokens()

    async def _load_tokens(self) -> None:
        forge, id, index = self.forge, self.rollout_id, self.at_segment
        if self.segments is not None and index < len(self.segments.segments):
            self.tokens = await forge.ask(lambda: forge.client.tokens(id, index))

    # --- painting

    def show(self) -> None:
        if not self.is_mounted:
            return
        for sheet in self.query(Sheet):
            if sheet.display and sheet.size.width:
                sheet.redraw()
        mine = [call for call in self.calls.values() if call.attempt_id == self._attempt]
        self.query_one("#calls", Grid).put([Row(str(call.id), self._call(call, mine)) for call in mine])
        found = self.segments.segments if self.segments is not None else []
        self.query_one("#segments", Grid).put(
            [Row(str(each.index), _segment(each)) for each in found],
            empty=f"no segments: {self.segments.fault} {self.segments.detail}".strip()
            if self.segments is not None and self.segments.fault
            else "none of its calls is trained",
        )

    def _head(self, width: int) -> list[Line]:
        names: Line = []
        for i, part in enumerate(PARTS):
            chosen = part == self.part
            names.append((f" {i + 1} {part.capitalize()} ", "text bold on chosen" if chosen else "muted"))
        if self.detail is None:
            return [[(self.rollout_id, "info bold"), ("  reading…", "muted")], names]
        row = self.detail.rollout
        state = row.outcome if row.state == "ended" else row.phase or row.state
        kind = "" if row.kind in (None, "ok", row.outcome) else f"{row.kind} ".replace("_", " ")
        value, style = words.reward(row.reward)
        line: Line = [
            (f"{row.id} ", "info bold"),
            words.told(state),
            (f" {kind}", "muted"),
            (" reward ", "muted"),
            (value, f"{style} bold"),
            (f"  {row.task or 'no task'}", "text"),
            (f" in {row.harness}", "muted"),
        ]
        return [line, names]

    def _summary(self, width: int) -> list[Line]:
        if self.detail is None:
            return []
        turns = [self.turns[seq] for seq in sorted(self.turns)]
        return summary(self.detail, list(self.calls.values()), turns, self.segments, self.forge.now(), width)

    def _conversation(self, width: int) -> list[Line]:
        turns = [self.turns[seq] for seq in sorted(self.turns)]
        lines = talk.conversation(turns, self.calls, width, whole=self.whole, agent=self.agent)
        return lines or [[("nothing was said yet", "muted")]]

    def _call(self, call: s.CallView, all_calls: Sequence[s.CallView]) -> tuple[Span, ...]:
        first = min(each.began_at for each in all_calls)
        last = max(each.ended_at or self.forge.now() for each in all_calls)
        took = None if call.ended_at is None else call.ended_at - call.began_at
        state = "completed" if call.end == "ok" else "running" if call.end is None else "infra_failure"
        mark, style = words.symbol(state)
        trained: Span = (
            ("✔", "good") if call.untrainable is None else (call.untrainable.replace("_", " "), "warn")
        )
        if self.segments is not None and call.seq in self.segments.untrained:
            trained = (self.segments.untrained[call.seq].replace("_", " "), "warn")
        agent = str((call.flags or {}).get("agent") or call.label or "-")
        return (
            (str(call.seq), "text bold"),
            (agent, "accent"),
            (f"{mark} {(call.end or 'in flight').replace('_', ' ')}", style),
            (f"+{words.span_of(call.began_at - first)}", "muted"),
            (words.span_of(took), "text"),
            (words.span_of(call.engine_ms / 1000) if call.engine_ms is not None else "-", "muted"),
            (
                words.span_of(call.held_ms / 1000) if call.held_ms else "-",
                "warn" if call.held_ms else "muted",
            ),
            (number(call.prompt_len), "text"),
            (number(call.completion_len), "text"),
            (call.finish_reason or "-", "muted"),
            (words.version(call.policy_version), "muted"),
            trained,
            (_lane(call.began_at, call.ended_at or last, first, last), "info"),
            (call.dialect, "muted"),
            (call.mode, "muted"),
        )

    def _tokens_head(self) -> list[Line]:
        count = len(self.segments.segments) if self.segments is not None else 0
        if self.tokens is None or not self.tokens.ids:
            return [
                [("none of its calls is trained: there is no segment" if not count else "reading…", "muted")],
                [],
            ]
        first: Line = [(f"segment {self.at_segment + 1} of {count}  ", "text bold")]
        first += [(f"by {self.mode}: ", "muted"), *tokens.legend(self.tokens, self.mode)]
        texts = self.tokens.text or tokens.pieces(self.tokens)
        return [first, tokens.under_cursor(self.tokens, self.at_token, texts)]

    def _tokens_text(self, width: int) -> list[Line]:
        if self.tokens is None or not self.tokens.ids:
            return []
        lines, self._places = tokens.flow(self.tokens, width, self.mode, self.at_token)
        left = self.tokens.length - len(self.tokens.ids)
        return [*lines, [(f"… {left} more tokens", "muted")]] if left > 0 else lines

    def _logs(self, width: int) -> list[Line]:
        out: list[Line] = []
        for log in self.logs:
            out.append(ink.rule(f"{log.stream} {words.short(log.attempt_id)}", width))
            out += [[(row, "text")] for row in ink.wrap(log.text.rstrip(), width)] + [[]]
        return out or [[("no log lines", "muted")]]

    # --- keys

    def action_back(self) -> None:
        self.dismiss(None)

    def action_part(self, part: Part) -> None:
        self.part = part
        self._open()

    def action_turn(self, by: int) -> None:
        self.action_part(cast(Part, PARTS[(PARTS.index(self.part) + by) % len(PARTS)]))

    def _open(self) -> None:
        self.query_one(ContentSwitcher).current = self.part
        target = {"tokens": "tokens-text"}.get(self.part, self.part)
        self.query_one(f"#{target}").focus()
        self.refresh_bindings()
        self._read_part()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        needs = {"unfold": "conversation", "agent": "conversation", "mode": "tokens", "segment": "tokens"}
        return needs.get(action, self.part) == self.part and (action != "token" or self.part == "tokens")

    @work(exclusive=True, group="part")
    async def _read_part(self) -> None:
        if self.detail is not None and self._attempt is not None:
            await self.forge.trying(self._load_part())
        self.show()

    def action_unfold(self) -> None:
        self.whole = not self.whole
        self._sheet("conversation").redraw()

    def action_agent(self) -> None:
        agents = [None, *talk.agents_of([self.turns[seq] for seq in sorted(self.turns)])]
        self.agent = agents[(agents.index(self.agent) + 1) % len(agents)] if self.agent in agents else None
        self._sheet("conversation").redraw()
        self.notify(
            "all agents" if self.agent is None else f"only {self.agent or 'the main agent'}", timeout=2
        )

    def action_mode(self) -> None:
        self.mode = tokens.MODES[(tokens.MODES.index(self.mode) + 1) % len(tokens.MODES)]
        self.show()

    def action_segment(self, by: int) -> None:
        count = len(self.segments.segments) if self.segments is not None else 0
        if count:
            self.at_segment, self.at_token, self.tokens = (self.at_segment + by) % count, 0, None
            self._read_part()

    def action_token(self, by: int) -> None:
        if self.tokens is None or not self.tokens.ids:
            return
        self.at_token = max(0, min(len(self.tokens.ids) - 1, self.at_token + by))
        sheet = self._sheet("tokens-text")
        sheet.redraw()
        self._sheet("tokens-head").redraw()
        place, top = self._places[self.at_token], sheet.scroll_offset.y
        if not top <= place < top + sheet.size.height:
            sheet.scroll_to(y=max(0, place - 2), animate=False)

    def on_grid_chosen(self, event: Grid.Chosen) -> None:
        if event.grid.id == "segments":
            self.at_segment, self.at_token, self.tokens = int(event.key), 0, None
            self.action_part("tokens")
        elif event.grid.id == "calls":
            self.agent = None
            self.action_part("conversation")
            self._scroll_to_call(int(event.key))

    def _scroll_to_call(self, call_id: int) -> None:
        seq = self.calls[call_id].seq
        sheet = self._sheet("conversation")
        for row, found in enumerate(sheet.lines):
            if found and found[0][0] == f"─ {seq} ":
                sheet.scroll_to(y=row, animate=False)

    def on_sheet_clicked(self, event: Sheet.Clicked) -> None:
        if event.sheet.id == "rollout-head" and event.row == 1:
            x = 0
            for i, part in enumerate(PARTS):
                x += len(f" {i + 1} {part} ")
                if event.column < x:
                    self.action_part(cast(Part, part))
                    return

    def action_steer(self, action: str) -> None:
        self.forge.steer_rollout(self.rollout_id, action)


def _lane(begin: float, end: float, first: float, last: float, width: int = 12) -> str:
    """Where the call lies in the attempt's time."""
    whole = max(last - first, 1e-9)
    a = min(width - 1, int((begin - first) / whole * width))
    b = max(a + 1, round((end - first) / whole * width))
    return "·" * a + "█" * (b - a) + "·" * (width - b)


def _segment(each: s.SegmentView) -> tuple[Span, ...]:
    span = f"v{each.min_version}" + (f"–v{each.max_version}" if each.max_version != each.min_version else "")
    return (
        (str(each.index + 1), "text bold"),
        (each.break_reason.replace("_", " "), "good" if each.break_reason == "first" else "warn"),
        (number(each.length), "text"),
        (number(each.trained), "info"),
        (number(each.prompt_len), "muted"),
        (span, "muted"),
        (" ".join(str(seq) for seq in each.calls), "muted"),
    )
