"""What the demo says at its end, from what the API and the reports of the command line tell about the run.
Pure.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import msgspec

from forge_server.client.schemas import RolloutView, StepMetrics
from forge_server.evaluation.stats import mean_interval

_WIDTH = 40


class Gain(msgspec.Struct, frozen=True):
    """Held-out reward of version 0 and of the last version, and the gain with its 95 % interval (paired by
    task).
    """

    before: float
    after: float
    gain: float
    low: float
    high: float
    tasks: int


def gain_of(rollouts: Sequence[RolloutView], first: int, last: int) -> Gain | None:
    """From the evaluation rollouts of versions ``first`` and ``last``; None when a version was not
    measured.
    """
    rewards: dict[int, dict[str, list[float]]] = {first: {}, last: {}}
    for rollout in rollouts:
        measured = rewards.get(rollout.policy_version)
        if rollout.mode == "eval" and measured is not None and rollout.reward is not None and rollout.task_id:
            measured.setdefault(rollout.task_id, []).append(rollout.reward)
    both = sorted(rewards[first].keys() & rewards[last].keys())
    if not both or first == last:
        return None
    before = [fmean(rewards[first][task]) for task in both]
    after = [fmean(rewards[last][task]) for task in both]
    gains = [b - a for a, b in zip(before, after, strict=True)]
    low, high = mean_interval(gains)
    return Gain(fmean(before), fmean(after), fmean(gains), low, high, len(both))


def curve(metrics: Sequence[StepMetrics]) -> list[tuple[int, float]]:
    """(version that was sampled, mean reward of its training rollouts)."""
    found = [(m.step - 1, m.metrics.get("reward/mean")) for m in metrics if m.source == "controller"]
    return [(version, reward) for version, reward in found if reward is not None]


def plot(points: Sequence[tuple[int, float]]) -> list[str]:
    """One bar per version, from reward 0 to 1."""
    return [
        f"  version {version:>3}  {reward:5.2f}  {'█' * round(reward * _WIDTH):<{_WIDTH}}|"
        for version, reward in points
    ]


def summary(
    *,
    gain: Gain | None,
    metrics: Sequence[StepMetrics],
    rollouts: Sequence[RolloutView],
    drift: Mapping[str, Any],
    counts: Mapping[str, int],
    phases: Mapping[str, float],
) -> str:
    """The whole text. ``drift`` and ``counts`` are the reports of ``drift`` and ``check --data``."""
    lines = [
        "",
        "Reward per policy version (training tasks, 128 rollouts each unless a row is short)",
        *plot(curve(metrics)),
    ]
    if gain is not None:
        lines += [
            "",
            f"Held-out tasks ({gain.tasks}, temperature 1): {gain.before:.3f} -> {gain.after:.3f}, "
            f"gain {gain.gain:+.3f} [{gain.low:+.3f}, {gain.high:+.3f}]",
        ]
    samples, trained = int(drift["samples"]), int(drift["trained_calls"])
    seconds = {
        name: sum(_figure(m, f"seconds/{name}") for m in metrics) for name in ("generate", "train", "swap")
    }
    lines += [
        "",
        f"calls       {drift['calls']} recorded, {trained} trained",
        f"samples     {samples}, {trained / samples if samples else 0:.2f} calls merged into each",
        f"drift       {_drift(drift)}",
        f"tokens      {drift['trained_tokens']} trained of {drift['tokens']}",
        f"checked     {counts['calls']} calls and {counts['samples']} samples keep the invariants",
        f"outcomes    {_kinds(rollouts)}",
        "of training " + ", ".join(f"{name} {value:.0f} s" for name, value in seconds.items()),
        "phases      " + ", ".join(f"{name} {value:.0f} s" for name, value in phases.items()),
    ]
    return "\n".join(lines)


def _figure(metrics: StepMetrics, name: str) -> float:
    return metrics.metrics.get(name) or 0.0 if metrics.source == "controller" else 0.0


def _drift(drift: Mapping[str, Any]) -> str:
    breaks = {name: cost["samples"] for name, cost in drift["reasons"].items() if name != "first"}
    return ", ".join(f"{count} breaks by {name}" for name, count in sorted(breaks.items())) or "none"


def _kinds(rollouts: Sequence[RolloutView]) -> str:
    kinds = Counter(f"{r.outcome}/{r.kind}" if r.kind != "ok" else "ok" for r in rollouts)
    retried = sum(r.attempts - 1 for r in rollouts if r.attempts > 1)
    shown = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    return f"{shown}; {retried} attempts repeated"
