"""``GET /events``: every state change in commit order, as server-sent events, resumable by ``Last-Event-ID``."""

from collections.abc import AsyncGenerator
from typing import Annotated, Any, Protocol

import msgspec
import sqlalchemy as sa
from litestar import get
from litestar.params import HeaderParameter, QueryParameter
from litestar.response import ServerSentEvent, ServerSentEventMessage

from forge_server.api import views
from forge_server.domain.errors import Gone, InvalidRequest
from forge_server.store import tables as t
from forge_server.store.database import Store

PAGE = 500
PING_S = 15.0
_GREATEST = 2**63 - 1


class News(Protocol):
    """Tells that new events were committed."""

    @property
    def count(self) -> int:
        """Commits heard of so far."""

    @property
    def over(self) -> bool:
        """The server stops: there will be no more."""

    async def beyond(self, count: int, timeout_s: float) -> bool:
        """Wait until more than ``count`` commits were heard of; False when that took too long."""


def event_routes(store: Store, news: News) -> list[Any]:
    async def after(last: int) -> list[Any]:
        query = sa.select(t.events).where(t.events.c.id > last).order_by(t.events.c.id).limit(PAGE)
        return list(await store.read(lambda c: c.execute(query).all()))

    @get("/events", summary="Every state change, in commit order (server-sent events)")
    async def events(
        last_event_id: Annotated[str | None, HeaderParameter(name="Last-Event-ID")] = None,
        since: Annotated[int | None, QueryParameter(ge=0, le=_GREATEST)] = None,
    ) -> ServerSentEvent:
        def bounds(connection: sa.Connection) -> tuple[int, int]:
            row = connection.execute(sa.select(sa.func.min(t.events.c.id), sa.func.max(t.events.c.id))).one()
            return row[0] or 1, row[1] or 0

        oldest, newest = await store.read(bounds)
        start = _number(last_event_id) if last_event_id else since if since is not None else newest
        if not oldest - 1 <= start <= newest:
            past = start < oldest
            raise Gone(
                f"events up to {oldest - 1} are no longer kept" if past else f"the last event is {newest}",
                where="Last-Event-ID",
                mend="read the lists again and start without Last-Event-ID",
            )

        async def stream() -> AsyncGenerator[ServerSentEventMessage, None]:
            last = start
            while not news.over:
                heard = news.count  # before the look: what is committed during it is news
                rows = await after(last)
                for row in rows:
                    last = row.id
                    body = msgspec.json.encode(views.event_view(row)).decode()
                    yield ServerSentEventMessage(data=body, id=row.id, event=row.kind)
                if not rows and not await news.beyond(heard, PING_S):
                    yield ServerSentEventMessage(comment="ping")

        return ServerSentEvent(stream())

    return [events]


def _number(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 19):
        raise InvalidRequest("Last-Event-ID is not an event's number", where="Last-Event-ID")
    return int(text)
