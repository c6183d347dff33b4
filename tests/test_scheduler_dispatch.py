"""How slots are filled and what is believed of a backend, with a backend that does as it is told."""

import asyncio
import contextlib
import threading
from collections import Counter
from typing import Any

import pytest
import sqlalchemy as sa
from api_rig import eventually
from scheduler_rig import Rig, rig

from forge_server.domain import events as e
from forge_server.domain.errors import ClusterError, SpecError, TaskError, TaskUnreadable
from forge_server.domain.events import Fact
from forge_server.domain.ids import new_id
from forge_server.scheduler import queue
from forge_server.scheduler.backend import Gone, LaunchFailed, Look
from forge_server.scheduler.scheduler import Options, Scheduler
from forge_server.store import tables as t


class FakeBackend:
    """Launches are remembered; ``fail`` makes them fail; ``gone`` ends one."""

    name = "local"
    trouble = ""
    seen: Fact | None = None  # by a closer look

    def __init__(self) -> None:
        self.launched, self.stopped = [], []
        self.alive: set[str] = set()
        self.fail: LaunchFailed | None = None
        self.blind = False
        self.turn: asyncio.Semaphore | None = None
        self.stopping = asyncio.Event()

    def hold(self) -> None:
        """Launches wait from now on, each for a release of ``turn``."""
        self.turn = asyncio.Semaphore(0)

    async def start(self, on_gone: Any) -> None:
        self.on_gone = on_gone

    async def launch(self, launch: Any) -> dict[str, Any]:
        if self.turn:
            await self.turn.acquire()
        if self.fail:
            raise self.fail
        self.launched.append(launch)
        self.alive.add(launch.attempt_id)
        return {"n": len(self.launched)}

    async def stop(self, attempt_id: str, grace_s: float) -> None:
        self.stopped.append(attempt_id)
        self.stopping.set()
        self.alive.discard(attempt_id)

    def room(self) -> int:
        return 1000

    async def running(self) -> frozenset[str]:
        if self.blind:
            raise ClusterError("the list failed", where="test")
        return frozenset(self.alive)

    async def look(self, attempt_id: str, *, silent: bool = False) -> Look:
        if self.blind:
            raise ClusterError("nothing can be seen", where="test")
        if attempt_id not in self.alive:
            return Look(evidence={"alive": False}, fact=Fact.PROCESS_GONE)
        return Look(evidence={"alive": True}, fact=self.seen, independent=True)

    async def close(self, grace_s: float) -> None:
        self.alive.clear()

    def gone(self, attempt_id: str, independent: bool = True) -> None:
        self.alive.discard(attempt_id)
        self.on_gone(
            Gone(attempt_id=attempt_id, fact=Fact.PROCESS_GONE, evidence={}, independent=independent)
        )


class NoPlans:
    """Every attempt has the same small plan."""

    error: Exception | None = None

    async def plan(self, attempt_id: str) -> Any:
        if self.error:
            raise self.error

        class Plan:
            class limits:
                memory_mb, pids = 100, 10

            agent_s = verify_s = grace_s = 10.0
            workdir, image = "/workspace", ""

        return Plan


@contextlib.asynccontextmanager
async def dispatching(tmp_path, clock=None, **options):
    async with rig(tmp_path, start=False) as it:
        it.fake, it.no_plans = FakeBackend(), NoPlans()
        arguments = {"clock": clock} if clock else {}
        scheduler = Scheduler(
            it.store,
            it.lifecycle,
            it.fake,
            it.no_plans,
            it.secret,
            Options(**{"in_flight": 2, "missing_s": 0.0, "heartbeat_s": 0.0, **options}),
            **arguments,
        )
        it.scheduler = scheduler
        await scheduler.start()
        yield it
        await scheduler.stop()
        it.scheduler = Idle()


class Idle:
    async def stop(self) -> None:
        pass


def launched(it: Rig, n: int):
    return it.until(lambda: len(it.of("attempt_launched")) >= n)


async def another_run(it: Rig) -> str:
    run_id = new_id("ru")
    settings = {"name": run_id, "taskset": "s", "harness": "react"}
    await it.lifecycle.apply(e.RunCreated(run_id=run_id, name=run_id, kind="train", settings=settings))
    return run_id


async def finish(it: Rig, attempt_id: str) -> None:
    """The attempt ends well."""
    await it.lifecycle.apply(e.RunnerJoined(attempt_id=attempt_id, nonce="n" * 16))
    await it.lifecycle.apply(e.HarnessStarted(attempt_id=attempt_id, agent_s=60))
    await it.record(attempt_id)
    await it.lifecycle.apply(e.AttemptSealed(attempt_id=attempt_id))
    await it.lifecycle.apply(e.RewardReported(attempt_id=attempt_id, value=1.0, source="verifier"))
    report = e.VerifierReport(status="ok", exit_code=0)
    await it.lifecycle.apply(e.RunnerFinished(attempt_id=attempt_id, exit_code=0, verifier=report))


