"""What is concluded of attempts that are late or silent: first what explains it, and nothing by the blind."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from test_scheduler_dispatch import dispatching, launched

from forge_server.domain import events as e
from forge_server.domain.events import Fact
from forge_server.scheduler.backend import Gone
from forge_server.scheduler.scheduler import Options, Scheduler
from forge_server.store import tables as t


async def working(it: Any, attempt_id: str) -> None:
    """The harness has called its model."""
    await it.lifecycle.apply(e.RunnerJoined(attempt_id=attempt_id, nonce="n" * 16))
    await it.lifecycle.apply(e.HarnessStarted(attempt_id=attempt_id, agent_s=600))
    await it.record(attempt_id)


async def silent_for(it: Any, attempt_id: str, seconds: float) -> None:
    a = t.attempts
    earlier = sa.update(a).where(a.c.id == attempt_id).values(heartbeat_at=a.c.heartbeat_at - seconds)
    await it.store.write(lambda c: c.execute(earlier))


async def test_silence_that_the_node_explains_is_not_held_against_the_agent(tmp_path: Path) -> None:
    """I5: the machine under an attempt dies and nobody has said so yet."""
    async with dispatching(tmp_path, in_flight=1) as it:
        await it.group(n=1, max_attempts=1)
        await launched(it, 1)
        attempt_id = it.fake.launched[0].attempt_id
        await working(it, attempt_id)
        await silent_for(it, attempt_id, 100)
        it.fake.blind = True
        await it.scheduler.sweep()
        assert not it.of("attempt_sealed") and not it.of("attempt_ended")  # nobody can tell
        it.fake.blind, it.fake.seen = False, Fact.NODE_LOST
        await it.scheduler.sweep()
        (ended,) = await it.ended()
        assert (ended.data["outcome"], ended.data["kind"]) == ("infra_failure", "node_lost")
        assert (await it.attempts())[0]["evidence"]["details"] == {"alive": True}


async def test_silence_without_explanation_is_the_agents(tmp_path: Path) -> None:
    async with dispatching(tmp_path, in_flight=1) as it:
        await it.group(n=1)
        await launched(it, 1)
        attempt_id = it.fake.launched[0].attempt_id
        await working(it, attempt_id)
        await silent_for(it, attempt_id, 100)
        await it.scheduler.sweep()
        await it.scheduler.sweep()
        (ended,) = await it.ended()
        assert (ended.data["outcome"], ended.data["kind"]) == ("policy_failure", "runner_lost")
        assert (await it.attempts())[0]["evidence"]["details"] == {"alive": True}


async def verifying(it: Any, silent_s: float) -> str:
    """An attempt whose verifier's time is over, and that was not heard for a while."""
    await it.group(n=1, max_attempts=1)
    await launched(it, 1)
    attempt_id: str = it.fake.launched[0].attempt_id
    await working(it, attempt_id)
    await it.lifecycle.apply(e.AttemptSealed(attempt_id=attempt_id))
    await it.lifecycle.apply(e.VerifierFetched(attempt_id=attempt_id, verify_s=30.0))
    await silent_for(it, attempt_id, silent_s)
    over = sa.update(t.attempts).values(verify_deadline=t.attempts.c.verify_deadline - 1000)
    await it.store.write(lambda c: c.execute(over))
    return attempt_id


@pytest.mark.parametrize("silent_s", [0, 3000])
async def test_a_verifier_that_the_node_took_along_is_not_held_against_the_agent(
    tmp_path: Path, silent_s: float
) -> None:
    """I5: a runner that lives reports before the verifier's clock is over."""
    async with dispatching(tmp_path, in_flight=1, heartbeat_lost_s=3000.0) as it:
        await verifying(it, silent_s)
        it.fake.blind = True
        await it.scheduler.sweep()
        assert not it.of("attempt_ended")  # nobody can tell
        it.fake.blind, it.fake.seen = False, Fact.NODE_LOST
        await it.scheduler.sweep()
        (ended,) = await it.ended()
        assert (ended.data["outcome"], ended.data["kind"]) == ("infra_failure", "node_lost")


@pytest.mark.parametrize("silent_s", [0, 3000])
async def test_a_verifier_that_nothing_excuses_is_over(tmp_path: Path, silent_s: float) -> None:
    async with dispatching(tmp_path, in_flight=1, heartbeat_lost_s=3000.0) as it:
        await verifying(it, silent_s)
        await it.scheduler.sweep()
        (ended,) = await it.ended()
        assert (ended.data["outcome"], ended.data["kind"]) == ("policy_failure", "verifier_crash")
        assert (await it.attempts())[0]["evidence"]["details"] == {"alive": True}


