"""Queries over what was recorded: the calls of an attempt, as the trajectory reads them."""

import sqlalchemy as sa

from forge_server.store import tables as t
from forge_server.trajectory.codec import CallRow

_OF_TOKENS = ("data", "prompt_digest", "media")


def call_rows(connection: sa.Connection, attempt_id: str) -> list[CallRow]:
    """Every call of the attempt in order, with its tokens where there are any; the bytes stay as they are."""
    names = [name for name in CallRow.__struct_fields__ if name not in _OF_TOKENS]
    query = (
        sa.select(*(t.calls.c[name] for name in names), *(t.call_tokens.c[name] for name in _OF_TOKENS))
        .outerjoin(t.call_tokens, t.call_tokens.c.call_id == t.calls.c.id)
        .where(t.calls.c.attempt_id == attempt_id)
        .order_by(t.calls.c.seq)
    )
    return [CallRow(**row) for row in connection.execute(query).mappings()]
