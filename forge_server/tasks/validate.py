"""Validates a task by running it twice: the gold solution must pass, doing nothing must fail.

A verifier that passes everything, or nothing, teaches nothing; one that cannot run fails every rollout.
Both are found here before a run is spent on them.
"""

from typing import Literal, Protocol

import msgspec

from forge_server.tasks.task import Task

PASS_REWARD = 1.0
NOTHING = "exit 0\n"


class Trial(msgspec.Struct, frozen=True):
    """How an attempt without a model came out. ``error`` is the verifier's, or that of the attempt itself."""

    verifier: Literal["ok", "crash", "timeout", "invalid", "none"]
    reward: float | None = None
    error: str = ""


class Trials(Protocol):
    """Runs attempts in which a shell script takes the agent's place; the scheduler's business."""

    async def run(self, task: Task, script: str) -> Trial:
        """One attempt: the task's files, ``script`` by bash in the work folder, then the verifier."""


class Validation(msgspec.Struct, frozen=True):
    """``faults`` is empty for a task that is fit for use."""

    name: str
    gold_reward: float | None
    idle_reward: float | None
    faults: tuple[str, ...]


async def validate(task: Task, trials: Trials) -> Validation:
    """Run the gold solution and nothing at all, one after the other."""
    faults = []
    gold = idle = None
    script = task.gold_script
    if script is None:
        faults.append("there is no gold solution: add solution/solve.sh, or gold to the line")
    else:
        gold = await trials.run(task, script)
        if gold.verifier != "ok":
            faults.append(f"with the gold solution the verifier says {gold.verifier}: {gold.error}")
        elif gold.reward is None or gold.reward < PASS_REWARD:
            faults.append(f"the gold solution gets {gold.reward}, less than {PASS_REWARD:g}")
    idle = await trials.run(task, NOTHING)
    if idle.verifier != "ok":
        faults.append(f"when nothing is done the verifier says {idle.verifier}: {idle.error}")
    elif idle.reward is None or idle.reward >= PASS_REWARD:
        faults.append(f"doing nothing passes (reward {idle.reward})")
    elif idle.reward < task.min_reward:
        faults.append(
            f"doing nothing gets {idle.reward:g}, less than the declared minimum {task.min_reward:g}"
        )
    return Validation(
        name=task.name,
        gold_reward=gold.reward if gold is not None else None,
        idle_reward=idle.reward,
        faults=tuple(faults),
    )
