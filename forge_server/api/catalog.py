"""Tasks and policies: what is attempted, and by which weights."""

from typing import Any, Protocol

import sqlalchemy as sa
from litestar import get, post

from forge_server.api import paging, views
from forge_server.api.idempotent import Idempotency, IdempotencyKey
from forge_server.client import schemas as s
from forge_server.store import tables as t
from forge_server.store.database import Store


class TaskImport(Protocol):
    async def __call__(self, body: s.TaskCreate) -> s.TasksCreated:
        """Register tasks. Raises TaskError naming the task and the mend; nothing half done."""


class Activate(Protocol):
    async def __call__(self, version: int) -> None:
        """Put a kept version live. Raises Conflict or NotFound."""


def catalog_routes(
    store: Store, import_tasks: TaskImport, activate: Activate, idempotency: Idempotency
) -> list[Any]:
    @post("/tasks", summary="Register tasks in bulk", status_code=201)
    async def create_tasks(data: s.TaskCreate, idempotency_key: IdempotencyKey = None) -> s.TasksCreated:
        return await idempotency.run(idempotency_key, "POST /tasks", data, lambda: import_tasks(data))

    @get("/tasks", summary="Tasks, by taskset and name")
    async def tasks(taskset: str | None = None, cursor: str | None = None, limit: int = 100) -> s.Page:
        after, limit = paging.decode_cursor(cursor), paging.check_limit(limit)

        def read(connection: sa.Connection) -> s.Page:
            query = sa.select(t.tasks).order_by(t.tasks.c.id).limit(limit + 1)
            if taskset is not None:
                query = query.where(t.tasks.c.taskset == taskset)
            if after is not None:
                query = query.where(t.tasks.c.id > after)
            return paging.page(connection.execute(query).all(), limit, lambda r: r.id, views.task_view)

        return await store.read(read)

    @get("/policies", summary="Every version of every policy, oldest first")
    async def policies() -> list[s.PolicyView]:
        def read(connection: sa.Connection) -> list[s.PolicyView]:
            query = sa.select(t.policies).order_by(t.policies.c.name, t.policies.c.version)
            return [views.policy_view(row) for row in connection.execute(query)]

        return await store.read(read)

    @post("/policies/{version:int}/activate", summary="Put a kept version live", status_code=200)
    async def activate_version(version: int) -> s.PolicyView:
        await activate(version)

        def read(connection: sa.Connection) -> s.PolicyView:
            query = sa.select(t.policies).where(t.policies.c.version == version)
            return views.policy_view(connection.execute(query).first())

        return await store.read(read)

    return [create_tasks, tasks, policies, activate_version]
