"""Rollouts: register one from outside, look at them, cancel, retry."""

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal, Protocol

import sqlalchemy as sa
from litestar import get, post
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter

from forge_server.api import views
from forge_server.api.idempotent import Idempotency, IdempotencyKey
from forge_server.api.paging import Cursor, Limit, decode_cursor
from forge_server.client import schemas as s
from forge_server.domain.outcome import Kind, Outcome
from forge_server.domain.run import Mode
from forge_server.store.database import Store

State = Literal["pending", "active", "ended"]
Sort = Literal["created", "ended", "reward", "attempts"]


class Rollouts(Protocol):
    async def register(self, body: s.RolloutCreate) -> s.Registration:
        """A rollout with an external attempt, ready for calls."""

    async def cancel(self, rollout_id: str) -> None: ...

    async def retry(self, rollout_id: str) -> None: ...


class LogTails(Protocol):
    def __call__(self, connection: sa.Connection, rollout_id: str) -> list[s.LogView]: ...


def rollout_routes(
    store: Store, rollouts: Rollouts, idempotency: Idempotency, bodies: views.Bodies, logs: LogTails
) -> list[Any]:
    @post("/rollouts", summary="Register a rollout from outside", status_code=201)
    async def register(
        data: JSONBody[s.RolloutCreate], idempotency_key: IdempotencyKey = None
    ) -> s.Registration:
        return await idempotency.run(idempotency_key, "POST /rollouts", data, lambda: rollouts.register(data))

    @get("/rollouts", summary="Rollouts, newest first unless sorted otherwise")
    async def listing(
        run: FromQuery[str | None] = None,
        state_: Annotated[State | None, QueryParameter(name="state")] = None,
        outcome: FromQuery[Outcome | None] = None,
        kind: FromQuery[Kind | None] = None,
        harness: FromQuery[str | None] = None,
        task: FromQuery[str | None] = None,
        mode: FromQuery[Mode | None] = None,
        text: FromQuery[str | None] = None,
        sort: FromQuery[Sort] = "created",
        order: FromQuery[Literal["asc", "desc"]] = "desc",
        cursor: Cursor = None,
        limit: Limit = 100,
    ) -> s.Page:
        only = views.RolloutFilter(
            run=run,
            state=state_,
            outcome=outcome,
            kind=kind,
            harness=harness,
            task=task,
            mode=mode,
            text=text,
            sort=sort,
            ascending=order == "asc",
        )
        after = decode_cursor(cursor)
        return await store.read(lambda c: views.rollouts(c, only, after, limit))

    @get("/rollouts/{rollout_id:str}", summary="One rollout with its attempts")
    async def show(rollout_id: FromPath[str]) -> s.RolloutDetail:
        return await detail(rollout_id)

    @get("/rollouts/{rollout_id:str}/calls", summary="Its calls, in order; with their messages on request")
    async def calls(rollout_id: FromPath[str], messages: FromQuery[bool] = False) -> list[s.CallView]:
        return await store.read(lambda c: views.calls(c, rollout_id, bodies if messages else None))

    @get("/rollouts/{rollout_id:str}/samples", summary="What its final attempt was cut into")
    async def samples(rollout_id: FromPath[str]) -> list[s.SampleView]:
        return await store.read(lambda c: views.samples(c, rollout_id))

    @get("/rollouts/{rollout_id:str}/logs", summary="Last lines of its runners and harnesses")
    async def log_tails(rollout_id: FromPath[str]) -> list[s.LogView]:
        await detail(rollout_id)
        return await store.read(lambda c: logs(c, rollout_id))

    async def detail(rollout_id: str) -> s.RolloutDetail:
        return await store.read(lambda c: views.rollout_detail(c, rollout_id))

    async def act(rollout_id: str, action: Callable[[str], Awaitable[None]]) -> s.RolloutDetail:
        await detail(rollout_id)
        await action(rollout_id)
        return await detail(rollout_id)

    @post("/rollouts/{rollout_id:str}/cancel", summary="End it now", status_code=200)
    async def cancel(rollout_id: FromPath[str]) -> s.RolloutDetail:
        return await act(rollout_id, rollouts.cancel)

    @post(
        "/rollouts/{rollout_id:str}/retry",
        summary="Give up the current attempt, start a new one",
        status_code=200,
    )
    async def retry(rollout_id: FromPath[str]) -> s.RolloutDetail:
        return await act(rollout_id, rollouts.retry)

    return [register, listing, show, calls, samples, log_tails, cancel, retry]
