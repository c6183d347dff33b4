"""``forge-server task …``"""

from pathlib import Path

from forge_server.client.http import ForgeClient
from forge_server.client.schemas import TaskCreate
from forge_server.commands import show as out
from forge_server.tasks import load

COLUMNS = ("name", "taskset", "split", "state", "instruction", "reason")


def import_(path: str, taskset: str, split: str, url: str | None, key: str | None) -> None:
    """Checked here first, so that a mistake is named before anything is sent."""
    given = Path(path).resolve()
    load.load(given)
    with ForgeClient(url, key, timeout_s=600.0) as client:
        done = client.create_tasks(TaskCreate(taskset=taskset, split=split, path=str(given)))
        out.console.print(f"{done.created} registered, {done.unchanged} unchanged")


def listing(taskset: str | None, limit: int, url: str | None, key: str | None, as_json: bool) -> None:
    with ForgeClient(url, key) as client:
        out.rows(
            list(client.tasks(taskset, limit)), COLUMNS, as_json, empty="no tasks yet: forge-server task import"
        )
