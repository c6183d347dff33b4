"""I6 as a state machine: whatever events come, in whatever order and however often, each rollout ends
exactly once.

Hypothesis draws events of every kind, alone and several at once (one group commit), moves the clock, and
restarts the server. After every step the rows are compared with what the events that were told say; at
the end a scheduler with nothing but deadlines and back-off brings every rollout to its end.
"""

import asyncio
from collections import Counter
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from lifecycle_world import World

from forge_server.domain import events as e
from forge_server.domain.events import Clock, Fact
from forge_server.domain.ids import new_id
from forge_server.domain.outcome import Kind, Outcome, check
from forge_server.domain.states import ATTEMPT_STEPS, AttemptState, CallEnd, RolloutState
from forge_server.lifecycle.apply import Lifecycle
from forge_server.store import instance, rows
from forge_server.store import tables as t
from forge_server.store.database import Store
from forge_server.store.rows import AttemptRow, RolloutRow

ROLLOUTS = 3
SLOTS = st.integers(0, ROLLOUTS - 1)


def finish(attempt_id: str, exit_code: int, verifier: str) -> e.RunnerFinished:
    report = e.VerifierReport(status=verifier)  # type: ignore[arg-type]
    return e.RunnerFinished(attempt_id=attempt_id, exit_code=exit_code, verifier=report)


STORIES = [
    lambda a: e.AttemptLaunching(attempt_id=a, startup_s=60),
    lambda a: e.AttemptLaunched(attempt_id=a, handle={"pid": 7}),
    lambda a: e.RunnerJoined(attempt_id=a, nonce="n"),
    lambda a: e.RunnerJoined(attempt_id=a, nonce="m"),
    lambda a: e.HarnessStarted(attempt_id=a, agent_s=100),
    lambda a: e.StopRequested(attempt_id=a, reason="a person"),
    lambda a: e.BudgetExceeded(attempt_id=a, kind=Kind.BUDGET_TOKENS),
    lambda a: e.AttemptSealed(attempt_id=a),
    lambda a: e.VerifierFetched(attempt_id=a, verify_s=50),
    lambda a: e.RewardReported(attempt_id=a, value=0.5, source="verifier"),
    lambda a: e.RewardReported(attempt_id=a, value=0.25, source="external"),
    lambda a: finish(a, 0, "ok"),
    lambda a: finish(a, 1, "crash"),
    lambda a: e.BackendFact(attempt_id=a, fact=Fact.NODE_LOST, evidence={}),
    lambda a: e.BackendFact(attempt_id=a, fact=Fact.PROCESS_GONE, evidence={"signal": 9}),
    lambda a: e.BackendFact(attempt_id=a, fact=Fact.OOM_AGENT, evidence={}),
    *(lambda a, c=c: e.DeadlinePassed(attempt_id=a, clock=c, limit_s=30) for c in Clock),
    lambda a: e.ServerLost(attempt_id=a),
]
STORY = st.integers(0, len(STORIES) - 1)


