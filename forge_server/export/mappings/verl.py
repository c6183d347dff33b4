"""veRL's classic ``DataProto``: one row per sample, unpadded, and ``padded``, which makes a batch's arrays of
rows.

``padded`` needs numpy only, so that this file can be read where veRL is installed and the server is not.
Prompts are padded on the left, responses on the right; the reward lies on the last response token.

veRL's own ``compute_advantage`` counts each row of this form as a rollout of its own. Where rollouts have
several samples, keep the ``advantages`` that come with the rows, or take the ``verl-v1`` form.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from forge_server.export.mappings.source import Row, TrainedRollout


def rows(rollout: "TrainedRollout") -> "Iterator[Row]":
    """One row per sample; ``uid`` is the group."""
    for sample in rollout.samples:
        at = sample.prompt_len
        yield {
            "uid": rollout.group_id,
            "rollout_id": rollout.id,
            "prompts": sample.tokens[:at].tolist(),
            "responses": sample.tokens[at:].tolist(),
            "response_mask": sample.loss_mask[at:].tolist(),
            "rollout_log_probs": sample.logprobs[at:].tolist(),
            "reward": rollout.reward,
            "advantage": rollout.advantage,
            "min_global_steps": sample.min_version,
            "max_global_steps": sample.max_version,
        }


def padded(
    rows: "Sequence[Row]", pad_token_id: int
) -> tuple[dict[str, npt.NDArray[Any]], dict[str, npt.NDArray[Any]]]:
    """Tensors and non-tensors for ``DataProto.from_dict``, as numpy arrays of one batch."""
    left = max(len(row["prompts"]) for row in rows)
    right = max(len(row["responses"]) for row in rows)

    def spread(name: str, dtype: type, pad: int = 0) -> npt.NDArray[Any]:
        out: npt.NDArray[Any] = np.full((len(rows), right), pad, dtype)
        for i, row in enumerate(rows):
            out[i, : len(row["responses"])] = row[name]
        return out

    prompts = np.full((len(rows), left), pad_token_id, np.int64)
    attention = np.zeros((len(rows), left + right), np.int64)
    rm_scores = np.zeros((len(rows), right), np.float32)
    for i, row in enumerate(rows):
        begin, length = left - len(row["prompts"]), len(row["responses"])
        prompts[i, begin:] = row["prompts"]
        attention[i, begin : left + length] = 1
        rm_scores[i, length - 1] = row["reward"]
    responses = spread("responses", np.int64, pad_token_id)
    mask = spread("response_mask", np.int64)
    of_rollout = np.array([[row["advantage"]] for row in rows], np.float32)
    tensors = {
        "prompts": prompts,
        "responses": responses,
        "input_ids": np.concatenate([prompts, responses], axis=1),
        "attention_mask": attention,
        "position_ids": np.maximum(np.cumsum(attention, axis=1) - 1, 0),
        "response_mask": mask,
        "rollout_log_probs": spread("rollout_log_probs", np.float32),
        "rm_scores": rm_scores,
        "advantages": of_rollout * mask.astype(np.float32),
    }
    names = ("uid", "rollout_id", "min_global_steps", "max_global_steps")
    return tensors, {name: np.array([row[name] for row in rows], dtype=object) for name in names}
