"""The ``events`` table: one row per state change, numbered in commit order by the one writer.

Whoever writes a state change appends its event in the same transaction. Whoever follows them reads on
after the last number it knows; numbers may have gaps, their order has none.
"""

from typing import Any

import sqlalchemy as sa

from forge_server.domain.events import EventRow
from forge_server.store import tables as t


def append(
    connection: sa.Connection,
    *,
    at: float,
    kind: str,
    data: dict[str, Any],
    run_id: str | None = None,
    rollout_id: str | None = None,
    attempt_id: str | None = None,
) -> EventRow:
    """Append one event within the caller's transaction."""
    values = {
        "at": at,
        "kind": kind,
        "data": data,
        "run_id": run_id,
        "rollout_id": rollout_id,
        "attempt_id": attempt_id,
    }
    key = connection.execute(sa.insert(t.events), values).inserted_primary_key
    assert key is not None
    return EventRow(id=int(key[0]), **values)  # type: ignore[arg-type]


def prune(connection: sa.Connection, before: float) -> int:
    """Delete events older than ``before``; the newest one stays, so that numbers go on. How many went."""
    newest = sa.select(sa.func.max(t.events.c.id)).scalar_subquery()
    gone = sa.delete(t.events).where(t.events.c.at < before, t.events.c.id < newest)
    return connection.execute(gone).rowcount
