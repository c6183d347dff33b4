"""What an export wrote and what it left out, each with its reason."""

from collections import Counter

import msgspec

from forge_server.domain.outcome import Outcome, counts_for_training
from forge_server.export.records import Rollout
from forge_server.trajectory.attempt import Cut


class ExportReport(msgspec.Struct):
    """``left_out``: rollouts without a row, by reason. ``untrained``: calls of the written rollouts that no
    sample trains, by reason. ``clipped_tokens``: completion tokens beyond the length limit. ``images``: files of
    them beside the rows.
    """

    path: str
    rows: int = 0
    rollouts: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    clipped_tokens: int = 0
    images: int = 0
    left_out: Counter[str] = msgspec.field(default_factory=Counter)
    untrained: Counter[str] = msgspec.field(default_factory=Counter)

    def add(self, found: Cut) -> None:
        """Count a rollout that is written."""
        self.rollouts += 1
        self.rows += len(found.samples)
        self.tokens += found.tokens
        self.trained_tokens += found.trained_tokens
        self.clipped_tokens += sum(found.clipped.values())
        self.untrained.update(reason.value for reason in found.untrained.values())


def left_out(rollout: Rollout, min_reward: float | None = None) -> str:
    """Why no sample of the rollout is written, as far as its row tells; empty when it may be."""
    if rollout.outcome is None or rollout.attempt_id is None:
        return f"rollout_{rollout.state}" if rollout.outcome is None else rollout.outcome
    if not counts_for_training(Outcome(rollout.outcome)):
        return rollout.outcome
    if rollout.mode == "eval":
        return "evaluation"
    if rollout.not_trained:
        return rollout.not_trained
    if min_reward is not None and (rollout.reward is None or rollout.reward < min_reward):
        return "below_min_reward"
    return ""
