"""Trainer processes: started, watched, restarted, taken over, ended; with a stand-in for torchrun."""

import asyncio
import os
import signal
import stat
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa
from controller_support import FakeLauncher, World, eventually, settings, world

from forge_server.controller import keeper as keeper_module
from forge_server.controller import processes
from forge_server.controller.keeper import Keeper
from forge_server.controller.launcher import AttachLauncher, TrainerJob
from forge_server.controller.local_trainer import LocalLauncher
from forge_server.domain.errors import ConfigError, StoreError, TrainerError
from forge_server.lifecycle import liveness
from forge_server.store import instance
from forge_server.store import tables as t

pytestmark = pytest.mark.timeout(120)

# Like torchrun: a parent, and a worker in a session of its own that outlives a killed parent.
_TORCHRUN = """#!/bin/sh
echo "started with $* for $FORGE_TRAINER_RUN" >> started
setsid sleep 300 &
wait $!
"""
_FAILING = """#!/bin/sh
echo "started" >> started
echo "OverrideRefused: Error: no such key"
exit 1
"""


@pytest.fixture
def job(tmp_path: Path) -> Any:
    made = TrainerJob(
        run_id=f"ru-{os.getpid()}-{tmp_path.name[-12:]}", url="u", key="k", folder=tmp_path / "run"
    )
    yield made
    for pid in processes.with_environment(f"FORGE_TRAINER_RUN={made.run_id}"):
        os.kill(pid, signal.SIGKILL)


def _launcher(tmp_path: Path, script: str = _TORCHRUN) -> LocalLauncher:
    program = tmp_path / "env" / "bin" / "torchrun"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(script)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)

    async def environment() -> Path:
        return tmp_path / "env"

    return LocalLauncher(environment, tmp_path / "staging", nproc=2, device="cpu", threads=1, grace_s=5.0)


def _processes(job: TrainerJob) -> list[int]:
    return processes.with_environment(f"FORGE_TRAINER_RUN={job.run_id}")


def _starts(job: TrainerJob) -> int:
    file = job.folder / "started"
    return len(file.read_text().splitlines()) if file.exists() else 0


async def _started(job: TrainerJob, starts: int = 1) -> None:
    await eventually(lambda: _starts(job) >= starts and len(_processes(job)) >= 2)


async def test_it_is_started_in_its_environment_and_ended_with_its_workers(
    tmp_path: Path, job: TrainerJob
) -> None:
    trainer = await _launcher(tmp_path).launch(job)
    await _started(job)
    text = (job.folder / "started").read_text()
    assert "--nproc-per-node=2 -m forge_server.trainer.worker" in text and job.run_id in text
    assert (tmp_path / "staging" / "forge_server" / "trainer" / "worker.py").exists()
    await trainer.stop()
    assert "signal" in await trainer.wait() and not _processes(job)


async def test_the_next_server_takes_it_over(tmp_path: Path, job: TrainerJob) -> None:
    await _launcher(tmp_path).launch(job)
    await _started(job)
    before = sorted(_processes(job))
    adopted = await _launcher(tmp_path).launch(job)
    assert sorted(_processes(job)) == before and _starts(job) == 1
    waiting = asyncio.create_task(adopted.wait())
    await adopted.stop()
    assert "gone" in await waiting


async def test_what_cannot_be_ours_is_ended_before_a_new_one_starts(tmp_path: Path, job: TrainerJob) -> None:
    await _launcher(tmp_path).launch(job)
    await _started(job)
    before = set(_processes(job))
    moved = msgspec.structs.replace(job, url="another port")
    trainer = await _launcher(tmp_path).launch(moved)
    await _started(job, 2)
    assert not before & set(_processes(job))
    await trainer.stop()


