"""AReaL's trajectories: a batch of one row per sample, as its rollout workflows return it.

``versions`` is -1 on what was not sampled. ``rewards`` is the rollout's, on every row of it.
"""

from collections.abc import Iterator

from forge_server.export.mappings.source import Row, TrainedRollout


def rows(rollout: TrainedRollout) -> Iterator[Row]:
    """One row per sample, each value with the batch dimension that AReaL expects."""
    for sample in rollout.samples:
        yield {
            "input_ids": [sample.tokens.tolist()],
            "loss_mask": [sample.loss_mask.tolist()],
            "logprobs": [sample.logprobs.tolist()],
            "versions": [sample.versions.tolist()],
            "attention_mask": [[True] * sample.tokens.size],
            "rewards": [rollout.reward],
        }
