"""Where tasks come from: a Harbor folder, a folder of such folders, a JSONL file, or a stored row."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forge_server.domain.errors import TaskError, TaskUnreadable
from forge_server.tasks import harbor, lines
from forge_server.tasks.task import Task


def load(path: Path) -> list[Task]:
    """All tasks at ``path``, in order of their names. Raises TaskError with place and mend."""
    try:
        tasks = _found(path)
    except OSError as error:
        raise TaskError(
            f"it cannot be read ({error.strerror})",
            where=str(error.filename or path),
            mend="check the path and its permissions",
        ) from None
    if not tasks:
        raise TaskError(
            "there is no task here",
            where=str(path),
            mend="give a Harbor folder (instruction.md, tests/test.sh), a folder of them, or a JSONL file",
        )
    return distinct(tasks)


def _found(path: Path) -> list[Task]:
    if path.is_file():
        with path.open("rb") as file:
            return lines.read_lines(file, str(path))
    if not path.is_dir():
        raise TaskError("there is no such file or folder", where=str(path), mend="check the path")
    if harbor.is_task(path):
        return [harbor.read_folder(path)]
    folders = sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))
    return [harbor.read_folder(folder) for folder in folders if harbor.is_task(folder)]


def from_lines(given: list[dict[str, Any]], where: str = "tasks") -> list[Task]:
    """Tasks of lines that came with a request."""
    return distinct([lines.read_line(line, f"{where}[{i}]") for i, line in enumerate(given)])


def from_row(row: Mapping[str, Any]) -> Task:
    """The task of a row of ``tasks``, read again from where it lies.

    Raises TaskError if it is no longer what was registered, since a run is over fixed tasks; TaskUnreadable if
    that cannot be told now, because its folder is gone (a whole disk may be) or cannot be read.
    """
    if row["path"] is None:
        task = lines.read_line(row["definition"], f"task {row['name']}", known=True)
    else:
        task = _again(Path(row["path"]))
    if task.digest != row["digest"]:
        raise TaskError(
            "it has changed since it was registered",
            where=row["path"] or f"task {row['name']}",
            mend="undo the change, or register it under another name",
        )
    return task


def _again(folder: Path) -> Task:
    try:
        if harbor.is_task(folder):
            return harbor.read_folder(folder, known=True)
    except OSError as error:
        raise TaskUnreadable(
            f"it cannot be read ({error.strerror})",
            where=str(error.filename or folder),
            mend="make it readable",
        ) from None
    raise TaskUnreadable(
        "its folder is gone or empty",
        where=str(folder),
        mend="put it back, or import the task from where it is now",
    )


def distinct(tasks: list[Task]) -> list[Task]:
    """``tasks`` by name; two of one name are an error."""
    by_name: dict[str, Task] = {}
    for task in tasks:
        if task.name in by_name:
            raise TaskError(f"two tasks are named {task.name!r}", mend="give each a name of its own")
        by_name[task.name] = task
    return [by_name[name] for name in sorted(by_name)]
