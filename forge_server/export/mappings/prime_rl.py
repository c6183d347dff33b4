"""prime-rl's ``TrainingSample``: four streams and the advantages, all as long as the tokens.

By name rather than in its positional msgpack, whose layout differs between versions. ``rl_weights`` is left
out: prime-rl's loss is a mean over all tokens of a batch, which does not depend on how a rollout was cut.
"""

from collections.abc import Iterator

from forge_server.export.mappings.source import Row, TrainedRollout, advantages, temperature


def rows(rollout: TrainedRollout) -> Iterator[Row]:
    """One row per sample: ``TrainingSample(**row)``."""
    for sample in rollout.samples:
        yield {
            "token_ids": sample.tokens.tolist(),
            "mask": sample.loss_mask.astype(bool).tolist(),
            "logprobs": sample.logprobs.tolist(),
            "temperatures": [temperature(sample)] * sample.tokens.size,
            "env_name": rollout.harness,
            "advantages": advantages(rollout, sample).tolist(),
        }
