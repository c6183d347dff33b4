"""The lifecycle's ways, one by one: what each event changes, and why it sometimes changes nothing."""

from collections.abc import AsyncIterator

import msgspec
import pytest
import sqlalchemy as sa
from lifecycle_world import World

from forge_server.domain import events as e
from forge_server.domain.events import EventRow, Refusal
from forge_server.domain.outcome import Kind, Outcome
from forge_server.domain.policy import POLICY_BUSY
from forge_server.domain.states import AttemptState, RolloutState, RunState
from forge_server.store import batch_bodies
from forge_server.store import tables as t
from forge_server.store.database import Store


@pytest.fixture
async def world(database_url: str) -> AsyncIterator[World]:
    store = Store.open(database_url, create=True)
    yield World(store)
    store.close()


async def test_the_straight_way(world: World) -> None:
    await world.run()
    await world.start("at1")
    await world.call("at1", 0)
    assert (await world.finish("at1")).applied
    attempt, rollout = await world.attempt("at1"), await world.rollout()
    assert (attempt.outcome, attempt.kind, attempt.reward) == (Outcome.COMPLETED, Kind.OK, 1.0)
    assert attempt.not_trained == "" and attempt.state is AttemptState.ENDED
    assert (rollout.outcome, rollout.reward, rollout.final_attempt_id) == (Outcome.COMPLETED, 1.0, "at1")
    assert world.kinds() == [
        "run_created",
        "group_created",
        "rollout_created",
        "attempt_queued",
        "attempt_launching",
        "attempt_launched",
        "attempt_starting",
        "attempt_running",
        "attempt_sealed",
        "attempt_verifying",
        "reward_reported",
        "attempt_ended",
        "rollout_ended",
        "group_complete",
    ]
    assert [row.id for row in world.heard] == sorted(row.id for row in world.heard)


async def test_repeats_change_nothing(world: World) -> None:
    await world.run()
    await world.start("at1")
    again = [
        e.AttemptQueued(attempt_id="at1", rollout_id="ro0", backend="local"),
        e.AttemptLaunched(attempt_id="at1", handle={"pid": 1}),
        e.RunnerJoined(attempt_id="at1", nonce="n"),
        e.HarnessStarted(attempt_id="at1", agent_s=600),
    ]
    await world.call("at1", 0)
    count = len(world.heard)
    for event in again:
        assert (await world.apply(event)).refusal is Refusal.REPEAT
    assert len(world.heard) == count
    await world.finish("at1")
    count = len(world.heard)
    for event in (
        e.AttemptSealed(attempt_id="at1"),
        e.RewardReported(attempt_id="at1", value=1.0, source="verifier"),
        e.RunnerFinished(attempt_id="at1", exit_code=0),
    ):
        assert (await world.apply(event)).refusal is Refusal.REPEAT
    assert len(world.heard) == count


async def test_another_runner_is_refused(world: World) -> None:
    await world.run()
    await world.start("at1")
    assert (await world.apply(e.RunnerJoined(attempt_id="at1", nonce="m"))).refusal is Refusal.OTHER_NONCE


async def test_first_terminal_event_wins(world: World) -> None:
    await world.run()
    await world.start("at1")
    await world.call("at1", 0)
    await world.finish("at1")
    late = e.BackendFact(attempt_id="at1", fact=e.Fact.NODE_LOST, evidence={})
    assert (await world.apply(late)).refusal is Refusal.ENDED
    assert (await world.rollout()).outcome is Outcome.COMPLETED


async def test_infra_failure_gets_a_new_attempt_after_a_pause_until_max_attempts(world: World) -> None:
    await world.run(max_attempts=2)
    await world.start("at1")
    await world.apply(e.BackendFact(attempt_id="at1", fact=e.Fact.NODE_LOST, evidence={"node": "n1"}))
    rollout = await world.rollout()
    assert rollout.state is RolloutState.PENDING and rollout.not_before > world.now
    early = e.AttemptQueued(attempt_id="at2", rollout_id="ro0", backend="local")
    assert (await world.apply(early)).refusal is Refusal.TOO_EARLY
    world.now = rollout.not_before
    await world.start("at2")
    await world.apply(e.BackendFact(attempt_id="at2", fact=e.Fact.EVICTED, evidence={}))
    rollout = await world.rollout()
    assert rollout.state is RolloutState.ENDED
    assert (rollout.outcome, rollout.kind, rollout.reward) == (Outcome.INFRA_FAILURE, Kind.EVICTED, None)
    assert world.kinds()[-1] == "group_complete"


