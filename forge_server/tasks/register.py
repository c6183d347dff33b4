"""Registers tasks in the store: idempotent by digest, all or nothing.

A name in a task set stands for one content for good, since figures of runs over it are compared: the same
content again changes nothing, other content under the same name is an error that names it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from forge_server.domain.errors import TaskError
from forge_server.tasks.task import Task


class StoredTask(Protocol):
    """What is registered under a name."""

    @property
    def digest(self) -> str: ...
    @property
    def split(self) -> str: ...


class TaskRows(Protocol):
    """The table, within one transaction."""

    def stored(self, taskset: str) -> Mapping[str, StoredTask]:
        """What is registered in a task set, by name."""

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        """Insert rows of ``tasks``."""


class Registered(msgspec.Struct, frozen=True):
    created: int
    unchanged: int


def register(
    rows: TaskRows,
    tasks: Sequence[Task],
    *,
    taskset: str,
    split: str,
    now: float,
    new_id: Callable[[str], str],
) -> Registered:
    """Add ``tasks`` to ``taskset``; a task that names no split of its own goes into ``split``."""
    stored = rows.stored(taskset)
    new = []
    for task in tasks:
        wanted = task.split or split
        known = stored.get(task.name)
        if known is None:
            new.append(_row(task, taskset, wanted, now, new_id("ta")))
        elif known.digest != task.digest:
            raise TaskError(
                f"task {task.name!r} is registered with other content",
                where=f"taskset {taskset}",
                mend="give the changed task another name, or register into another taskset",
            )
        elif known.split != wanted:
            raise TaskError(
                f"task {task.name!r} is registered in split {known.split!r}, not {wanted!r}",
                where=f"taskset {taskset}",
                mend="a task stays in its split: register into another taskset",
            )
    rows.add(new)
    return Registered(created=len(new), unchanged=len(tasks) - len(new))


def _row(task: Task, taskset: str, split: str, now: float, id: str) -> dict[str, Any]:
    return {
        "id": id,
        "taskset": taskset,
        "name": task.name,
        "split": split,
        "digest": task.digest,
        "instruction": task.instruction,
        "path": task.path,
        # by JSON, which has no dates and, unlike TOML, only finite numbers
        "definition": msgspec.json.decode(msgspec.json.encode(task.definition)),
        "min_reward": task.min_reward,
        "state": "ready",
        "reason": "",
        "created_at": now,
    }
