"""``GET /events``: commit order, resumption, 410, waking at a commit, ending with the server."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import msgspec
import pytest
import sqlalchemy as sa
from api_rig import Rig, client, eventually, on, rig

from forge_server.api.events import PING_S
from forge_server.client.schemas import EventView
from forge_server.domain.events import EventRow
from forge_server.services.news import News
from forge_server.store import tables as t

LIMIT_S = 60.0


class Stream:
    """What a client of server-sent events makes of the bytes."""

    def __init__(self, answer: httpx.Response) -> None:
        self._lines = answer.aiter_lines()

    async def next(self) -> EventView:
        fields: dict[str, str] = {}
        async with asyncio.timeout(LIMIT_S):
            async for text in self._lines:
                if not text and "data" in fields:
                    view = msgspec.json.decode(fields["data"], type=EventView)
                    assert (fields["id"], fields["event"]) == (str(view.id), view.kind)
                    return view
                name, _, value = text.partition(":")
                fields[name] = value.strip()
        raise EOFError

    async def take(self, count: int) -> list[EventView]:
        return [await self.next() for _ in range(count)]


@asynccontextmanager
async def stream(api: Rig, last: int | None = None) -> AsyncIterator[Stream]:
    headers = {} if last is None else {"last-event-id": str(last)}
    async with (
        client(api.server) as http,
        http.stream("GET", "/api/v1/events", headers=headers) as answer,
    ):
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield Stream(answer)


async def in_the_database(api: Rig) -> list[int]:
    query = sa.select(t.events.c.id).order_by(t.events.c.id)
    return list(await api.server.store.read(lambda c: c.execute(query).scalars().all()))


async def test_every_change_in_commit_order_from_any_point(tmp_path: Path, database_url: str) -> None:
    async with rig(tmp_path, **on(database_url)) as api:
        await asyncio.gather(*(api.register() for _ in range(8)))
        ids = await in_the_database(api)
        async with stream(api, 0) as events:
            seen = await events.take(len(ids))
        assert [event.id for event in seen] == ids
        kinds = [event.kind for event in seen if event.rollout_id == seen[-1].rollout_id]
        assert kinds[:2] == ["rollout_created", "attempt_queued"]

        middle = ids[len(ids) // 2]
        async with stream(api, middle) as events:
            assert (await events.next()).id == ids[len(ids) // 2 + 1]
        params = {"since": middle}
        async with client(api.server) as http, http.stream("GET", "/api/v1/events", params=params) as answer:
            assert (await Stream(answer).next()).id == ids[len(ids) // 2 + 1]


async def test_it_wakes_at_a_commit(tmp_path: Path) -> None:
    """Well before its own ping: many times, since it is a race that must not be lost."""
    async with rig(tmp_path) as api, stream(api, 0) as events:
        run = await api.create_run("r", harness="external")
        while (await events.next()).kind != "run_created":
            pass
        for i in range(20):
            began = time.monotonic()
            action = "resume" if i % 2 else "pause"
            await api.http.patch(f"/api/v1/runs/{run['id']}", json={"action": action})
            assert (await events.next()).kind == f"run_{action}d"
            assert time.monotonic() - began < PING_S / 2  # a lost wake costs the whole pause


async def test_a_fresh_stream_starts_at_the_end(tmp_path: Path) -> None:
    async with rig(tmp_path) as api:
        await api.register()
        async with stream(api) as events:
            run = await api.create_run("r", harness="external")
            first = await events.next()
            assert (first.kind, first.run_id) == ("run_created", run["id"])


async def test_too_old_and_never_sent_are_gone(tmp_path: Path) -> None:
    async with rig(tmp_path) as api:
        await api.register()
        ids = await in_the_database(api)
        keep = ids[3]
        await api.server.store.write(
            lambda c: c.execute(sa.delete(t.events).where(t.events.c.id < keep)).rowcount
        )
        for last in (0, keep - 2):
            found = await api.refused(
                410, "gone", "GET", "/api/v1/events", headers={"last-event-id": str(last)}
            )
            assert "no longer kept" in found.detail
        async with stream(api, keep - 1) as events:
            assert (await events.next()).id == keep
        future = {"last-event-id": str(ids[-1] + 1000)}  # of another database
        await api.refused(410, "gone", "GET", "/api/v1/events", headers=future)


async def test_open_streams_do_not_delay_the_stop(tmp_path: Path) -> None:
    async with rig(tmp_path) as api, stream(api, 0) as events:
        await api.register()
        await events.next()
        server = api.server
        began = time.monotonic()
        await server.stop()
        with pytest.raises(EOFError):
            while True:
                await events.next()
        assert time.monotonic() - began < LIMIT_S


async def test_a_client_that_hangs_up_is_let_go(tmp_path: Path) -> None:
    async with rig(tmp_path) as api:
        await api.register()
        before = len(asyncio.all_tasks())
        for _ in range(30):
            async with stream(api, 0) as events:
                await events.next()
        await eventually(lambda: len(asyncio.all_tasks()) < before + 10)


async def test_news_between_the_look_and_the_wait_is_not_lost() -> None:
    news = News()
    row = EventRow(id=1, at=0.0, kind="x", run_id=None, rollout_id=None, attempt_id=None, data={})
    seen = news.count
    news(row)  # while the database is being read
    assert await news.beyond(seen, 60.0)
    assert not await news.beyond(news.count, 0.01)
    waiting = asyncio.create_task(news.beyond(news.count, 60.0))
    await asyncio.sleep(0)
    news.close()
    assert await waiting
