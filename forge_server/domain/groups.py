"""Groups: which rollouts of a group count, and whether the group has anything to teach.

A group may be trained when at least two of its rollouts are valid, their rewards are not all equal and at least
one of them is trainable. Infra failures never count (I5); a valid rollout that must not be trained (I4) still
gives its reward to the baseline.
"""

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from forge_server.domain.outcome import Outcome, counts_for_training


class Dropped(StrEnum):
    """Why a group is not trained; "" in the row means it may be."""

    TOO_FEW_VALID = "too_few_valid"
    EQUAL_REWARDS = "equal_rewards"
    NOTHING_TRAINABLE = "nothing_trainable"
    STALE = "stale"


class Member(msgspec.Struct, frozen=True):
    """An ended rollout of a group. ``not_trained`` is that of its final attempt."""

    rollout_id: str
    outcome: Outcome
    reward: float | None
    not_trained: str


class Verdict(msgspec.Struct, frozen=True):
    """``valid`` rollouts form the baseline, ``trained`` ones give samples; ``dropped`` is None for a good group."""

    valid: tuple[str, ...]
    trained: tuple[str, ...]
    dropped: Dropped | None


def judge(members: Sequence[Member]) -> Verdict:
    """The verdict on a complete group."""
    valid = [m for m in members if counts_for_training(m.outcome) and m.reward is not None]
    trained = tuple(m.rollout_id for m in valid if not m.not_trained)
    dropped: Dropped | None = None
    if len(valid) < 2:
        dropped = Dropped.TOO_FEW_VALID
    elif len({m.reward for m in valid}) == 1:
        dropped = Dropped.EQUAL_REWARDS
    elif not trained:
        dropped = Dropped.NOTHING_TRAINABLE
    return Verdict(tuple(m.rollout_id for m in valid), trained, dropped)