async def test_who_may_have_died_while_it_verified_has_the_time_to_be_missed(tmp_path: Path) -> None:
    """I5: a node that is dead is told only after a while; until then it seems to be well."""
    async with dispatching(tmp_path, in_flight=1, heartbeat_lost_s=3000.0) as it:
        attempt_id = await verifying(it, 2000)
        await it.scheduler.sweep()
        assert not it.of("attempt_ended")
        await silent_for(it, attempt_id, 1000)
        it.fake.seen = Fact.NODE_LOST
        await it.scheduler.sweep()
        (ended,) = await it.ended()
        assert (ended.data["outcome"], ended.data["kind"]) == ("infra_failure", "node_lost")


async def test_the_startup_clock_stands_while_the_backend_waits(tmp_path: Path) -> None:
    now = [1000.0]
    async with dispatching(tmp_path, clock=lambda: now[0], in_flight=1, startup_s=0.001) as it:
        it.fake.hold()
        await it.group(n=1, max_attempts=1)
        await it.until(lambda: it.of("attempt_launching"))
        now[0] += 1000.0
        await it.scheduler.sweep()
        assert not it.of("attempt_ended")  # there is no room for it yet
        it.fake.turn.release()
        await launched(it, 1)
        it.fake.trouble = "the API server is away"
        await it.scheduler.sweep()
        it.fake.trouble = ""
        await it.scheduler.sweep()
        assert not it.of("attempt_ended")  # it could not start, and now has its whole time
        now[0] += 1.0
        await it.scheduler.sweep()
        (ended,) = await it.ended()
        assert ended.data["kind"] == "startup_timeout"
        assert (await it.attempts())[0]["evidence"]["details"] == {"alive": True}


async def test_no_more_are_launched_than_there_is_room_for(tmp_path: Path) -> None:
    async with dispatching(tmp_path, in_flight=8) as it:
        it.fake.room = lambda: places - len(it.scheduler.live)
        places = 3
        await it.group(n=8)
        await launched(it, 3)
        await it.scheduler.reconcile()
        assert len(it.of("attempt_queued")) == 3
        places = 5
        await launched(it, 5)
        assert len(it.of("attempt_queued")) == 5


async def test_a_launch_that_was_not_finished_is_taken_up_again(tmp_path: Path) -> None:
    """The server died between the row and the pod: no attempt is spent on that."""
    async with dispatching(tmp_path, in_flight=2) as it:
        it.fake.name = "kubernetes"  # of what lives longer than we do
        it.fake.hold()
        await it.group(n=2, max_attempts=1)
        await it.until(lambda: len(it.of("attempt_launching")) == 2)
        await it.scheduler.stop()
        assert not it.of("attempt_ended")
        first = [row.attempt_id for row in it.of("attempt_queued")]
        it.fake.turn = None
        it.scheduler = Scheduler(
            it.store, it.lifecycle, it.fake, it.no_plans, it.secret, Options(in_flight=2, heartbeat_s=0.0)
        )
        await it.scheduler.start()
        await launched(it, 2)
        assert sorted(launch.attempt_id for launch in it.fake.launched) == sorted(first)
        await it.scheduler.stop()


async def test_a_full_cluster_spends_no_attempt_and_trips_no_breaker(tmp_path: Path) -> None:
    async with dispatching(tmp_path, in_flight=2) as it:
        await it.group(n=1, max_attempts=1)
        await launched(it, 1)
        await working(it, it.fake.launched[0].attempt_id)  # one is under way
        await it.group(n=1, max_attempts=1)
        for number in range(15):
            await launched(it, number + 2)
            attempt_id = it.fake.launched[-1].attempt_id
            await it.lifecycle.apply(
                e.BackendFact(attempt_id=attempt_id, fact=Fact.UNSCHEDULABLE, evidence={}, independent=True)
            )
        await launched(it, 17)
        assert not it.of("rollout_ended") and not it.of("run_paused")


async def test_evidence_and_last_words_are_shown(tmp_path: Path) -> None:
    """What ended an attempt can be read with the server down, too."""
    async with dispatching(tmp_path, in_flight=1) as it:
        await it.group(n=1, max_attempts=1)
        await launched(it, 1)
        launch = it.fake.launched[0]
        evidence = {"node": "node-7", "conditions": [{"type": "Ready", "reason": "ContainersNotReady"}]}
        gone = Gone(
            attempt_id=launch.attempt_id,
            fact=Fact.EVICTED,
            evidence=evidence,
            independent=True,
            log="runner: the last thing I saw\n",
        )
        await it.fake.on_gone(gone)
        await it.ended()
    said = {word: await _cli(tmp_path, "rollout", word, launch.rollout_id) for word in ("show", "logs")}
    assert "evicted" in said["show"] and "node-7" in said["show"] and "ContainersNotReady" in said["show"]
    assert "the last thing I saw" in said["logs"]


async def _cli(folder: Path, *words: str) -> str:
    environ = {**os.environ, "FORGE_STORE__URL": f"sqlite:///{folder / 'forge.db'}", "COLUMNS": "300"}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "forge_server.cli", *words),
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    async with asyncio.timeout(240):
        out, _ = await process.communicate()
    assert process.returncode == 0, out.decode()
    return out.decode()
