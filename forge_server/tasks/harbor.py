"""Reads a task from a Harbor-format folder.

    instruction.md          what the agent is told
    task.toml               limits: [agent] timeout_sec, [verifier] timeout_sec, [environment] memory_mb;
                            [environment] docker_image: a built image of the environment; workdir
    environment/            the files an attempt starts with; the work folder is WORKDIR of the Dockerfile, unless
                            [environment] workdir names another
    tests/test.sh, …        the verifier; writes /logs/verifier/reward.txt or reward.json
    solution/solve.sh, …    optional: the gold solution

Keys that only concern Harbor itself are ignored, as Harbor does; a key that would change how an attempt is
run or scored and that we cannot honour is an error. ``[metadata]`` may carry our own ``split`` and
``min_reward``.
"""

import os
import re
import stat
import tomllib
from pathlib import Path
from typing import Any

from forge_server.domain.errors import TaskError
from forge_server.harness.plan import WORKDIR, TaskFile
from forge_server.tasks.task import LARGEST, Task, check

_IMAGE_FILES = frozenset({"Dockerfile", ".dockerignore"})
_COMPOSE_FILES = ("docker-compose.yaml", "docker-compose.yml")
_JUNK = frozenset({"__pycache__", ".DS_Store", ".git"})
_WORKDIR = re.compile(r"^\s*WORKDIR\s+[\"']?(/[^\s\"']*)", re.IGNORECASE | re.MULTILINE)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT])(?:i?B)?", re.IGNORECASE)
_MIB = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024 * 1024}
# key of [environment] -> what it asks for, the mend
_NOT_HAD = {
    "env": ("environment variables", "harnesses get none: put the values into a file of environment/"),
    "mcp_servers": ("MCP servers", "a harness has the tools that its spec gives it: leave them out"),
    "healthcheck": (
        "a health check",
        "nothing is started before the harness: leave it out if nothing must be",
    ),
}


def is_task(folder: Path) -> bool:
    """Whether ``folder`` looks like a task, complete or not."""
    return (folder / "task.toml").is_file() or (folder / "instruction.md").is_file()


def read_folder(folder: Path, *, known: bool = False) -> Task:
    """The task in ``folder``, named after it; ``known`` as for ``check``. Raises TaskError with the path and the mend,
    and OSError."""
    _named(folder.resolve())
    where = str(folder)
    settings = _settings(folder / "task.toml")
    _refuse(settings, where)
    for file in _COMPOSE_FILES:
        if (folder / "environment" / file).exists():
            raise TaskError(
                f"it has environment/{file}",
                where=where,
                mend="an attempt is one container: have one image give all it needs, and name it in docker_image",
            )
    environment = settings.get("environment", {})
    metadata = settings.get("metadata", {})
    image = folder / "environment" / "Dockerfile"
    places = _WORKDIR.findall(_text(image)) if image.is_file() else []
    workdir = environment.get("workdir") or (places[-1] if places else WORKDIR)
    if not isinstance(workdir, str) or not workdir.startswith("/"):
        raise TaskError(f"environment.workdir is {workdir!r}", where=where, mend="write an absolute path")
    split = metadata.get("split")
    if split is not None and not isinstance(split, str):
        raise TaskError(f"metadata.split is {split!r}", where=where, mend='write a word, such as "test"')
    task = Task(
        name=folder.resolve().name,
        instruction=_text(folder / "instruction.md") if (folder / "instruction.md").is_file() else "",
        files=tuple(f for f in _files(folder / "environment") if f.path not in _IMAGE_FILES),
        tests=_files(folder / "tests"),
        gold=_files(folder / "solution"),
        definition=settings,
        split=split,
        path=str(folder.resolve()),
        workdir=workdir,
        agent_s=_number(settings, "agent", "timeout_sec", where),
        verify_s=_number(settings, "verifier", "timeout_sec", where),
        memory_mb=_memory(environment, where),
        min_reward=_number(settings, "metadata", "min_reward", where, positive=False) or 0.0,
        image=_image(environment, where),
    )
    return check(task, where, known=known)


