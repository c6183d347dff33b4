"""Real attempts through the real scheduler, lifecycle, runner routes and sandbox."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import sqlalchemy as sa
from api_rig import eventually
from runner_support import plan_limits
from scheduler_rig import CALL, Tasks, rig, script_spec, solve
from test_scheduler_doubt import silent_for

from forge_server.domain import events as e
from forge_server.domain.errors import EnvironmentMissing, SandboxError, StoreError, TaskError
from forge_server.runner.confine import ChildFailed, kill_user
from forge_server.runner.main import DISMISSED
from forge_server.runner.place import remove_tree
from forge_server.scheduler import leftovers, local
from forge_server.scheduler.limits import Cgroups, clear_instance
from forge_server.scheduler.sandbox import probe
from forge_server.scheduler.trials import LocalTrials
from forge_server.scheduler.uids import UserIds
from forge_server.store import tables as t
from forge_server.tasks.lines import read_line
from forge_server.tasks.validate import validate

pytestmark = pytest.mark.sandbox

PLUM = "echo -n plum > answer.txt\n"


async def outcome(tmp_path, script, *, tasks=None, **options):
    """Outcome, kind and reward of one rollout whose harness is ``script``."""
    async with rig(tmp_path, specs={"script": script_spec(script)}, tasks=tasks, **options) as it:
        await it.group(harness="script", max_attempts=1)
        (ended,) = await it.ended()
        return ended.data["outcome"], ended.data["kind"], ended.data["reward"]


async def test_attempts_run_and_are_rewarded(tmp_path):
    async with rig(tmp_path) as it:
        it.model = solve
        await it.group(n=6)
        ended = await it.ended(6)
        assert [row.data["outcome"] for row in ended] == ["completed"] * 6, await it.log("runner")
        assert {row.data["reward"] for row in ended} == {1.0}
        assert await it.log("harness") == "react: 2 calls\n" * 6
        await it.quiet()
        assert list(it.backend.attempts.iterdir()) == []


async def test_a_task_is_validated_in_the_sandbox(tmp_path):
    verify = {"answer_file": "answer.txt", "equals": "plum"}
    line = {"name": "a", "instruction": "Write plum.", "verify": verify}
    async with rig(tmp_path) as it:
        found = await validate(read_line(line, "line 1"), LocalTrials(it.backend, plan_limits()))
    assert (found.gold_reward, found.idle_reward, found.faults) == (1.0, 0.0, ())


@pytest.mark.parametrize("workdir", ["/usr/games/x", "/lib/x", "/etc/ssl"])
async def test_a_work_folder_that_the_sandbox_cannot_have_is_the_tasks_fault(tmp_path, workdir):
    """No runner is started for it, and none again."""
    async with rig(tmp_path, specs={"script": script_spec("exit 0")}, tasks=Tasks(workdir=workdir)) as it:
        await it.group(harness="script")
        (ended,) = await it.ended()
        assert (ended.data["outcome"], ended.data["kind"]) == ("task_failure", "bad_spec")
        (attempt,) = await it.attempts()
        assert attempt["handle"] is None and await it.log("runner") == ""
        assert workdir in str(attempt["evidence"]) and "/workspace" in str(attempt["evidence"]), attempt


async def test_a_harness_that_exits_at_once_is_ours_to_mend(tmp_path):
    """No call was made: nothing of the policy's is in it."""
    assert await outcome(tmp_path, "exit 3") == ("infra_failure", "harness_no_call", None)


async def test_a_harness_that_fails_after_a_call_keeps_its_reward(tmp_path):
    got = await outcome(tmp_path, CALL + PLUM + "call; exit 3")
    assert got == ("policy_failure", "harness_exit", 1.0)


async def test_a_harness_that_never_ends_is_timed_out(tmp_path):
    script = CALL + PLUM + "call; trap '' TERM; while :; do sleep 0.2; done"
    got = await outcome(tmp_path, script, run={"max_seconds": 15.0})
    assert got == ("policy_failure", "agent_timeout", 1.0)


