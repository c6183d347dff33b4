"""Runs: create, list, show; pause, resume, cancel, set N; metrics."""

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import msgspec
import sqlalchemy as sa
from litestar import get, patch, post

from forge_server.api import paging, views
from forge_server.api.idempotent import Idempotency, IdempotencyKey
from forge_server.client import schemas as s
from forge_server.domain.errors import InvalidRequest
from forge_server.domain.run import RunSettings
from forge_server.store import tables as t
from forge_server.store.database import Store


class Runs(Protocol):
    """What the controller offers to people."""

    async def create(self, settings: RunSettings) -> str:
        """Create the run or resume the one of that name; the id. Raises Conflict naming the changed key."""

    async def pause(self, run_id: str, reason: str) -> None: ...

    async def resume(self, run_id: str) -> None: ...

    async def cancel(self, run_id: str) -> None: ...


def parse_run(table: dict[str, Any]) -> RunSettings:
    """A ``[[run]]`` table as sent. Raises InvalidRequest."""
    try:
        return msgspec.convert(table, RunSettings)
    except msgspec.ValidationError as error:
        raise InvalidRequest(str(error), where="settings", mend="mend that key") from None


def run_routes(
    store: Store,
    runs: Runs,
    idempotency: Idempotency,
    set_in_flight: Callable[[int], Awaitable[None]],
) -> list[Any]:
    @post("/runs", summary="Create a run, or resume the one of that name", status_code=201)
    async def create(data: s.RunCreate, idempotency_key: IdempotencyKey = None) -> s.RunView:
        async def act() -> s.RunView:
            run_id = await runs.create(parse_run(data.settings))
            return await store.read(lambda c: views.run_view(c, views.run_row(c, run_id)))

        return await idempotency.run(idempotency_key, "POST /runs", data, act)

    @get("/runs", summary="All runs, newest first")
    async def listing(cursor: str | None = None, limit: int = 100) -> s.Page:
        after, limit = paging.decode_cursor(cursor), paging.check_limit(limit)

        def read(connection: sa.Connection) -> s.Page:
            query = sa.select(t.runs).order_by(t.runs.c.id.desc()).limit(limit + 1)
            if after is not None:
                query = query.where(t.runs.c.id < after)
            rows = connection.execute(query).all()
            return paging.page(rows, limit, lambda r: r.id, lambda r: views.run_view(connection, r))

        return await store.read(read)

    @get("/runs/{run:str}", summary="One run by id or name")
    async def show(run: str) -> s.RunView:
        return await store.read(lambda c: views.run_view(c, views.run_row(c, run)))

    @patch("/runs/{run:str}", summary="Pause, resume, cancel, or set the number in flight")
    async def change(run: str, data: s.RunPatch) -> s.RunView:
        row = await store.read(lambda c: views.run_row(c, run))
        if data.action == "pause":
            await runs.pause(row.id, "paused by a person")
        elif data.action == "resume":
            await runs.resume(row.id)
        elif data.action == "cancel":
            await runs.cancel(row.id)
        elif data.action is not None:
            raise InvalidRequest(
                f"unknown action {data.action!r}", where="action", mend="pause, resume or cancel"
            )
        if data.in_flight is not None:
            if data.in_flight < 0:
                raise InvalidRequest("in_flight must not be negative", where="in_flight")
            await set_in_flight(data.in_flight)
        return await store.read(lambda c: views.run_view(c, views.run_row(c, row.id)))

    @get("/runs/{run:str}/metrics", summary="Metrics of every step, by source")
    async def metrics(run: str) -> list[s.StepMetrics]:
        def read(connection: sa.Connection) -> list[s.StepMetrics]:
            row = views.run_row(connection, run)
            query = (
                sa.select(t.step_metrics)
                .where(t.step_metrics.c.run_id == row.id)
                .order_by(t.step_metrics.c.step, t.step_metrics.c.source)
            )
            return [
                s.StepMetrics(step=m.step, source=m.source, metrics=m.metrics, at=m.at)
                for m in connection.execute(query)
            ]

        return await store.read(read)

    return [create, listing, show, change, metrics]
