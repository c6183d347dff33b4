"""The canonical table of samples: its schema, and batches of rows built from samples without copies per
token.

One row per sample. ``loss_mask``, ``logprobs`` (0 outside the mask) and ``versions`` (-1 outside it) are as
long as ``tokens``. A call span covers ``[start, end)`` of its row: context from ``start``, completion from
``prompt_end``; it is trained where ``owned``. ``loss_weight`` is 1 over the trained tokens of the whole
rollout, for trainers that weigh rollouts equally. ``advantage`` is null: it belongs to a group and is the
trainer's to compute, once per rollout (I11). ``mm`` names the images of ``tokens``: the placeholders of one stand in
``[offset, offset + length)``, and its file lies beside the table as ``media/SHA256``.
"""

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from forge_server.domain.sample import Sample
from forge_server.export.identity import Identity

SCHEMA_VERSION = "1"
_WORD = pa.dictionary(pa.int32(), pa.string())
_SPAN = pa.struct(
    [
        ("call_id", pa.int64()),
        ("start", pa.int32()),
        ("prompt_end", pa.int32()),
        ("end", pa.int32()),
        ("finish", _WORD),
        ("temperature", pa.float32()),
        ("owned", pa.bool_()),
        ("version", pa.int32()),
    ]
)
_MEDIA = pa.struct(
    [
        ("sha256", pa.string()),
        ("offset", pa.int32()),
        ("length", pa.int32()),
        ("modality", _WORD),
        ("kwargs_ref", pa.string()),
    ]
)
_FIELDS = [
    ("tokens", pa.large_list(pa.int32())),
    ("loss_mask", pa.large_list(pa.uint8())),
    ("logprobs", pa.large_list(pa.float32())),
    ("versions", pa.large_list(pa.int32())),
    ("call_spans", pa.list_(_SPAN)),
    ("prompt_len", pa.int32()),
    ("rollout_id", _WORD),
    ("group_id", _WORD),
    ("task_id", _WORD),
    ("forest_key", _WORD),
    ("harness", _WORD),
    ("sample_index", pa.int16()),
    ("n_samples", pa.int16()),
    ("reward", pa.float32()),
    ("advantage", pa.float32()),
    ("loss_weight", pa.float32()),
    ("valid", pa.bool_()),
    ("failure_kind", _WORD),
    ("truncated", pa.bool_()),
    ("min_version", pa.int32()),
    ("max_version", pa.int32()),
    ("mm", pa.list_(_MEDIA)),
    ("routed_ref", pa.string()),
    ("kept_ref", pa.string()),
]
_SFT_FIELDS = ("tokens", "loss_mask", "rollout_id", "sample_index", "reward")


def schema(identity: Identity) -> pa.Schema:
    """The schema, with what the ids belong to in its metadata."""
    return pa.schema(_FIELDS, metadata=_metadata(identity))


def sft_schema(identity: Identity) -> pa.Schema:
    """What supervised fine-tuning reads."""
    return pa.schema(
        [(name, kind) for name, kind in _FIELDS if name in _SFT_FIELDS], metadata=_metadata(identity)
    )


def _metadata(identity: Identity) -> dict[str, str]:
    return {"schema_version": SCHEMA_VERSION, **msgspec.to_builtins(identity)}


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A sample and what its rollout says."""

    sample: Sample
    n_samples: int
    rollout_tokens: int
    rollout_id: str
    group_id: str | None
    task_id: str | None
    harness: str
    reward: float | None
    kind: str


class Words:
    """Dictionaries that only grow, so that each batch's extends the one before (an Arrow file wants that)."""

    def __init__(self) -> None:
        self._known: dict[str, dict[str, int]] = {}

    def encode(self, column: str, values: Iterable[str | None]) -> pa.DictionaryArray:
        known = self._known.setdefault(column, {"": 0})  # an empty dictionary cannot grow in an Arrow file
        codes = [None if value is None else known.setdefault(value, len(known)) for value in values]
        return pa.DictionaryArray.from_arrays(pa.array(codes, pa.int32()), pa.array(known, pa.string()))


