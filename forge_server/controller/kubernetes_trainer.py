"""The ``kubernetes`` launcher: a Job of the cluster, in an image with veRL, on a volume that it shares with us.

The Job is named after its run, so that a restarted server finds it and takes it over; one that was told another URL
cannot be ours any more and is replaced. The program it runs is staged on the shared volume: the image needs nothing of
forge-server. A Job may start its pod twice; the session's fence tells which trainer is in charge.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import structlog

from forge_server.assets import stage_package
from forge_server.controller.launcher import LOG, Trainer, TrainerJob, last_words
from forge_server.domain.errors import ClusterError, ConfigError

log = structlog.get_logger(__name__)

URL = "forge-server/url"
"""Annotation of the Job."""

REFUSED_S = 30.0
"""An API server that has just started refuses what it allows once it has read who may do what."""

_LOOK_S = 2.0
_PAUSE_MAX_S = 15.0


class State(Protocol):
    @property
    def annotations(self) -> Mapping[str, str]: ...

    @property
    def ended(self) -> str:
        """How the Job ended; empty while it goes on."""


class Jobs(Protocol):
    """What is asked of the cluster. All raise ClusterError when it does not answer now, ConfigError when it refuses."""

    async def create(self, manifests: list[dict[str, Any]]) -> None: ...

    async def state(self, name: str) -> State | None: ...

    async def evidence(self, name: str) -> tuple[str, str]:
        """What became of its pods, and their last lines."""

    async def delete(self, name: str, secret: str) -> bool: ...


def name_of(run_id: str) -> str:
    """Of the run's Job and its Secret."""
    return f"trainer-{run_id}"


class KubernetesLauncher:
    """``render`` fills the template for a job of this name; ``staging`` is a folder of ours on the shared volume."""

    def __init__(
        self,
        jobs: Jobs,
        render: Callable[[TrainerJob, str], list[dict[str, Any]]],
        staging: Path,
        *,
        refused_s: float = REFUSED_S,
    ) -> None:
        self._jobs, self._render, self._staging, self._refused_s = jobs, render, staging, refused_s

    async def launch(self, job: TrainerJob) -> Trainer:
        name, pause, began = name_of(job.run_id), 0.5, time.monotonic()
        while True:
            try:
                found = await self._jobs.state(name)
                if found is not None and not found.ended and found.annotations.get(URL) == job.url:
                    log.info("the trainer is still there: taking it over", run=job.run_id, job=name)
                    break
                await self._jobs.delete(name, name)
                await self._start(job, name)
                break
            except (ClusterError, ConfigError) as error:  # it will be away again: no reason to end a run
                if isinstance(error, ConfigError) and time.monotonic() - began > self._refused_s:
                    raise
                log.warning("the trainer cannot be started yet", run=job.run_id, error=str(error))
                await asyncio.sleep(pause)
                pause = min(2 * pause, _PAUSE_MAX_S)
        return _JobTrainer(self._jobs, name, job.folder / LOG)

    async def _start(self, job: TrainerJob, name: str) -> None:
        await asyncio.to_thread(stage_package, "trainer", self._staging)
        job.folder.mkdir(parents=True, exist_ok=True)
        await self._jobs.create(self._render(job, name))
        log.info("trainer started", run=job.run_id, job=name)

    async def sweep(self, run_id: str) -> bool:
        return await self._jobs.delete(name_of(run_id), name_of(run_id))


class _JobTrainer:
    def __init__(self, jobs: Jobs, name: str, log_file: Path) -> None:
        self._jobs, self._name, self._log = jobs, name, log_file

    async def wait(self) -> str:
        while True:
            try:
                found = await self._jobs.state(self._name)
                if found is None:
                    return "its Job was deleted"
                if found.ended:
                    return await self._why(found.ended)
            except (ClusterError, ConfigError):
                pass  # its lease tells meanwhile whether it lives
            await asyncio.sleep(_LOOK_S)

    async def _why(self, ended: str) -> str:
        facts, text = await self._jobs.evidence(self._name)
        if text:
            await asyncio.to_thread(self._log.write_text, text)
        said = last_words(self._log) if text else ""
        return "; ".join(filter(None, (ended, facts, said and f"its last words: {said}")))

    async def stop(self) -> None:
        await self._jobs.delete(self._name, self._name)
