"""I12 and I6 across a restart: downtime charges no clock, lost calls end, local attempts get their next
one.
"""

import itertools
from collections.abc import AsyncIterator

import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st
from lifecycle_world import World

from forge_server.domain import clock
from forge_server.domain import events as e
from forge_server.domain.clock import Interval
from forge_server.domain.outcome import Kind, Outcome
from forge_server.domain.states import AttemptState, CallEnd, RolloutState
from forge_server.lifecycle.attempts import SEAL_TO_VERIFY_S
from forge_server.store import instance
from forge_server.store import tables as t
from forge_server.store.database import Store


@pytest.fixture
async def world(database_url: str) -> AsyncIterator[World]:
    store = Store.open(database_url, create=True)
    made = World(store)
    await instance.load(store, made.now)
    yield made
    store.close()


async def test_the_first_start_finds_nothing(world: World) -> None:
    found = await world.lifecycle.recover()
    assert (found.downtime_s, found.lost_calls, found.lost_attempts, found.adopted_attempts) == (0, 0, (), ())


async def test_i12_downtime_charges_no_clock(world: World) -> None:
    await world.run(rollouts=3)
    await world.start("at0", "ro0", backend="kubernetes")
    await world.start("at1", "ro1", backend="kubernetes")
    await world.apply(e.AttemptSealed(attempt_id="at1"))
    await world.apply(e.AttemptQueued(attempt_id="at2", rollout_id="ro2", backend="kubernetes"))
    await world.apply(e.AttemptLaunching(attempt_id="at2", startup_s=60))
    before = [await world.attempt(f"at{n}") for n in range(3)]
    await world.lived(10)
    world.now += 5_000
    found = await world.lifecycle.recover()
    assert found.downtime_s == 5_000
    assert found.adopted_attempts == ("at0", "at1", "at2")
    after = [await world.attempt(f"at{n}") for n in range(3)]
    assert after[0].agent_deadline == (before[0].agent_deadline or 0) + 5_000
    assert after[1].verify_deadline == (before[1].verify_deadline or 0) + 5_000
    assert after[2].startup_deadline == (before[2].startup_deadline or 0) + 5_000
    assert await world.lifecycle.due(30) == []  # nobody is missed before one full silence
    world.now += 29
    assert await world.lifecycle.due(30) == []
    again = await world.lifecycle.recover()  # a restart of the restart
    assert again.downtime_s == 29
    holds = await world.store.read(
        lambda c: [tuple(row) for row in c.execute(sa.select(t.holds.c.reason, t.holds.c.end_at))]
    )
    assert [reason for reason, _ in holds] == ["server_down", "server_down"]


async def test_i12_a_hold_cut_short_by_a_crash_is_counted_once(world: World) -> None:
    await world.run()
    await world.start("at0", "ro0", backend="kubernetes")
    deadline = (await world.attempt("at0")).agent_deadline
    world.now += 10
    await world.apply(e.HoldBegan(reason="weight_update"))
    await world.lived(7)
    world.now += 100
    await world.lifecycle.recover()
    assert (await world.attempt("at0")).agent_deadline == (deadline or 0) + 107
    assert (await world.apply(e.HoldEnded(reason="weight_update"))).refusal is e.Refusal.REPEAT
    assert (await world.attempt("at0")).agent_deadline == (deadline or 0) + 107


async def test_i1_calls_of_the_former_life_end_as_server_lost(world: World) -> None:
    await world.run()
    await world.start("at0", "ro0", backend="kubernetes")
    await world.call("at0", 0)
    await world.call("at0", 1, end=None)
    found = await world.lifecycle.recover()
    assert found.lost_calls == 1
    rows = await world.store.read(
        lambda c: c.execute(sa.select(t.calls.c.end, t.calls.c.untrainable).order_by(t.calls.c.seq)).all()
    )
    assert [row.end for row in rows] == [CallEnd.OK, CallEnd.SERVER_LOST]
    assert rows[1].untrainable == "not_ok"
    # the harness asked again and went on: nothing that mattered is missing
    await world.call("at0", 2)
    await world.finish("at0")
    assert (await world.attempt("at0")).not_trained == ""


async def test_i3_books_left_open_by_a_kill_are_closed(world: World) -> None:
    """Sealed, then killed before the reasons were written; an attempt that goes on is left alone."""
    await world.run(rollouts=2)
    for n in (0, 1):
        await world.start(f"at{n}", f"ro{n}", backend="kubernetes")
        await world.call(f"at{n}", 0)
    await world.apply(e.AttemptSealed(attempt_id="at0"))
    await world.lifecycle.recover()
    query = sa.select(t.calls.c.untrainable).order_by(t.calls.c.attempt_id)
    reasons = await world.store.read(lambda c: list(c.execute(query).scalars()))
    assert reasons == ["delivery_unknown", None]


async def test_a_silent_runner_is_sealed_before_it_is_given_up(world: World) -> None:
    """Its calls get their ends in between; should it come back meanwhile, it goes on from the sealing."""
    await world.run()
    await world.start("at0", "ro0", backend="kubernetes")
    await world.call("at0", 0)
    await world.lived(31)
    for state in (AttemptState.SEALED, AttemptState.ENDED):
        (passed,) = await world.lifecycle.due(30)
        assert (await world.apply(passed)).applied
        assert (await world.attempt("at0")).state is state
    assert (await world.attempt("at0")).kind is Kind.RUNNER_LOST


