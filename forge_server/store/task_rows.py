"""Rows of ``tasks``, for their registration (see ``tasks.register``)."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from forge_server.store import tables as t


class StoredTask(msgspec.Struct, frozen=True):
    id: str
    digest: str
    split: str
    path: str | None
    state: str


class TaskRows:
    """The table within one transaction."""

    def __init__(self, connection: sa.Connection) -> None:
        self._connection = connection

    def stored(self, taskset: str) -> Mapping[str, StoredTask]:
        """What is registered in a task set, by name."""
        c = t.tasks.c
        query = sa.select(c.name, c.id, c.digest, c.split, c.path, c.state).where(c.taskset == taskset)
        return {name: StoredTask(*values) for name, *values in self._connection.execute(query)}

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        if rows:
            self._connection.execute(sa.insert(t.tasks), rows)

    def change(self, changes: Mapping[str, dict[str, Any]]) -> None:
        """Set columns of ``tasks``, the same ones in each, by id."""
        if changes:
            statement = sa.update(t.tasks).where(t.tasks.c.id == sa.bindparam("of"))
            self._connection.execute(statement, [{"of": id, **values} for id, values in changes.items()])