async def test_n_are_kept_in_flight(tmp_path):
    async with dispatching(tmp_path) as it:
        await it.group(n=5)
        await launched(it, 2)
        assert len(it.fake.launched) == 2
        await finish(it, it.fake.launched[0].attempt_id)
        await launched(it, 3)
        it.scheduler.set_in_flight(4)
        await launched(it, 5)
        assert len(it.scheduler.live) == 4
        launch = it.fake.launched[0]
        assert (launch.memory_mb, launch.pids) == (100, 10) and launch.join_token.startswith("fk-join-")


async def test_begun_groups_come_first(tmp_path):
    """The retry of an early rollout and the rest of its group are launched before a later group."""
    async with dispatching(tmp_path) as it:
        it.scheduler.set_in_flight(0)
        groups = [await it.group(n=2) for _ in range(3)]
        it.scheduler.set_in_flight(3)
        await launched(it, 3)
        it.scheduler.set_in_flight(4)
        await launched(it, 4)
        query = sa.select(t.rollouts.c.id, t.rollouts.c.group_id)
        group_of = dict(await it.store.read(lambda c: [tuple(r) for r in c.execute(query)]))
        order = [group_of[launch.rollout_id] for launch in it.fake.launched]
        assert sorted(order[:3]) == sorted([groups[0], groups[0], groups[1]]) and order[3] == groups[1]


async def test_runs_share_the_slots_evenly(tmp_path):
    """A run with a long backlog does not keep a later one waiting, and takes what that one leaves."""
    async with dispatching(tmp_path, in_flight=0) as it:
        big, small = it.run_id, await another_run(it)
        for _ in range(4):
            await it.group(n=8)
        it.run_id = small
        await it.group(n=6)
        it.scheduler.set_in_flight(8)
        await launched(it, 8)
        runs = Counter(launch.run_id for launch in it.fake.launched)
        assert runs == {big: 4, small: 4}
        for launch in [x for x in it.fake.launched if x.run_id == small]:
            await finish(it, launch.attempt_id)
        await launched(it, 12)  # two are left of the small one: two slots go to it, two to the big one
        runs = Counter(launch.run_id for launch in it.fake.launched)
        assert runs == {big: 6, small: 6}


async def test_launches_under_way_are_bounded(tmp_path, monkeypatch):
    """An attempt has no row, and so no startup clock, before the backend can get to it."""
    monkeypatch.setattr("forge_server.scheduler.scheduler.LAUNCHES", 3)
    async with dispatching(tmp_path, in_flight=10) as it:
        it.fake.turn = asyncio.Semaphore(0)
        await it.group(n=10)
        await it.until(lambda: len(it.of("attempt_launching")) >= 3)
        await it.scheduler.reconcile()
        assert len(it.of("attempt_queued")) == 3 and it.fake.launched == []
        for _ in range(10):
            it.fake.turn.release()
        await launched(it, 10)


async def test_a_paused_run_is_not_launched(tmp_path):
    async with dispatching(tmp_path) as it:
        await it.lifecycle.apply(e.RunPaused(run_id=it.run_id, reason="a person"))
        await it.group(n=1)
        await it.scheduler.reconcile()
        assert it.fake.launched == []
        await it.lifecycle.apply(e.RunResumed(run_id=it.run_id))
        await launched(it, 1)


async def test_nothing_is_launched_while_suspended(tmp_path):
    async with dispatching(tmp_path) as it:
        it.scheduler.suspend(True)
        await it.group(n=1)
        await it.scheduler.reconcile()
        assert it.fake.launched == []
        it.scheduler.suspend(False)
        await launched(it, 1)


async def test_infra_failures_are_attempted_again_then_given_up(tmp_path):
    """The back-off is waited for by a timer, not by polling."""
    async with dispatching(tmp_path, in_flight=1) as it:
        await it.group(n=1, max_attempts=2)
        await launched(it, 1)
        it.fake.gone(it.fake.launched[0].attempt_id)
        await it.until(lambda: it.of("rollout_pending"))
        await launched(it, 2)
        it.fake.gone(it.fake.launched[1].attempt_id)
        (ended,) = await it.ended()
        assert (ended.data["outcome"], ended.data["kind"]) == ("infra_failure", "runner_lost")


async def test_failed_launches_trip_the_breaker(tmp_path):
    async with dispatching(tmp_path, in_flight=4) as it:
        it.fake.fail = LaunchFailed(Fact.LAUNCH_FAILED, {"error": "no room"})
        await it.group(n=20, max_attempts=1)  # the first four count as one
        (paused,) = await it.until(lambda: it.of("run_paused"))
        assert "infra" in paused.data["reason"] or "breaker" in paused.data["reason"]
        count = len(it.of("attempt_queued"))
        await it.scheduler.reconcile()
        assert len(it.of("attempt_queued")) <= count + 4


async def test_a_plan_that_cannot_be_made_fails_the_task(tmp_path):
    async with dispatching(tmp_path) as it:
        it.no_plans.error = TaskError("it has changed since it was registered", where="task")
        await it.group(n=1)
        (ended,) = await it.ended()
        assert (ended.data["outcome"], ended.data["kind"]) == ("task_failure", "bad_spec")
        assert it.fake.launched == []


