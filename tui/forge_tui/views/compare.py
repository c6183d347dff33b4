"""How do harnesses, or tasks, fare against each other?"""

from typing import Any, ClassVar, Literal

from textual.app import ComposeResult
from textual.binding import Binding

from forge_server.client.schemas import Comparison
from forge_tui import words
from forge_tui.grid import Column, Grid, Row
from forge_tui.ink import Line, Span
from forge_tui.plot import bar, number
from forge_tui.sheet import Sheet
from forge_tui.views.base import View

MODES = (None, "train", "eval", "record")
SORTS = ("name", "pass", "reward", "calls", "tokens", "seconds", "failures")


class CompareView(View):
    PERIOD = 15.0
    BY: ClassVar[Literal["task", "harness"]] = "task"

    BINDINGS: ClassVar = [
        Binding("s", "sort", "Sort"),
        Binding("r", "reverse", "Reverse", show=False),
        Binding("o", "mode", "Mode"),
    ]

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._found: list[Comparison] = []
        self.sort, self.ascending = "name", True
        self.mode: str | None = None

    def compose(self) -> ComposeResult:
        yield Sheet(id=f"{self.BY}-head", classes="head")
        yield Grid(columns(self.BY), id=f"{self.BY}-grid", empty="reading…")

    def on_mount(self) -> None:
        self.query_one(Sheet).put(lambda width, height: [self._head()])

    def begin(self) -> None:
        self.query_one(Grid).focus()

    async def load(self) -> None:
        forge, run = self.forge, self.forge.model.run
        if run is None:
            self._found = []
        else:
            self._found = await forge.ask(lambda: forge.client.compare(run, self.BY, self.mode))
        self.show()

    def forget(self) -> None:
        super().forget()
        self._found = []

    def show(self) -> None:
        found = sorted(self._found, key=self._key, reverse=not self.ascending)
        self.query_one(Grid).put([Row(each.name, cells(each)) for each in found], empty="no rollouts yet")
        self.query_one(Grid).heading(self.sort, not self.ascending)
        self.query_one(Sheet).redraw()

    def _key(self, each: Comparison) -> Any:
        value = {
            "pass": each.pass_at_1,
            "reward": each.reward,
            "calls": each.calls,
            "tokens": each.completion_tokens,
            "seconds": each.seconds,
            "failures": float(sum(each.failures.values())),
        }.get(self.sort, 0.0)
        return (value if value is not None else -1e18, each.name)

    def _head(self) -> Line:
        k = self._found[0].k if self._found else 0
        line: Line = [
            (f"{len(self._found)} ", "text bold"),
            ("tasks" if self.BY == "task" else "harnesses", "muted"),
        ]
        line += [(f", {self.mode or 'all'} rollouts, k = {k or '-'}", "muted")]
        return [*line, ("   enter shows the rollouts", "muted")]

    def action_sort(self) -> None:
        self.sort = SORTS[(SORTS.index(self.sort) + 1) % len(SORTS)]
        self.ascending = self.sort == "name"
        self.show()

    def action_reverse(self) -> None:
        self.ascending = not self.ascending
        self.show()

    def action_mode(self) -> None:
        self.mode = MODES[(MODES.index(self.mode) + 1) % len(MODES)]
        self.stale = True
        self.forge.hurry()

    def on_grid_sorted(self, event: Grid.Sorted) -> None:
        self.ascending = not self.ascending if event.sort == self.sort else event.sort == "name"
        self.sort = event.sort
        self.show()

    def on_grid_chosen(self, event: Grid.Chosen) -> None:
        self.forge.go("rollouts", **{self.BY: event.key, "mode": self.mode})


class TasksView(CompareView):
    TITLE = "Tasks"
    BY = "task"


class HarnessesView(CompareView):
    TITLE = "Harnesses"
    BY = "harness"


def columns(by: str) -> tuple[Column, ...]:
    """Of a table of comparisons."""
    return (
        Column(by, 14, grow=True, sort="name"),
        Column("rollouts", 8, "right"),
        Column("pass", 10, sort="pass"),
        Column("pass@1", 6, "right"),
        Column("pass@k", 6, "right"),
        Column("pass^k", 6, "right"),
        Column("reward", 7, "right", priority=1, sort="reward"),
        Column("calls", 6, "right", priority=3, sort="calls"),
        Column("out tok", 8, "right", priority=4, sort="tokens"),
        Column("in tok", 7, "right", priority=7),
        Column("time", 7, "right", priority=5, sort="seconds"),
        Column("tries", 5, "right", priority=8),
        Column("failures", 34, priority=6, sort="failures"),
    )


def cells(each: Comparison) -> tuple[Span, ...]:
    share = each.passed / each.valid if each.valid else 0.0
    failed = ", ".join(f"{kind.replace('_', ' ')} {n}" for kind, n in each.failures.items())
    return (
        (each.name, "info"),
        (str(each.rollouts), "text"),
        ("".join(text for text, _ in bar(share, 10)), "good"),
        (words.percent(each.pass_at_1), "text bold"),
        (words.percent(each.pass_at_k), "text"),
        (words.percent(each.pass_hat_k), "text"),
        (number(each.reward), "text"),
        (number(each.calls), "text"),
        (number(each.completion_tokens), "text"),
        (number(each.prompt_tokens), "muted"),
        (words.span_of(each.seconds), "text"),
        (number(each.attempts, 2), "warn" if each.attempts > 1.05 else "muted"),
        (failed, "warn"),
    )