def batch(rows: Sequence[Row], schema: pa.Schema, words: Words) -> pa.RecordBatch:
    """Rows as a batch of ``schema`` (all of the table, or a selection of its columns)."""
    samples = [row.sample for row in rows]
    offsets = np.cumsum([0, *(sample.tokens.size for sample in samples)], dtype=np.int64)

    def per_token(name: str) -> pa.Array:
        flat = np.concatenate([getattr(sample, name) for sample in samples])
        return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(flat))

    def column(name: str, kind: pa.DataType) -> pa.Array:
        match name:
            case "tokens" | "loss_mask" | "logprobs" | "versions":
                return per_token(name)
            case "call_spans":
                return _spans(samples, words)
            case "rollout_id" | "group_id" | "task_id" | "harness":
                return words.encode(name, (getattr(row, name) for row in rows))
            case "forest_key":
                return words.encode(name, (sample.forest_key for sample in samples))
            case "failure_kind":
                return words.encode(name, (row.kind for row in rows))
            case "prompt_len" | "truncated" | "min_version" | "max_version":
                return pa.array([getattr(sample, name) for sample in samples], kind)
            case "sample_index":
                return pa.array([sample.index for sample in samples], kind)
            case "n_samples" | "reward":
                return pa.array([getattr(row, name) for row in rows], kind)
            case "loss_weight":
                return pa.array([1.0 / row.rollout_tokens for row in rows], kind)
            case "valid":
                return pa.array([True] * len(rows), kind)
            case "mm":
                return _media(samples, words)
            case _:  # advantage, routed_ref, kept_ref: not known here
                return pa.nulls(len(rows), kind)

    return pa.record_batch([column(field.name, field.type) for field in schema], schema=schema)


def _media(samples: Sequence[Sample], words: Words) -> pa.ListArray:
    spans = [span for sample in samples for span in sample.media]
    columns = [
        pa.array([span.sha256 for span in spans], pa.string()),
        pa.array([span.offset for span in spans], pa.int32()),
        pa.array([span.length for span in spans], pa.int32()),
        words.encode("modality", ["image"] * len(spans)),
        pa.nulls(len(spans), pa.string()),
    ]
    counts: npt.NDArray[np.int32] = np.cumsum([0, *(len(s.media) for s in samples)], dtype=np.int32)
    inner = pa.StructArray.from_arrays(columns, fields=list(_MEDIA))
    return pa.ListArray.from_arrays(pa.array(counts), inner)


def _spans(samples: Sequence[Sample], words: Words) -> pa.ListArray:
    spans = [span for sample in samples for span in sample.spans]
    starts = [start for sample in samples for start in (0, *(span.end for span in sample.spans[:-1]))]

    def numbers(kind: pa.DataType, values: Iterable[float]) -> pa.Array:
        return pa.array(list(values), kind)

    columns = {
        "call_id": numbers(pa.int64(), (span.call_id for span in spans)),
        "start": numbers(pa.int32(), starts),
        "prompt_end": numbers(pa.int32(), (span.prompt_end for span in spans)),
        "end": numbers(pa.int32(), (span.end for span in spans)),
        "finish": words.encode("finish", (span.finish_reason for span in spans)),
        "temperature": numbers(pa.float32(), (span.temperature for span in spans)),
        "owned": numbers(pa.bool_(), (span.owned for span in spans)),
        "version": numbers(pa.int32(), (span.version for span in spans)),
    }
    counts: npt.NDArray[np.int32] = np.cumsum([0, *(len(s.spans) for s in samples)], dtype=np.int32)
    inner = pa.StructArray.from_arrays(list(columns.values()), fields=list(_SPAN))
    return pa.ListArray.from_arrays(pa.array(counts), inner)