@pytest.mark.parametrize("word", ["banana", "nan", "1e9"])
async def test_a_verifier_that_prints_nonsense(tmp_path, word):
    tasks = Tasks(f"echo {word} > /logs/verifier/reward.txt\n")
    got = await outcome(tmp_path, CALL + "call", tasks=tasks)
    assert got == ("policy_failure", "verifier_crash", 0.0)


async def test_a_verifier_brought_down_by_the_agent_wins_nothing(tmp_path):
    """The agent leaves something on which the verifier crashes: the minimum reward, and no second try."""
    tasks = Tasks(". ./answer.txt; echo 0 > /logs/verifier/reward.txt\n")
    got = await outcome(tmp_path, CALL + "call; echo 'kill -9 $$' > answer.txt", tasks=tasks)
    assert got == ("policy_failure", "verifier_crash", 0.0)


async def test_a_verifier_that_never_ends(tmp_path):
    got = await outcome(tmp_path, CALL + "call", tasks=Tasks("sleep 1000\n"), plan={"verify_s": 1.0})
    assert got == ("policy_failure", "verifier_crash", 0.0)


async def test_memory_is_limited(tmp_path):
    """The hog dies, the machine and the runner do not; the policy bears it."""
    hog = '"$PY" -I -S -c "x = bytearray(400 << 20)"'
    got = await outcome(tmp_path, CALL + f"call; {hog}; exit 9", plan={"memory_mb": 100})
    assert got == ("policy_failure", "oom_agent", 0.0)


async def called(it):
    """Wait until the only attempt has called its model; its row."""
    async with asyncio.timeout(120):
        while not await it.store.read(lambda c: c.execute(sa.select(t.calls.c.id)).first()):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    (attempt,) = await it.attempts()
    return attempt


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_a_killed_runner_is_an_infra_failure_and_tried_again(tmp_path, number):
    """I5: also one that is asked to end, as systemd asks every process of a unit."""
    async with rig(tmp_path, specs={"script": script_spec(CALL + PLUM + "call; sleep 1000")}) as it:
        await it.group(harness="script", max_attempts=2)
        attempt = await called(it)
        os.kill(attempt["handle"]["pid"], number)
        (pending,) = await it.until(lambda: it.of("rollout_pending"))
        first = it.of("attempt_ended")[0]
        assert (first.data["outcome"], first.data["kind"]) == ("infra_failure", "runner_lost")
        await it.until(lambda: len(it.of("attempt_running")) == 2)
        assert pending.rollout_id == first.rollout_id
        second = it.of("attempt_running")[1].attempt_id
        assert [folder.name for folder in it.backend.attempts.iterdir()] == [second]


async def test_i5_an_end_that_could_not_be_written_is_said_again(tmp_path, monkeypatch):
    """The runner is dismissed while the database takes no writes."""

    async def refuse(*given, **named):
        raise StoreError("the disk is full")

    async with rig(tmp_path, specs={"script": script_spec(CALL + "call; sleep 1000")}, missing_s=0.0) as it:
        await it.group(harness="script", max_attempts=1)
        attempt = await called(it)
        with monkeypatch.context() as patch:
            patch.setattr(it.store.writer, "submit", refuse)
            os.kill(attempt["handle"]["pid"], signal.SIGTERM)
            await eventually(lambda: not it.backend._runners and not it.backend._tasks)
        (ended,) = await it.ended()
        assert (ended.data["outcome"], ended.data["kind"]) == ("infra_failure", "runner_lost")
        assert (await it.attempts())[0]["evidence"]["details"]["runner_exit"] == DISMISSED
        await eventually(lambda: not it.backend._ended)


async def test_i5_silence_is_not_the_agents_while_its_runner_is_tidied_up_after(tmp_path, monkeypatch):
    """Which may take longer than a runner may be silent."""
    begun, go_on = threading.Event(), threading.Event()

    def remove(path):
        begun.set()
        assert go_on.wait(240)
        remove_tree(path)

    async with rig(tmp_path, specs={"script": script_spec(CALL + "call; sleep 1000")}) as it:
        await it.group(harness="script", max_attempts=1)
        attempt = await called(it)
        monkeypatch.setattr(local, "remove_tree", remove)
        try:
            os.kill(attempt["handle"]["pid"], signal.SIGKILL)
            assert await asyncio.to_thread(begun.wait, 120)
            await silent_for(it, attempt["id"], 1000)
            (ended,) = await it.ended()
        finally:
            go_on.set()
        assert (ended.data["outcome"], ended.data["kind"]) == ("infra_failure", "runner_lost")
        assert (await it.attempts())[0]["evidence"]["details"]["runner_exit"] == -signal.SIGKILL


