"""What a start finds of the life before it (invariants I1, I6, I12).

The time since the last liveness beat was a downtime: it is written down as a hold and added to all
clocks. Calls without an end belong to a proxy that is gone: their end is ``server_lost`` (their answers
never left, since an end is committed first). Books that were left open are closed. Local attempts died
with the server and are lost; pods and external harnesses go on, and get one full silence before anybody
misses their heartbeat.
"""

import msgspec
import sqlalchemy as sa

from forge_server.domain.clock import Interval
from forge_server.domain.states import AttemptState, CallEnd, Delivery, RolloutState, Untrainable
from forge_server.lifecycle import deadlines, liveness
from forge_server.store import instance
from forge_server.store import tables as t

SETTLING_S = 600.0
"""The books of an attempt are closed within this time of its sealing."""


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """What was found. ``lost_attempts`` are local; ``adopted_attempts`` go on. ``half_registered`` are rollouts of
    harnesses from outside that never got their keys.
    """

    downtime_s: float
    lost_calls: int
    lost_attempts: tuple[str, ...]
    adopted_attempts: tuple[str, ...]
    half_registered: tuple[str, ...]


def settle(connection: sa.Connection, now: float) -> Recovery:
    """Write down the downtime and end the calls of the former life, in one transaction."""
    down = _downtime(connection, now)
    lost_calls = connection.execute(
        sa.update(t.calls)
        .where(t.calls.c.end.is_(None))
        .values(
            end=CallEnd.SERVER_LOST.value,
            ended_at=now,
            error="the server stopped while the call was in flight",
            delivered=Delivery.NO.value,
            untrainable=Untrainable.NOT_OK.value,
        )
    ).rowcount
    _close_books(connection, now - down - SETTLING_S)
    live = connection.execute(
        sa.select(t.attempts.c.id, t.attempts.c.backend)
        .where(t.attempts.c.state != AttemptState.ENDED)
        .order_by(t.attempts.c.id)
    ).all()
    liveness.miss_nobody(connection, now)
    return Recovery(
        downtime_s=down,
        lost_calls=lost_calls,
        lost_attempts=tuple(row.id for row in live if row.backend == "local"),
        adopted_attempts=tuple(row.id for row in live if row.backend != "local"),
        half_registered=_half_registered(connection),
    )


def _half_registered(connection: sa.Connection) -> tuple[str, ...]:
    """A registration was several transactions once: what a kill between them left has no clock."""
    r, a = t.rollouts.c, t.attempts.c
    query = (
        sa.select(r.id)
        .outerjoin(t.attempts, sa.and_(a.rollout_id == r.id, a.state != AttemptState.ENDED))
        .where(r.external, r.state != RolloutState.ENDED, a.running_at.is_(None))
        .order_by(r.id)
    )
    return tuple(connection.execute(query).scalars())


def _close_books(connection: sa.Connection, since: float) -> None:
    """Attempts sealed just before the end may not have their reasons written: what is not known to be
    delivered is not trained (I3)."""
    a = t.attempts.c
    recent = sa.select(a.id).where(
        a.state.in_((AttemptState.SEALED, AttemptState.VERIFYING, AttemptState.ENDED)),
        sa.or_(a.sealed_at >= since, a.ended_at >= since),
    )
    for delivery, reason in (
        (Delivery.NO, Untrainable.NOT_DELIVERED),
        (Delivery.UNKNOWN, Untrainable.DELIVERY_UNKNOWN),
    ):
        connection.execute(
            sa.update(t.calls)
            .where(
                t.calls.c.attempt_id.in_(recent),
                t.calls.c.end == CallEnd.OK,
                t.calls.c.untrainable.is_(None),
                t.calls.c.delivered == delivery,
            )
            .values(untrainable=reason.value)
        )


def _downtime(connection: sa.Connection, now: float) -> float:
    alive_at = instance.last_alive(connection)
    open_holds = connection.execute(
        sa.select(t.holds.c.id, t.holds.c.begin_at).where(t.holds.c.end_at.is_(None))
    ).all()
    instance.beat(connection, now)
    if alive_at is None:
        return 0.0
    down = Interval(min(alive_at, now), now)
    held = [Interval(row.begin_at, now) for row in open_holds]
    deadlines.add_downtime(connection, held, down)
    if open_holds:
        connection.execute(sa.update(t.holds).where(t.holds.c.end_at.is_(None)).values(end_at=now))
    if down.end > down.begin:
        liveness.add_hold(connection, down)
    return down.end - down.begin
