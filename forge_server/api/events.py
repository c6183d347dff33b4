"""``GET /events``: every state change in commit order, as server-sent events, resumable by ``Last-Event-ID``."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Annotated, Any, Protocol

import msgspec
import sqlalchemy as sa
from litestar import get
from litestar.params import Parameter
from litestar.response import ServerSentEvent, ServerSentEventMessage

from forge_server.api import views
from forge_server.domain.errors import Gone, InvalidRequest
from forge_server.store import tables as t
from forge_server.store.database import Store

PAGE = 500
PING_S = 15.0


class Wake(Protocol):
    """Tells that new events were committed."""

    async def wait(self, timeout_s: float) -> None:
        """Return at the next commit, or after ``timeout_s``."""


def event_routes(store: Store, wake: Wake) -> list[Any]:
    async def after(last: int) -> list[Any]:
        query = sa.select(t.events).where(t.events.c.id > last).order_by(t.events.c.id).limit(PAGE)
        return list(await store.read(lambda c: c.execute(query).all()))

    @get("/events", summary="Every state change, in commit order (server-sent events)")
    async def events(
        last_event_id: Annotated[str | None, Parameter(header="Last-Event-ID", required=False)] = None,
        since: int | None = None,
    ) -> ServerSentEvent:
        def bounds(connection: sa.Connection) -> tuple[int, int]:
            row = connection.execute(sa.select(sa.func.min(t.events.c.id), sa.func.max(t.events.c.id))).one()
            return row[0] or 0, row[1] or 0

        oldest, newest = await store.read(bounds)
        try:
            start = int(last_event_id) if last_event_id else (since if since is not None else newest)
        except ValueError:
            raise InvalidRequest("Last-Event-ID is not a number", where="Last-Event-ID") from None
        if oldest and start + 1 < oldest:
            raise Gone(
                f"events up to {oldest - 1} are no longer kept",
                where="Last-Event-ID",
                mend="read the lists again and start without Last-Event-ID",
            )

        async def stream() -> AsyncGenerator[ServerSentEventMessage, None]:
            last = start
            while True:
                rows = await after(last)
                for row in rows:
                    last = row.id
                    body = msgspec.json.encode(views.event_view(row)).decode()
                    yield ServerSentEventMessage(data=body, id=row.id, event=row.kind)
                if not rows:
                    before = asyncio.get_running_loop().time()
                    await wake.wait(PING_S)
                    if asyncio.get_running_loop().time() - before >= PING_S:
                        yield ServerSentEventMessage(comment="ping")

        return ServerSentEvent(stream())

    return [events]
