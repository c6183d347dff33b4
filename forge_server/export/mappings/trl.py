"""TRL's ``RolloutSample``, the rows of its asynchronous GRPO trainer.

It is the one TRL trainer in which a conversation may have several rows; they share its advantage, as here.
"""

from collections.abc import Iterator

from forge_server.export.mappings.source import Row, TrainedRollout


def rows(rollout: TrainedRollout) -> Iterator[Row]:
    """One row per sample: ``RolloutSample(**row)`` with the three lists as arrays.

    ``prompt`` and ``completion`` are messages that TRL only logs; they are empty. ``model_version`` is the
    oldest of the sample.
    """
    for sample in rollout.samples:
        yield {
            "prompt": [],
            "completion": [],
            "input_ids": sample.tokens.tolist(),
            "completion_mask": sample.loss_mask.tolist(),
            "old_log_probs": sample.logprobs.tolist(),
            "advantage": rollout.advantage,
            "model_version": sample.min_version,
            "group_id": rollout.group_number,
            "metrics": {"reward": rollout.reward},
        }
