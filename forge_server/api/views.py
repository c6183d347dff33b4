"""Reads for the control API: rows to the Structs of ``client.schemas``."""

from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from forge_server.client import schemas as s
from forge_server.domain.errors import NotFound
from forge_server.store import tables as t


def run_row(connection: Connection, id_or_name: str) -> Any:
    """The run by id or name. Raises NotFound."""
    row = connection.execute(
        sa.select(t.runs).where(sa.or_(t.runs.c.id == id_or_name, t.runs.c.name == id_or_name))
    ).one_or_none()
    if row is None:
        raise NotFound(f"there is no run {id_or_name!r}", mend="`forge-server run list` shows them")
    return row


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
