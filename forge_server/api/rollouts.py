"""Rollouts: register one from outside, look at them, cancel, retry."""

from typing import Annotated, Any, Protocol

import sqlalchemy as sa
from litestar import get, post
from litestar.params import Parameter

from forge_server.api import paging, views
from forge_server.api.idempotent import Idempotency, IdempotencyKey
from forge_server.client import schemas as s
from forge_server.domain.errors import InvalidRequest
from forge_server.store import tables as t
from forge_server.store.database import Store


class Rollouts(Protocol):
    async def register(self, body: s.RolloutCreate) -> s.Registration:
        """A rollout with an external attempt, ready for calls."""

    async def cancel(self, rollout_id: str) -> None: ...

    async def retry(self, rollout_id: str) -> None: ...


class Conversations(Protocol):
    """Requests and responses of calls, decoded from the content-addressed messages."""

    def __call__(
        self, connection: sa.Connection, call_ids: list[int]
    ) -> dict[int, tuple[list[Any], Any]]: ...


class LogTails(Protocol):
    def __call__(self, connection: sa.Connection, rollout_id: str) -> list[s.LogView]: ...


def rollout_routes(
    store: Store, rollouts: Rollouts, idempotency: Idempotency, conversations: Conversations, logs: LogTails
) -> list[Any]:
    @post("/rollouts", summary="Register a rollout from outside", status_code=201)
    async def register(data: s.RolloutCreate, idempotency_key: IdempotencyKey = None) -> s.Registration:
        if data.mode not in ("record", "eval", "train"):
            raise InvalidRequest(f"unknown mode {data.mode!r}", where="mode", mend="record, eval or train")
        return await idempotency.run(idempotency_key, "POST /rollouts", data, lambda: rollouts.register(data))

    @get("/rollouts", summary="Rollouts, newest first")
    async def listing(
        run: str | None = None,
        in_state: Annotated[str | None, Parameter(query="state", required=False)] = None,
        cursor: str | None = None,
        limit: int = 100,
    ) -> s.Page:
        after, limit = paging.decode_cursor(cursor), paging.check_limit(limit)

        def read(connection: sa.Connection) -> s.Page:
            query = sa.select(t.rollouts).order_by(t.rollouts.c.id.desc()).limit(limit + 1)
            if run is not None:
                query = query.where(t.rollouts.c.run_id == views.run_row(connection, run).id)
            if in_state is not None:
                query = query.where(t.rollouts.c.state == in_state)
            if after is not None:
                query = query.where(t.rollouts.c.id < after)
            return paging.page(connection.execute(query).all(), limit, lambda r: r.id, views.rollout_view)

        return await store.read(read)

    @get("/rollouts/{rollout_id:str}", summary="One rollout with its attempts")
    async def show(rollout_id: str) -> s.RolloutDetail:
        return await store.read(lambda c: views.rollout_detail(c, rollout_id))

    @get("/rollouts/{rollout_id:str}/calls", summary="Its calls, in order; with their messages on request")
    async def calls(rollout_id: str, messages: bool = False) -> list[s.CallView]:
        def read(connection: sa.Connection) -> list[s.CallView]:
            views.rollout_detail(connection, rollout_id)
            out = [views.call_view(row) for row in views.call_rows(connection, rollout_id)]
            if messages:
                bodies = conversations(connection, [call.id for call in out])
                for call in out:
                    call.request, call.response = bodies.get(call.id, (None, None))
            return out

        return await store.read(read)

    @get("/rollouts/{rollout_id:str}/samples", summary="What its final attempt was cut into")
    async def samples(rollout_id: str) -> list[s.SampleView]:
        def read(connection: sa.Connection) -> list[s.SampleView]:
            views.rollout_detail(connection, rollout_id)
            query = (
                sa.select(t.samples).where(t.samples.c.rollout_id == rollout_id).order_by(t.samples.c.index)
            )
            return [views.sample_view(row) for row in connection.execute(query)]

        return await store.read(read)

    @get("/rollouts/{rollout_id:str}/logs", summary="Last lines of its runners and harnesses")
    async def log_tails(rollout_id: str) -> list[s.LogView]:
        def read(connection: sa.Connection) -> list[s.LogView]:
            views.rollout_detail(connection, rollout_id)
            return logs(connection, rollout_id)

        return await store.read(read)

    @post("/rollouts/{rollout_id:str}/cancel", summary="End it now", status_code=200)
    async def cancel(rollout_id: str) -> s.RolloutDetail:
        await store.read(lambda c: views.rollout_detail(c, rollout_id))
        await rollouts.cancel(rollout_id)
        return await store.read(lambda c: views.rollout_detail(c, rollout_id))

    @post(
        "/rollouts/{rollout_id:str}/retry",
        summary="Give up the current attempt, start a new one",
        status_code=200,
    )
    async def retry(rollout_id: str) -> s.RolloutDetail:
        await store.read(lambda c: views.rollout_detail(c, rollout_id))
        await rollouts.retry(rollout_id)
        return await store.read(lambda c: views.rollout_detail(c, rollout_id))

    return [register, listing, show, calls, samples, log_tails, cancel, retry]
