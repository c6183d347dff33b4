"""Rows of ``tasks``, for their registration (see ``tasks.register``)."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from forge_server.store import tables as t


class StoredTask(msgspec.Struct, frozen=True):
    digest: str
    split: str


class TaskRows:
    """The table within one transaction."""

    def __init__(self, connection: sa.Connection) -> None:
        self._connection = connection

    def stored(self, taskset: str) -> Mapping[str, StoredTask]:
        """What is registered in a task set, by name."""
        c = t.tasks.c
        query = sa.select(c.name, c.digest, c.split).where(c.taskset == taskset)
        return {row.name: StoredTask(row.digest, row.split) for row in self._connection.execute(query)}

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        if rows:
            self._connection.execute(sa.insert(t.tasks), rows)