async def test_what_does_not_even_die_of_sigkill_holds_nothing_up(tmp_path, monkeypatch):
    """As what hangs in a disk or a network file system."""

    def kill_some(uid):
        kill_user(uid)
        raise ChildFailed("1 processes of the agent do not die")

    script = script_spec(CALL + "call; sleep 1000")
    async with rig(tmp_path, specs={"script": script}, stop_grace_s=0.3) as it:
        await it.group(harness="script", max_attempts=1)
        await it.until(lambda: it.of("attempt_running"))
        (attempt,) = await it.attempts()
        monkeypatch.setattr(local, "kill_user", kill_some)
        os.kill(attempt["handle"]["pid"], signal.SIGKILL)
        (ended,) = await it.ended()
        assert (ended.data["outcome"], ended.data["kind"]) == ("infra_failure", "runner_lost")
        assert not await it.backend.running()
        assert len(it.backend._users._taken) == 1


async def test_a_verifier_that_cannot_be_had_is_not_the_agents_fault(tmp_path):
    """I5: the task's folder is edited while an attempt runs."""

    class Edited(Tasks):
        async def verifier(self, task_id):
            raise TaskError("it has changed since it was registered", where=task_id, mend="undo the change")

    got = await outcome(tmp_path, CALL + PLUM + "call", tasks=Edited())
    assert got == ("task_failure", "bad_spec", None)


async def test_a_cancelled_rollout_leaves_nothing(tmp_path):
    async with rig(
        tmp_path, specs={"script": script_spec("trap '' TERM; sleep 1000")}, stop_grace_s=1.0
    ) as it:
        await it.group(harness="script")
        (running,) = await it.until(lambda: it.of("attempt_running"))
        await it.lifecycle.apply(e.RolloutCancelled(rollout_id=running.rollout_id))
        await it.quiet()


DEEP = """import os
for _ in range(3000):
    os.mkdir('a')
    os.chdir('a')
"""


async def test_folders_nested_without_end_are_removed(tmp_path):
    """Deeper than Python recurses, and than a path may be long."""
    script = script_spec(
        f"exec \"$PY\" -I -S - <<'END'\n{DEEP}open('/workspace/ready', 'w')\n"
        "__import__('time').sleep(1000)\nEND"
    )
    async with rig(tmp_path, specs={"script": script}, stop_grace_s=1.0) as it:
        await it.group(harness="script")
        (running,) = await it.until(lambda: it.of("attempt_running"))
        ready = it.backend.attempts / running.attempt_id / "work" / "ready"
        async with asyncio.timeout(120):
            while not ready.exists():  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        await it.lifecycle.apply(e.RolloutCancelled(rollout_id=running.rollout_id))
        await it.quiet()
        assert list(it.backend.attempts.iterdir()) == [] and it.backend._users._taken == set()


def test_a_restart_removes_folders_nested_without_end(tmp_path):
    folder = tmp_path / "attempts" / "at-1"
    folder.mkdir(parents=True)
    subprocess.run([sys.executable, "-c", DEEP], cwd=folder, check=True)
    assert leftovers.remove_folders(tmp_path / "attempts") == 1
    assert not folder.exists()


async def test_a_runner_that_hangs_is_missed(tmp_path):
    """A runner that is stopped sends no heartbeat; its sandbox goes with it."""
    async with rig(
        tmp_path,
        specs={"script": script_spec("sleep 1000")},
        heartbeat_lost_s=6.0,
        stop_grace_s=0.5,
    ) as it:
        await it.group(harness="script", max_attempts=1)
        await it.until(lambda: it.of("attempt_running"))
        (attempt,) = await it.attempts()
        os.kill(attempt["handle"]["pid"], signal.SIGSTOP)
        (ended,) = await it.ended()
        assert (ended.data["outcome"], ended.data["kind"]) == ("infra_failure", "runner_lost")  # no call yet


