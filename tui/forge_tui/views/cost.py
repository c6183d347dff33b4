"""Where do time and money go?"""

from textual.app import ComposeResult

from forge_server.client.cost import Cost
from forge_tui import ink, plot, words
from forge_tui.ink import Line
from forge_tui.plot import number
from forge_tui.sheet import Sheet
from forge_tui.views.base import View

GAP = 3
LOOP = (
    ("generate", "generate_s", "info", "█", "attempts are in flight"),
    ("train", "train_s", "accent", "▓", "the trainer trains"),
    ("both", "both_s", "good", "▒", "both at the same time"),
    ("swap", "swap_s", "warn", "░", "calls are held for new weights"),
    ("wait", "wait_s", "mark", "─", "batches are made, the trainer starts or saves"),
    ("paused", "paused_s", "muted", "·", "by a person or by itself"),
    ("down", "down_s", "bad", "x", "server or engine were away"),
)
ROLLOUT = (
    ("idle", "idle_s", "muted", "·", "waits for a slot"),
    ("start-up", "startup_s", "warn", "░", "launch to the harness's start"),
    ("agent", "agent_s", "info", "█", "the harness works"),
    ("verify", "verify_s", "accent", "▓", "the verifier works"),
)


class CostView(View):
    TITLE = "Cost"
    PERIOD = 15.0

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._found: Cost | None = None

    def compose(self) -> ComposeResult:
        yield Sheet(id="cost")

    def on_mount(self) -> None:
        self.query_one(Sheet).put(lambda width, height: draw(self._found, width))

    def begin(self) -> None:
        self.query_one(Sheet).focus()

    async def load(self) -> None:
        forge, run = self.forge, self.forge.model.run
        self._found = await forge.ask(lambda: forge.client.cost(run)) if run is not None else None
        self.show()

    def forget(self) -> None:
        super().forget()
        self._found = None

    def show(self) -> None:
        self.query_one(Sheet).redraw()


def draw(found: Cost | None, width: int) -> list[Line]:
    if found is None:
        return [[], [("  Nothing has run yet.", "muted")]]
    columns = 2 if width >= 120 else 1
    each = (width - GAP * (columns - 1)) // columns
    left = [*_money(found, each), [], *_start_up(found, each)]
    right = [*_loop(found, each), [], *_rollouts(found, each)]
    if columns == 2:
        return ink.beside([(left, each), (right, each)], GAP)
    return [
        *_money(found, each),
        [],
        *_loop(found, each),
        [],
        *_rollouts(found, each),
        [],
        *_start_up(found, each),
    ]


def _money(found: Cost, width: int) -> list[Line]:
    def money(value: float | None) -> str:
        return "-" if value is None else f"{words.money(value)} {found.currency}"

    priced = any(line.price for line in found.lines)
    out: list[Line] = [
        ink.rule("Cost", width),
        [
            ("total ", "muted"),
            (money(found.total), "text bold"),
            ("   solved task ", "muted"),
            (money(found.per_solved), "text bold"),
            ("   rollout ", "muted"),
            (money(found.per_rollout), "text"),
        ],
        [
            (f"{found.solved} ", "good bold"),
            (
                f"of {found.ended} rollouts solved, {number(found.completion_tokens)} tokens sampled, ",
                "muted",
            ),
            (f"{words.span_of(found.wall_s)}", "text bold"),
        ],
    ]
    if not priced:
        out.append([("▲ no prices: set them in [cost] of forge.toml", "warn")])
    out.append([(f"{'':18}{'hours':>9}{'price':>9}{'cost':>11}", "muted")])
    for line in found.lines:
        out.append(
            [
                (ink.fit(line.what, 18), "text"),
                (f"{line.hours:>9.2f}{line.price:>9.2f}{line.cost:>11.2f}", "text"),
                (f"  {line.unit}", "muted"),
            ]
        )
    return out


def _loop(found: Cost, width: int) -> list[Line]:
    parts = [(getattr(found.loop, key), style, fill) for _, key, style, fill, _ in LOOP]
    out: list[Line] = [ink.rule(f"Wall-clock of the run: {words.span_of(found.wall_s)}", width)]
    out.append(plot.stacked(parts, width, found.wall_s))
    for (name, _, style, fill, text), (value, _, _) in zip(LOOP, parts, strict=True):
        if value:
            out.append(_part(fill, style, name, value, found.wall_s, text))
    return out


def _rollouts(found: Cost, width: int) -> list[Line]:
    time = found.time
    parts = [(getattr(time, key), style, fill) for _, key, style, fill, _ in ROLLOUT]
    out: list[Line] = [ink.rule(f"Time of all rollouts together: {words.span_of(time.total_s)}", width)]
    out.append(plot.stacked(parts, width, time.total_s))
    for (name, _, style, fill, text), (value, _, _) in zip(ROLLOUT, parts, strict=True):
        if value:
            out.append(_part(fill, style, name, value, time.total_s, text))
        if name == "agent" and value:
            out.append(
                _part(" ", "info", "engine", time.engine_s, time.total_s, "of it: a call is in the engine")
            )
            if time.held_s:
                out.append(_part(" ", "warn", "held", time.held_s, time.total_s, "of it: a call is held"))
    return out


def _part(fill: str, style: str, name: str, value: float, total: float, text: str) -> Line:
    share = value / total if total else 0.0
    return [
        (f"{fill} {ink.fit(name, 9)}", style),
        (f"{words.span_of(value):>8}{share:>6.0%}  ", "text"),
        (text, "muted"),
    ]


def _start_up(found: Cost, width: int) -> list[Line]:
    start = found.start_up
    out: list[Line] = [ink.rule("Start-up, launch to the harness's start", width)]
    if not start.attempts:
        return [*out, [("no attempt has started yet", "muted")]]
    longest = start.most_s or 1.0
    for name, value in (
        ("p50", start.p50_s),
        ("p90", start.p90_s),
        ("p99", start.p99_s),
        ("most", start.most_s),
    ):
        share = (value or 0.0) / longest if longest else 0.0
        out.append(
            [(f"{name:5}", "muted"), (f"{words.span_of(value):>7} ", "text bold"), *plot.bar(share, 24)]
        )
    return [*out, [(f"{start.attempts} attempts", "muted")]]