async def test_workers_of_a_killed_torchrun_do_not_stay(tmp_path: Path, job: TrainerJob) -> None:
    launcher = _launcher(tmp_path)
    trainer = await launcher.launch(job)
    await _started(job)
    record = msgspec.json.decode((job.folder / "trainer.json").read_bytes())
    os.kill(record["pid"], signal.SIGKILL)
    assert "signal 9" in await trainer.wait()
    assert _processes(job)  # the worker is still there
    await launcher.sweep(job.run_id)
    assert not _processes(job)


async def test_one_that_keeps_dying_is_given_up_with_its_last_words(
    database_url: str, tmp_path: Path, job: TrainerJob
) -> None:
    async with world(database_url, tmp_path, drive=False) as w:
        gave_up = asyncio.Event()
        keeper = Keeper(w.store, _launcher(tmp_path, _FAILING), job, gave_up.set, first_backoff_s=0.01)
        await asyncio.wait_for(gave_up.wait(), 60)
        assert isinstance(keeper.fault, TrainerError) and "no such key" in str(keeper.fault)
        assert _starts(job) == keeper_module.MAX_DEATHS
        await keeper.stop()


async def test_a_trainer_that_a_killed_server_left_to_a_paused_run_is_ended(
    database_url: str, tmp_path: Path, job: TrainerJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody keeps it, and its link tells it to go on. A try that fails is made again."""
    async with world(database_url, tmp_path) as w:
        await w.tasks()
        run_id = await w.runs.create(settings())
        await w.runs.pause(run_id, "by a person")
    launcher, job = _launcher(tmp_path), msgspec.structs.replace(job, run_id=run_id)
    sweep, faults = launcher.sweep, [ConfigError("the Job cannot be deleted")]

    async def shaky(run_id: str) -> bool:
        if faults:
            raise faults.pop()
        return await sweep(run_id)

    def ended() -> bool:
        w.bells.ring(run_id)
        return not _processes(job)

    await launcher.launch(job)
    try:
        await _started(job)
        monkeypatch.setattr(launcher, "sweep", shaky)
        async with world(database_url, tmp_path, drive=False) as w:
            w.launcher = launcher  # type: ignore[assignment]
            await w.lifecycle.recover()
            await w.controller.start()
            await eventually(ended)
            row = await w.run_row(run_id)
            assert (row.state, row.reason) == ("paused", "by a person")
    finally:
        for pid in _processes(job):
            os.kill(pid, signal.SIGKILL)


async def test_a_missing_environment_says_how_to_make_it(tmp_path: Path, job: TrainerJob) -> None:
    launcher = _launcher(tmp_path)
    (tmp_path / "env" / "bin" / "torchrun").unlink()
    with pytest.raises(TrainerError, match="env create trainer"):
        await launcher.launch(job)


async def test_a_lost_lease_brings_a_new_trainer(database_url: str, tmp_path: Path) -> None:
    async with world(database_url, tmp_path) as w:
        await w.tasks()
        run_id = await w.runs.create(settings())
        await eventually(lambda: w.rows(t.batches))
        await eventually(lambda: w.launcher.launched)
        assert len(w.launcher.launched) == 1
        await w.trainer(run_id).open()
        lapse = sa.update(t.trainer_sessions).values(lease_until=0.0)
        await w.store.write(lambda c: c.execute(lapse) and None)
        keeper = Keeper(
            w.store, launcher := FakeLauncher(), w.launcher.launched[0], lambda: None, start_s=0.05
        )
        await eventually(lambda: launcher.swept)
        await keeper.stop()
        assert (await w.run_row(run_id)).state == "active"


@pytest.mark.parametrize("deaf", ["read", "write"])
async def test_a_database_in_trouble_ends_no_trainer(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deaf: str
) -> None:
    """Its lease could not be renewed meanwhile. Who is silent afterwards is replaced."""
    monkeypatch.setattr(keeper_module, "LOOK_S", 0.02)
    monkeypatch.setattr(keeper_module, "AGAIN_S", 0.02)
    now, away = [1000.0], [False]
    async with world(database_url, tmp_path, drive=False) as w:
        await w.tasks()
        run_id = await w.runs.create(settings())
        job = TrainerJob(run_id=run_id, url="u", key="k", folder=tmp_path / "job")
        read, looks = w.store.read, [0]

        async def shaky(fn: Any) -> Any:
            looks[0] += 1
            if away[0] and deaf == "read":
                raise StoreError("the database cannot be reached")
            return await read(fn)

        async def looked() -> None:
            seen = looks[0]
            await eventually(lambda: looks[0] > seen + 2)

        def renewed(c: sa.Connection) -> None:
            c.execute(sa.update(t.trainer_sessions).values(lease_until=now[0] + 60))

        async def beat() -> None:
            await w.store.write(lambda c: liveness.beat(c, now[0]))

        await beat()
        monkeypatch.setattr(w.store, "read", shaky)
        launcher = FakeLauncher()
        keeper = Keeper(w.store, launcher, job, lambda: None, clock=lambda: now[0])
        await looked()
        await open_session(w, run_id, now[0], now[0] + 60)
        await looked()
        away[0], now[0] = True, now[0] + 300  # no beat is written either
        await looked()
        away[0] = False
        await looked()
        await beat()
        now[0] += 50  # a lease after it the trainer is heard
        await beat_on(w, now[0])
        await looked()
        assert launcher.swept == 0
        await w.store.write(renewed)
        await looked()
        for _ in range(8):
            now[0] += 8
            await beat_on(w, now[0])
        await eventually(lambda: launcher.swept)
        await keeper.stop()
        assert keeper.fault is None


async def open_session(w: World, run_id: str, at: float, lease_until: float) -> None:
    row = {"run_id": run_id, "fence": 1, "token": "t", "world_size": 1, "resume_step": 0, "phase": "training"}
    row |= {"lease_until": lease_until, "created_at": at, "overrides": []}
    await w.store.write(lambda c: c.execute(sa.insert(t.trainer_sessions), row) and None)


async def beat_on(w: World, at: float) -> None:
    """The server was well all the time until then."""
    await w.store.write(lambda c: instance.beat(c, at))


async def test_one_that_falls_silent_at_once_is_replaced_after_its_lease(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_module, "LOOK_S", 0.02)
    async with world(database_url, tmp_path, drive=False) as w:
        await w.tasks()
        run_id = await w.runs.create(settings())
        job = TrainerJob(run_id=run_id, url="u", key="k", folder=tmp_path / "job")
        launcher = FakeLauncher()
        keeper = Keeper(w.store, launcher, job, lambda: None, lease_s=0.1)
        await eventually(lambda: launcher.launched)
        await asyncio.sleep(0.2)
        lapsed = time.time() - 1
        await open_session(w, run_id, lapsed, lapsed)
        await eventually(lambda: launcher.swept)
        await keeper.stop()


async def test_attach_writes_the_command_for_a_person(tmp_path: Path, job: TrainerJob) -> None:
    trainer = await AttachLauncher("cuda", 8).launch(job)
    command = job.folder / "trainer-command.sh"
    assert "FORGE_TRAINER_KEY=k" in command.read_text() and "--nproc-per-node 8" in command.read_text()
    assert command.stat().st_mode & 0o077 == 0
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(trainer.wait(), 0.05)


async def test_one_that_has_done_its_steps_is_let_go(
    database_url: str, tmp_path: Path, job: TrainerJob
) -> None:
    """A trainer that leaves after the last checkpoint is not started again while its run is still measured."""
    async with world(database_url, tmp_path) as w:
        ended = asyncio.Event()
        keeper = Keeper(w.store, _launcher(tmp_path, _FAILING), job, ended.set, first_backoff_s=0.01)
        keeper.let_go()
        async with asyncio.timeout(60):
            await ended.wait()
        assert keeper.fault is None
        assert _starts(job) <= 1
        await keeper.stop()
