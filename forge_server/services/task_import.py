"""Registers tasks that a request brings or names: one transaction, all or nothing."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from forge_server.client.schemas import TaskCreate, TasksCreated
from forge_server.domain.ids import new_id
from forge_server.store import tables as t
from forge_server.store.database import Store
from forge_server.tasks import load
from forge_server.tasks.register import Registered, register


class _Rows:
    """The ``tasks`` table within the writer's transaction."""

    def __init__(self, connection: sa.Connection) -> None:
        self._connection = connection

    def stored(self, taskset: str) -> Mapping[str, Any]:
        c = t.tasks.c
        query = sa.select(c.name, c.digest, c.split).where(c.taskset == taskset)
        return {row.name: row for row in self._connection.execute(query)}

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        if rows:
            self._connection.execute(sa.insert(t.tasks), list(rows))


class TaskImport:
    """``POST /tasks``."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def __call__(self, body: TaskCreate) -> TasksCreated:
        """Raises TaskError naming the task and the mend; then nothing was registered."""
        tasks = load.from_lines(body.tasks) if body.tasks else []
        if body.path is not None:
            tasks = load.distinct([*tasks, *await asyncio.to_thread(load.load, Path(body.path))])

        def write(connection: sa.Connection) -> Registered:
            return register(
                _Rows(connection), tasks, taskset=body.taskset, split=body.split, now=time.time(), new_id=new_id
            )

        done = await self._store.write(write)
        return TasksCreated(created=done.created, unchanged=done.unchanged)
