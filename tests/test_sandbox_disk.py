"""An agent that takes more of the disk than it may, on a small disk with the database on it as well (I5)."""

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from runner_support import FakePod, Lab, plan, plan_limits, say, verifier_tar
from scheduler_rig import rig, script_spec
from test_sandbox_delivery import proxied

from forge_server.domain import classify
from forge_server.domain.errors import SandboxError
from forge_server.runner import disk
from forge_server.runner.main import BROKEN
from forge_server.scheduler.trials import LocalTrials
from forge_server.tasks import load

pytestmark = pytest.mark.sandbox

SIZE_MB = 200
ONE = "echo 1 > /logs/verifier/reward.txt\n"
AGENT = """
import os, time, urllib.error, urllib.request
def call(size):
    text = "".join(chr(97 + b % 26) for b in os.urandom(size))
    body = '{"messages": [{"role": "user", "content": "%s"}]}' % text
    request = urllib.request.Request(os.environ["BASE"] + "/v1/chat/completions", body.encode())
    request.add_header("Authorization", "Bearer " + os.environ["KEY"])
    try:
        return urllib.request.urlopen(request).status
    except urllib.error.HTTPError as error:
        return error.code
def fill(keep=True):
    files = []
    for number in range(4):
        file = open("fill%d" % number, "wb", buffering=0)
        files.append(file)
        if not keep:
            os.unlink(file.name)
        for size in (1 << 20, 4096):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                pass
    return files
print(call(10), flush=True)
"""
LEAVES = AGENT + "fill()\n"
ASKS = AGENT + "files = fill()\nprint(call(300000), flush=True)\ntime.sleep(600)\n"
HIDES = AGENT + "files = fill(keep=False)\ntime.sleep(600)\n"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk that keeps nothing back for root."""
    place = tmp_path / "disk"
    place.mkdir()
    options = ("-o", f"size={SIZE_MB}m,mode=755")
    subprocess.run(["mount", "-t", "tmpfs", *options, "tmpfs", place], check=True)
    yield place
    subprocess.run(["umount", "-l", place], check=True)


@pytest.mark.parametrize("script", [LEAVES, ASKS, HIDES])
async def test_i5_a_disk_that_the_agent_filled_is_its_own_doing(small_disk: Path, script: str) -> None:
    """Also when a call could not be recorded for want of room; the server goes on."""
    spec = script_spec(f"exec \"$PY\" -I -S - <<'END'\n{script}\nEND")
    async with rig(small_disk, specs={"script": spec}, through=proxied, disk_mb=SIZE_MB - 20) as it:
        await it.group(harness="script", max_attempts=1)
        (ended,) = await it.ended(within=240.0)
        assert (ended.data["outcome"], ended.data["kind"]) == ("policy_failure", "runner_lost")
        assert ended.data["reward"] == 0.0
        (attempt,) = await it.attempts()
        assert attempt["evidence"]["finish"]["stopped_by"] == classify.DISK_EXCESS


def attempt(folder: Path, script: str, *, verifier: str = ONE, code: int = 0) -> FakePod:
    """Run ``script`` as the harness to the end of the attempt."""
    argv = ["{python}", "-I", "-S", "-c", script]
    given = plan(argv, env={"BASE": "{base_url}", "KEY": "{agent_key}"})
    lab = Lab(folder)
    try:
        with FakePod(given, [say("hello")], verifier_tar(verifier)) as pod:
            return lab.run(pod, code=code, disk_mb=50)
    finally:
        lab.close()


def test_who_stays_below_the_limit_is_left_alone(small_disk: Path) -> None:
    """Also on a disk that others have filled."""
    with (small_disk / "of others").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, (SIZE_MB - 60) << 20)
    script = "import time\nopen('a', 'wb').write(bytes(10 << 20)); time.sleep(2)\n"
    pod = attempt(small_disk, script, verifier="test $(stat -c %s a) = 10485760 && " + ONE)
    assert pod.of("finish")[0]["stopped_by"] == "" and len(pod.of("reward")) == 1


def test_an_attempt_without_room_to_begin_is_no_failure_of_its_own(small_disk: Path) -> None:
    with (small_disk / "of others").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, (SIZE_MB - 40) << 20)
    pod = attempt(small_disk, "print('hello')", code=BROKEN)
    finish = pod.of("finish")[0]
    assert "MiB left on the disk" in finish["runner_error"] and "needs 50" in finish["runner_error"]
    assert not [event for event in pod.of("events") if "harness_started" in str(event)]


async def test_i5_a_full_disk_is_waited_out(small_disk: Path) -> None:
    """What one attempt may hold can be what another needs to begin: it waits, and is not spent."""
    async with rig(small_disk, specs={"script": script_spec("exit 0")}, disk_mb=50) as it:
        others = small_disk / "of others"
        with others.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, (SIZE_MB - 40) << 20)
        await it.group(harness="script", max_attempts=1)
        trials = LocalTrials(it.backend, plan_limits())
        (task,) = load.from_lines([{"name": "a", "instruction": "b", "verify": {"script": ONE}}])
        with pytest.raises(SandboxError, match=r"could not be run .*MiB left on the disk"):
            await trials.run(task, "true")
        await asyncio.sleep(1.0)
        assert "MiB left on the disk" in it.backend.full and await it.attempts() == []
        others.unlink()
        (ended,) = await it.ended(within=60.0)
        assert ended.data["kind"] != "runner_lost" and len(await it.attempts()) == 1


def free(monkeypatch: pytest.MonkeyPatch, mb: int) -> None:
    found = SimpleNamespace(f_bavail=mb, f_frsize=1 << 20)
    monkeypatch.setattr(disk, "os", SimpleNamespace(statvfs=lambda root: found))


def test_i5_what_the_machine_lacks_is_not_asked_of_an_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With little room one would be stopped for what another, a moment earlier, was allowed."""
    free(monkeypatch, 2000)
    with pytest.raises(OSError, match=r"only 2000 MiB left .* needs 2048: make room"):
        disk.Disk(str(tmp_path), -1, 10240 << 20).begin()
    small = disk.Disk(str(tmp_path), -1, 50 << 20)
    small.begin()
    free(monkeypatch, 2050)
    large = disk.Disk(str(tmp_path), -1, 10240 << 20)
    large.begin()
    assert (small._limit >> 20, large._limit >> 20) == (50, 1537)


def test_no_file_is_longer_than_the_limit(small_disk: Path) -> None:
    script = "try: open('a', 'wb').write(bytes(60 << 20))\nexcept OSError as error: print(error.strerror)\n"
    assert attempt(small_disk, script).log("harness") == "File too large\n"


def test_a_verifier_that_fills_the_disk_is_stopped_and_leaves_none_of_it(small_disk: Path) -> None:
    """The agent's program does it when it is tested; the work folder is emptied before a word is said."""
    fill = "for n in 1 2 3; do head -c 40M /dev/zero > fill$n; done; sleep 60\n"
    lab = Lab(small_disk)
    try:
        with FakePod(plan(["true"]), verifier=verifier_tar(fill)) as pod:
            lab.run(pod, disk_mb=50)
    finally:
        lab.close()
    assert pod.of("finish")[0]["verifier"]["error"] == disk.EXCESS
    found = os.statvfs(small_disk)
    assert found.f_bavail * found.f_frsize > (SIZE_MB - 20) << 20


def test_runner_and_rules_call_it_by_one_name() -> None:
    assert disk.EXCESS == classify.DISK_EXCESS
