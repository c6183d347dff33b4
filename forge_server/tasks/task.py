"""A task: an instruction, the files an attempt starts with, and the verifier that scores what it leaves.

Harbor folders and JSONL lines both become this one value. It is pure data; ``digest`` covers everything that
can move a reward, so equal digests mean the same task wherever it came from.
"""

import base64
import hashlib
import io
import os
import tarfile
from typing import Any

import msgspec

from forge_server.domain.errors import TaskError
from forge_server.harness.plan import WORKDIR, TaskFile, TaskInput
from forge_server.runner.place import reserved

TEST = "test.sh"
SOLVE = "solve.sh"
MAX_BYTES = 32 << 20
"""Files of a task, all together: they travel with every attempt."""
LONGEST_NAME, LONGEST_PATH = 255, 2048  # bytes; a file system takes twice that, with the folder around it
LARGEST = 1e9
"""Of a task's numbers: seconds, MiB, rewards. TOML has numbers that are none, and ones that nothing holds."""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """``files`` lie in ``workdir`` when the harness starts. ``tests`` (with ``test.sh``) are seen by the
    verifier only, ``gold`` (with ``solve.sh``, empty when there is none) by `task validate` only.

    ``agent_s`` and ``verify_s`` are seconds, ``memory_mb`` MiB; None: the task states no limit. ``path`` is
    the Harbor folder, None for a line; ``definition`` is the line, or the parsed ``task.toml``. ``image`` is the
    container image of its environment, empty when it states none.
    """

    name: str
    instruction: str
    files: tuple[TaskFile, ...]
    tests: tuple[TaskFile, ...]
    gold: tuple[TaskFile, ...]
    definition: dict[str, Any]
    split: str | None = None
    path: str | None = None
    workdir: str = WORKDIR
    agent_s: float | None = None
    verify_s: float | None = None
    memory_mb: int | None = None
    min_reward: float = 0.0
    image: str = ""

    @property
    def digest(self) -> str:
        """sha256 over everything in the task; its place on disk and its split do not count."""
        content = {
            "name": self.name,
            "instruction": self.instruction,
            "workdir": self.workdir,
            "limits": [self.agent_s, self.verify_s, self.memory_mb, self.min_reward],
            **{kind: _listing(getattr(self, kind)) for kind in ("files", "tests", "gold")},
            **({"image": self.image} if self.image else {}),
        }
        return hashlib.sha256(msgspec.json.encode(content, order="sorted")).hexdigest()

    @property
    def input(self) -> TaskInput:
        """What the plan of an attempt needs to know."""
        return TaskInput(
            instruction=self.instruction,
            files=self.files,
            workdir=os.path.normpath("/" + self.workdir.lstrip("/")),  # as images have it: /app for /app/
            agent_s=self.agent_s,
            verify_s=self.verify_s,
            memory_mb=self.memory_mb,
            image=self.image,
        )

    @property
    def verifier_tar(self) -> bytes:
        """The verifier's files as a tar; equal tasks give equal bytes."""
        return archive(self.tests)

    @property
    def gold_script(self) -> str | None:
        """A shell script that takes the agent's place and solves the task; None when there is no gold.

        It unpacks the solution at ``/solution``, where Harbor has it, if there is such a folder, else into a
        temporary one, and runs it in the work folder.
        """
        if not self.gold:
            return None
        packed = base64.encodebytes(archive(self.gold)).decode()
        return (
            "set -e\n"
            "place=/solution\n"
            '[ -w "$place" ] || place=$(mktemp -d)\n'
            f"base64 -d <<'PACKED' | tar -x -C \"$place\"\n{packed}PACKED\n"
            f'exec bash "$place/{SOLVE}" </dev/null\n'
        )


def archive(files: tuple[TaskFile, ...]) -> bytes:
    """A tar of ``files``, without owners and times."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for file in sorted(files, key=lambda file: file.path):
            info = tarfile.TarInfo(file.path)
            info.size, info.mode = len(file.content), file.mode
            tar.addfile(info, io.BytesIO(file.content))
    return out.getvalue()


def check(task: Task, where: str, *, known: bool = False) -> Task:
    """Return ``task``, or raise TaskError if something in it cannot work. Of one that is ``known``, being registered,
    no places are asked: a run may be under way on it, and what a backend cannot have, that tells."""
    if not task.name or "\n" in task.name or len(task.name) > 128:
        raise TaskError("its name is empty or longer than 128 characters", where=where, mend="name it")
    if not task.instruction.strip():
        raise TaskError("its instruction is empty", where=where, mend="say what is to be done")
    if not any(file.path == TEST for file in task.tests):
        raise TaskError(
            f"it has no tests/{TEST}",
            where=where,
            mend="add one that writes a number to /logs/verifier/reward.txt",
        )
    if task.gold and not any(file.path == SOLVE for file in task.gold):
        raise TaskError(f"its solution has no {SOLVE}", where=where, mend="add it, or remove the solution")
    if not known:
        _check_workdir(task, where)
        for kind in ("files", "tests", "gold"):
            _check_paths(kind, [file.path for file in getattr(task, kind)], where)
    size = sum(len(file.content) for file in (*task.files, *task.tests, *task.gold))
    if size > MAX_BYTES:
        raise TaskError(
            f"its files are {size >> 20} MiB, more than {MAX_BYTES >> 20} MiB",
            where=where,
            mend="fetch what is large from inside the attempt, or bake it into the image",
        )
    return task


def _check_workdir(task: Task, where: str) -> None:
    work = task.input.workdir
    if "\0" in work or _too_long(work) or reserved(work):
        what = (
            "is no path" if "\0" in work else "is too long" if _too_long(work) else "is ours or the system's"
        )
        raise TaskError(
            f"its work folder {_shown(work)} {what}",
            where=where,
            mend="name a folder of its own, such as /workspace: in workdir, which goes before WORKDIR of a Dockerfile",
        )


def _check_paths(kind: str, paths: list[str], where: str) -> None:
    """All of them can lie in one folder."""
    known = set(paths)
    if len(known) < len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        raise TaskError(f"of its {kind} two are {_shown(twice)}", where=where, mend="leave one out")
    for path in paths:
        if _too_long(path):
            raise TaskError(
                f"of its {kind} {_shown(path)} is too long",
                where=where,
                mend=f"give a path of {LONGEST_PATH} bytes at most, each name in it {LONGEST_NAME}",
            )
        parts = path.split("/")
        for n in range(1, len(parts)):
            if (folder := "/".join(parts[:n])) in known:
                what = f"of its {kind} {_shown(folder)} is a file and the folder of another"
                raise TaskError(what, where=where, mend="rename one")


def _too_long(path: str) -> bool:
    return len(path.encode()) > LONGEST_PATH or any(len(p.encode()) > LONGEST_NAME for p in path.split("/"))


def _shown(path: str) -> str:
    return repr(path if len(path) <= 80 else path[:80] + "…")


def _listing(files: tuple[TaskFile, ...]) -> list[list[Any]]:
    return sorted([file.path, file.mode, hashlib.sha256(file.content).hexdigest()] for file in files)
