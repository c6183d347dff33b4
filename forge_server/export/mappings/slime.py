"""slime's ``Sample`` (miles has the same): ``Sample.from_dict`` reads a row.

The samples of a rollout share ``rollout_id``, over which slime sums masks and demands one reward. What belongs
to the response is as long as it.
"""

from collections.abc import Iterator

import numpy as np

from forge_server.export.mappings.source import Row, TrainedRollout, cut_short


def rows(rollout: TrainedRollout) -> Iterator[Row]:
    """One row per sample; our own ids are in ``metadata``."""
    for sample in rollout.samples:
        at = sample.prompt_len
        versions = np.unique(sample.versions[sample.loss_mask == 1])
        yield {
            "group_index": rollout.group_number,
            "index": rollout.number,
            "rollout_id": rollout.number,
            "tokens": sample.tokens.tolist(),
            "response_length": sample.tokens.size - at,
            "loss_mask": sample.loss_mask[at:].tolist(),
            "rollout_log_probs": sample.logprobs[at:].tolist(),
            "reward": rollout.reward,
            "weight_versions": [str(version) for version in versions.tolist()],
            "status": "truncated" if cut_short(sample) else "completed",
            "metadata": {"rollout": rollout.id, "group": rollout.group_id, "sample": sample.index},
        }
