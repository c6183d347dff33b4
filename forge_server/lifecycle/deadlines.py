"""The clocks of attempts: which deadlines are behind, and how held time moves them.

Deadlines are rows. When a hold ends, its length is added to every agent deadline that was running; a
downtime of the server is added to all clocks. While a hold lasts, its length so far counts as added
(I12).
"""

import sqlalchemy as sa

from forge_server.domain import clock
from forge_server.domain.clock import Interval
from forge_server.domain.events import Clock, DeadlinePassed
from forge_server.domain.run import EXTERNAL
from forge_server.domain.states import AttemptState
from forge_server.store import rows
from forge_server.store import tables as t
from forge_server.store.rows import AttemptRow

MISSED = 0.25
"""Of the silence that a runner is allowed: after that it is missed, if not yet lost."""

_WATCHED: dict[Clock, frozenset[AttemptState]] = {
    Clock.STARTUP: frozenset({AttemptState.LAUNCHING, AttemptState.STARTING}),
    Clock.AGENT: frozenset({AttemptState.RUNNING}),
    Clock.VERIFY: frozenset({AttemptState.SEALED, AttemptState.VERIFYING}),
    Clock.HEARTBEAT: frozenset(
        {AttemptState.STARTING, AttemptState.RUNNING, AttemptState.SEALED, AttemptState.VERIFYING}
    ),
}


def due(connection: sa.Connection, now: float, silence_s: float) -> list[DeadlinePassed]:
    """Deadlines that are behind; ``silence_s`` is how long a runner may send no heartbeat.

    An attempt of an external harness has such a clock only if it was registered with one (``ttl_s``), and then
    that long.
    """
    a = t.attempts.c
    behind = {
        Clock.STARTUP: a.startup_deadline <= now,
        Clock.AGENT: a.agent_deadline <= now,
        Clock.VERIFY: a.verify_deadline <= now,
        Clock.HEARTBEAT: sa.or_(
            a.heartbeat_at <= now - silence_s, sa.and_(a.backend == EXTERNAL, a.handle.is_not(None))
        ),
    }
    # with their states, or every attempt that runs would be read again and again for having started long ago
    watched = sa.or_(*(sa.and_(a.state.in_(sorted(_WATCHED[kind])), behind[kind]) for kind in Clock))
    query = rows.select(AttemptRow).where(watched)
    held = open_holds(connection, now)
    found = []
    for attempt in rows.fetch(connection, AttemptRow, query):
        kind = next((kind for kind in Clock if is_due(attempt, kind, now, silence_s, held)), None)
        if kind is not None:
            found.append(DeadlinePassed(attempt_id=attempt.id, clock=kind, limit_s=silence_s))
    return found


def is_due(attempt: AttemptRow, kind: Clock, now: float, silence_s: float, held: list[Interval]) -> bool:
    """Whether the attempt is in a state that this clock watches and its deadline is behind.

    ``held`` are the holds that last (``open_holds``).
    """
    if attempt.state not in _WATCHED[kind]:
        return False
    if kind is Clock.HEARTBEAT:
        allowed: float | None = silence_s
        if attempt.backend == EXTERNAL:
            allowed = (attempt.handle or {}).get("ttl_s")
        heard = attempt.heartbeat_at
        return allowed is not None and heard is not None and heard + allowed <= now
    deadline = {
        Clock.STARTUP: attempt.startup_deadline,
        Clock.AGENT: attempt.agent_deadline,
        Clock.VERIFY: attempt.verify_deadline,
    }[kind]
    if deadline is None or deadline > now:
        return False
    if kind is Clock.VERIFY:
        return not _missed(attempt, now, silence_s)
    if kind is Clock.STARTUP:
        return True
    assert attempt.running_at is not None
    return deadline + clock.uncharged(attempt.running_at, held) <= now


def _missed(attempt: AttemptRow, now: float, silence_s: float) -> bool:
    """Whether its runner is silent and will soon be lost. It watches the verifier's clock itself, so most likely it is
    dead, and who knows why needs a while to say so: of a node up to 50 s."""
    heard = attempt.heartbeat_at
    if attempt.backend == EXTERNAL or heard is None:
        return False
    return heard + MISSED * silence_s <= now < heard + silence_s


def left(attempt: AttemptRow, now: float, held: list[Interval]) -> float | None:
    """Seconds left on the clock that the attempt's state is under, or None when it has none. ``held`` are the holds
    that last (``open_holds``)."""
    if attempt.state is AttemptState.RUNNING and attempt.agent_deadline is not None:
        assert attempt.running_at is not None
        return max(0.0, attempt.agent_deadline + clock.uncharged(attempt.running_at, held) - now)
    for kind, deadline in (
        (Clock.STARTUP, attempt.startup_deadline),
        (Clock.VERIFY, attempt.verify_deadline),
    ):
        if attempt.state in _WATCHED[kind] and deadline is not None:
            return max(0.0, deadline - now)
    return None


def open_holds(connection: sa.Connection, now: float) -> list[Interval]:
    """Holds that last, as intervals up to now."""
    query = sa.select(t.holds.c.begin_at).where(t.holds.c.end_at.is_(None))
    return [Interval(begin, now) for begin in connection.execute(query).scalars()]


def add_hold(connection: sa.Connection, held: list[Interval]) -> None:
    """Move the agent deadlines of running attempts by the part of ``held`` that they ran in."""
    _shift(connection, Clock.AGENT, t.attempts.c.running_at, t.attempts.c.agent_deadline, held)


def add_downtime(connection: sa.Connection, held: list[Interval], down: Interval) -> None:
    """Move every clock by the downtime; agent clocks by the holds that it cut short as well."""
    add_hold(connection, [*held, down])
    _shift_all(connection, down)


def add_standstill(connection: sa.Connection, down: Interval, now: float) -> None:
    """Move every clock by a time up to now in which the server did nothing. Agent clocks have been moved by the holds
    that ended meanwhile, and will be by those that last: of ``down`` they get what no hold covers."""
    h = t.holds.c
    query = sa.select(h.begin_at, sa.func.coalesce(h.end_at, now)).where(
        sa.or_(h.end_at.is_(None), h.end_at > down.begin)
    )
    held = [Interval(begin, end) for begin, end in connection.execute(query)]
    add_hold(connection, clock.beyond(down, held))
    _shift_all(connection, down)


def _shift_all(connection: sa.Connection, down: Interval) -> None:
    """Clocks that run through holds."""
    _shift(connection, Clock.STARTUP, t.attempts.c.launched_at, t.attempts.c.startup_deadline, [down])
    _shift(connection, Clock.VERIFY, t.attempts.c.sealed_at, t.attempts.c.verify_deadline, [down])


def _shift(
    connection: sa.Connection,
    kind: Clock,
    started: sa.Column[float],
    deadline: sa.Column[float],
    held: list[Interval],
) -> None:
    query = sa.select(t.attempts.c.id, started.label("started"), deadline.label("deadline")).where(
        t.attempts.c.state.in_(sorted(_WATCHED[kind])), started.is_not(None), deadline.is_not(None)
    )
    moved = [
        {"which": row.id, deadline.name: row.deadline + clock.uncharged(row.started, held)}
        for row in connection.execute(query).all()
    ]
    if moved:
        connection.execute(sa.update(t.attempts).where(t.attempts.c.id == sa.bindparam("which")), moved)
