"""Groups and their rollouts as the controller and the evaluation see them, and how new ones are made."""

import math

import msgspec

from forge_server.domain.events import GroupCreated, RolloutCreated
from forge_server.domain.ids import new_id
from forge_server.domain.outcome import Outcome, counts_for_training
from forge_server.domain.run import Mode, RunSettings


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout of a group. ``attempt_id`` and ``not_trained`` are those of its final attempt."""

    id: str
    ended: bool
    outcome: str | None
    kind: str | None
    reward: float | None
    attempts: int
    attempt_id: str | None
    not_trained: str
    created_at: float
    ended_at: float | None

    @property
    def valid(self) -> bool:
        """Whether its reward counts: see ``domain.batches``."""
        return (
            self.outcome is not None
            and counts_for_training(Outcome(self.outcome))
            and self.reward is not None
            and math.isfinite(self.reward)
        )


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """The rollouts of one task under one run step, by slot."""

    id: str
    step: int
    round: int
    task_id: str
    members: tuple[Member, ...]

    @property
    def complete(self) -> bool:
        return all(member.ended for member in self.members)


def new_group(
    run_id: str,
    settings: RunSettings,
    *,
    task_id: str,
    harness: str,
    mode: Mode,
    step: int,
    size: int,
    policy_version: int,
    round: int = 0,
) -> GroupCreated:
    """A group of ``size`` rollouts of one task in one harness."""
    group_id = new_id("gr")
    return GroupCreated(
        group_id=group_id,
        run_id=run_id,
        task_id=task_id,
        step=step,
        mode=mode,
        round=round,
        rollouts=tuple(
            RolloutCreated(
                rollout_id=new_id("ro"),
                run_id=run_id,
                harness=harness,
                mode=mode,
                task_id=task_id,
                group_id=group_id,
                slot=slot,
                max_attempts=settings.max_attempts,
                policy_version=policy_version,
            )
            for slot in range(size)
        ),
    )
