"""Which rollouts and groups a batch is made of. Pure rules; invariants I4, I5 and I11 rest on them.

Three nested sets of the rollouts that a step has drawn:

1. *valid*: ended ``completed`` or as a policy failure, with a reward. All of them make up the reported
   reward, and nothing else does: infra failures leave no trace in it (I5).
2. *trainable*: valid, its attempt was recorded whole (I4), and at least one of its tokens is to be trained.
   They are the baseline of their group: a rollout that gets no advantage must not move that of the others.
   One whose tokens all lie beyond the length limit stays in it: it did what its reward says, and the others'
   advantages must not depend on where rows are cut.
3. *trained*: the trainable rollouts of groups with a signal: at least two of them, rewards not all equal,
   and a token to train.

The advantage itself is the trainer's (I11): the batch carries rewards and groups, and every rollout of it is
there with all of its samples. Only rows for trainers that expect one (`forge-server export`) carry the plain
``advantages``.
"""

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum

import msgspec

from forge_server.domain.outcome import Outcome, counts_for_training


class Drop(StrEnum):
    """Why a complete group is not trained."""

    EQUAL_REWARDS = "equal_rewards"
    TOO_FEW_VALID = "too_few_valid"
    STALE = "stale"


class EndedRollout(msgspec.Struct, frozen=True, kw_only=True):
    """What the selection must know of a rollout that has ended.

    ``not_trained`` is the reason of its final attempt (I4), empty when there is none; ``trained_tokens``
    counts the tokens with loss mask 1 over all its samples, ``clipped_tokens`` those that would have it but for
    the length limit; ``versions`` are the policy versions that its reward is of: those that answered any call that
    took part, trained or not; none without a token of either kind.
    """

    id: str
    group_id: str
    outcome: Outcome
    reward: float | None
    not_trained: str = ""
    trained_tokens: int = 0
    clipped_tokens: int = 0
    versions: frozenset[int] = frozenset()

    @property
    def valid(self) -> bool:
        return counts_for_training(self.outcome) and self.reward is not None and math.isfinite(self.reward)

    @property
    def trainable(self) -> bool:
        return self.valid and not self.not_trained and self.trained_tokens + self.clipped_tokens > 0


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """``groups`` are those with a signal, in the order given, each with its trainable rollouts in order."""

    groups: dict[str, tuple[EndedRollout, ...]]
    dropped: dict[str, Drop]


def judge(rollouts: Sequence[EndedRollout], usable: frozenset[int] | None = None) -> Drop | None:
    """Why the complete group of these rollouts has no place in a batch, or None.

    With ``usable`` the group is stale when another policy version has sampled of a trainable rollout.
    """
    trainable = [r for r in rollouts if r.trainable]
    trained = [r for r in trainable if r.trained_tokens]
    if len(trainable) < 2 or not trained:
        return Drop.TOO_FEW_VALID
    if len({r.reward for r in trainable}) == 1:
        return Drop.EQUAL_REWARDS
    if usable is not None and foreign(trainable, usable):
        return Drop.STALE
    return None


def foreign(rollouts: Sequence[EndedRollout], usable: frozenset[int]) -> bool:
    """Whether other policy versions have sampled of a valid rollout: its reward is theirs, whatever it is."""
    return any(r.versions - usable for r in rollouts if r.valid)


def select(groups: Mapping[str, Sequence[EndedRollout]], usable: frozenset[int] | None = None) -> Selection:
    """Divide complete groups into those to train and those dropped, each with its reason; see ``judge``."""
    kept: dict[str, tuple[EndedRollout, ...]] = {}
    dropped: dict[str, Drop] = {}
    for group_id, rollouts in groups.items():
        reason = judge(rollouts, usable)
        if reason is None:
            kept[group_id] = tuple(r for r in rollouts if r.trainable)
        else:
            dropped[group_id] = reason
    return Selection(groups=kept, dropped=dropped)


def advantages(rewards: Sequence[float]) -> tuple[float, ...]:
    """Of the trainable rollouts of one group: each reward minus their mean."""
    mean = math.fsum(rewards) / len(rewards) if rewards else 0.0
    return tuple(reward - mean for reward in rewards)


class Move(StrEnum):
    """What follows once every drawn group of a step is complete."""

    DRAW = "draw"
    ASSEMBLE = "assemble"
    NO_SIGNAL = "no_signal"


def next_move(with_signal: int, wanted: int, rounds: int, max_rounds: int) -> Move:
    """Draw another round, train a (possibly smaller) batch, or pause because there is nothing to learn."""
    if with_signal >= wanted:
        return Move.ASSEMBLE
    if rounds < max_rounds:
        return Move.DRAW
    return Move.ASSEMBLE if with_signal else Move.NO_SIGNAL
