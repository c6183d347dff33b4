"""Which rollouts are next, and which attempts live: the reads of the scheduler."""

from heapq import merge
from itertools import islice

import msgspec
import sqlalchemy as sa

from forge_server.domain.states import AttemptState, RolloutState, RunState
from forge_server.store import tables as t

_OTHER = t.rollouts.alias("other")  # made once: each is a cycle of hundreds of objects for the collector


class Pending(msgspec.Struct, frozen=True):
    """A rollout that may get its next attempt."""

    rollout_id: str
    run_id: str
    harness: str


class LiveAttempt(msgspec.Struct, frozen=True):
    """An attempt of this backend that has not ended. ``since``: when its row was written, or it was
    launched."""

    attempt_id: str
    state: AttemptState
    since: float


def _eligible() -> sa.ColumnElement[bool]:
    return sa.and_(
        t.rollouts.c.state == RolloutState.PENDING.value,
        t.rollouts.c.external.is_(False),
        t.runs.c.state == RunState.ACTIVE.value,
    )


def pending(connection: sa.Connection, now: float, limit: int) -> list[Pending]:
    """The next rollouts. Each is of the run that has the fewest in flight by then, so that no run's backlog keeps
    another waiting; within a run, groups that have been begun come first, then by age: groups end early and
    whole."""
    r = t.rollouts.c
    query = (
        sa.select(
            t.runs.c.id, sa.func.count(sa.case((r.state == RolloutState.ACTIVE.value, 1))).label("live")
        )
        .join(t.rollouts, r.run_id == t.runs.c.id)
        .where(
            t.runs.c.state == RunState.ACTIVE.value,
            r.state.in_((RolloutState.ACTIVE.value, RolloutState.PENDING.value)),
            r.external.is_(False),
        )
        .group_by(t.runs.c.id, t.runs.c.created_at)
        .order_by(t.runs.c.created_at, t.runs.c.id)
    )
    waiting = [
        [
            (row.live + ahead, order, item)
            for ahead, item in enumerate(_of_run(connection, row.id, now, limit))
        ]
        for order, row in enumerate(connection.execute(query).all())
    ]
    return [item for _, _, item in islice(merge(*waiting, key=lambda entry: entry[:2]), limit)]


def _of_run(connection: sa.Connection, run_id: str, now: float, limit: int) -> list[Pending]:
    r, g = t.rollouts.c, t.groups.c
    begun = sa.exists().where(
        _OTHER.c.group_id == r.group_id,
        _OTHER.c.group_id.is_not(None),
        _OTHER.c.state != RolloutState.PENDING.value,
    )
    query = (
        sa.select(r.id, r.run_id, r.harness)
        .join(t.runs, t.runs.c.id == r.run_id)
        .outerjoin(t.groups, g.id == r.group_id)
        .where(r.run_id == run_id, _eligible(), r.not_before <= now)
        .order_by(
            sa.case((begun, 0), else_=1),
            sa.func.coalesce(g.created_at, r.created_at),
            sa.func.coalesce(r.group_id, r.id),
            r.slot,
        )
        .limit(limit)
    )
    return [Pending(row.id, row.run_id, row.harness) for row in connection.execute(query)]


def next_moment(connection: sa.Connection, now: float) -> float | None:
    """When the next back-off ends, or None when no rollout waits for one."""
    query = (
        sa.select(sa.func.min(t.rollouts.c.not_before))
        .join(t.runs, t.runs.c.id == t.rollouts.c.run_id)
        .where(_eligible(), t.rollouts.c.not_before > now)
    )
    moment: float | None = connection.execute(query).scalar_one()
    return moment


def unlaunched(connection: sa.Connection, backend: str) -> list[tuple[str, Pending]]:
    """Attempts of which it is not known whether the backend took them."""
    a, r = t.attempts.c, t.rollouts.c
    states = (AttemptState.QUEUED.value, AttemptState.LAUNCHING.value)
    query = (
        sa.select(a.id.label("attempt_id"), r.id, r.run_id, r.harness)
        .join(t.rollouts, r.id == a.rollout_id)
        .where(a.backend == backend, a.state.in_(states), a.handle.is_(None))
        .order_by(a.id)
    )
    return [(row.attempt_id, Pending(row.id, row.run_id, row.harness)) for row in connection.execute(query)]


def live(connection: sa.Connection, backend: str) -> list[LiveAttempt]:
    a = t.attempts.c
    query = sa.select(a.id, a.state, sa.func.coalesce(a.launched_at, a.created_at).label("since")).where(
        a.backend == backend, a.state != AttemptState.ENDED.value
    )
    return [LiveAttempt(row.id, AttemptState(row.state), row.since) for row in connection.execute(query)]
