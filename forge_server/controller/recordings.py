"""From an ended attempt's recorded calls to samples. Reads only; what cannot be read back is not
trained (I4)."""

from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy import Connection

from forge_server.domain.sample import Sample
from forge_server.store import tables as t
from forge_server.trajectory.codec import CallRow, CorruptRecord, decode_attempt
from forge_server.trajectory.samples import cover

CORRUPT = "corrupt_record"


class Cut(msgspec.Struct, frozen=True, kw_only=True):
    """What one attempt was cut into, and what of it was not trained, by reason."""

    samples: tuple[Sample, ...]
    calls: int
    untrained: dict[str, int]
    clipped_tokens: int = 0
    fault: str = ""

    @property
    def trained_tokens(self) -> int:
        return sum(int(sample.loss_mask.sum()) for sample in self.samples)

    @property
    def tokens(self) -> int:
        return sum(int(sample.tokens.size) for sample in self.samples)

    @property
    def min_version(self) -> int:
        return min((sample.min_version for sample in self.samples), default=0)


def cut_attempt(connection: Connection, attempt_id: str, max_len: int) -> Cut:
    """Read, rebuild and cut the calls of the attempt into samples of at most ``max_len`` tokens."""
    rows = _read(connection, attempt_id)
    try:
        found = cover(decode_attempt(rows), max_len)
    except CorruptRecord:
        return Cut(samples=(), calls=len(rows), untrained={}, fault=CORRUPT)
    untrained: dict[str, int] = {}
    for reason in found.untrained.values():
        untrained[reason.value] = untrained.get(reason.value, 0) + 1
    return Cut(
        samples=found.samples,
        calls=len(rows),
        untrained=untrained,
        clipped_tokens=sum(found.clipped.values()),
    )


def sample_rows(rollout_id: str, attempt_id: str, cut: Cut) -> list[dict[str, Any]]:
    """Rows of the ``samples`` table."""
    return [
        {
            "rollout_id": rollout_id,
            "index": sample.index,
            "attempt_id": attempt_id,
            "length": int(sample.tokens.size),
            "trained": int(sample.loss_mask.sum()),
            "prompt_len": sample.prompt_len,
            "break_reason": sample.break_reason.value,
            "min_version": sample.min_version,
            "max_version": sample.max_version,
            "call_ids": [span.call_id for span in sample.spans if span.owned],
        }
        for sample in cut.samples
    ]


def _read(connection: Connection, attempt_id: str) -> list[CallRow]:
    c, tokens = t.calls.c, t.call_tokens.c
    query = (
        sa.select(
            c.id,
            c.seq,
            c.end,
            c.delivered,
            c.untrainable,
            c.label,
            c.forest_key,
            c.storage_parent_id,
            c.prefix_len,
            c.finish_reason,
            c.temperature,
            tokens.data,
            tokens.prompt_digest,
        )
        .outerjoin(t.call_tokens, tokens.call_id == c.id)
        .where(c.attempt_id == attempt_id)
        .order_by(c.seq)
    )
    return [CallRow(**row) for row in connection.execute(query).mappings()]
