"""Lays out one attempt: its folders, the plan's files, and the plan's placeholders."""

from __future__ import annotations

import binascii
import os
import re
import sys

from .confine import HOME, Box
from .scrub import SYSTEM

TYPE_CHECKING = False  # without importing typing: every attempt would pay for it
if TYPE_CHECKING:
    from typing import Any

REMOVE_S = 120.0  # longest removal of a folder
_OURS = ("/forge", "/forge-join", "/forge-attempt", "/tests", "/logs", "/proc", "/sys", "/dev")
PATH = "/usr/local/bin:/usr/bin:/bin"
PLACEHOLDER = re.compile(r"\{(base_url|agent_key|model|instruction|workdir|home|env|python|forge)\}")


def fill(text: str, values: dict[str, str]) -> str:
    """Replace the known placeholders, once: what a value contains (an instruction may hold braces) stays."""
    return PLACEHOLDER.sub(lambda match: values[match[1]], text)


def make_folders(box: Box) -> None:
    """The attempt's folder, with ``work`` and ``home`` owned by the agent's user, and a small ``/etc``.

    In a pod the work folder may come with the image: what is in it becomes the agent's. Raises ValueError for one
    that must not.
    """
    os.makedirs(box.root, mode=0o711, exist_ok=True)
    if box.in_place:
        work = box.path("work")
        refuse_system(work)
        os.makedirs(work, exist_ok=True)
        box.give_all(work)
        folder(box, "home", owned=True)
        name_user(box)
        return
    folder(box, "work", owned=True)
    folder(box, "home", owned=True)
    uid = box.uid if box.own_user else 1000
    _plain(box.path("passwd"), f"root:x:0:0:root:/root:/bin/sh\nagent:x:{uid}:{uid}:agent:{HOME}:/bin/sh\n")
    _plain(box.path("group"), f"root:x:0:\nagent:x:{uid}:\n")
    _plain(box.path("hosts"), "127.0.0.1 localhost forge\n")


def reserved(work: str) -> bool:
    """Whether a folder at the absolute path ``work`` would hold, or lie in, what is ours or the system's."""
    inside = work.rstrip("/") + "/"
    within = any(inside.startswith(f"{place}/") for place in _OURS)
    return within or any(f"{place}/".startswith(inside) for place in (*_OURS, *SYSTEM))


def refuse_system(work: str) -> None:
    """Raise ValueError for a work folder in a pod that would give the agent what is ours or the system's."""
    if reserved(os.path.realpath(work)):
        raise ValueError(
            f"the work folder {work} holds more than the task: give the task a folder of its own, such as /workspace"
        )


def name_user(box: Box) -> None:
    """In a pod: a line for the agent's user in the image's ``/etc/passwd``, without which some programs fail."""
    try:
        os.makedirs("/etc", exist_ok=True)
        with open("/etc/passwd", "a+") as file:
            file.seek(0)
            if not any(line.split(":")[2:3] == [str(box.uid)] for line in file):
                file.write(f"agent:x:{box.uid}:{box.uid}:agent:{box.path('home')}:/bin/sh\n")
    except OSError as error:  # an image that is mounted read-only
        sys.stderr.write(f"runner: the agent's user has no name: {error}\n")


def folder(box: Box, name: str, *, owned: bool) -> str:
    """Make a folder of the attempt; returns its path. What an image has in its place is removed."""
    path = box.path(name)
    if box.in_place and os.path.lexists(path):
        remove(path)
    os.mkdir(path)
    os.chmod(path, 0o755)
    if owned:
        box.give(path)
    return path


def write_files(box: Box, plan: dict[str, Any], values: dict[str, str]) -> None:
    """The task's files into ``work``, the harness's (placeholders filled) into ``home``."""
    for item in plan["task_files"]:
        put(box, "work", item["path"], binascii.a2b_base64(item["content_b64"]), item["mode"])
    for item in plan["files"]:
        put(box, "home", item["path"], fill(item["content"], values).encode(), item["mode"])


def put(box: Box, below: str, path: str, content: bytes, mode: int) -> None:
    """Write one file below a folder of the attempt, with its parent folders, owned by the agent's user."""
    parts = [p for p in path.split("/") if p not in ("", ".")]
    if not parts or ".." in parts or path.startswith("/"):
        raise ValueError(f"file path {path!r} leads out of its folder")
    place = box.path(below)
    for part in parts[:-1]:
        place = os.path.join(place, part)
        if not os.path.isdir(place):
            os.mkdir(place, 0o755)
            box.give(place)
    place = os.path.join(place, parts[-1])
    if box.in_place and os.path.lexists(place):  # the image brought one
        remove(place)
    with open(place, "xb") as file:
        file.write(content)
    os.chmod(place, mode)
    box.give(place)


def remove(path: str) -> None:
    """Remove a file, a link or a whole folder."""
    if os.path.isdir(path) and not os.path.islink(path):
        import shutil  # seldom needed

        shutil.rmtree(path)
    else:
        os.unlink(path)


def remove_tree(path: str) -> None:
    """Remove a folder that an agent has filled, on this machine. Raises OSError when something of it is left.

    By programs, which bear folders nested without end. Folders that their owner may not write to, as Go makes them,
    are in the way of a server that is not root.
    """
    import subprocess  # seldom needed

    removal = ("rm", "-rf", "--one-file-system", "--", path)
    for command in (removal, ("chmod", "-R", "u+rwX", "--", path), removal):
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=REMOVE_S)
        except subprocess.TimeoutExpired:
            raise OSError(f"{path} was not removed within {REMOVE_S:g} s") from None
        if not os.path.lexists(path):
            return
        if os.path.islink(path):  # chmod would follow it
            break
    raise OSError(f"{path} cannot be removed: {done.stderr[-300:].decode('utf-8', 'replace')}")


def _plain(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
    os.chmod(path, 0o644)
