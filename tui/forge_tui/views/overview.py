"""Is it healthy? Five seconds must be enough: the verdict first, then what is wrong and its mend, then figures; where
time and money go; what to look at next."""

from collections.abc import Sequence

from textual.app import ComposeResult

from forge_server.client.cost import Cost
from forge_server.client.schemas import EventView, Overview, RolloutView
from forge_tui import ink, plot, words
from forge_tui.ink import Line, Span
from forge_tui.model import Model
from forge_tui.plot import number
from forge_tui.sheet import Sheet
from forge_tui.views import cost
from forge_tui.views.base import View

GAP = 3
COST_S = 60.0
"""At most so often the server reckons the run's cost for this screen: it reads all attempts for it."""
ON_THE_WAY = frozenset(
    f"attempt_{state}"
    for state in ("queued", "launching", "launched", "starting", "running", "sealed", "verifying")
) | {"rollout_created", "reward_reported", "group_created", "group_complete"}


class OverviewView(View):
    TITLE = "Overview"
    PERIOD = 10.0

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.failed: list[RolloutView] = []
        self.cost: Cost | None = None
        self._cost_at = float("-inf")

    def compose(self) -> ComposeResult:
        yield Sheet(id="overview")

    def begin(self) -> None:
        self.query_one(Sheet).focus()

    def on_mount(self) -> None:
        self.query_one(Sheet).put(
            lambda width, height: draw(
                self.forge.model, self.forge.recent, self.failed, self.cost, width, height
            )
        )

    async def load(self) -> None:
        forge = self.forge
        await forge.load_metrics()
        if not forge.recent:
            found = await forge.ask(lambda: forge.client.history(limit=200))
            forge.recent.extend(event for event in reversed(found.items) if tells(event))
        if forge.wide:
            page = await forge.ask(
                lambda: forge.client.rollout_page(limit=100, run=forge.model.run, state="ended")
            )
            self.failed = [row for row in page.items if row.outcome != "completed"]
        if (run := forge.model.run) is not None and forge.monotonic() - self._cost_at >= COST_S:
            self._cost_at = forge.monotonic()
            self.cost = await forge.ask(lambda: forge.client.cost(run))
        self.show()

    def forget(self) -> None:
        super().forget()
        self.cost, self._cost_at = None, float("-inf")

    def show(self) -> None:
        self.query_one(Sheet).redraw()


def tells(event: EventView) -> bool:
    """It is worth a line here: not one of the steps that every rollout takes on its way to its end."""
    if event.kind == "attempt_ended":
        return event.data.get("outcome") != "completed"
    return event.kind not in ON_THE_WAY