async def test_i5_the_verifiers_clock_waits_for_a_runner_that_is_being_missed(world: World) -> None:
    """It would have kept that clock itself, and what it died of may not be known yet. Never longer than for a lost one;
    harnesses from outside are not lost by silence."""
    await world.run(rollouts=2)
    await world.start("at0", "ro0", backend="kubernetes")
    await world.start("at1", "ro1", backend="external")
    for attempt in ("at0", "at1"):
        await world.apply(e.AttemptSealed(attempt_id=attempt))
    await world.lived(SEAL_TO_VERIFY_S)
    for attempt in ("at0", "at1"):
        await world.lifecycle.heartbeat(attempt)
    due = {}
    for silent in range(0, 61, 5):
        due[silent] = {p.attempt_id for p in await world.lifecycle.due(60) if p.clock is e.Clock.VERIFY}
        late = e.DeadlinePassed(attempt_id="at0", clock=e.Clock.VERIFY, limit_s=60)
        if silent == 30:
            assert (await world.apply(late)).refusal is e.Refusal.TOO_EARLY
        await world.lived(5)
    both = {"at0", "at1"}
    assert due == {s: both if s < 15 or s >= 60 else {"at1"} for s in range(0, 61, 5)}


async def test_i6_local_attempts_die_with_the_server_and_are_not_charged(world: World) -> None:
    await world.run(max_attempts=1)
    for number in range(5):
        await world.start(f"at{number}")
        found = await world.lifecycle.recover()
        assert found.lost_attempts == (f"at{number}",)
        attempt, rollout = await world.attempt(f"at{number}"), await world.rollout()
        assert (attempt.outcome, attempt.kind) == (Outcome.INFRA_FAILURE, Kind.SERVER_LOST)
        assert rollout.state is RolloutState.PENDING and rollout.not_before <= world.now
    assert (await world.run_row()).infra_streak == 0
    await world.start("at9")
    await world.call("at9", 0)
    await world.finish("at9")
    assert (await world.rollout()).outcome is Outcome.COMPLETED


async def test_i6_a_rollout_that_never_survives_a_restart_ends_at_last(world: World) -> None:
    from forge_server.lifecycle.ending import FREE_RESTARTS

    await world.run(max_attempts=2)
    for number in range(2 + FREE_RESTARTS):
        await world.start(f"at{number}")
        await world.lifecycle.recover()
    rollout = await world.rollout()
    assert (rollout.state, rollout.kind) == (RolloutState.ENDED, Kind.SERVER_LOST)


async def test_attempts_of_external_harnesses_have_no_heartbeat_but_their_clocks(world: World) -> None:
    await world.apply(e.RunCreated(run_id="ru", name="external", kind="record", settings={}))
    created = e.RolloutCreated(
        rollout_id="ro0", run_id="ru", harness="mine", mode="record", external=True, max_attempts=3
    )
    await world.apply(created)
    await world.apply(e.AttemptQueued(attempt_id="at0", rollout_id="ro0", backend="external"))
    await world.apply(e.RunnerJoined(attempt_id="at0", nonce="n"))
    await world.apply(e.HarnessStarted(attempt_id="at0", agent_s=600))
    await world.call("at0", 0)
    await world.lived(500)
    assert await world.lifecycle.due(30) == []
    await world.lived(100)
    for _ in range(2):
        for due in await world.lifecycle.due(30):
            assert (await world.apply(due)).applied
        await world.lived(1_000)
    attempt = await world.attempt("at0")
    assert attempt.state is AttemptState.ENDED and attempt.kind is Kind.AGENT_TIMEOUT


async def test_i6_half_a_registration_of_an_older_server_ends(world: World) -> None:
    """A registration was several transactions once; one that is whole goes on."""
    await world.apply(e.RunCreated(run_id="ru", name="external", kind="record", settings={}))
    for n in range(5):
        steps: list[e.Event] = [
            e.RolloutCreated(
                rollout_id=f"ro{n}", run_id="ru", harness="mine", mode="record", external=True, max_attempts=1
            ),
            e.AttemptQueued(attempt_id=f"at{n}", rollout_id=f"ro{n}", backend="external"),
            e.AttemptLaunched(attempt_id=f"at{n}", handle={"ttl_s": 60.0}),
            e.RunnerJoined(attempt_id=f"at{n}", nonce="n"),
            e.HarnessStarted(attempt_id=f"at{n}", agent_s=600),
        ]
        for step in steps[: n + 1]:
            assert (await world.apply(step)).applied
    found = await world.lifecycle.recover()
    assert found.half_registered == ("ro0", "ro1", "ro2", "ro3")
    for n in range(4):
        rollout = await world.rollout(f"ro{n}")
        assert (rollout.state, rollout.outcome) == (RolloutState.ENDED, Outcome.CANCELLED)
        assert n == 0 or (await world.attempt(f"at{n}")).state is AttemptState.ENDED
    assert (await world.rollout("ro4")).state is RolloutState.ACTIVE
    await world.apply(e.AttemptSealed(attempt_id="at4"))
    assert (await world.lifecycle.recover()).half_registered == ()
    assert (await world.rollout("ro4")).state is RolloutState.ACTIVE


intervals = st.lists(
    st.tuples(st.integers(0, 50), st.integers(0, 20)).map(lambda p: Interval(p[0], p[0] + p[1])), max_size=8
)


@given(intervals, st.integers(0, 60))
def test_i12_uncharged_time_is_counted_second_by_second(held: list[Interval], started: int) -> None:
    seconds = {s for i in held for s in range(int(i.begin), int(i.end)) if s >= started}
    assert clock.uncharged(started, held) == len(seconds)


@given(intervals)
def test_a_union_is_disjoint_and_in_order(held: list[Interval]) -> None:
    joined = clock.union(held)
    assert all(a.end < b.begin for a, b in itertools.pairwise(joined))


def test_backoff_grows_to_its_limit() -> None:
    waits = [clock.backoff(n) for n in range(1, 40)]
    assert waits == sorted(waits) and waits[0] == 2 and waits[-1] == 60
