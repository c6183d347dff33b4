"""Reads the calls of an attempt, and writes down what they were cut into."""

from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from forge_server.store import tables as t
from forge_server.trajectory.attempt import Cut, cut
from forge_server.trajectory.codec import CallRow


def cut_attempt(connection: Connection, attempt_id: str, max_len: int) -> Cut:
    """Cut the attempt's calls into samples of at most ``max_len`` tokens; a fault is in the result."""
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
    return cut([CallRow(**row) for row in connection.execute(query).mappings()], max_len)


def sample_rows(rollout_id: str, attempt_id: str, found: Cut) -> list[dict[str, Any]]:
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
        for sample in found.samples
    ]
