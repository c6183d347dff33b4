"""I12 within one life: what the server was away for, because nothing could be written or nothing ran, charges no
clock and loses no attempt."""

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lifecycle_world import World
from scheduler_rig import CALL, rig, script_spec

from forge_server.domain import events as e
from forge_server.domain.errors import StoreError
from forge_server.domain.outcome import Kind, Outcome
from forge_server.domain.states import AttemptState
from forge_server.lifecycle import deadlines
from forge_server.lifecycle.liveness import STOOD_STILL_S, TRY_AGAIN_S
from forge_server.store import engines, instance
from forge_server.store.database import Store


@pytest.fixture
async def world(database_url: str) -> AsyncIterator[World]:
    store = Store.open(database_url, create=True)
    made = World(store)
    await instance.load(store, made.now)
    yield made
    store.close()


async def test_i12_a_standstill_charges_no_clock(world: World) -> None:
    await world.run(rollouts=3)
    await world.start("at0", "ro0")
    await world.start("at1", "ro1", backend="kubernetes")
    await world.apply(e.AttemptSealed(attempt_id="at1"))
    await world.apply(e.AttemptQueued(attempt_id="at2", rollout_id="ro2", backend="kubernetes"))
    await world.apply(e.AttemptLaunching(attempt_id="at2", startup_s=60))
    await world.lived(20)
    before = [await world.attempt(f"at{n}") for n in range(3)]
    world.now += 5_000
    assert await world.lifecycle.due(30) == []
    for clock in (e.Clock.AGENT, e.Clock.HEARTBEAT):
        late = e.DeadlinePassed(attempt_id="at0", clock=clock, limit_s=30)
        assert (await world.apply(late)).refusal is e.Refusal.TOO_EARLY
    await world.lifecycle.beat()
    after = [await world.attempt(f"at{n}") for n in range(3)]
    assert after[0].agent_deadline == (before[0].agent_deadline or 0) + 5_000
    assert after[1].verify_deadline == (before[1].verify_deadline or 0) + 5_000
    assert after[2].startup_deadline == (before[2].startup_deadline or 0) + 5_000
    assert [row.heartbeat_at for row in after[:2]] == [world.now, world.now]
    await world.lived(TRY_AGAIN_S)  # what is not heard now is missed
    await world.lived(30 - TRY_AGAIN_S)
    assert {passed.attempt_id for passed in await world.lifecycle.due(30)} == {"at0", "at1"}


async def test_what_was_due_before_is_due_once_runners_had_time_to_try_again(world: World) -> None:
    await world.run()
    await world.start("at0")
    await world.call("at0", 0)
    await world.lived(600)
    world.now += STOOD_STILL_S
    await world.lifecycle.beat()
    assert await world.lifecycle.due(700) == []
    await world.lived(TRY_AGAIN_S)
    (passed,) = await world.lifecycle.due(700)
    assert passed.clock is e.Clock.AGENT


async def test_a_late_beat_of_a_busy_machine_is_none(world: World) -> None:
    await world.run()
    await world.start("at0")
    before = (await world.attempt("at0")).agent_deadline
    world.now += STOOD_STILL_S - 1
    await world.lifecycle.beat()
    assert (await world.attempt("at0")).agent_deadline == before


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("lived"), st.integers(1, 9)),
        st.tuples(st.just("still"), st.integers(int(STOOD_STILL_S), 90)),
        st.tuples(st.just("still, and a hold ends"), st.integers(int(STOOD_STILL_S), 90)),
        st.tuples(st.sampled_from(["hold a", "hold b"]), st.booleans()),
        st.tuples(st.just("restart"), st.integers(0, 40)),
    ),
    max_size=12,
)


