"""Registers tasks that a request brings or names: one transaction, all or nothing."""

import asyncio
import time
from pathlib import Path

import sqlalchemy as sa

from forge_server.client.schemas import TaskCreate, TasksCreated
from forge_server.domain.errors import TaskError
from forge_server.domain.ids import new_id
from forge_server.store.database import Store
from forge_server.store.task_rows import TaskRows
from forge_server.tasks import load
from forge_server.tasks.register import Registered, register


class TaskImport:
    """``POST /tasks``."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def __call__(self, body: TaskCreate) -> TasksCreated:
        """Raises TaskError naming the task and the mend; then nothing was registered."""
        if not body.tasks and body.path is None:
            raise TaskError("there is no task", where="tasks", mend="give tasks (lines) or a path")
        tasks = load.from_lines(body.tasks) if body.tasks else []
        if body.path is not None:
            tasks = load.distinct([*tasks, *await asyncio.to_thread(load.load, Path(body.path))])

        def write(connection: sa.Connection) -> Registered:
            return register(
                TaskRows(connection),
                tasks,
                taskset=body.taskset,
                split=body.split,
                now=time.time(),
                new_id=new_id,
            )

        done = await self._store.write(write)
        return TasksCreated(created=done.created, unchanged=done.unchanged, renewed=done.renewed)