class Machine(RuleBasedStateMachine):
    """One group of rollouts in a run of its own, in a database that all examples share."""

    store: Store
    loop: asyncio.AbstractEventLoop

    def __init__(self) -> None:
        super().__init__()
        self.world = World(self.store)
        self.run_id, self.group_id = new_id("ru"), new_id("gr")
        self.rollouts = [new_id("ro") for _ in range(ROLLOUTS)]
        self.attempts: list[str] = [new_id("at")]  # the first is unknown to the server
        self.frozen: dict[str, AttemptRow | RolloutRow] = {}
        self.calls = 0
        self.do(self._admit())

    def do(self, job: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(job, 30))

    async def _admit(self) -> None:
        await instance.load(self.store, self.world.now)
        await self.store.write(lambda c: instance.beat(c, self.world.now))
        created = e.RunCreated(run_id=self.run_id, name=self.run_id, kind="train", settings={})
        assert (await self.world.apply(created)).applied
        task = {"id": self.run_id, "name": "t", "taskset": self.run_id, "digest": "d", "instruction": "i"}
        await self.store.insert(t.tasks, {**task, "definition": {}, "created_at": 0.0})
        members = tuple(
            e.RolloutCreated(
                rollout_id=rollout,
                run_id=self.run_id,
                harness="h",
                mode="train",
                task_id=self.run_id,
                group_id=self.group_id,
                slot=slot,
                max_attempts=2,
            )
            for slot, rollout in enumerate(self.rollouts)
        )
        group = e.GroupCreated(
            group_id=self.group_id,
            run_id=self.run_id,
            task_id=self.run_id,
            step=1,
            mode="train",
            rollouts=members,
        )
        assert (await self.world.apply(group)).applied

    # --- what may happen ----------------------------------------------------------------------------------

    @rule(slot=SLOTS, backend=st.sampled_from(["local", "kubernetes"]))
    def queue(self, slot: int, backend: Any) -> None:
        attempt = new_id("at")
        event = e.AttemptQueued(attempt_id=attempt, rollout_id=self.rollouts[slot], backend=backend)
        if self.do(self.world.apply(event)).applied:
            self.attempts.append(attempt)

    @rule(pick=st.integers(0, 99), stories=st.lists(STORY, min_size=1, max_size=6))
    def one_after_another(self, pick: int, stories: list[int]) -> None:
        attempt = self.attempts[-1 - pick % len(self.attempts)]
        for story in stories:
            self.do(self.world.apply(STORIES[story](attempt)))

    @rule(told=st.lists(st.tuples(st.integers(0, 99), STORY), min_size=2, max_size=12))
    def all_at_once(self, told: list[tuple[int, int]]) -> None:
        async def apply() -> None:
            events = [STORIES[story](self.attempts[-1 - pick % len(self.attempts)]) for pick, story in told]
            await asyncio.gather(*(self.world.apply(event) for event in events))

        self.do(apply())

    @rule(pick=st.integers(0, 99), end=st.sampled_from([None, *CallEnd]))
    def call(self, pick: int, end: CallEnd | None) -> None:
        attempt = self.attempts[-1 - pick % len(self.attempts)]
        row = self.do(self.store.read(lambda c: rows.by_id(c, AttemptRow, attempt)))
        if row is not None and row.state in (AttemptState.STARTING, AttemptState.RUNNING):
            self.calls += 1
            self.do(self._record(attempt, self.calls, end))

    async def _record(self, attempt: str, seq: int, end: CallEnd | None) -> None:
        row = {"attempt_id": attempt, "seq": seq, "dialect": "chat", "mode": "record", "end": end}
        id = int.from_bytes(new_id("x").encode()[-6:], "big")
        await self.store.insert(t.calls, {**row, "id": id, "request_digest": b"", "began_at": 0.0})

    @rule(slot=SLOTS, retry=st.booleans())
    def a_person_meddles(self, slot: int, retry: bool) -> None:
        rollout = self.rollouts[slot]
        self.do(
            self.world.apply(
                e.RolloutRetried(rollout_id=rollout) if retry else e.RolloutCancelled(rollout_id=rollout)
            )
        )

    @rule(seconds=st.sampled_from([1, 20, 70, 500]), still=st.booleans())
    def time_passes(self, seconds: int, still: bool) -> None:
        """While the server lives, or stands still."""
        if still:
            self.world.now += seconds
            self.do(self.world.lifecycle.beat())
        else:
            self.do(self.world.lived(seconds))

    @rule(begin=st.booleans())
    def hold(self, begin: bool) -> None:
        event = e.HoldBegan(reason="weight_update") if begin else e.HoldEnded(reason="weight_update")
        self.do(self.world.apply(event))

    @rule(down=st.sampled_from([0, 5, 1000]))
    def restart(self, down: int) -> None:
        self.world.now += down
        self.world.lifecycle = Lifecycle(self.store, clock=lambda: self.world.now)
        self.world.lifecycle.subscribe(self.world.heard.append)
        self.do(self.world.lifecycle.recover())

    # --- what must hold -----------------------------------------------------------------------------------

    @invariant()
    def rows_are_what_was_told(self) -> None:
        self.do(self._check())

    async def _check(self) -> None:
        query = rows.select(RolloutRow).where(t.rollouts.c.run_id == self.run_id)
        rollouts = await self.store.read(lambda c: rows.fetch(c, RolloutRow, query))
        of_them = rows.select(AttemptRow).where(t.attempts.c.rollout_id.in_(self.rollouts))
        attempts = await self.store.read(lambda c: rows.fetch(c, AttemptRow, of_them))
        mine = [row for row in self.world.heard if row.run_id == self.run_id]
        assert [row.id for row in mine] == sorted({row.id for row in mine})
        ends = Counter(row.rollout_id for row in mine if row.kind == "rollout_ended")
        for rollout in rollouts:
            assert ends[rollout.id] == (1 if rollout.state is RolloutState.ENDED else 0)
            lives = [a for a in attempts if a.rollout_id == rollout.id]
            going = [a for a in lives if a.state is not AttemptState.ENDED]
            assert len(going) == (1 if rollout.state is RolloutState.ACTIVE else 0)
            assert sorted(a.number for a in lives) == list(range(1, rollout.attempts + 1))
            if rollout.state is RolloutState.ENDED:
                self._ended(rollout)
        for attempt in attempts:
            told = [row.kind for row in mine if row.attempt_id == attempt.id]
            assert told.count("attempt_ended") == (1 if attempt.state is AttemptState.ENDED else 0)
            if attempt.state is AttemptState.ENDED:
                assert told[-1] == "attempt_ended"
                self._ended(attempt)
        complete = sum(row.kind == "group_complete" for row in mine)
        assert complete == (1 if all(r.state is RolloutState.ENDED for r in rollouts) else 0)

    def _ended(self, row: AttemptRow | RolloutRow) -> None:
        """The first terminal event wins: nothing changes an ended row."""
        assert self.frozen.setdefault(row.id, row) == row
        assert row.outcome is not None and row.kind is not None
        check(row.outcome, row.kind)
        valid = row.outcome in (Outcome.COMPLETED, Outcome.POLICY_FAILURE)
        assert (row.reward is not None) == valid  # I5: nothing but a valid rollout has a reward

    def teardown(self) -> None:
        self.do(self.world.apply(e.HoldEnded(reason="weight_update")))
        self.do(self._bring_to_an_end())
        self.rows_are_what_was_told()

    async def _bring_to_an_end(self) -> None:
        """A scheduler that starts what waits and sweeps deadlines; no runner ever answers it."""
        for _ in range(200):
            await self.world.apply(e.RunResumed(run_id=self.run_id))
            query = rows.select(RolloutRow).where(
                t.rollouts.c.run_id == self.run_id, t.rollouts.c.state != RolloutState.ENDED
            )
            left = await self.store.read(lambda c, q=query: rows.fetch(c, RolloutRow, q))
            if not left:
                return
            await self.world.lived(100)
            for rollout in left:
                attempt = new_id("at")
                await self.world.apply(
                    e.AttemptQueued(attempt_id=attempt, rollout_id=rollout.id, backend="local")
                )
            waiting = rows.select(AttemptRow).where(
                t.attempts.c.rollout_id.in_(self.rollouts), t.attempts.c.state == AttemptState.QUEUED
            )
            for queued in await self.store.read(lambda c, q=waiting: rows.fetch(c, AttemptRow, q)):
                await self.world.apply(e.AttemptLaunching(attempt_id=queued.id, startup_s=60))
            for due in await self.world.lifecycle.due(30):
                await self.world.apply(due)
        raise AssertionError("a rollout never ends")


@pytest.mark.parametrize("examples", [25])
def test_i6_every_rollout_ends_exactly_once(database_url: str, examples: int) -> None:
    store = Store.open(database_url, create=True)
    loop = asyncio.new_event_loop()
    machine = type("Machine", (Machine,), {"store": store, "loop": loop})
    try:
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=examples,
                stateful_step_count=25,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
    finally:
        store.close()
        loop.close()


def test_the_machine_of_attempts_only_goes_forward() -> None:
    order = list(AttemptState)
    for state, steps in ATTEMPT_STEPS.items():
        assert all(order.index(step) > order.index(state) for step in steps)
