"""veRL's V1 trainer: the TransferQueue key of each row and the fields of its ``AgentLoopOutput``.

The key is ``{uid}_{session}_{index}``; ids of groups hold no ``_``. veRL reads a rollout's advantage at the
first trained token of its last index: every sample has one. All rows carry the reward, as veRL copies the last
one's to the others.
"""

from collections.abc import Iterator

from forge_server.export.mappings.source import Row, TrainedRollout


def rows(rollout: TrainedRollout) -> Iterator[Row]:
    """One row per sample, by index."""
    for index, sample in enumerate(rollout.samples):
        at = sample.prompt_len
        yield {
            "key": f"{rollout.group_id}_{rollout.slot}_{index}",
            "output": {
                "prompt_ids": sample.tokens[:at].tolist(),
                "response_ids": sample.tokens[at:].tolist(),
                "response_mask": sample.loss_mask[at:].tolist(),
                "response_logprobs": sample.logprobs[at:].tolist(),
                "reward_score": rollout.reward,
                "num_turns": 2 * len(sample.spans),  # of each call what was asked and what was answered
                "metrics": {},
                "extra_fields": {
                    "min_global_steps": sample.min_version,
                    "max_global_steps": sample.max_version,
                    "reward_extra_info": {},
                },
            },
        }