def draw(
    model: Model,
    recent: Sequence[EventView],
    failed: Sequence[RolloutView],
    spent: Cost | None,
    width: int,
    height: int,
) -> list[Line]:
    """The whole screen."""
    found = model.overview
    if found is None:
        return [[("  reading…", "muted")]]
    if found.run is None:
        return [*verdict(found, width, 2), *nothing_yet(width)]
    top = verdict(found, width, 3 if height < 30 else 6)
    room = height - len(top) - 1
    columns = 3 if width >= 120 else 2
    each = (width - GAP * (columns - 1)) // columns
    tall = max(3, (room - 9) // 3 if columns == 3 else min(10, room - 9))
    learning = _learning(model, each, tall)
    if columns == 3:
        now = [*_attempts(found, each), [], *_traffic(model, found, each, 3), [], *_loop(model, found, each)]
        now += [[], *_spent(spent, each)] if spent is not None else []
        ended = _ended(found, each, max(6, room // 3))
        blocks = [
            [*learning, [], *_more_curves(model, each, tall)],
            [*now, [], *_failed(failed, found.now, each, max(1, room - len(now) - 2))],
            [*ended, [], *_recent(recent, each, max(3, room - len(ended) - 2))],
        ]
    else:
        low = room < 18
        left = [*learning, *([] if low else [[]]), *_ended(found, each, max(3, room - len(learning) - 2))]
        right = [*_attempts(found, each), *_traffic(model, found, each, 0), *_loop(model, found, each)]
        right += _spent(spent, each) if spent is not None else []
        blocks = [left, right]
    return [*top, [], *ink.beside([(block, each) for block in blocks], GAP)]


def verdict(found: Overview, width: int, most: int) -> list[Line]:
    """One line that says it all, and the alarms with their mends."""
    errors = sum(alarm.level == "error" for alarm in found.alarms)
    warnings = len(found.alarms) - errors
    if not found.alarms:
        first: Line = [("✔ All is well", "good bold")]
    else:
        parts = [
            f"{n} {word}{'s' if n > 1 else ''}" for n, word in ((errors, "error"), (warnings, "warning")) if n
        ]
        first = [
            ("✖ Not healthy: " if errors else "▲ Look at this: ", ("bad" if errors else "warn") + " bold"),
            (", ".join(parts), "bad" if errors else "warn"),
        ]
    if (run := found.run) is not None:
        first += [("   ", ""), *_progress(found)]
        if run.state in ("completed", "cancelled", "failed"):
            first += [("  ended " + words.clock_of(run.ended_at), "muted")]
    out = [first]
    for alarm in found.alarms[:most]:
        mark: Span = ("  ✖ ", "bad") if alarm.level == "error" else ("  ▲ ", "warn")
        text, mend = f"{alarm.name}: {alarm.what}", f"  → {alarm.mend}"
        if len(text) + len(mend) + 4 > width:
            mend = ink.fit(mend, width - len(text) - 4) if len(text) + 14 < width else ""
        out.append([mark, (ink.fit(text, min(len(text), width - 4)), "text"), (mend, "muted")])
    if len(found.alarms) > most:
        out.append([(f"    and {len(found.alarms) - most} more", "muted")])
    return out


def _progress(found: Overview) -> Line:
    run = found.run
    assert run is not None
    steps = int(run.settings.get("steps") or 0)
    mark, style = words.symbol(run.state)
    line: Line = [(f"{mark} {run.state}", style), (f"  {run.kind}", "muted")]
    if run.kind == "train" and steps:
        line += [("  step ", "muted"), (f"{run.step}/{steps} ", "text bold"), *plot.bar(run.step / steps, 10)]
    return line


def nothing_yet(width: int) -> list[Line]:
    """An empty database."""
    rows = [
        ("Nothing has run yet.", "text bold"),
        ("", ""),
        ("A run is a [[run]] table in forge.toml (docs/configuration.md), or", "text"),
        ("    forge-server run create FILE", "info"),
        ("A harness that runs anywhere can register a rollout by itself (docs/api.md).", "text"),
        ("The whole loop on one machine, with a tiny model:", "text"),
        ("    forge-server demo", "info"),
        ("", ""),
        ("What is missing is listed above; this screen follows by itself.", "muted"),
    ]
    return [[], *([("  ", ""), (ink.fit(text, min(len(text), width - 2)), style)] for text, style in rows)]


def _learning(model: Model, width: int, tall: int) -> list[Line]:
    rewards = model.series("controller", "reward/mean")
    passed = model.last("controller", "pass_rate")
    evaluated = model.last("eval", "reward/mean")
    head = ink.rule("Reward", width)
    line: Line = [("now ", "muted"), (number(model.last("controller", "reward/mean")), "text bold")]
    line += [("   pass ", "muted"), (words.percent(passed), "text bold")]
    if evaluated is not None:
        line += [("   held-out ", "muted"), (number(evaluated), "text bold")]
    return [head, line, *plot.curve(rewards, width, tall)]


def _more_curves(model: Model, width: int, tall: int) -> list[Line]:
    return [
        ink.rule("Pass rate", width),
        *plot.curve(model.series("controller", "pass_rate"), width, tall, "good", floor=0.0),
        [],
        ink.rule("KL to the sampling policy", width),
        *plot.curve(model.series("trainer", "ppo_kl"), width, max(3, tall - 1), "accent"),
    ]


def _attempts(found: Overview, width: int) -> list[Line]:
    count = sum(found.attempts.values())
    fills = {
        "queued": "░",
        "launching": "▒",
        "starting": "▒",
        "running": "█",
        "sealed": "▓",
        "verifying": "▓",
    }
    parts = [(found.attempts.get(state, 0), words.symbol(state)[1], fills[state]) for state in words.LIVE]
    head = ink.rule("In flight", width)
    limit = max(found.in_flight, count, 1)
    room = max(8, width - 12)
    line: Line = [
        (f"{count}/{found.in_flight}".rjust(9) + "  ", "text bold"),
        *plot.stacked(parts, room, limit),
    ]
    names: Line = []
    for state in words.LIVE:
        if n := found.attempts.get(state, 0):
            mark, style = words.symbol(state)
            names += [(f"{mark} {n} {state}  ", style)]
    pending = found.run.rollouts.get("pending", 0) if found.run else 0
    if pending:
        names.append((f"◌ {pending} wait", "muted"))
    return [head, line, *(ink.flow(names, width) if names else [[("nothing is in flight", "muted")]])]


def _traffic(model: Model, found: Overview, width: int, tall: int) -> list[Line]:
    rates = found.rates
    failed: Span = (f"{rates.failed} failed", "bad" if rates.failed else "muted")
    lines: list[Line] = [
        ink.rule("Traffic, last minute", width),
        [
            ("calls ", "muted"),
            (f"{number(rates.calls)}/s", "text bold"),
            ("   engine ", "muted"),
            (words.span_of(rates.engine_ms / 1000 if rates.engine_ms is not None else None), "text bold"),
            ("   ", ""),
            failed,
        ],
        [
            ("tokens ", "muted"),
            (f"{number(rates.completion_tokens)}/s out", "text bold"),
            (f", {number(rates.prompt_tokens)}/s in", "text"),
        ],
        [
            ("at the engine ", "muted"),
            (str(found.calls_running), "text bold"),
            ("   waiting ", "muted"),
            (f"{found.calls_waiting}{' (held)' if found.held else ''}", "warn" if found.held else "text"),
        ],
    ]
    if tall:
        lines += plot.curve([tokens for _, _, tokens in model.rates], width, 3, "good", floor=0.0)
    return lines


def _loop(model: Model, found: Overview, width: int) -> list[Line]:
    trainer, policy = found.trainer, found.policy
    phase: Span = ("no trainer", "muted")
    over = found.run is not None and found.run.state not in ("active", "paused")
    if trainer is not None and over:
        phase = ("has left", "muted")
    elif trainer is not None:
        phase = (
            f"{'▶' if trainer.alive else '✖'} {trainer.phase or 'starting'}",
            "info" if trainer.alive else "bad",
        )
    stale = model.last("controller", "staleness/mean")
    lines: list[Line] = [
        ink.rule("Loop", width),
        [("trainer ", "muted"), phase],
        [
            ("policy ", "muted"),
            (f"v{policy.version}" if policy is not None else "-", "text bold"),
            (f" {policy.state} " if policy is not None else "", "muted"),
            (words.span_of(found.now - policy.live_at) if policy and policy.live_at else "", "muted"),
            ("   staleness ", "muted"),
            (number(stale), "text bold"),
        ],
    ]
    last = model.of("controller")[-1:]
    if last:
        figures = last[0].metrics
        parts = [(figures.get(f"seconds/{name}") or 0.0, style, fill) for name, style, fill in PHASES]
        total = sum(value for value, _, _ in parts)
        if total:
            lines.append(
                [
                    ("step ", "muted"),
                    (words.span_of(total) + " ", "text bold"),
                    *plot.stacked(parts, width - 14),
                ]
            )
            lines += ink.flow(_legend(parts), width)
    return lines


PHASES = (
    ("generate", "info", "█"),
    ("train", "accent", "▓"),
    ("swap", "warn", "▒"),
    ("assemble", "good", "░"),
)


def _legend(parts: list[tuple[float, str, str]]) -> Line:
    return [
        (f"{fill} {name} {words.span_of(value)}  ", style)
        for (name, _, _), (value, style, fill) in zip(PHASES, parts, strict=True)
        if value
    ]


def _spent(found: Cost, width: int) -> list[Line]:
    """Where time and money of the run went; the Cost screen has it in full."""
    parts = [(name, getattr(found.loop, key), style, fill) for name, key, style, fill, _ in cost.LOOP]
    line: Line = [(words.span_of(found.wall_s) + "   ", "text bold")]
    if any(each.price for each in found.lines):
        line += [(f"{words.money(found.total)} {found.currency}", "text bold")]
        if found.per_solved is not None:
            line += [("   solved task ", "muted"), (words.money(found.per_solved), "text bold")]
    else:
        line += [("no prices in forge.toml", "muted")]
    most = sorted((part for part in parts if part[1] > 0.005 * found.wall_s), key=lambda part: -part[1])
    return [
        ink.rule("Time and money (6)", width),
        line,
        plot.stacked([(value, style, fill) for _, value, style, fill in parts], width, found.wall_s),
        *ink.flow(
            [
                (f"{fill} {name} {words.percent(value / found.wall_s)}  ", style)
                for name, value, style, fill in most
            ],
            width,
        ),
    ]


def _ended(found: Overview, width: int, most: int) -> list[Line]:
    counts = found.run.rollouts if found.run is not None else {}
    total = sum(counts.get(outcome, 0) for outcome in words.OUTCOMES)
    lines: list[Line] = [ink.rule(f"Ended rollouts: {total}", width)]
    if not total:
        return [*lines, [("none yet", "muted")]]
    for outcome in words.OUTCOMES:
        if n := counts.get(outcome, 0):
            text, style = words.told(outcome)
            lines.append(
                [
                    (ink.fit(text, 16), style),
                    (f"{n:>7} ", "text bold"),
                    *plot.bar(n / total, max(4, width - 25), style),
                ]
            )
    kinds = sorted(found.failures.items(), key=lambda item: -item[1])
    left = most - len(lines)
    for name, n in kinds[: max(0, left)]:
        outcome, _, kind = name.partition("/")
        mark, style = words.symbol(outcome)
        lines.append([(f"  {mark} {kind.replace('_', ' ')}", style), (f"  {n}", "text")])
    if found.lost:
        lost = sum(found.lost.values())
        lines.append([(f"  {lost} of {found.recent_attempts} attempts lost in 15 min", "warn")])
    return lines


def _failed(rows: Sequence[RolloutView], now: float, width: int, most: int) -> list[Line]:
    lines: list[Line] = [ink.rule("Look at next: failures (2, o)", width)]
    for row in rows[:most]:
        mark, style = words.symbol(row.outcome)
        ago = words.span_of(now - (row.ended_at or now))
        lines.append(
            [
                (words.short(row.id), "info"),
                (f" {mark} {str(row.kind).replace('_', ' ')}", style),
                (f"  {row.task or '-'}, {row.harness}, {ago} ago", "muted"),
            ]
        )
    return lines if len(lines) > 1 else [*lines, [("none", "muted")]]


def _recent(events: Sequence[EventView], width: int, most: int) -> list[Line]:
    lines: list[Line] = [ink.rule("Just now", width)]
    for event in list(events)[-most:][::-1]:
        mark, style = words.symbol(str(event.data.get("outcome", "")))
        lines.append(
            [
                (words.clock_of(event.at) + " ", "muted"),
                (f"{mark} ", style),
                (event.kind.replace("_", " ") + " ", "text"),
                (words.short(event.rollout_id) if event.rollout_id else "", "info"),
                (f" {event.data.get('kind') or event.data.get('reason') or ''}", "muted"),
            ]
        )
    return lines if len(lines) > 1 else [*lines, [("nothing has happened since this was opened", "muted")]]
