"""Bytes of one training batch: a safetensors file, equal for equal input (invariant I8).

A row is a sample. Rows of one rollout are contiguous and in order, so that a rollout can be kept whole
(I11); rewards and groups are per rollout, and no advantage is written: the trainer computes it, once per
rollout.
"""

import struct
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from forge_server.domain.sample import Sample

SCHEMA = "1"
_DTYPES = {np.dtype("<i4"): "I32", np.dtype("<i8"): "I64", np.dtype("<f4"): "F32", np.dtype("u1"): "U8"}
Array = npt.NDArray[np.generic]


class BatchRollout(msgspec.Struct, frozen=True):
    """A valid rollout as it enters a batch, its samples in order.

    Without samples (all of it beyond the length limit) it has no row, but counts in its group's baseline.
    """

    rollout_id: str
    group_id: str
    reward: float
    samples: tuple[Sample, ...]


def write_batch(run: str, k: int, rollouts: Sequence[BatchRollout], seed: int) -> bytes:
    """Batch ``k`` of ``run``. T tokens, N rows, R rollouts, S spans of trained calls:

    ``tokens`` i32 [T], ``loss_mask`` u8 [T], ``logprobs`` f32 [T], ``versions`` i32 [T], ``row_offsets``
    i64 [N+1], ``prompt_len`` i32 [N], ``rollout`` i32 [N], ``row_temperature`` f32 [N], ``rollout_group``
    i32 [R], ``rollout_reward`` f32 [R], and ``span_row``, ``span_start``, ``span_end`` i32 [S] with starts
    and ends in the row.
    """
    rows = [(r, sample) for r, rollout in enumerate(rollouts) for sample in rollout.samples]
    if not rows:
        raise ValueError("a batch needs a sample")
    samples = [sample for _, sample in rows]
    if any(sample.media for sample in samples):
        raise ValueError("a batch carries no images: a call with images in its prompt is not trained")
    groups = list(dict.fromkeys(rollout.group_id for rollout in rollouts))
    spans = [
        (row, span.prompt_end, span.end)
        for row, sample in enumerate(samples)
        for span in sample.spans
        if span.owned
    ]
    lengths = [sample.tokens.size for sample in samples]
    tensors: dict[str, Array] = {
        "tokens": np.concatenate([s.tokens for s in samples]).astype("<i4"),
        "loss_mask": np.concatenate([s.loss_mask for s in samples]).astype("u1"),
        "logprobs": np.concatenate([s.logprobs for s in samples]).astype("<f4"),
        "versions": np.concatenate([s.versions for s in samples]).astype("<i4"),
        "row_offsets": np.cumsum([0, *lengths], dtype="<i8"),
        "prompt_len": np.array([s.prompt_len for s in samples], "<i4"),
        "rollout": np.array([r for r, _ in rows], "<i4"),
        "row_temperature": np.array([_temperature(s) for s in samples], "<f4"),
        "rollout_group": np.array([groups.index(r.group_id) for r in rollouts], "<i4"),
        "rollout_reward": np.array([r.reward for r in rollouts], "<f4"),
        "span_row": np.array([s[0] for s in spans], "<i4"),
        "span_start": np.array([s[1] for s in spans], "<i4"),
        "span_end": np.array([s[2] for s in spans], "<i4"),
    }
    metadata = {
        "schema": SCHEMA,
        "run": run,
        "k": str(k),
        "rollouts": msgspec.json.encode([r.rollout_id for r in rollouts]).decode(),
        "groups": msgspec.json.encode(groups).decode(),
        "min_version": str(min(s.min_version for s in samples)),
        "max_version": str(max(s.max_version for s in samples)),
        "seed": str(seed),
    }
    return safetensors(tensors, metadata)


def safetensors(tensors: dict[str, Array], metadata: dict[str, str]) -> bytes:
    """Serialise in the safetensors format: wider types first so that each is aligned, then by name."""
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))
    header: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))}
    at = 0
    for name, array in ordered:
        header[name] = {
            "dtype": _DTYPES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [at, at + array.nbytes],
        }
        at += array.nbytes
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    return b"".join((struct.pack("<Q", len(text)), text, *(array.tobytes() for _, array in ordered)))


def _temperature(sample: Sample) -> float:
    """The one temperature that the sample's trained calls were sampled at (`samples.cover` cuts by it)."""
    (temperature,) = {span.temperature for span in sample.spans if span.owned}
    return temperature
