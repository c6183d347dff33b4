"""SIGKILL of the server with calls in flight, and what the next life makes of it (I1, I3, I4, I12)."""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import httpx
from proxy_rig import PATIENCE, Rig, follow, hello

from forge_server.domain.classify import CallFact, hole
from forge_server.domain.states import CallEnd
from forge_server.store.database import Store

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
        async with asyncio.timeout(60):
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
