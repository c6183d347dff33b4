"""Registers tasks in the store: idempotent by digest, all or nothing.

A name in a task set stands for one content for good, since figures of runs over it are compared: other content
under the same name is an error that names it. The same content again changes nothing, but that the task is found
where it lies now, and that one that failed is used again: whoever registers it again says that it can be.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from forge_server.domain.errors import TaskError
from forge_server.tasks.task import Task


class StoredTask(Protocol):
    """What is registered under a name."""

    @property
    def id(self) -> str: ...
    @property
    def digest(self) -> str: ...
    @property
    def split(self) -> str: ...
    @property
    def path(self) -> str | None: ...
    @property
    def state(self) -> str: ...


class TaskRows(Protocol):
    """The table, within one transaction."""

    def stored(self, taskset: str) -> Mapping[str, StoredTask]:
        """What is registered in a task set, by name."""

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        """Insert rows of ``tasks``."""

    def change(self, changes: Mapping[str, dict[str, Any]]) -> None:
        """Set columns of ``tasks``, the same ones in each, by id."""


class Registered(msgspec.Struct, frozen=True):
    """``renewed``: those of the ``unchanged`` that lie elsewhere now, or had failed and are used again."""

    created: int
    unchanged: int
    renewed: int = 0


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
    new, renewed = [], {}
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
        elif known.path != task.path or known.state != "ready":
            renewed[known.id] = {**_place(task), "state": "ready", "reason": ""}
    rows.add(new)
    rows.change(renewed)
    return Registered(created=len(new), unchanged=len(tasks) - len(new), renewed=len(renewed))


def _place(task: Task) -> dict[str, Any]:
    """Where its content is read from again."""
    return {
        "path": task.path,
        # by JSON, which has no dates and, unlike TOML, only finite numbers
        "definition": msgspec.json.decode(msgspec.json.encode(task.definition)),
    }


def _row(task: Task, taskset: str, split: str, now: float, id: str) -> dict[str, Any]:
    return {
        "id": id,
        "taskset": taskset,
        "name": task.name,
        "split": split,
        "digest": task.digest,
        "instruction": task.instruction,
        **_place(task),
        "min_reward": task.min_reward,
        "state": "ready",
        "reason": "",
        "created_at": now,
    }
