"""Tasks and policies: what is attempted, and by which weights."""

from typing import Any, Protocol

from litestar import get, post
from litestar.params import FromPath, FromQuery, JSONBody

from forge_server.api import views
from forge_server.api.idempotent import Idempotency, IdempotencyKey
from forge_server.api.paging import Cursor, Limit, decode_cursor
from forge_server.client import schemas as s
from forge_server.store.database import Store


class TaskImport(Protocol):
    async def __call__(self, body: s.TaskCreate) -> s.TasksCreated:
        """Register tasks. Raises TaskError naming the task and the mend; nothing half done."""


class Activate(Protocol):
    async def __call__(self, version: int) -> None:
        """Put a kept version of the served policy live. Raises Conflict or NotFound."""


def catalog_routes(
    store: Store, import_tasks: TaskImport, activate: Activate, policy: str, idempotency: Idempotency
) -> list[Any]:
    @post("/tasks", summary="Register tasks in bulk", status_code=201)
    async def create_tasks(
        data: JSONBody[s.TaskCreate], idempotency_key: IdempotencyKey = None
    ) -> s.TasksCreated:
        return await idempotency.run(idempotency_key, "POST /tasks", data, lambda: import_tasks(data))

    @get("/tasks", summary="Tasks, oldest first")
    async def tasks(
        taskset: FromQuery[str | None] = None, cursor: Cursor = None, limit: Limit = 100
    ) -> s.Page:
        after = decode_cursor(cursor)
        return await store.read(lambda c: views.tasks(c, taskset, after, limit))

    @get("/policies", summary="Every version of every policy, oldest first")
    async def policies() -> list[s.PolicyView]:
        return await store.read(views.policies)

    @post("/policies/{version:int}/activate", summary="Put a kept version live", status_code=200)
    async def activate_version(version: FromPath[int]) -> s.PolicyView:
        await activate(version)
        versions = await store.read(views.policies)
        return next(view for view in versions if (view.name, view.version) == (policy, version))

    return [create_tasks, tasks, policies, activate_version]
