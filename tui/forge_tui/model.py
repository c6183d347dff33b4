"""What several screens show: the overview, the run's figures, the rates of the last minutes."""

from collections import deque
from collections.abc import Iterable, Sequence

from forge_server.client.schemas import Overview, PolicyView, StepMetrics

HISTORY = 240


class Model:
    """Filled by the app from answers of the server; read by screens."""

    def __init__(self) -> None:
        self.overview: Overview | None = None
        self.metrics: dict[tuple[int, str], StepMetrics] = {}
        self.policies: list[PolicyView] = []
        self.rates: deque[tuple[float, float, float]] = deque(maxlen=HISTORY)
        self._run: str | None = None

    def take(self, overview: Overview) -> None:
        """A newer overview. Figures of another run are forgotten."""
        run = overview.run.id if overview.run else None
        if run != self._run:
            self._run = run
            self.metrics.clear()
        before = self.overview
        self.overview = overview
        if before is None or overview.now > before.now:
            rates = overview.rates
            self.rates.append((overview.now, rates.calls, rates.prompt_tokens + rates.completion_tokens))

    @property
    def run(self) -> str | None:
        """Id of the run that is looked at."""
        return self._run

    @property
    def last_step(self) -> int:
        return max((step for step, _ in self.metrics), default=0)

    def add(self, found: Iterable[StepMetrics]) -> None:
        for each in found:
            self.metrics[each.step, each.source] = each

    def of(self, source: str) -> list[StepMetrics]:
        """Rows of a source, oldest first."""
        return sorted((m for (_, s), m in self.metrics.items() if s == source), key=lambda m: m.step)

    def series(self, source: str, name: str) -> list[float | None]:
        return [row.metrics.get(name) for row in self.of(source)]

    def last(self, source: str, name: str) -> float | None:
        return next((v for v in reversed(self.series(source, name)) if v is not None), None)


def names(rows: Sequence[StepMetrics], prefix: str = "") -> list[str]:
    """Names of the figures that begin with ``prefix``."""
    return sorted({name for row in rows for name in row.metrics if name.startswith(prefix)})
