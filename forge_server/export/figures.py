"""A run's figures as trackers have them: by step, each named after its source."""

import msgspec
import sqlalchemy as sa
from sqlalchemy import Connection

from forge_server.store import tables as t


class Figures(msgspec.Struct, frozen=True):
    """What one source told of one step."""

    step: int
    at: float
    values: dict[str, float]


def figures(connection: Connection, run_id: str) -> list[Figures]:
    """In order of the steps."""
    c = t.step_metrics.c
    rows = connection.execute(
        sa.select(t.step_metrics).where(c.run_id == run_id).order_by(c.step, c.source)
    ).all()
    return [
        Figures(
            row.step, row.at, {f"{row.source}/{name}": v for name, v in row.metrics.items() if v is not None}
        )
        for row in rows
    ]
