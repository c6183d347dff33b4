"""What an evaluation round says: mean, its 95 % interval, pass@k. Pure and deterministic.

The task is the unit: rollouts of one task are not independent of each other, so the mean is over tasks
and the interval comes from resampling tasks.
"""

from collections.abc import Sequence
from math import comb
from statistics import fmean

import numpy as np

RESAMPLES = 2000
PASS_REWARD = 1.0


def mean_interval(values: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """The 95 % bootstrap interval of the mean of ``values`` (at least one)."""
    drawn = np.random.default_rng(seed).choice(
        np.asarray(values, np.float64), (RESAMPLES, len(values)), replace=True
    )
    low, high = np.percentile(drawn.mean(axis=1), (2.5, 97.5))
    return float(low), float(high)


def pass_at_k(n: int, passed: int, k: int) -> float:
    """The chance that one of ``k`` rollouts passes, estimated without bias from ``n`` of which some
    passed."""
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} cannot be told from {n} rollouts")
    return 1.0 - comb(n - passed, k) / comb(n, k)


def round_figures(rewards: Sequence[Sequence[float]], k: int) -> dict[str, float]:
    """The figures of a round. ``rewards``: the valid rollouts of each task; a task may have lost all of
    them."""
    measured = [task for task in rewards if task]
    figures: dict[str, float] = {
        "tasks/measured": len(measured),
        "tasks/lost": len(rewards) - len(measured),
        "rollouts/valid": sum(len(task) for task in measured),
    }
    if not measured:
        return figures
    means = [fmean(task) for task in measured]
    low, high = mean_interval(means)
    figures |= {"reward/mean": fmean(means), "reward/low95": low, "reward/high95": high}
    passes = [(len(task), sum(reward >= PASS_REWARD for reward in task)) for task in measured]
    for depth in sorted({1, k}):
        known = [pass_at_k(n, passed, depth) for n, passed in passes if n >= depth]
        if known:
            figures[f"pass@{depth}"] = fmean(known)
    return figures
