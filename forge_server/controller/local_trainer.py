"""The ``local`` launcher: torchrun on this machine, in veRL's environment.

A trainer outlives a killed server: the next one finds it by the pid and start time in ``trainer.json``
and takes it over, or ends it when it cannot be ours (another URL, a file that was never written).
Workers run in sessions of their own, so that kin are found by the environment variable they all carry,
not by process group.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import structlog

from forge_server.assets import stage_package
from forge_server.controller import processes
from forge_server.controller.launcher import LOG, WORKER, Trainer, TrainerJob, last_words
from forge_server.domain.errors import TrainerError

log = structlog.get_logger(__name__)

_PASSED_ON = (
    "PATH",
    "HOME",
    "LANG",
    "LC_ALL",
    "TMPDIR",
    "LD_LIBRARY_PATH",
    "CUDA_VISIBLE_DEVICES",
    "HF_HOME",
)


_ROUNDS = 5
"""Of ending what is left: what dies may have started more after it was looked for."""


class _Record(msgspec.Struct, frozen=True):
    """``trainer.json``."""

    pid: int
    started: int
    url: str


class LocalLauncher:
    """``environment`` gives the folder of veRL's environment (made when missing); ``staging`` is a
    folder of ours that its PYTHONPATH points at."""

    def __init__(
        self,
        environment: Callable[[], Awaitable[Path]],
        staging: Path,
        *,
        nproc: int = 1,
        device: str = "auto",
        threads: int = 0,
        grace_s: float = 10.0,
    ) -> None:
        self._environment, self._staging = environment, staging
        self._nproc, self._device, self._threads, self._grace_s = nproc, device, threads, grace_s

    async def launch(self, job: TrainerJob) -> Trainer:
        record = _read(job.folder)
        if record is not None and record.url == job.url and _alive(record):
            log.info("the trainer is still there: taking it over", run=job.run_id, pid=record.pid)
            return _LocalTrainer(self, job, record, None)
        await self.sweep(job.run_id)
        return await self._start(job)

    async def sweep(self, run_id: str) -> bool:
        mark = f"FORGE_TRAINER_RUN={run_id}"
        for _ in range(_ROUNDS):
            pids = await asyncio.to_thread(processes.with_environment, mark)
            if not pids:
                return True
            log.info("ending what is left of the trainer", run=run_id, pids=pids)
            await processes.end_all(pids, self._grace_s)
        return False

    async def _start(self, job: TrainerJob) -> Trainer:
        environment = await self._environment()
        stage_package("trainer", self._staging)
        job.folder.mkdir(parents=True, exist_ok=True)
        variables = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        variables |= job.environment(self._device)
        variables |= {"PYTHONPATH": str(self._staging), "PYTHONUNBUFFERED": "1"}
        if self._threads:
            variables["OMP_NUM_THREADS"] = str(self._threads)
        command = [
            str(environment / "bin" / "torchrun"),
            "--standalone",
            f"--nproc-per-node={self._nproc}",
            "-m",
            WORKER,
        ]
        with (job.folder / LOG).open("ab") as output:
            try:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    cwd=job.folder,
                    env=variables,
                    start_new_session=True,
                )
            except OSError as error:
                raise TrainerError(
                    f"torchrun cannot be started ({error.strerror})",
                    where=command[0],
                    mend="`forge-server env create trainer` makes its environment",
                ) from None
        record = _Record(pid=process.pid, started=processes.start_time(process.pid) or 0, url=job.url)
        _write(job.folder, record)
        log.info("trainer started", run=job.run_id, pid=record.pid, log=str(job.folder / LOG))
        return _LocalTrainer(self, job, record, process)


class _LocalTrainer:
    def __init__(
        self,
        launcher: LocalLauncher,
        job: TrainerJob,
        record: _Record,
        process: asyncio.subprocess.Process | None,
    ) -> None:
        self._launcher, self._run_id, self._log = launcher, job.run_id, job.folder / LOG
        self._record, self._process = record, process

    async def wait(self) -> str:
        if self._process is not None:
            code = await self._process.wait()
            ended = f"exit code {code}" if code >= 0 else f"signal {-code}"
        else:
            await processes.gone(self._record.pid, self._record.started)
            ended = "it is gone"
        said = last_words(self._log)
        return f"{ended}; its last words: {said}" if said else ended

    async def stop(self) -> None:
        await self._launcher.sweep(self._run_id)


def _alive(record: _Record) -> bool:
    return record.started != 0 and processes.start_time(record.pid) == record.started


def _read(folder: Path) -> _Record | None:
    try:
        return msgspec.json.decode((folder / "trainer.json").read_bytes(), type=_Record)
    except (OSError, msgspec.DecodeError):
        return None


def _write(folder: Path, record: _Record) -> None:
    fresh = folder / "trainer.json.new"
    fresh.write_bytes(msgspec.json.encode(record))
    fresh.rename(folder / "trainer.json")