async def test_policy_failure_without_the_verifiers_word_gets_the_minimum(world: World) -> None:
    await world.run()
    await world.start("at1")
    await world.call("at1", 0)
    await world.apply(e.BudgetExceeded(attempt_id="at1", kind=Kind.BUDGET_CALLS))
    assert (await world.lifecycle.heartbeat("at1")).stop
    crashed = e.VerifierReport(status="crash")
    await world.finish("at1", reward=None, verifier=crashed)
    attempt = await world.attempt("at1")
    assert (attempt.outcome, attempt.kind) == (Outcome.POLICY_FAILURE, Kind.BUDGET_CALLS)
    assert attempt.reward == -1.0
    sources = await world.store.read(lambda c: c.execute(sa.select(t.rewards.c.source)).scalars().all())
    assert list(sources) == ["minimum"]


async def test_agent_deadline_seals_and_keeps_the_verifiers_reward(world: World) -> None:
    await world.run()
    await world.start("at1")
    await world.call("at1", 0)
    world.now += 600
    await world.lifecycle.heartbeat("at1")
    due = await world.lifecycle.due(30)
    assert due == [e.DeadlinePassed(attempt_id="at1", clock=e.Clock.AGENT, limit_s=30)]
    assert (await world.apply(due[0])).applied
    instruction = await world.lifecycle.heartbeat("at1")
    assert instruction.stop and instruction.reason == "agent_timeout"
    await world.finish("at1", reward=0.25, exit_code=None, signal=9)
    attempt = await world.attempt("at1")
    assert (attempt.outcome, attempt.kind, attempt.reward) == (
        Outcome.POLICY_FAILURE,
        Kind.AGENT_TIMEOUT,
        0.25,
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e9])
async def test_nonsense_rewards_are_refused(world: World, value: float) -> None:
    await world.run()
    await world.start("at1")
    await world.apply(e.AttemptSealed(attempt_id="at1"))
    reported = e.RewardReported(attempt_id="at1", value=value, source="verifier")
    assert (await world.apply(reported)).refusal is Refusal.BAD_REWARD


async def test_a_verifiers_reward_is_taken_only_once_sealed(world: World) -> None:
    await world.run()
    await world.start("at1")
    reported = e.RewardReported(attempt_id="at1", value=1.0, source="verifier")
    assert (await world.apply(reported)).refusal is Refusal.WRONG_STATE


async def test_a_call_in_flight_at_the_end_is_not_trained(world: World) -> None:
    await world.run()
    await world.start("at1")
    await world.call("at1", 0)
    await world.call("at1", 1, end=None)
    await world.finish("at1")
    attempt = await world.attempt("at1")
    assert attempt.outcome is Outcome.COMPLETED and attempt.not_trained == "call_in_flight"


async def test_held_time_is_not_charged(world: World) -> None:
    await world.run()
    await world.start("at1")
    world.now += 100
    await world.apply(e.HoldBegan(reason="weight_update"))
    world.now += 550
    await world.lifecycle.heartbeat("at1")
    assert await world.lifecycle.due(30) == []  # 650 s, 550 of them held
    await world.apply(e.HoldEnded(reason="weight_update"))
    assert (await world.attempt("at1")).agent_deadline == 1_000 + 600 + 550
    instruction = await world.lifecycle.heartbeat("at1")
    assert instruction.left_s == pytest.approx(500) and not instruction.stop


async def test_overlapping_holds_are_counted_once(world: World) -> None:
    await world.run()
    await world.start("at1")
    await world.apply(e.HoldBegan(reason="weight_update"))  # 1000
    world.now += 10
    await world.apply(e.HoldBegan(reason="engine_down"))  # 1010
    world.now += 10
    await world.apply(e.HoldEnded(reason="weight_update"))  # 1020
    world.now += 10
    await world.apply(e.HoldEnded(reason="engine_down"))  # 1030
    assert (await world.attempt("at1")).agent_deadline == 1_000 + 600 + 30


