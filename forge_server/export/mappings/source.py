"""What the mappings start from: one trained rollout with all of its samples."""

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from forge_server.domain.sample import Sample

Row = dict[str, Any]
"""A row as JSON holds it: names, numbers, text and lists."""


class TrainedRollout(msgspec.Struct, frozen=True, kw_only=True):
    """A trainable rollout of a complete group with a signal (``domain.batches``).

    ``advantage`` is of the rollout: all its samples have the same (I11). ``number`` and ``group_number`` count
    the rollouts and groups of one export from 0, for targets whose ids are integers.
    """

    id: str
    group_id: str
    task_id: str
    harness: str
    slot: int
    number: int
    group_number: int
    reward: float
    advantage: float
    samples: tuple[Sample, ...]


def temperature(sample: Sample) -> float:
    """The one temperature that the sample's trained calls were sampled at (``samples.cover`` cuts by it)."""
    (found,) = {span.temperature for span in sample.spans if span.owned}
    return found


def advantages(rollout: TrainedRollout, sample: Sample) -> npt.NDArray[np.float64]:
    """The rollout's advantage on every trained token, 0 elsewhere; as long as the sample."""
    return np.where(sample.loss_mask == 1, rollout.advantage, 0.0)


def cut_short(sample: Sample) -> bool:
    """Whether its last trained call stopped for length, or the sample itself was cut."""
    last = [span for span in sample.spans if span.owned][-1]
    return sample.truncated or last.finish_reason == "length"
