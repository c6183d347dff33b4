"""SkyRL's ``GeneratorOutput`` for step-wise training; a column of it is the list of the rows' values.

SkyRL tells trajectories apart by ``is_last_step`` alone, so the rows of a rollout follow each other; the reward
is on the last.
"""

from collections.abc import Iterator

from forge_server.export.mappings.source import Row, TrainedRollout, cut_short


def rows(rollout: TrainedRollout) -> Iterator[Row]:
    """One row per sample; ``trajectory_ids`` are the fields of ``TrajectoryID``."""
    for sample in rollout.samples:
        at, last = sample.prompt_len, sample is rollout.samples[-1]
        yield {
            "prompt_token_ids": sample.tokens[:at].tolist(),
            "response_ids": sample.tokens[at:].tolist(),
            "loss_masks": sample.loss_mask[at:].tolist(),
            "rollout_logprobs": sample.logprobs[at:].tolist(),
            "rewards": rollout.reward if last else 0.0,
            "stop_reasons": "length" if cut_short(sample) else "stop",
            "trajectory_ids": {"instance_id": rollout.group_id, "repetition_id": rollout.slot},
            "is_last_step": last,
        }
