"""The demo's summary, from rows as the API gives them."""

from typing import Any

from forge_server.client.schemas import RolloutView, StepMetrics
from forge_server.demo.summary import curve, gain_of, plot, summary


def rollout(task: str, version: int, reward: float | None, mode: str = "eval", **changes: Any) -> RolloutView:
    values: dict[str, Any] = {
        "id": f"ro-{task}-{version}",
        "run_id": "ru",
        "group_id": None,
        "task_id": task,
        "harness": "react",
        "mode": mode,
        "state": "ended",
        "attempts": 1,
        "outcome": "completed",
        "kind": "ok",
        "reward": reward,
        "policy_version": version,
        "final_attempt_id": None,
        "created_at": 0.0,
        "ended_at": 1.0,
    }
    return RolloutView(**(values | changes))


def test_the_gain_is_paired_by_task() -> None:
    before = [rollout(f"t{i}", 0, float(i < 4)) for i in range(10)]
    after = [rollout(f"t{i}", 3, float(i < 8)) for i in range(10)]
    lost = [
        rollout("t99", 0, 1.0),
        rollout("t98", 3, None),
        rollout("t1", 1, 0.0),
        rollout("t2", 3, 0.0, "train"),
    ]
    again = [rollout("t0", 0, 0.0), rollout("t9", 0, 1.0)]  # several rollouts of a task count as their mean
    gain = gain_of([*before, *again, *after, *lost], 0, 3)
    assert gain is not None
    assert (gain.before, gain.after, gain.tasks) == (0.4, 0.8, 10)
    assert abs(gain.gain - 0.4) < 1e-9
    assert gain.low < 0.4 < gain.high


def test_there_is_no_gain_without_both_measurements() -> None:
    assert gain_of([rollout("t", 0, 1.0)], 0, 3) is None
    assert gain_of([rollout("t", 0, 1.0)], 0, 0) is None


def test_the_curve_is_of_the_version_that_was_sampled() -> None:
    rows = [
        StepMetrics(1, "controller", {"reward/mean": 0.25, "seconds/generate": 3.0}, 0.0),
        StepMetrics(1, "trainer", {"loss": 1.0}, 0.0),
        StepMetrics(2, "controller", {"reward/mean": 1.0}, 0.0),
        StepMetrics(2, "eval", {"reward/mean": 0.9}, 0.0),
    ]
    assert curve(rows) == [(0, 0.25), (1, 1.0)]
    low, high = plot(curve(rows))
    assert low.count("█") == 10 and high.count("█") == 40
    text = summary(
        gain=None,
        metrics=rows,
        rollouts=[
            rollout("a", 0, 1.0),
            rollout("b", 0, 0.0, outcome="policy_failure", kind="budget_calls", attempts=2),
        ],
        drift={
            "calls": 7,
            "trained_calls": 6,
            "samples": 3,
            "tokens": 100,
            "trained_tokens": 40,
            "reasons": {"first": {"samples": 2}, "root": {"samples": 1}},
        },
        counts={"calls": 7, "samples": 3},
        phases={"training": 61.0},
    )
    assert "7 recorded, 6 trained" in text
    assert "2.00 calls merged into each" in text
    assert "1 breaks by root" in text
    assert "1 ok, 1 policy_failure/budget_calls; 1 attempts repeated" in text
    assert "generate 3 s" in text and "training 61 s" in text