@pytest.mark.parametrize(
    "error",
    [
        SpecError("there is no harness 'mine'", mend="known: react"),
        TaskUnreadable("its folder is gone or empty", where="/tasks/a", mend="put it back"),
    ],
    ids=lambda error: error.type,
)
async def test_what_is_away_pauses_the_run_and_fails_no_task(tmp_path, error):
    async with dispatching(tmp_path, in_flight=4) as it:
        it.no_plans.error = error
        await it.group(n=30, max_attempts=1)  # the first four count as one
        (paused,) = await it.until(lambda: it.of("run_paused"))
        assert paused.data["reason"].startswith("breaker: ")
        assert paused.data["reason"].endswith(f"runner_lost: {error}")
        assert {row.data["outcome"] for row in it.of("attempt_ended")} == {"infra_failure"}
        state = await it.store.read(lambda c: c.execute(sa.select(t.tasks.c.state)).scalar_one())
        assert state == "ready" and not it.of("task_failed")


async def test_a_row_without_process_is_believed_gone(tmp_path):
    async with dispatching(tmp_path, in_flight=1) as it:
        await it.group(n=1, max_attempts=1)
        await launched(it, 1)
        it.fake.alive.clear()
        await it.scheduler.reconcile()
        (ended,) = await it.ended()
        assert ended.data["kind"] == "runner_lost"


async def test_a_failed_list_ends_nothing(tmp_path):
    async with dispatching(tmp_path, in_flight=1) as it:
        await it.group(n=1)
        await launched(it, 1)
        it.fake.alive.clear()
        it.fake.blind = True
        await it.scheduler.reconcile()
        assert not it.of("attempt_ended") and it.fake.stopped == []


async def test_a_launch_that_ends_while_rows_are_read_is_in_flight(tmp_path, monkeypatch):
    """I6: its slot is taken, and it is among those of which a closer look is taken, or that a stop ends."""
    read, go_on = threading.Event(), threading.Event()

    def slowly(connection, backend):
        found = live(connection, backend)
        read.set()
        assert go_on.wait(120)
        return found

    async with dispatching(tmp_path, in_flight=1) as it:
        live = queue.live
        monkeypatch.setattr(queue, "live", slowly)
        reconciling = asyncio.create_task(it.scheduler.reconcile())
        try:
            assert await asyncio.to_thread(read.wait, 120)
            await it.group(n=1)
            await launched(it, 1)
            await eventually(lambda: not it.scheduler._launching)
        finally:
            go_on.set()
        await reconciling
        assert it.scheduler.live == {it.fake.launched[0].attempt_id}


async def test_a_process_without_row_is_stopped(tmp_path):
    async with dispatching(tmp_path) as it:
        it.fake.alive.add("at-nobody")
        await it.scheduler.reconcile()
        assert it.fake.stopped == []  # it may be on its way out
        await it.scheduler.reconcile()
        await asyncio.wait_for(it.fake.stopping.wait(), 60)
        assert it.fake.stopped == ["at-nobody"]


async def test_a_cancelled_rollout_is_stopped_at_once(tmp_path):
    async with dispatching(tmp_path) as it:
        await it.group(n=1)
        await launched(it, 1)
        launch = it.fake.launched[0]
        await it.lifecycle.apply(e.RolloutCancelled(rollout_id=launch.rollout_id))
        await asyncio.wait_for(it.fake.stopping.wait(), 60)
        assert it.fake.stopped == [launch.attempt_id]


async def test_a_finished_runner_is_left_to_leave(tmp_path):
    async with dispatching(tmp_path) as it:
        await it.group(n=1)
        await launched(it, 1)
        await finish(it, it.fake.launched[0].attempt_id)
        await it.ended()
        assert it.fake.stopped == []


async def test_deadlines_are_swept_but_not_before_a_heartbeat(tmp_path):
    now = [1000.0]
    async with dispatching(tmp_path, clock=lambda: now[0], startup_s=0.0, heartbeat_s=5.0) as it:
        await it.group(n=1, max_attempts=1)
        await launched(it, 1)
        await it.scheduler.sweep()
        assert not it.of("attempt_ended")
        now[0] += 6.0
        await it.scheduler.sweep()
        (ended,) = await it.ended()
        assert ended.data["kind"] == "startup_timeout"


async def test_what_a_stop_cuts_short_is_our_fault(tmp_path):
    async with dispatching(tmp_path) as it:
        await it.group(n=3)
        await launched(it, 2)
        first, second = (launch.attempt_id for launch in it.fake.launched)
        stopping = asyncio.create_task(it.scheduler.stop(drain_s=60))
        await finish(it, first)  # drained
        stopping_now = asyncio.create_task(it.scheduler.stop(drain_s=0))
        await stopping_now
        stopping.cancel()
        kinds = {row.attempt_id: row.data["kind"] for row in it.of("attempt_ended")}
        assert kinds == {first: "ok", second: "server_lost"}
        assert len(it.fake.launched) == 2 and it.fake.alive == set()
