"""The server's own beat: time in which it did nothing is a downtime, also within one life (invariant I12).

A database that takes no writes, a machine that sleeps, a process that is stopped: meanwhile no heartbeat and no
reward can be heard, and no attempt is at fault for that. A beat that comes late says so, moves the clocks, and gives
every runner a full silence. Until then, and for a moment afterwards in which runners try again, nothing is due.
"""

import sqlalchemy as sa

from forge_server.domain.clock import Interval
from forge_server.domain.states import AttemptState
from forge_server.lifecycle import deadlines
from forge_server.store import instance
from forge_server.store import tables as t

STOOD_STILL_S = 5 * instance.BEAT_S
"""A beat that comes so late is no longer a matter of a busy machine."""

TRY_AGAIN_S = 5.0
"""Within this time a runner that could not be heard has tried again."""

SERVER_DOWN = "server_down"


def beat(connection: sa.Connection, now: float) -> float:
    """Note that the server lives; the seconds for which it stood still before this beat, 0 if it did not."""
    alive_at = instance.last_alive(connection)
    instance.beat(connection, now)
    if alive_at is None or now - alive_at < STOOD_STILL_S:
        return 0.0
    down = Interval(alive_at, now)
    deadlines.add_standstill(connection, down, now)
    miss_nobody(connection, now)
    add_hold(connection, down)
    return down.end - down.begin


def unsettled(connection: sa.Connection, now: float) -> bool:
    """Whether nothing may be concluded from clocks now: they do not tell yet for how long the server was away, or
    its runners may not have been heard since."""
    alive_at = instance.last_alive(connection)
    if alive_at is not None and now - alive_at >= STOOD_STILL_S:
        return True
    h = t.holds.c
    long = h.end_at - h.begin_at >= STOOD_STILL_S
    back = sa.select(sa.func.max(h.end_at)).where(h.reason == SERVER_DOWN, h.end_at <= now, long)
    since = connection.execute(back).scalar_one()
    return since is not None and now - since < TRY_AGAIN_S


def heard_since(connection: sa.Connection, now: float) -> float:
    """Since when the server has heard whoever had something to say: the end of its last downtime, ``now`` while one
    lasts."""
    alive_at = instance.last_alive(connection)
    if alive_at is not None and now - alive_at >= STOOD_STILL_S:
        return now
    h = t.holds.c
    back = sa.select(sa.func.max(h.end_at)).where(h.reason == SERVER_DOWN, h.end_at <= now)
    return connection.execute(back).scalar_one() or 0.0


def miss_nobody(connection: sa.Connection, now: float) -> None:
    """Whoever has been heard before was heard now."""
    a = t.attempts.c
    connection.execute(
        sa.update(t.attempts)
        .where(a.state != AttemptState.ENDED, a.heartbeat_at.is_not(None))
        .values(heartbeat_at=now)
    )


def add_hold(connection: sa.Connection, down: Interval) -> None:
    """Write the downtime down."""
    hold = {"reason": SERVER_DOWN, "begin_at": down.begin, "end_at": down.end}
    connection.execute(sa.insert(t.holds), hold)
