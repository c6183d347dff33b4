"""tinker's ``Datum`` for its policy losses: inputs without the last token, everything else without the first.

Position i of the loss inputs speaks of token i + 1. ``mask`` is the cookbook's, which takes it out before it
sends a datum.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from forge_server.export.mappings.source import Row, TrainedRollout, advantages


def rows(rollout: TrainedRollout) -> Iterator[Row]:
    """One row per sample, in the API's own JSON."""
    for sample in rollout.samples:
        yield {
            "model_input": {"chunks": [{"type": "encoded_text", "tokens": sample.tokens[:-1].tolist()}]},
            "loss_fn_inputs": {
                "target_tokens": _tensor(sample.tokens, "int64"),
                "logprobs": _tensor(sample.logprobs, "float32"),
                "advantages": _tensor(advantages(rollout, sample), "float32"),
                "mask": _tensor(sample.loss_mask.astype(np.float32), "float32"),
            },
        }


def _tensor(values: npt.NDArray[np.generic], dtype: str) -> Row:
    shifted = values[1:].tolist()
    return {"data": shifted, "dtype": dtype, "shape": [len(shifted)]}