async def test_the_breaker_pauses_the_run_and_says_why(database_url: str) -> None:
    store = Store.open(database_url, create=True)
    world = World(store, breaker_after=3)
    try:
        await world.run(rollouts=4)
        for n in range(3):
            await world.start(f"at{n}", f"ro{n}")
        for n in range(3):
            fact = e.BackendFact(attempt_id=f"at{n}", fact=e.Fact.IMAGE_PULL, evidence={})
            await world.apply(fact)
        run = await world.run_row()
        assert run.state is RunState.PAUSED and "image_pull" in run.reason
        blocked = e.AttemptQueued(attempt_id="at9", rollout_id="ro3", backend="local")
        assert (await world.apply(blocked)).refusal is Refusal.RUN_NOT_ACTIVE
        await world.apply(e.RunResumed(run_id="ru"))
        assert (await world.apply(blocked)).applied
    finally:
        store.close()


async def test_a_pause_that_ends_by_itself_gives_way_to_another(world: World) -> None:
    """Whoever lifts it has read the row before."""
    await world.run()
    waits, person = e.RunPaused(run_id="ru", reason=POLICY_BUSY), e.RunPaused(run_id="ru", reason="a person")
    lifted = e.RunResumed(run_id="ru", reason=POLICY_BUSY)
    assert (await world.apply(waits)).applied
    assert (await world.apply(waits)).refusal is Refusal.REPEAT
    assert [row.kind for row in (await world.apply(person)).rows] == ["run_paused"]
    for late in (waits, person):
        assert (await world.apply(late)).refusal is Refusal.REPEAT
    assert (await world.apply(lifted)).refusal is Refusal.WRONG_STATE
    run = await world.run_row()
    assert (run.state, run.reason) == (RunState.PAUSED, "a person")
    assert (await world.apply(e.RunResumed(run_id="ru"))).applied
    assert (await world.apply(waits)).applied and (await world.apply(lifted)).applied
    assert (await world.apply(lifted)).refusal is Refusal.REPEAT


async def test_attempts_that_one_fault_took_count_once_for_the_breaker(world: World) -> None:
    """A node takes all its pods with it; what is launched afterwards tells whether more is broken."""
    await world.run(rollouts=40, max_attempts=9)
    for n in range(30):
        await world.start(f"at{n}", f"ro{n}")
    for n in range(30):
        world.now += 1
        fact = e.BackendFact(attempt_id=f"at{n}", fact=e.Fact.NODE_LOST, evidence={}, independent=True)
        await world.apply(fact)
    run = await world.run_row()
    assert (run.state, run.infra_streak) == (RunState.ACTIVE, 1)
    for n in range(30, 40):
        await world.start(f"at{n}", f"ro{n}")
        await world.apply(
            e.BackendFact(attempt_id=f"at{n}", fact=e.Fact.NODE_LOST, evidence={}, independent=True)
        )
    assert (await world.run_row()).infra_streak == 11
    world.now += 1000
    await world.start("again", "ro0")
    await world.apply(e.BackendFact(attempt_id="again", fact=e.Fact.NODE_LOST, evidence={}, independent=True))
    run = await world.run_row()
    assert run.state is RunState.PAUSED and "12 infra failures in a row" in run.reason
    await world.apply(e.RunResumed(run_id="ru"))
    run = await world.run_row()
    assert (run.state, run.infra_streak, run.infra_since) == (RunState.ACTIVE, 0, None)


async def test_an_oversampled_group_ends_with_its_nth_valid_rollout(world: World) -> None:
    await world.run(rollouts=5, max_attempts=1, oversample=2)
    for n in range(4):
        await world.start(f"at{n}", f"ro{n}")
    for n in (3, 1):
        await world.call(f"at{n}", 0)
        await world.finish(f"at{n}", float(n))
    await world.apply(e.BackendFact(attempt_id="at0", fact=e.Fact.NODE_LOST, evidence={}, independent=True))
    assert "group_complete" not in world.kinds()  # an infra failure is none of the n
    await world.call("at2", 0)
    await world.finish("at2", 0.0)
    rollouts = [await world.rollout(f"ro{n}") for n in range(5)]
    assert [r.outcome for r in rollouts] == [
        Outcome.INFRA_FAILURE,
        Outcome.COMPLETED,
        Outcome.COMPLETED,
        Outcome.COMPLETED,
        Outcome.CANCELLED,
    ]
    assert rollouts[4].kind is Kind.SURPLUS and rollouts[4].reward is None
    (complete,) = [row for row in world.heard if row.kind == "group_complete"]
    assert complete.data["valid"] == 3 and sorted(complete.data["rewards"]) == [0.0, 1.0, 3.0]


