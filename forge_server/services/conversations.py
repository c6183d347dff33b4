"""What was said: requests and responses of calls, and the last lines of runners, for people to read."""

from typing import Any

import sqlalchemy as sa
import zstandard

from forge_server.client.schemas import LogView
from forge_server.store import messages
from forge_server.store import tables as t


def conversations(connection: sa.Connection, call_ids: list[int]) -> dict[int, tuple[list[Any], Any]]:
    """(messages of the request, the answering message) of each recorded call."""
    out: dict[int, tuple[list[Any], Any]] = {}
    for call_id in call_ids:
        request = messages.request_of(connection, call_id)
        if request is not None:
            out[call_id] = (request[1], messages.response_of(connection, call_id))
    return out


def log_tails(connection: sa.Connection, rollout_id: str) -> list[LogView]:
    """The log tails of a rollout's attempts, first attempt first."""
    query = (
        sa.select(t.attempt_logs)
        .join(t.attempts, t.attempts.c.id == t.attempt_logs.c.attempt_id)
        .where(t.attempts.c.rollout_id == rollout_id)
        .order_by(t.attempts.c.number, t.attempt_logs.c.stream)
    )
    return [
        LogView(row.attempt_id, row.stream, zstandard.decompress(row.tail).decode("utf-8", "replace"))
        for row in connection.execute(query)
    ]
