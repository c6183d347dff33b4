"""``forge-server task …``"""

import asyncio
import tempfile
from pathlib import Path

import msgspec

from forge_server import logs
from forge_server import settings as config_tree
from forge_server.client.http import ForgeClient
from forge_server.client.schemas import TaskCreate
from forge_server.commands import show as out
from forge_server.commands.source import reading
from forge_server.domain.errors import SandboxError, TaskError
from forge_server.domain.ids import new_id
from forge_server.harness.plan import PlanLimits
from forge_server.scheduler.backend import Gone
from forge_server.scheduler.local import LocalBackend, LocalOptions
from forge_server.scheduler.trials import LocalTrials
from forge_server.tasks import load
from forge_server.tasks.task import Task
from forge_server.tasks.validate import Validation
from forge_server.tasks.validate import validate as validate_task

COLUMNS = ("name", "taskset", "split", "state", "instruction", "reason")


def import_(path: str, taskset: str, split: str, url: str | None, key: str | None) -> None:
    """Checked here first, so that a mistake is named before anything is sent."""
    given = Path(path).resolve()
    load.load(given)
    with ForgeClient(url, key, timeout_s=600.0) as client:
        done = client.create_tasks(TaskCreate(taskset=taskset, split=split, path=str(given)))
        renewed = f", {done.renewed} of them elsewhere than before or failed" if done.renewed else ""
        out.console.print(f"{done.created} registered, {done.unchanged} unchanged{renewed}")


def listing(taskset: str | None, limit: int, url: str | None, key: str | None, as_json: bool) -> None:
    with reading(url, key) as source:
        out.rows(
            list(source.tasks(taskset, limit)),
            COLUMNS,
            as_json,
            empty="no tasks yet: forge-server task import",
        )


def validate(path: str, config: str | None, as_json: bool) -> None:
    """Raises TaskError when a task is not fit for use."""
    settings = config_tree.load(config_tree.find_file(config))
    logs.configure("error", "console")
    found = asyncio.run(_validate(load.load(Path(path).resolve()), settings, as_json))
    if as_json:
        print(msgspec.json.encode(found).decode())
    bad = [v.name for v in found if v.faults]
    if bad:
        raise TaskError(f"{len(bad)} of {len(found)} tasks were not found fit for use: {', '.join(bad[:10])}")


async def _validate(tasks: list[Task], settings: config_tree.Settings, as_json: bool) -> list[Validation]:
    limits = PlanLimits(
        model=settings.engine.served_model,
        heartbeat_s=settings.scheduler.heartbeat_s,
        agent_s=600.0,
        verify_s=settings.scheduler.verify_s,
        grace_s=settings.scheduler.grace_s,
        pids=settings.local.pids,
        memory_mb=settings.local.memory_mb,
        window=settings.engine.max_model_len,
        output=settings.engine.max_model_len,
    )
    found = []
    with tempfile.TemporaryDirectory(prefix="forge-validate-") as folder:
        options = LocalOptions(
            instance=new_id("in"),
            pod_url="",
            folder=Path(folder),
            min_sandbox=settings.local.min_sandbox,
            disk_mb=settings.local.disk_mb,
        )
        backend = LocalBackend(options, lambda harness: None)
        await backend.start(_unheard)
        trials = LocalTrials(backend, limits)
        try:
            for task in tasks:
                try:
                    result = await validate_task(task, trials)
                except (TaskError, SandboxError) as error:  # the others may well be fit
                    faults = (error.what,)
                    result = Validation(name=task.name, gold_reward=None, idle_reward=None, faults=faults)
                found.append(result)
                if not as_json:
                    mark = "[red]FAIL[/]" if result.faults else "[green]ok[/]  "
                    line = f"{mark} {out.text(result.name)} {out.text('; '.join(result.faults))}"
                    out.console.print(line, soft_wrap=True)
        finally:
            await backend.close(settings.scheduler.grace_s)
    return found


async def _unheard(gone: Gone) -> None:
    """Trials tell their end themselves."""
