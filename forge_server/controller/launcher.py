"""How trainers are started. One launcher per place: this machine, a cluster, or a person who starts it anywhere.

A launcher only starts, watches and stops; whether a trainer is the one in charge is told by its
session's fence.
"""

import asyncio
from pathlib import Path
from typing import NoReturn, Protocol

import msgspec
import structlog

log = structlog.get_logger(__name__)

WORKER = "forge_server.trainer.worker"
LOG = "trainer.log"
"""In the run's own folder."""


class TrainerJob(msgspec.Struct, frozen=True, kw_only=True):
    """What a trainer of a run needs to know: where its link is, its key, and the run's own folder."""

    run_id: str
    url: str
    key: str
    folder: Path

    def environment(self, device: str) -> dict[str, str]:
        """The worker's configuration. ``FORGE_TRAINER_RUN`` marks its processes as this run's."""
        return {
            "FORGE_TRAINER_RUN": self.run_id,
            "FORGE_TRAINER_URL": self.url,
            "FORGE_TRAINER_KEY": self.key,
            "FORGE_TRAINER_DEVICE": device,
        }


class Trainer(Protocol):
    """A trainer that was started or found."""

    async def wait(self) -> str:
        """Return when it is gone, with what is known of why."""

    async def stop(self) -> None:
        """End it and everything it started; returns when all is gone."""


class Launcher(Protocol):
    async def launch(self, job: TrainerJob) -> Trainer:
        """Start the run's trainer, or take over the one that is still there. Raises ForgeError."""

    async def sweep(self, run_id: str) -> bool:
        """End what is left of the run's trainers; False when that has to be tried again."""


def last_words(log_file: Path) -> str:
    """The last line of a trainer's log that is an error and not torchrun's own account of the failure."""
    try:
        with log_file.open("rb") as file:
            file.seek(max(0, log_file.stat().st_size - 16_384))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    said = [line for line in lines if "Error: " in line and "ChildFailedError" not in line]
    return said[-1].strip()[:300] if said else ""


class AttachLauncher:
    """A person starts the trainer. Says how; the lease tells whether it lives."""

    def __init__(self, device: str, nproc: int) -> None:
        self._device, self._nproc = device, nproc

    async def launch(self, job: TrainerJob) -> Trainer:
        variables = " ".join(f"{k}={v}" for k, v in job.environment(self._device).items())
        command = f"{variables} torchrun --nproc-per-node {self._nproc} -m {WORKER}"
        path = job.folder / "trainer-command.sh"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.write_text(f"{command}\n")
        log.warning("the run waits for its trainer: run this command in veRL's environment", file=str(path))
        return _Elsewhere()

    async def sweep(self, run_id: str) -> bool:
        return True  # nothing of it is here


class _Elsewhere:
    """A trainer that only its lease tells of."""

    async def wait(self) -> NoReturn:
        await asyncio.Event().wait()
        raise AssertionError

    async def stop(self) -> None:
        """It leaves by itself at its next heartbeat."""
