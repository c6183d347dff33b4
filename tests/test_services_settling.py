"""The end of an attempt that nobody sealed: its calls have ends and deliveries before it is judged (I3, I4)."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from proxy_rig import PATIENCE, Rig, hello, rig

from forge_server.domain import events as e
from forge_server.domain.events import Event, EventRow
from forge_server.services import settling
from forge_server.services.settling import Settling
from forge_server.store.rows import AttemptRow, by_id


@pytest.fixture
async def proxy(database_url: str) -> AsyncIterator[Rig]:
    async with rig(database_url) as made:
        yield made


@pytest.mark.parametrize("how", ["finish", "gone"])
async def test_i4_calls_in_flight_get_their_ends_before_the_attempt_is_judged(proxy: Rig, how: str) -> None:
    lifecycle = Settling(proxy.lifecycle, proxy.sessions)
    event: Event = e.RunnerFinished(attempt_id=proxy.attempt, exit_code=0)
    if how == "gone":
        event = e.BackendFact(attempt_id=proxy.attempt, fact=e.Fact.PROCESS_GONE, evidence={})
    ended = asyncio.Event()
    proxy.lifecycle.subscribe(lambda row: _note(row, ended))
    async with proxy.client() as client, proxy.client() as other:
        await proxy.ask(client)
        proxy.engine.blocked()
        asking = asyncio.create_task(proxy.ask(other, hello("b")))
        await proxy.engine.arrived()
        await proxy.engine.arrived()
        assert (await lifecycle.apply(event)).applied
        assert ended.is_set()
        found = [(row.end, row.delivered) for row in await proxy.rows()]
        async with asyncio.timeout(PATIENCE):
            assert (await asking).status_code == 409
    assert found == [("ok", "yes"), ("rejected", "no")]
    attempt = await proxy.store.read(lambda c: by_id(c, AttemptRow, proxy.attempt))
    assert attempt is not None and attempt.not_trained == ""


def _note(row: EventRow, ended: asyncio.Event) -> None:
    if row.kind == "attempt_ended":
        ended.set()


async def test_a_deadline_that_is_early_seals_nothing(proxy: Rig) -> None:
    lifecycle = Settling(proxy.lifecycle, proxy.sessions)
    async with proxy.client() as client:
        await proxy.ask(client)
        passed = e.DeadlinePassed(attempt_id=proxy.attempt, clock=e.Clock.AGENT)
        assert (await lifecycle.apply(passed)).refusal is e.Refusal.TOO_EARLY
        assert (await proxy.ask(client, hello("b"))).status_code == 200


async def test_i6_books_that_cannot_be_closed_keep_no_attempt_from_ending(
    proxy: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settling, "PATIENCE_S", 0.05)
    never = asyncio.Event()
    async with proxy.client() as client:
        await proxy.ask(client)
        write = proxy.store.write_rows

        async def stuck(rows: Any) -> None:
            await never.wait()
            await write(rows)

        monkeypatch.setattr(proxy.store, "write_rows", stuck)
        gone = e.BackendFact(attempt_id=proxy.attempt, fact=e.Fact.PROCESS_GONE, evidence={})
        async with asyncio.timeout(PATIENCE):
            assert (await Settling(proxy.lifecycle, proxy.sessions).apply(gone)).applied
        never.set()
