"""What the overview makes of rows: windows go by when things ended, and what is over is no trouble."""

from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa

from forge_server.api import overview
from forge_server.domain import ids
from forge_server.store import tables as t
from forge_server.store.database import Store

NOW = 1_800_000_000.0


class Rows:
    """A database with one active run of ten steps and what is put into it."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._numbers = iter(range(10_000))

    async def add(self, table: sa.Table, **row: Any) -> None:
        await self.store.insert(table, row)

    async def run(self, id: str, created_at: float = NOW - 7200) -> None:
        settings = {"harness": "react", "steps": 10}
        row = {"id": id, "name": id, "kind": "train", "state": "active", "settings": settings}
        await self.add(t.runs, **row, created_at=created_at)
        await self.add(
            t.rollouts,
            id=f"ro-{id}",
            run_id=id,
            harness="react",
            mode="train",
            state="active",
            created_at=NOW,
        )

    async def attempt(self, run: str, began: float, **row: Any) -> str:
        id = ids.first_id("at", began) + f"{next(self._numbers):08d}"
        number = next(self._numbers)
        more = {"backend": "local", "created_at": began, "running_at": began, **row}
        await self.add(t.attempts, id=id, rollout_id=f"ro-{run}", number=number, **more)
        return id

    async def call(self, attempt: str, began: float, ended: float | None, **row: Any) -> None:
        number = next(self._numbers)
        base = {"dialect": "chat", "mode": "record", "request_digest": b"x" * 16, "seq": number}
        end = None if ended is None else "ok"
        await self.add(
            t.calls,
            id=ids.first_call_id(began) + number,
            attempt_id=attempt,
            began_at=began,
            ended_at=ended,
            end=end,
            **base,
            **row,
        )

    async def version(self, number: int, run: str, step: int, state: str = "live", reason: str = "") -> None:
        row = {"name": "default", "version": number, "run_id": run, "step": step, "state": state, "path": ""}
        await self.add(t.policies, **row, reason=reason, manifest_sha256="", created_at=NOW - 3000 + number)

    async def read(self) -> tuple[Any, Any]:
        return await self.store.read(lambda c: overview.read(c, None, NOW, "default"))


@pytest.fixture
def rows(database_url: str) -> Iterator[Rows]:
    store = Store.open(database_url, create=True)
    yield Rows(store)
    store.close()


async def test_a_long_call_counts_when_it_ends(rows: Rows) -> None:
    await rows.run("ru-1")
    attempt = await rows.attempt("ru-1", NOW - 1800, state="running")
    await rows.call(attempt, NOW - 95, NOW - 5, prompt_len=600, completion_len=300, engine_ms=90_000.0)
    await rows.call(attempt, NOW - 200, NOW - 100, prompt_len=7, completion_len=7, engine_ms=1.0)
    view, more = await rows.read()
    assert (view.rates.calls * 60, view.rates.prompt_tokens * 60) == (1, 600)
    assert (view.rates.completion_tokens * 60, view.rates.failed) == (300, 0)
    assert view.rates.engine_ms == 90_000.0
    assert more.silence_s == 5.0


async def test_silence_is_as_long_as_it_is_known_to_be(rows: Rows) -> None:
    await rows.run("ru-1")
    attempt = await rows.attempt("ru-1", NOW - 7000, state="running")
    await rows.call(attempt, NOW - 500, NOW - 400)
    assert (await rows.read())[1].silence_s == 400.0
    await rows.attempt("ru-1", NOW - 30, state="running")
    assert (await rows.read())[1].silence_s == 400.0
    await rows.store.write(lambda c: c.execute(sa.delete(t.calls)) and None)
    assert (await rows.read())[1].silence_s == overview.LONGEST_CALL_S


async def test_attempts_that_were_lost_late_are_counted(rows: Rows) -> None:
    await rows.run("ru-1")
    for number in range(8):
        lost = number < 6
        outcome = ("infra_failure", "evicted") if lost else ("completed", "ok")
        ended = NOW - 60 * number
        more = {"state": "ended", "outcome": outcome[0], "kind": outcome[1], "ended_at": ended}
        await rows.attempt("ru-1", NOW - 2400, **more)
    await rows.attempt("ru-1", NOW - 2400, state="ended", outcome="completed", kind="ok", ended_at=NOW - 1000)
    await rows.attempt("ru-1", NOW - 60, state="running")
    view, _ = await rows.read()
    assert (view.recent_attempts, view.lost) == (8, {"evicted": 6})


async def test_a_trainer_that_has_left_after_its_last_step_is_not_missed(rows: Rows) -> None:
    await rows.run("ru-1")
    session = {"run_id": "ru-1", "fence": 1, "token": "x", "world_size": 1, "resume_step": 0}
    await rows.add(
        t.trainer_sessions, **session, phase="waiting", lease_until=NOW - 100, created_at=NOW - 900
    )
    await rows.version(9, "ru-1", 9)
    view, _ = await rows.read()
    assert view.trainer is not None and not view.trainer.alive
    await rows.version(10, "ru-1", 10, state="rejected")
    assert (await rows.read())[0].trainer is not None
    await rows.version(11, "ru-1", 10, state="exported")
    assert (await rows.read())[0].trainer is None


async def test_what_another_run_was_refused_is_not_this_ones_trouble(rows: Rows) -> None:
    await rows.run("ru-1")
    await rows.version(1, "ru-1", 1, state="rejected", reason="probe: gap 9")
    assert (await rows.read())[1].rejected == "probe: gap 9"
    await rows.run("ru-2")
    assert (await rows.read())[1].rejected == ""


async def test_only_a_weight_update_is_told_as_one(rows: Rows) -> None:
    await rows.add(t.holds, reason="engine_down", begin_at=NOW - 300)
    assert (await rows.read())[1].held_s == 0.0
    await rows.add(t.holds, reason="weight_update", begin_at=NOW - 200)
    assert (await rows.read())[1].held_s == 200.0
