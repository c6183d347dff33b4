"""A run's figures by step, as a sheet of small curves. Pure."""

from collections.abc import Callable, Sequence

from forge_tui import ink, plot
from forge_tui.ink import Line
from forge_tui.plot import number

GAP = 3
CURVES = (
    ("Reward", "controller", "reward/mean", "info"),
    ("Held-out reward", "eval", "reward/mean", "good"),
    ("Groups with a signal", "controller", "groups/mixed_share", "good"),
    ("KL to the sampling policy", "trainer", "ppo_kl", "accent"),
    ("Entropy", "trainer", "entropy", "info"),
    ("Gradient norm", "trainer", "grad_norm", "warn"),
    ("Loss", "trainer", "loss", "info"),
    ("Clipped share", "trainer", "clip_fraction", "warn"),
    ("Importance weights, mean", "trainer", "is_mean", "accent"),
    ("Effective sample size", "trainer", "is_effective_sample_size", "good"),
    ("Logprob gap, engine to trainer", "trainer", "logprob_gap_mean", "bad"),
    ("Staleness, mean", "controller", "staleness/mean", "warn"),
    ("Calls per rollout", "controller", "calls/per_rollout", "info"),
    ("Samples per rollout", "controller", "samples/per_rollout", "accent"),
    ("Tokens trained", "controller", "tokens/trained", "info"),
)
"""Title, source, figure, style."""

Curve = tuple[str, Sequence[float | None], str]
"""Title, values, style."""


def of_run(series: Callable[[str, str], Sequence[float | None]]) -> list[Curve]:
    """Those of ``CURVES`` that have values; ``series`` gives them for source and figure."""
    known = [(title, series(source, name), style) for title, source, name, style in CURVES]
    return [each for each in known if any(value is not None for value in each[1])]


def sheet(curves: Sequence[Curve], width: int, height: int) -> list[Line]:
    """All of them, in as many columns as there is room for; ``height`` is a wish."""
    if not curves:
        return [[("This run has trained no step.", "muted")]]
    columns = max(1, min(3, width // 36))
    each = (width - GAP * (columns - 1)) // columns
    tall = max(3, min(8, height // (-(-len(curves) // columns)) - 2))
    out: list[Line] = []
    for first in range(0, len(curves), columns):
        blocks = []
        for title, values, style in curves[first : first + columns]:
            last = next((v for v in reversed(values) if v is not None), None)
            head = ink.rule(f"{title} {number(last)}", each)
            blocks.append(([head, *plot.curve(values, each, tall, style), []], each))
        out += ink.beside(blocks, GAP)
    return out