def test_i12_only_time_in_which_an_agent_could_work_is_charged(database_url: str) -> None:
    """Lived time without a hold, whatever order standstills, holds and restarts come in."""
    store = Store.open(database_url, create=True)
    loop = asyncio.new_event_loop()
    number = 0

    async def play(steps: list[tuple[str, int]]) -> None:
        nonlocal number
        number += 1
        world = World(store)
        world.now += 10_000 * number  # what examples before this one have left in the database is over
        await instance.load(store, world.now)
        await world.lived(0)
        for hold in "ab":
            await world.apply(e.HoldEnded(reason=hold))
        await world.lifecycle.recover()
        run, rollout, attempt = f"ru{number}", f"ro{number}", f"at{number}"
        await world.apply(e.RunCreated(run_id=run, name=run, kind="record", settings={}))
        made = e.RolloutCreated(rollout_id=rollout, run_id=run, harness="h", mode="record", max_attempts=1)
        await world.apply(made)
        await world.start(attempt, rollout, backend="kubernetes")
        charged, held = 0.0, set[str]()
        for what, how in steps:
            if what == "lived":
                await world.lived(how)
                charged += 0 if held else how
            elif what.startswith("still"):
                world.now += how
                if held and what != "still":  # it is written before the beat
                    await world.apply(e.HoldEnded(reason=held.pop()))
                await world.lifecycle.beat()
            elif what == "restart":
                world.now += how
                await world.lifecycle.recover()  # which ends every hold
                held.clear()
            elif how:
                await world.apply(e.HoldBegan(reason=what))
                held.add(what)
            else:
                await world.apply(e.HoldEnded(reason=what))
                held.discard(what)
        row = await world.attempt(attempt)
        open_holds = await store.read(lambda c: deadlines.open_holds(c, world.now))
        assert deadlines.left(row, world.now, open_holds) == pytest.approx(max(0.0, 600 - charged))
        for hold in ("hold a", "hold b"):
            await world.apply(e.HoldEnded(reason=hold))

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(STEPS)
    def check(steps: list[tuple[str, int]]) -> None:
        loop.run_until_complete(asyncio.wait_for(play(steps), 30))

    try:
        check()
    finally:
        store.close()
        loop.close()


async def test_i5_a_database_that_takes_no_writes_makes_no_policy_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Locked for longer than heartbeats may be missing: what runners said meanwhile was not taken."""
    monkeypatch.setattr(engines, "BUSY_MS", 100)
    file = tmp_path / "forge.db"
    store = Store.open(f"sqlite:///{file}", create=True)
    world = World(store)
    await instance.load(store, world.now)
    await world.run(rollouts=2)
    for number in range(2):
        await world.start(f"at{number}", f"ro{number}")
        await world.call(f"at{number}", 0)
    await world.apply(e.AttemptSealed(attempt_id="at1"))
    await world.apply(e.VerifierFetched(attempt_id="at1", verify_s=50))
    reward = e.RewardReported(attempt_id="at1", value=1.0, source="verifier")
    await world.lived(10)
    other = sqlite3.connect(file, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    for _ in range(3):
        world.now += 25
        for refused in (world.lifecycle.heartbeat("at0"), world.apply(reward), world.lifecycle.beat()):
            with pytest.raises(StoreError):
                await refused
        assert await world.lifecycle.due(60) == []
    other.execute("ROLLBACK")
    other.close()
    world.now += 1
    assert await world.lifecycle.due(60) == []
    await world.lifecycle.beat()
    assert await world.lifecycle.due(60) == []
    assert not (await world.lifecycle.heartbeat("at0")).stop
    assert (await world.apply(reward)).applied
    await world.apply(e.RunnerFinished(attempt_id="at1", exit_code=0, verifier=e.VerifierReport(status="ok")))
    await world.lived(TRY_AGAIN_S)
    assert await world.lifecycle.due(60) == []
    assert (await world.attempt("at0")).state is AttemptState.RUNNING
    found = await world.attempt("at1")
    assert (found.outcome, found.kind, found.reward) == (Outcome.COMPLETED, Kind.OK, 1.0)
    store.close()


@pytest.mark.sandbox
async def test_i5_a_machine_that_slept_ends_no_attempt(tmp_path: Path) -> None:
    """Its clock jumps by more than every clock of an attempt has."""
    slept = 0.0
    script = CALL + "call; sleep 4; echo -n plum > answer.txt; call"
    async with rig(
        tmp_path,
        specs={"script": script_spec(script)},
        clock=lambda: time.time() + slept,
        plan={"heartbeat_s": 2.0},
    ) as it:
        await it.group(n=3, harness="script", max_attempts=1)
        await it.until(lambda: len(it.of("attempt_running")) == 3)
        slept = 36_000.0
        ended = await it.ended(3)
        assert [(row.data["kind"], row.data["reward"]) for row in ended] == [("ok", 1.0)] * 3
        assert {row.data["reason"] for row in it.of("attempt_sealed")} == {""}  # by its runner