async def test_a_surplus_attempt_in_flight_is_ended_and_evaluations_are_whole(world: World) -> None:
    await world.run(rollouts=2, oversample=1)
    for n in range(2):
        await world.start(f"at{n}", f"ro{n}")
    await world.call("at0", 0)
    await world.finish("at0")
    attempt = await world.attempt("at1")
    assert (attempt.outcome, attempt.kind) == (Outcome.CANCELLED, Kind.SURPLUS)
    (other,) = [e.RolloutCreated(rollout_id="x0", run_id="ru", harness="react", mode="eval", group_id="ev")]
    members = (other, msgspec.structs.replace(other, rollout_id="x1", slot=1))
    created = e.GroupCreated(group_id="ev", run_id="ru", task_id="ta", step=1, mode="eval", rollouts=members)
    assert (await world.apply(created)).applied
    await world.start("e0", "x0")
    await world.call("e0", 0)
    await world.finish("e0")
    assert (await world.rollout("x1")).outcome is None


async def test_ending_a_run_cancels_what_has_not_ended(world: World) -> None:
    await world.run(rollouts=3)
    await world.start("at0", "ro0")
    await world.call("at0", 0)
    await world.finish("at0")
    await world.start("at1", "ro1")
    await world.apply(e.RunEnded(run_id="ru", state=RunState.CANCELLED))
    outcomes = [(await world.rollout(f"ro{n}")).outcome for n in range(3)]
    assert outcomes == [Outcome.COMPLETED, Outcome.CANCELLED, Outcome.CANCELLED]
    assert world.kinds().count("group_complete") == 1


async def test_retry_discards_the_attempt_and_cancel_ends_the_rollout(world: World) -> None:
    await world.run()
    await world.start("at1")
    assert (await world.apply(e.RolloutRetried(rollout_id="ro0"))).applied
    assert (await world.rollout()).state is RolloutState.PENDING
    await world.start("at2")
    assert (await world.apply(e.RolloutCancelled(rollout_id="ro0"))).applied
    assert (await world.rollout()).outcome is Outcome.CANCELLED
    assert (await world.apply(e.RolloutRetried(rollout_id="ro0"))).refusal is Refusal.ENDED


async def test_i8_a_batch_is_written_once_with_its_groups_and_its_step(world: World) -> None:
    await world.run(rollouts=2)
    batch = e.BatchAssembled(
        run_id="ru", k=1, group_ids=("gr",), rollout_ids=("ro0", "ro1"), sha256="a", body=b"x" * 9, stats={}
    )
    assert (await world.apply(batch)).applied
    assert (await world.apply(batch)).refusal is Refusal.REPEAT
    other = e.BatchAssembled(run_id="ru", k=1, group_ids=(), rollout_ids=(), sha256="b", body=b"y", stats={})
    assert (await world.apply(other)).refusal is Refusal.CONFLICT
    too_far = e.BatchAssembled(
        run_id="ru", k=3, group_ids=(), rollout_ids=(), sha256="b", body=b"y", stats={}
    )
    assert (await world.apply(too_far)).refusal is Refusal.WRONG_STATE
    assert (await world.run_row()).step == 1
    assert await world.store.read(lambda c: batch_bodies.read(c, "ru", 1)) == b"x" * 9
    trained = await world.store.read(lambda c: c.execute(sa.select(t.groups.c.batch_k)).scalar_one())
    assert trained == 1
    dropped = e.GroupDropped(group_id="gr", reason="stale")
    assert (await world.apply(dropped)).refusal is Refusal.CONFLICT


async def test_other_rows_are_written_in_the_same_transaction(world: World) -> None:
    await world.run()

    def also(connection: sa.Connection) -> None:
        connection.execute(sa.update(t.tasks).values(reason="seen"))

    def failing(connection: sa.Connection) -> None:
        also(connection)
        raise ValueError("no")

    note = e.Noted(kind="policy_live", run_id="ru", data={"version": 3})
    with pytest.raises(ValueError, match="no"):
        await world.lifecycle.apply(note, also=failing)
    assert "policy_live" not in world.kinds()
    reason = sa.select(t.tasks.c.reason)
    assert await world.store.read(lambda c: c.execute(reason).scalar_one()) == ""
    await world.lifecycle.apply(note, also=also)
    assert world.heard[-1].kind == "policy_live" and world.heard[-1].data == {"version": 3}
    assert await world.store.read(lambda c: c.execute(reason).scalar_one()) == "seen"


