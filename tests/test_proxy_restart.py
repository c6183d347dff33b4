"""SIGKILL of the server with calls in flight, and what the next life makes of it (I1, I3, I4, I12)."""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import httpx
import sqlalchemy as sa
from proxy_rig import PATIENCE, Rig, follow, hello, rig

from forge_server.domain.classify import CallFact, hole
from forge_server.domain.engine import ChatResult, EngineUnavailable
from forge_server.domain.errors import StoreError
from forge_server.domain.outcome import Kind
from forge_server.domain.states import CallEnd
from forge_server.store import tables as t
from forge_server.store.database import Store
from forge_server.store.rows import AttemptRow, by_id

CHILD = Path(__file__).with_name("proxy_child.py")


async def test_i1_calls_in_flight_at_a_kill_end_as_server_lost(database_url: str) -> None:
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        CHILD,
        database_url,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert child.stdout is not None
    try:
        async with asyncio.timeout(240):
            url, attempt = (await child.stdout.readline()).decode().split()
        former = Rig.__new__(Rig)
        former.attempt, former.url = attempt, url
        async with former.client() as client, former.client() as other:
            body = hello("work")
            first = (await former.ask(client, body)).json()
            body = follow(body, first)
            lost = await former.ask(client, body)  # answered and recorded, but suppose that nobody got it
            assert lost.status_code == 200
            waiting = asyncio.create_task(former.ask(other, hello("forever")))
            store = Store.open(database_url, lock=False)
            try:
                await _recorded(store, attempt, 3)
            finally:
                store.close()
            child.send_signal(signal.SIGKILL)
            await child.wait()
            (broken,) = await asyncio.gather(waiting, return_exceptions=True)
            assert isinstance(broken, httpx.TransportError)
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()

    store = Store.open(database_url)
    try:
        proxy = Rig(store)
        proxy.attempt = attempt
        before = await proxy.rows()
        assert [row.end for row in before] == ["ok", "ok", None]
        # I4: as long as the end is missing the attempt is not trained
        log = tuple(CallFact(row.seq, CallEnd(row.end) if row.end else None) for row in before)
        assert hole(log) == "call_in_flight"

        assert (await proxy.lifecycle.recover()).lost_calls == 1
        rows = await proxy.rows()
        assert [(row.end, row.delivered, row.untrainable) for row in rows[2:]] == [
            ("server_lost", "no", "not_ok")
        ]
        async with proxy.serving(), proxy.client() as client:
            # the harness asks again for what it lost: the recorded answer is given again, not sampled again
            again = await proxy.ask(client, body)
            assert again.json()["choices"] == lost.json()["choices"]
            assert proxy.engine.asked == []
            # what was in flight is sampled anew
            assert (await proxy.ask(client, hello("forever"))).status_code == 200
            # and the conversation goes on where it was: stored as a delta beyond calls of the former life
            third = await proxy.ask(client, follow(body, lost.json()))
            assert third.status_code == 200
            await proxy.seal()
        rows = await proxy.rows()
        assert [row.seq for row in rows] == list(range(6))
        assert [row.retry_of for row in rows] == [None, None, None, rows[1].id, None, None]
        assert (rows[5].storage_parent_id, rows[5].parent_id) == (rows[1].id, rows[1].id)
        assert [row.delivered for row in rows] == ["yes", "yes", "no", "yes", "yes", "yes"]
        assert [row.untrainable for row in rows] == [None, None, "not_ok", "duplicate", None, None]
    finally:
        store.close()


async def _recorded(store: Store, attempt: str, count: int) -> None:
    proxy: Any = Rig.__new__(Rig)
    proxy.store, proxy.attempt = store, attempt
    async with asyncio.timeout(PATIENCE):
        await proxy.until(lambda rows: len(rows) == count)


async def test_i12_what_failed_for_a_reason_of_ours_is_not_charged_after_a_restart(database_url: str) -> None:
    """Two calls are allowed: one that the engine did not answer and one lost with the server are none."""
    async with rig(database_url, max_calls=2) as proxy:

        async def away(body: dict[str, Any]) -> ChatResult:
            raise EngineUnavailable("gone", sent=True)

        async with proxy.client() as client:
            proxy.engine.script = away
            assert (await proxy.ask(client)).status_code == 503
            proxy.engine.script = proxy.engine.answer
            assert (await proxy.ask(client)).status_code == 200
        await proxy.store.write(
            lambda c: c.execute(
                sa.insert(t.calls),
                {
                    "id": 1,
                    "attempt_id": proxy.attempt,
                    "seq": 2,
                    "dialect": "chat",
                    "mode": "record",
                    "request_digest": b"x" * 16,
                    "began_at": 1.0,
                },
            )
        )
        assert (await proxy.lifecycle.recover()).lost_calls == 1
        async with proxy.serving(), proxy.client() as client:
            assert (await proxy.ask(client, hello("b"))).status_code == 200
            assert (await proxy.ask(client, hello("c"))).status_code == 400


async def test_i3_an_answer_that_was_withheld_is_not_given_after_a_restart(database_url: str) -> None:
    async with rig(database_url) as proxy:
        works = proxy.refuse_writes(lambda rows: bool(proxy.engine.asked))
        async with proxy.client() as client:
            assert (await proxy.ask(client)).status_code == 503
        works.set()
        await proxy.until(lambda rows: rows[0].end is not None)
        async with proxy.serving(), proxy.client() as client:
            answer = (await proxy.ask(client)).json()
            assert answer["choices"][0]["message"]["content"] == "answer 2"
            await proxy.seal()
        assert [(row.status, row.delivered, row.untrainable) for row in await proxy.rows()] == [
            (503, "no", "not_delivered"),
            (200, "yes", None),
        ]


async def test_a_budget_is_not_used_up_before_that_is_written(database_url: str) -> None:
    async with rig(database_url, max_calls=1) as proxy:
        exceeded, trouble = proxy.budget_exceeded, [StoreError("the disk is full")]

        async def shaky(attempt_id: str, kind: Kind) -> None:
            if trouble:
                raise trouble.pop()
            await exceeded(attempt_id, kind)

        proxy.calls._budget_exceeded = shaky
        async with proxy.client() as client:
            codes = [(await proxy.ask(client, hello(str(n)))).status_code for n in range(4)]
        assert codes == [200, 503, 400, 400]
        attempt = await proxy.store.read(lambda c: by_id(c, AttemptRow, proxy.attempt))
        assert attempt is not None and attempt.stop_reason == "budget_calls"
