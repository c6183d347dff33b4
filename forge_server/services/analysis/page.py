"""The report as one HTML page: style, drawings and texts are in it, and it asks for nothing else.

What came from a model or a task is text, never markup: the template escapes everything that is not a drawing of ours.
"""

import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from forge_server import __version__
from forge_server.client.schemas import StepMetrics
from forge_server.services.analysis.charts import Series, chart
from forge_server.services.analysis.gather import Analysis
from forge_server.services.analysis.words import lives, phases, seconds

TASKS = 200
"""Tasks shown, those with the lowest reward first."""

CURVES: dict[str, tuple[tuple[str, str, str], ...]] = {
    "Reward": (("controller", "reward/mean", "training"), ("eval", "reward/mean", "evaluation")),
    "Pass rate": (("controller", "pass_rate", "training"), ("eval", "pass@1", "evaluation")),
    "Groups with unequal rewards": (("controller", "groups/mixed_share", "share"),),
    "Loss": (("trainer", "loss", "loss"),),
    "Gradient norm": (("trainer", "grad_norm", "norm"),),
    "Entropy": (("trainer", "entropy", "entropy"),),
    "Clipped tokens": (("trainer", "clip_fraction", "share"),),
    "KL between engine and trainer": (("trainer", "sampling_kl", "KL"),),
    "Logprob gap of engine and trainer": (
        ("trainer", "logprob_gap_mean", "mean"),
        ("trainer", "logprob_gap_max", "largest"),
    ),
    "Staleness in versions": (
        ("controller", "staleness/mean", "mean"),
        ("controller", "staleness/max", "largest"),
    ),
    "Calls per sample": (("controller", "samples/merge_ratio", "merge ratio"),),
    "Seconds of a step": (
        ("controller", "seconds/generate", "generate"),
        ("controller", "seconds/train", "train"),
        ("controller", "seconds/swap", "swap"),
        ("controller", "seconds/wait_trainer", "wait"),
    ),
}
"""Title -> curves: source, figure, name. Those that a run does not have are left out."""


def render(analysis: Analysis) -> str:
    """The page."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"when": _when, "seconds": seconds, "share": _share, "figure": _figure}
    tasks = sorted(analysis.by_task, key=lambda row: (row.reward is None, row.reward or 0.0, row.name))
    return environment.get_template("report.html.j2").render(
        a=analysis,
        version=__version__,
        curves=list(_curves(analysis.metrics)),
        loop=_bar(phases(analysis.cost), analysis.cost.wall_s),
        time=_bar(lives(analysis.cost), analysis.cost.time.total_s),
        tasks=tasks[:TASKS],
        tasks_left=len(tasks[TASKS:]),
        passed=sum(row.passed for row in analysis.by_task),
        valid=sum(row.valid for row in analysis.by_task),
    )


def _curves(metrics: list[StepMetrics]) -> Iterator[tuple[str, Markup]]:
    for title, wanted in CURVES.items():
        series = []
        for source, figure, name in wanted:
            points = _points(metrics, source, figure)
            if points:
                series.append(
                    Series(
                        name,
                        points,
                        _interval(metrics) if (source, figure) == ("eval", "reward/mean") else (),
                    )
                )
        if series:
            yield title, chart(series)


def _points(metrics: list[StepMetrics], source: str, figure: str) -> list[tuple[float, float]]:
    rows = ((row.step, row.metrics.get(figure)) for row in metrics if row.source == source)
    return [(float(step), value) for step, value in rows if value is not None]


def _interval(metrics: list[StepMetrics]) -> list[tuple[float, float, float]]:
    """Of the mean reward of evaluations."""
    low, high = (dict(_points(metrics, "eval", f"reward/{end}95")) for end in ("low", "high"))
    return [(step, low[step], high[step]) for step in low if step in high]


def _bar(parts: Mapping[str, float], whole: float) -> list[tuple[str, float, float]]:
    """Name, seconds, percent; without those that are nothing."""
    return [(name, part, 100.0 * part / whole) for name, part in parts.items() if part > 0 and whole > 0]


def _when(moment: float | None) -> str:
    return "-" if moment is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
