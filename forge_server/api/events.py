"""``GET /events``: every state change in commit order, as server-sent events, resumable by ``Last-Event-ID``.

What a stream has missed is read from the database; after that it lives on what is heard, so that a watcher costs
no reads. ``GET /events/history`` goes the other way, newest first.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import Annotated, Any, Protocol

import msgspec
import sqlalchemy as sa
from litestar import get
from litestar.params import FromQuery, HeaderParameter, QueryParameter
from litestar.response import Stream

from forge_server.api import views
from forge_server.api.paging import Cursor, Limit, decode_cursor, page
from forge_server.client import schemas as s
from forge_server.domain.errors import Gone, InvalidRequest
from forge_server.domain.events import EventRow
from forge_server.store import tables as t
from forge_server.store.database import Store

PAGE = 500
PING_S = 15.0
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_GREATEST = 2**63 - 1
Kinds = Annotated[str | None, QueryParameter(max_length=512)]


class News(Protocol):
    """Tells that new events were committed."""

    @property
    def count(self) -> int:
        """Commits heard of so far."""

    @property
    def over(self) -> bool:
        """The server stops: there will be no more."""

    def after(self, count: int) -> Sequence[EventRow] | None:
        """What was heard after the first ``count``; None when that is no longer kept."""

    async def beyond(self, count: int, timeout_s: float) -> bool:
        """Wait until more than ``count`` commits were heard of; False when that took too long."""


def event_routes(store: Store, news: News) -> list[Any]:
    async def stored(last: int) -> Sequence[Any]:
        query = sa.select(t.events).where(t.events.c.id > last).order_by(t.events.c.id).limit(PAGE)
        return await store.read(lambda c: c.execute(query).all())

    @get(
        "/events",
        summary="Every state change, in commit order (server-sent events)",
        media_type="text/event-stream",
    )
    async def events(
        last_event_id: Annotated[str | None, HeaderParameter(name="Last-Event-ID")] = None,
        since: Annotated[int | None, QueryParameter(ge=0, le=_GREATEST)] = None,
        run: FromQuery[str | None] = None,
        kinds: Kinds = None,
        every: Annotated[float, QueryParameter(ge=0, le=60)] = 0.0,
    ) -> Stream:
        def bounds(connection: sa.Connection) -> tuple[int, int, str | None]:
            row = connection.execute(sa.select(sa.func.min(t.events.c.id), sa.func.max(t.events.c.id))).one()
            run_id = views.run_row(connection, run).id if run is not None else None
            return row[0] or 1, row[1] or 0, run_id

        oldest, newest, run_id = await store.read(bounds)
        start = _number(last_event_id) if last_event_id else since if since is not None else newest
        if not oldest - 1 <= start <= newest:
            past = start < oldest
            raise Gone(
                f"events up to {oldest - 1} are no longer kept" if past else f"the last event is {newest}",
                where="Last-Event-ID",
                mend="read the lists again and start without Last-Event-ID",
            )
        wanted = _wanted(run_id, kinds)

        async def stream() -> AsyncGenerator[bytes, None]:
            last, heard = start, -1  # -1: not yet level with what is heard
            while not news.over:
                count = news.count  # before the look: what is committed during it is news
                rows: Sequence[Any] | None = news.after(heard) if heard >= 0 else None
                if rows is None:
                    rows = await stored(last)
                    heard = count if len(rows) < PAGE else -1
                else:
                    heard, rows = count, [row for row in rows if row.id > last]
                if rows:
                    last = rows[-1].id
                    if body := encoded(row for row in rows if wanted(row)):
                        yield body
                if heard < 0:
                    continue
                if not await news.beyond(heard, PING_S):
                    yield b": ping\r\n\r\n"
                elif every:
                    await asyncio.sleep(every)

        return Stream(stream(), headers=HEADERS)

    @get("/events/history", summary="Events that are kept, newest first")
    async def history(
        run: FromQuery[str | None] = None,
        rollout: FromQuery[str | None] = None,
        kinds: Kinds = None,
        cursor: Cursor = None,
        limit: Limit = 100,
    ) -> s.Page:
        after = decode_cursor(cursor)
        return await store.read(lambda c: kept(c, run, rollout, kinds, after, limit))

    return [events, history]


def kept(
    connection: sa.Connection,
    run: str | None,
    rollout: str | None,
    kinds: str | None,
    after: str | None,
    limit: int,
) -> s.Page:
    """Events that are kept, newest first; ``kinds`` with commas between. Raises NotFound: no such run."""
    c = t.events.c
    query = sa.select(t.events).order_by(c.id.desc()).limit(limit + 1)
    if run is not None:
        query = query.where(c.run_id == views.run_row(connection, run).id)
    if rollout is not None:
        query = query.where(c.rollout_id == rollout)
    if kinds:
        query = query.where(c.kind.in_(kinds.split(",")))
    if after is not None:
        query = query.where(c.id < _number(after))
    return page(connection.execute(query).all(), limit, lambda r: str(r.id), views.event_view)


def encoded(rows: Iterable[Any]) -> bytes:
    """Rows as server-sent events."""
    return b"".join(
        b"id: %d\r\nevent: %s\r\ndata: %s\r\n\r\n"
        % (row.id, row.kind.encode(), msgspec.json.encode(views.event_view(row)))
        for row in rows
    )


def _wanted(run_id: str | None, kinds: str | None) -> Callable[[Any], bool]:
    named = frozenset(kinds.split(",")) if kinds else frozenset()
    return lambda row: (run_id is None or row.run_id == run_id) and (not named or row.kind in named)


def _number(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 19):
        raise InvalidRequest("Last-Event-ID is not an event's number", where="Last-Event-ID")
    return int(text)
