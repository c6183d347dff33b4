"""The store: what is acknowledged is there, a unit fails alone, many callers share a commit."""

import asyncio
import time
from collections.abc import Iterator

import pytest
import sqlalchemy as sa

from forge_server.store.database import Store
from forge_server.store.tables import events, holds, runs


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    opened = Store.open(database_url, create=True)
    yield opened
    opened.close()


def run_row(number: int) -> dict[str, object]:
    return {
        "id": f"ru-{number}",
        "name": f"run {number}",
        "kind": "record",
        "state": "active",
        "settings": {"n": number},
        "created_at": time.time(),
    }


async def count(store: Store, table: sa.Table) -> int:
    return await store.read(lambda c: c.execute(sa.select(sa.func.count()).select_from(table)).scalar_one())


async def test_inserts_that_wait_together_share_commits(store: Store) -> None:
    before = store.commits
    await asyncio.gather(*(store.insert(runs, run_row(n)) for n in range(200)))
    assert await count(store, runs) == 200
    assert store.commits - before < 50


async def test_a_failing_unit_fails_alone(store: Store) -> None:
    def broken(connection: sa.Connection) -> None:
        connection.execute(sa.insert(runs), run_row(1000))
        raise ZeroDivisionError("mine")

    jobs = [store.insert(runs, run_row(n)) for n in range(20)]
    jobs.insert(7, store.write(broken))
    jobs.insert(13, store.insert(runs, run_row(3)))  # the same key twice
    results = await asyncio.gather(*jobs, return_exceptions=True)
    failed = [r for r in results if r is not None]
    assert {type(r) for r in failed} == {ZeroDivisionError, sa.exc.IntegrityError}
    assert len(failed) == 2
    assert await count(store, runs) == 20


async def test_rows_of_a_unit_are_durable_together_and_in_order(store: Store) -> None:
    mark = sa.update(runs).where(runs.c.id == sa.bindparam("which"))
    await asyncio.gather(
        *(
            store.write_rows(
                [
                    (runs, run_row(n)),
                    (mark, {"which": f"ru-{n}", "state": "paused"}),
                    (events, {"at": 0.0, "kind": "k", "data": {}}),
                ]
            )
            for n in range(30)
        )
    )
    states = await store.read(lambda c: c.execute(sa.select(runs.c.state)).scalars().all())
    assert list(states) == ["paused"] * 30
    assert await count(store, events) == 30


async def test_listeners_hear_of_commits_in_commit_order_even_for_cancelled_callers(store: Store) -> None:
    heard: list[int] = []

    def append(connection: sa.Connection) -> int:
        connection.execute(sa.insert(holds), {"reason": "r", "begin_at": 0.0})
        return int(connection.execute(sa.select(sa.func.max(holds.c.id))).scalar_one())

    tasks = [asyncio.create_task(store.write(append, after=heard.append)) for _ in range(50)]
    await asyncio.sleep(0)
    for task in tasks[::3]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await store.write(lambda c: None)
    assert heard == sorted(heard) and len(heard) == 50