def _settings(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        settings = tomllib.loads(_text(file))
    except tomllib.TOMLDecodeError as error:
        raise TaskError(f"not TOML ({error})", where=str(file), mend="mend the syntax") from None
    for name in ("agent", "verifier", "environment", "metadata"):
        if not isinstance(settings.get(name, {}), dict):
            raise TaskError(f"{name} is not a table", where=str(file), mend=f"write [{name}] and its keys")
    return settings


def _refuse(settings: dict[str, Any], where: str) -> None:
    verifier = settings.get("verifier", {})
    for table in ("agent", "verifier"):
        user = settings.get(table, {}).get("user")
        if user in ("root", "0", 0):
            raise TaskError(
                f"{table}.user is root",
                where=where,
                mend="agents and verifiers run as a user without rights, else an agent could read the runner's keys "
                "and write its own reward: have the image give what they need to every user",
            )
    if settings.get("steps"):
        raise TaskError("it has several steps", where=where, mend="make each step a task of its own")
    if verifier.get("env"):
        raise TaskError(
            "its verifier wants environment variables",
            where=where,
            mend="verifiers run without network and secrets: set the values in tests/test.sh",
        )
    if verifier.get("environment_mode", "shared") != "shared":
        raise TaskError(
            "its verifier wants a container of its own",
            where=where,
            mend="only verifiers that run over the agent's work folder are supported",
        )
    environment = settings.get("environment", {})
    for key, (what, mend) in _NOT_HAD.items():
        if environment.get(key):
            raise TaskError(f"its environment wants {what} (environment.{key})", where=where, mend=mend)
    system = environment.get("os") or "linux"
    if str(system).lower() != "linux":
        raise TaskError(f"environment.os is {system!r}", where=where, mend="attempts are made on Linux only")


def _number(
    settings: dict[str, Any], table: str, key: str, where: str, *, positive: bool = True
) -> float | None:
    value = settings.get(table, {}).get(key)
    if value is None:
        return None
    number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST
    if not number or (positive and value <= 0):
        kind = "a number above 0" if positive else "a number"
        raise TaskError(
            f"{table}.{key} is {value!r}", where=where, mend=f"write {kind}, {LARGEST:,.0f} at most"
        )
    return float(value)


def _memory(environment: dict[str, Any], where: str) -> int | None:
    """``memory_mb``, or the older spelling ``memory = "2G"``."""
    if "memory" in environment and "memory_mb" not in environment:
        match = _SIZE.fullmatch(str(environment["memory"]))
        if match is None:
            raise TaskError(
                f"environment.memory is {environment['memory']!r}", where=where, mend="write memory_mb = 2048"
            )
        environment = {"memory_mb": float(match[1]) * _MIB[match[2].upper()]}
    value = _number({"environment": environment}, "environment", "memory_mb", where)
    return None if value is None else max(int(value), 1)  # 0 would be no limit


def _image(environment: dict[str, Any], where: str) -> str:
    image = environment.get("docker_image") or ""
    if not isinstance(image, str):
        raise TaskError(
            f"environment.docker_image is {image!r}", where=where, mend='write a name, such as "debian:12"'
        )
    return image


def _named(file: Path) -> None:
    try:
        str(file).encode()
    except UnicodeEncodeError:
        raise TaskError(
            "its name is not UTF-8",
            where=os.fsencode(file).decode("utf-8", "backslashreplace"),
            mend="rename it",
        ) from None


def _text(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise TaskError(f"cannot be read ({error})", where=str(file), mend="make it UTF-8") from None


def _files(root: Path) -> tuple[TaskFile, ...]:
    """Every file below ``root``, in order; empty when there is no such folder. Modes are 0755 or 0644."""
    found = []
    for file in sorted(_below(root)) if root.is_dir() else ():
        relative = file.relative_to(root)
        if _JUNK.intersection(relative.parts) or file.suffix == ".pyc":
            continue
        _named(file)
        mode = file.lstat().st_mode
        if stat.S_ISLNK(mode):
            raise TaskError("it is a link", where=str(file), mend="put the file itself there")
        if stat.S_ISREG(mode):
            content = file.read_bytes()
            found.append(
                TaskFile(path=relative.as_posix(), content=content, mode=0o755 if mode & 0o111 else 0o644)
            )
    return tuple(found)


def _below(root: Path) -> list[Path]:
    """All that is in ``root``. Raises OSError, where ``rglob`` takes a folder that cannot be read for an empty one."""

    def refuse(error: OSError) -> None:
        raise error

    walk = os.walk(root, onerror=refuse)
    return [Path(folder, name) for folder, folders, files in walk for name in (*folders, *files)]