async def test_a_missing_environment_is_said(tmp_path):
    def missing(harness):
        raise EnvironmentMissing("mini is not installed", mend="run env create")

    async with rig(tmp_path) as it:
        it.backend._home = missing
        await it.group(max_attempts=1)
        await it.ended()
        (attempt,) = await it.attempts()
        assert "mini is not installed" in attempt["evidence"]["details"]["error"]


async def test_a_killed_server_leaves_nothing_after_its_restart(tmp_path):
    """SIGKILL in the middle of two attempts: their processes die with it, the restart clears the rest and the
    rollouts are attempted again, uncharged.
    """
    here = Path(__file__).parent
    victim = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, str(here / "scheduler_victim.py"), str(tmp_path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": f"{here}:{here.parent}"},
    )
    with victim:
        assert b"up\n" in iter(victim.stdout.readline, b"")
        runners = marked_runners(tmp_path)
        assert len(runners) == 2
        os.kill(runners[0], signal.SIGSTOP)  # one that cannot notice the server's death
        victim.kill()
        victim.wait(60)
    async with rig(tmp_path, specs={"endless": script_spec(CALL + PLUM + "call", name="endless")}) as it:
        assert set(marked_runners(tmp_path)).isdisjoint(runners)
        ended = await it.ended(2)
        assert [(row.data["outcome"], row.data["reward"]) for row in ended] == [("completed", 1.0)] * 2
        kinds = [(a["number"], a["kind"]) for a in await it.attempts()]
        assert sorted(kinds) == [(1, "server_lost"), (1, "server_lost"), (2, "ok"), (2, "ok")]
    assert marked_runners(tmp_path) == []


def marked_runners(folder):
    """Runner processes whose programs lie below ``folder``."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                words = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if f"{folder}/local/forge/runner.pyz".encode() in words:
                found.append(int(name))
    return found


def test_a_strangers_process_is_never_killed(tmp_path):
    """Only the words of this very instance make a process ours."""
    with subprocess.Popen(["sleep", "1000"], env=leftovers.marks("in-other", "at-1")) as other:
        try:
            end = time.monotonic() + 60  # the kernel shows its environment a moment after it has begun
            while not leftovers._is_marked(other.pid, "in-other"):
                assert time.monotonic() < end
            assert leftovers.kill_runners("in-mine") == 0
            assert other.poll() is None
            assert leftovers.kill_runners("in-other") == 1
            assert other.wait(60) == -signal.SIGKILL
        finally:
            other.kill()


def test_below_the_demanded_level_nothing_starts(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        SandboxError, match=r"'namespaces' is demanded.*bubblewrap is not installed; install it"
    ):
        probe("namespaces")
    assert probe("none").level in ("user", "none")


def test_the_level_is_stated():
    assert str(probe("namespaces")) == "namespaces (bubblewrap, own user)"


def test_user_ids_are_never_shared(tmp_path):
    first, second = UserIds.hold(tmp_path), UserIds.hold(tmp_path)
    taken = [first.take(), first.take(), second.take()]
    assert len(set(taken)) == 3
    first.give_back(taken[0])
    assert first.take() == taken[0]
    first.close()
    third = UserIds.hold(tmp_path)
    assert third.take() == taken[0]
    second.close()
    third.close()


def test_cgroups_of_an_earlier_life_are_found_and_cleared():
    """Also where the server lived elsewhere in the hierarchy; what runs in them is killed."""
    cgroups = Cgroups.find("in-test")
    assert cgroups.kind
    folders = cgroups.make("at-1", 100, 10)
    with subprocess.Popen(["sleep", "1000"]) as process:
        for folder in folders:
            Path(folder, "cgroup.procs").write_text(str(process.pid))
        clear_instance("in-test")
        assert process.wait(60) == -signal.SIGKILL
    assert not any(Path(folder).parent.exists() for folder in folders)
    cgroups.make("at-2", 0, 0)  # it may have been another life that cleared
    cgroups.close()
