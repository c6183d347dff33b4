"""Rows of ``step_metrics``: one flat record per step and source, merged as its figures come in."""

import math
from collections.abc import Mapping

import sqlalchemy as sa
from sqlalchemy import Connection

from forge_server.store import tables as t


def merge_metrics(
    connection: Connection,
    run_id: str,
    step: int,
    source: str,
    metrics: Mapping[str, float | None],
    at: float,
) -> None:
    """Add ``metrics`` to the record; a name that is there already is replaced. Not finite becomes None."""
    where = _record(run_id, step, source)
    clean = {name: _finite(value) for name, value in metrics.items()}
    stored = connection.execute(sa.select(t.step_metrics.c.metrics).where(where)).scalar_one_or_none()
    if stored is None:
        row = {"run_id": run_id, "step": step, "source": source, "metrics": clean, "at": at}
        connection.execute(sa.insert(t.step_metrics).values(row))
    else:
        connection.execute(sa.update(t.step_metrics).where(where).values(metrics={**stored, **clean}, at=at))


def put_metrics(
    connection: Connection,
    run_id: str,
    step: int,
    source: str,
    metrics: Mapping[str, float | None],
    at: float,
) -> None:
    """The record is ``metrics`` and nothing of before. Not finite becomes None."""
    connection.execute(sa.delete(t.step_metrics).where(_record(run_id, step, source)))
    merge_metrics(connection, run_id, step, source, metrics, at)


def _record(run_id: str, step: int, source: str) -> sa.ColumnElement[bool]:
    c = t.step_metrics.c
    return (c.run_id == run_id) & (c.step == step) & (c.source == source)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
