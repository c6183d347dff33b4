"""Reads for the control API: rows to the Structs of ``client.schemas``. Lists come in pages."""

from collections.abc import Callable, Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from forge_server.api.paging import page
from forge_server.client import schemas as s
from forge_server.domain.errors import NotFound
from forge_server.store import tables as t

Bodies = Callable[[Connection, list[int]], Mapping[int, tuple[list[Any], Any]]]
"""Requests and responses of calls, decoded from the content-addressed messages."""


def run_row(connection: Connection, id_or_name: str) -> Any:
    """The run by id or name. Raises NotFound."""
    c = t.runs.c
    query = sa.select(t.runs).where(sa.or_(c.id == id_or_name, c.name == id_or_name))
    row = connection.execute(query.order_by((c.id == id_or_name).desc())).first()
    if row is None:
        raise NotFound(f"there is no run {id_or_name!r}", mend="`forge-server run list` shows them")
    return row


def runs(connection: Connection, after: str | None, limit: int) -> s.Page:
    """Runs, newest first."""
    query = sa.select(t.runs).order_by(t.runs.c.id.desc()).limit(limit + 1)
    if after is not None:
        query = query.where(t.runs.c.id < after)
    rows = connection.execute(query).all()
    return page(rows, limit, lambda r: r.id, lambda r: run_view(connection, r))


def step_metrics(connection: Connection, run: str) -> list[s.StepMetrics]:
    """Metrics of every step of a run by id or name. Raises NotFound."""
    c = t.step_metrics.c
    query = sa.select(t.step_metrics).where(c.run_id == run_row(connection, run).id)
    rows = connection.execute(query.order_by(c.step, c.source))
    return [s.StepMetrics(step=m.step, source=m.source, metrics=m.metrics, at=m.at) for m in rows]


def tasks(connection: Connection, taskset: str | None, after: str | None, limit: int) -> s.Page:
    """Tasks, oldest first."""
    query = sa.select(t.tasks).order_by(t.tasks.c.id).limit(limit + 1)
    if taskset is not None:
        query = query.where(t.tasks.c.taskset == taskset)
    if after is not None:
        query = query.where(t.tasks.c.id > after)
    return page(connection.execute(query).all(), limit, lambda r: r.id, task_view)


def rollouts(
    connection: Connection, run: str | None, state: str | None, after: str | None, limit: int
) -> s.Page:
    """Rollouts, newest first. Raises NotFound for a run that is not there."""
    c = t.rollouts.c
    query = sa.select(t.rollouts).order_by(c.id.desc()).limit(limit + 1)
    if run is not None:
        query = query.where(c.run_id == run_row(connection, run).id)
    if state is not None:
        query = query.where(c.state == state)
    if after is not None:
        query = query.where(c.id < after)
    return page(connection.execute(query).all(), limit, lambda r: r.id, rollout_view)


def policies(connection: Connection) -> list[s.PolicyView]:
    """Every version of every policy, oldest first."""
    query = sa.select(t.policies).order_by(t.policies.c.name, t.policies.c.version)
    return [policy_view(row) for row in connection.execute(query)]


def samples(connection: Connection, rollout_id: str) -> list[s.SampleView]:
    """What a rollout's final attempt was cut into. Raises NotFound."""
    rollout_detail(connection, rollout_id)
    query = sa.select(t.samples).where(t.samples.c.rollout_id == rollout_id).order_by(t.samples.c.index)
    return [sample_view(row) for row in connection.execute(query)]


def calls(connection: Connection, rollout_id: str, bodies: Bodies | None) -> list[s.CallView]:
    """A rollout's calls in order, with their messages when ``bodies`` is given. Raises NotFound."""
    rollout_detail(connection, rollout_id)
    out = [call_view(row) for row in call_rows(connection, rollout_id)]
    found = bodies(connection, [call.id for call in out]) if bodies else {}
    for call in out:
        call.request, call.response = found.get(call.id, (None, None))
    return out


def run_view(connection: Connection, row: Any) -> s.RunView:
    counts: dict[str, int] = {}
    query = (
        sa.select(t.rollouts.c.state, t.rollouts.c.outcome, sa.func.count())
        .where(t.rollouts.c.run_id == row.id)
        .group_by(t.rollouts.c.state, t.rollouts.c.outcome)
    )
    for state, outcome, count in connection.execute(query):
        key = outcome if state == "ended" and outcome else state
        counts[key] = counts.get(key, 0) + count
    return s.RunView(
        id=row.id,
        name=row.name,
        kind=row.kind,
        state=row.state,
        reason=row.reason,
        step=row.step,
        settings=row.settings,
        created_at=row.created_at,
        ended_at=row.ended_at,
        rollouts=counts,
    )


def task_view(row: Any) -> s.TaskView:
    return s.TaskView(**{name: getattr(row, name) for name in s.TaskView.__struct_fields__})


def rollout_view(row: Any) -> s.RolloutView:
    return s.RolloutView(**{name: getattr(row, name) for name in s.RolloutView.__struct_fields__})


def attempt_view(row: Any) -> s.AttemptView:
    return s.AttemptView(**{name: getattr(row, name) for name in s.AttemptView.__struct_fields__})


def policy_view(row: Any) -> s.PolicyView:
    return s.PolicyView(**{name: getattr(row, name) for name in s.PolicyView.__struct_fields__})


def event_view(row: Any) -> s.EventView:
    return s.EventView(**{name: getattr(row, name) for name in s.EventView.__struct_fields__})


def sample_view(row: Any) -> s.SampleView:
    return s.SampleView(**{name: getattr(row, name) for name in s.SampleView.__struct_fields__})


def rollout_detail(connection: Connection, rollout_id: str) -> s.RolloutDetail:
    """The rollout with its attempts, first to last. Raises NotFound."""
    row = connection.execute(sa.select(t.rollouts).where(t.rollouts.c.id == rollout_id)).one_or_none()
    if row is None:
        raise NotFound(f"there is no rollout {rollout_id!r}", mend="`forge-server rollout list` shows them")
    attempts = connection.execute(
        sa.select(t.attempts).where(t.attempts.c.rollout_id == rollout_id).order_by(t.attempts.c.number)
    ).all()
    return s.RolloutDetail(rollout=rollout_view(row), attempts=[attempt_view(a) for a in attempts])


def call_rows(connection: Connection, rollout_id: str) -> list[Any]:
    query = (
        sa.select(t.calls)
        .join(t.attempts, t.attempts.c.id == t.calls.c.attempt_id)
        .where(t.attempts.c.rollout_id == rollout_id)
        .order_by(t.attempts.c.number, t.calls.c.seq)
    )
    return list(connection.execute(query).all())


def call_view(row: Any) -> s.CallView:
    plain = [n for n in s.CallView.__struct_fields__ if n not in ("request", "response")]
    return s.CallView(**{name: getattr(row, name) for name in plain})
