"""Heartbeats that come at the same time share a write, and each has its own answer; on both databases."""

import asyncio
from collections.abc import Iterator

import pytest
from lifecycle_world import World

from forge_server.domain import events as e
from forge_server.domain.errors import StoreError
from forge_server.domain.outcome import Kind
from forge_server.lifecycle.heartbeats import MOST
from forge_server.store.database import Store


@pytest.fixture
def world(database_url: str) -> Iterator[World]:
    store = Store.open(database_url, create=True)
    yield World(store)
    store.close()


async def test_each_has_its_own_answer_and_one_write_serves_all(world: World) -> None:
    await world.run(rollouts=4)
    for number in range(4):
        await world.start(f"at{number}", f"ro{number}")
    await world.apply(e.AttemptSealed(attempt_id="at1"))
    await world.apply(e.BudgetExceeded(attempt_id="at2", kind=Kind.BUDGET_CALLS))
    await world.finish("at3")
    world.now += 7
    commits = world.store.commits
    asked = [f"at{number}" for number in range(4)] + ["no"]
    answers = await asyncio.gather(*map(world.lifecycle.heartbeat, asked))
    told = dict(zip(asked, answers, strict=True))
    assert world.store.commits - commits == 1
    assert not told["at0"].stop and told["at0"].left_s == 593
    assert (told["at1"].stop, told["at1"].reason, told["at1"].ended) == (True, "sealed", False)
    assert told["at2"].stop and told["at2"].reason == "budget_calls"
    assert told["at3"].ended and told["no"].ended
    assert [(await world.attempt(id)).heartbeat_at for id in ("at0", "at3")] == [1_007, 1_000]


async def test_more_than_fit_into_one_write(world: World) -> None:
    await world.run()
    await world.start("at0")
    asked = ["at0", *(f"no{number}" for number in range(MOST)), "at0"]
    told = await asyncio.gather(*map(world.lifecycle.heartbeat, asked))
    assert [not one.ended for one in told] == [True, *[False] * MOST, True]


async def test_one_that_hangs_up_costs_the_others_nothing(world: World) -> None:
    await world.run()
    await world.start("at0")
    first, *rest = [asyncio.create_task(world.lifecycle.heartbeat("at0")) for _ in range(3)]
    await asyncio.sleep(0)
    first.cancel()
    assert not any(told.stop for told in await asyncio.gather(*rest))
    assert first.cancelled()


async def test_a_fault_of_the_database_is_told_to_everybody(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.run()
    await world.start("at0")

    async def fail(*_: object, **__: object) -> None:
        raise StoreError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(world.store, "write", fail)
        told = await asyncio.gather(
            *(world.lifecycle.heartbeat("at0") for _ in range(3)), return_exceptions=True
        )
    assert [type(one) for one in told] == [StoreError] * 3
    assert not (await world.lifecycle.heartbeat("at0")).stop
