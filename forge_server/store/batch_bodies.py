"""The bytes of batches, in parts: SQLite takes no value above 10^9 bytes and Postgres none above 2^30, and a batch of
long rollouts has more."""

import sqlalchemy as sa
from sqlalchemy import Connection

from forge_server.store.tables import batch_parts

PART_BYTES = 64 * 1024 * 1024


def write(connection: Connection, run_id: str, k: int, body: bytes) -> None:
    """Store the body of batch ``k``, which has none yet."""
    for part, at in enumerate(range(0, len(body), PART_BYTES)):
        row = {"run_id": run_id, "k": k, "part": part, "body": body[at : at + PART_BYTES]}
        connection.execute(sa.insert(batch_parts), row)


def read(connection: Connection, run_id: str, k: int) -> bytes:
    """The body of batch ``k``; empty when there is none."""
    c = batch_parts.c
    query = sa.select(c.body).where(c.run_id == run_id, c.k == k).order_by(c.part)
    return b"".join(connection.execute(query).scalars())
