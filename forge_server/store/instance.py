"""The instance row: who this server is, and when it was last alive.

Its id labels everything the server starts; its secret makes the keys; its beat tells the next start how
long the server was down (invariant I12: downtime charges no clock).
"""

import os
import time

import msgspec
import sqlalchemy as sa

from forge_server.domain.ids import new_id
from forge_server.store import tables as t
from forge_server.store.database import Store

BEAT_S = 2.0
"""How often a running server beats. A downtime is known to this precision, always to the attempt's favour."""


class Instance(msgspec.Struct, frozen=True):
    id: str
    secret: bytes


async def load(store: Store, now: float | None = None) -> Instance:
    """The instance of this database; made at the first start."""
    moment = time.time() if now is None else now

    def write(connection: sa.Connection) -> Instance:
        row = connection.execute(sa.select(t.instance.c.id, t.instance.c.secret)).one_or_none()
        if row is not None:
            return Instance(row.id, bytes(row.secret))
        made = Instance(new_id("in"), os.urandom(32))
        connection.execute(
            sa.insert(t.instance),
            {"id": made.id, "secret": made.secret, "created_at": moment, "alive_at": moment},
        )
        return made

    return await store.write(write)


def in_flight(connection: sa.Connection, configured: int) -> int:
    """How many attempts are to be kept in flight: what a person has set since the settings say ``configured``, else
    that."""
    i = t.instance.c
    query = sa.select(i.in_flight).where(i.in_flight_instead_of == configured)
    found: int | None = connection.execute(query).scalar_one_or_none()
    return configured if found is None else found


def set_in_flight(connection: sa.Connection, n: int, configured: int) -> None:
    """Note that a person wants ``n``; it holds across restarts until the settings say something else."""
    connection.execute(sa.update(t.instance).values(in_flight=n, in_flight_instead_of=configured))


def beat(connection: sa.Connection, now: float) -> None:
    """Note that the server is alive at ``now``."""
    connection.execute(sa.update(t.instance).values(alive_at=now))


def last_alive(connection: sa.Connection) -> float | None:
    """The last beat, or None before the first start."""
    return connection.execute(sa.select(t.instance.c.alive_at)).scalar_one_or_none()