async def test_a_task_that_cannot_be_launched_is_used_no_more(world: World) -> None:
    await world.run()
    await world.apply(e.AttemptQueued(attempt_id="at1", rollout_id="ro0", backend="local"))
    await world.apply(e.AttemptLaunching(attempt_id="at1", startup_s=60))
    await world.apply(e.BackendFact(attempt_id="at1", fact=e.Fact.BAD_SPEC, evidence={"why": "no image"}))
    assert (await world.rollout()).outcome is Outcome.TASK_FAILURE
    state = await world.store.read(lambda c: c.execute(sa.select(t.tasks.c.state)).scalar_one())
    assert state == "failed" and "task_failed" in world.kinds()


def registered(rollout: str, attempt: str, ttl_s: float | None = None) -> e.RolloutRegistered:
    created = e.RolloutCreated(
        rollout_id=rollout, run_id="ru", harness="mine", mode="record", external=True, max_attempts=1
    )
    return e.RolloutRegistered(rollout=created, attempt_id=attempt, agent_s=600, ttl_s=ttl_s)


async def test_i6_a_registration_is_whole_or_nothing(world: World) -> None:
    await world.apply(e.RunCreated(run_id="ru", name="external", kind="record", settings={}))
    for rollout, attempt, ttl_s in (("ro1", "at1", None), ("ro2", "at2", 60.0)):
        told = [row.kind for row in (await world.apply(registered(rollout, attempt, ttl_s))).rows]
        launched = [] if ttl_s is None else ["attempt_launched"]
        steps = ["rollout_created", "attempt_queued", *launched, "attempt_starting", "attempt_running"]
        assert told == steps
        assert (await world.attempt(attempt)).state is AttemptState.RUNNING
        assert (await world.apply(registered(rollout, attempt, ttl_s))).refusal is Refusal.REPEAT
    count = len(world.heard)
    with pytest.raises(AssertionError):
        await world.apply(registered("ro3", "at1"))  # another's attempt
    await world.apply(e.RunPaused(run_id="ru", reason="a person"))
    assert (await world.apply(registered("ro3", "at3"))).refusal is Refusal.RUN_NOT_ACTIVE
    alone = registered("ro3", "at3").rollout
    assert (await world.apply(alone)).refusal is Refusal.RUN_NOT_ACTIVE
    await world.apply(e.RunEnded(run_id="ru", state=RunState.CANCELLED))
    assert (await world.apply(registered("ro3", "at3"))).refusal is Refusal.RUN_NOT_ACTIVE
    assert "ro3" not in {row.rollout_id for row in world.heard[count:]}
    known = await world.store.read(lambda c: set(c.execute(sa.select(t.rollouts.c.id)).scalars()))
    assert known == {"ro1", "ro2"}


async def test_unknown_ids_and_names_taken(world: World) -> None:
    await world.run()
    for event in (
        e.AttemptSealed(attempt_id="no"),
        e.RunnerFinished(attempt_id="no"),
        e.RolloutCancelled(rollout_id="no"),
        e.RunPaused(run_id="no", reason=""),
        e.GroupDropped(group_id="no", reason="stale"),
        e.AttemptQueued(attempt_id="x", rollout_id="no", backend="local"),
    ):
        assert (await world.apply(event)).refusal is Refusal.UNKNOWN
    taken = e.RunCreated(run_id="ru2", name="r", kind="train", settings={})
    assert (await world.apply(taken)).refusal is Refusal.NAME_TAKEN
    assert (await world.lifecycle.heartbeat("no")).ended


async def test_a_listener_that_fails_does_not_keep_the_others_from_hearing(world: World) -> None:
    def broken(_row: EventRow) -> None:
        raise RuntimeError("mine")

    later: list[EventRow] = []
    world.lifecycle.subscribe(broken)
    world.lifecycle.subscribe(later.append)
    await world.run()
    assert [row.id for row in later] == [row.id for row in world.heard] != []


async def test_pruned_events_leave_the_newest(world: World) -> None:
    from forge_server.store import events

    await world.run()
    world.now += 100
    await world.apply(e.RunPaused(run_id="ru", reason="r"))
    newest = world.heard[-1].id
    assert await world.store.write(lambda c: events.prune(c, world.now + 1)) == len(world.heard) - 1
    await world.apply(e.RunResumed(run_id="ru"))
    assert world.heard[-1].id > newest
