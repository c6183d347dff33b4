"""Reads the calls of an attempt, and writes down what they were cut into."""

from typing import Any

from sqlalchemy import Connection

from forge_server.store.recordings import call_rows
from forge_server.trajectory.attempt import Cut, cut


def cut_attempt(connection: Connection, attempt_id: str, max_len: int) -> Cut:
    """Cut the attempt's calls into samples of at most ``max_len`` tokens; a fault is in the result."""
    return cut(call_rows(connection, attempt_id), max_len)


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
