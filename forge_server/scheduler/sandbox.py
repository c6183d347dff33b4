"""Which level of sandbox this machine can give local attempts, found out by trying.

The levels are those of ``runner.confine``. Below the level that is demanded nothing starts: the error names
what is missing and how to get it.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec

from forge_server.domain.errors import SandboxError
from forge_server.runner.confine import LEVELS
from forge_server.scheduler import uids

_TRY = ("--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--unshare-pid", "--unshare-net")
_TRY_USER = ("--unshare-user", "--uid", "1000", "--gid", "1000")


class Sandbox(msgspec.Struct, frozen=True, kw_only=True):
    """The level in force. ``own_user``: every attempt has a user id of its own. ``note``: why it is no
    higher."""

    level: str
    own_user: bool
    python: str
    prefix: str
    bwrap: str = ""
    note: str = ""

    def __str__(self) -> str:
        user = "own user" if self.own_user else "the server's user"
        text = {
            "namespaces": f"namespaces (bubblewrap, {user})",
            "user": "user (own user, shared network and files)",
            "none": "none (no sandbox)",
        }[self.level]
        return f"{text}; {self.note}" if self.note else text


def probe(minimum: str) -> Sandbox:
    """The best level that works here. Raises SandboxError when that is below ``minimum``."""
    python = os.path.realpath(getattr(sys, "_base_executable", "") or sys.executable)
    prefix = os.path.realpath(sys.base_prefix)
    root = os.geteuid() == 0
    bwrap, fault = _bubblewrap(root)
    note = ""
    if bwrap:
        level = "namespaces"
    else:
        level, note = ("user" if root and _can_switch(python) else "none"), fault.what
    if LEVELS.index(level) < LEVELS.index(minimum):
        raise SandboxError(
            f"the sandbox level {minimum!r} is demanded, only {level!r} is possible: {fault.what}",
            where="[local] min_sandbox",
            mend=fault.mend,
        )
    return Sandbox(
        level=level,
        own_user=root and level != "none",
        python=python,
        prefix=prefix,
        bwrap=bwrap,
        note=note,
    )


def _bubblewrap(root: bool) -> tuple[str, SandboxError]:
    """The path of a bubblewrap that works ("" for none) and what is wrong."""
    found = shutil.which("bwrap")
    if found is None:
        return "", SandboxError(
            "bubblewrap is not installed", mend="install it (Debian: apt-get install bubblewrap)"
        )
    command = [found, *_TRY, *(() if root else _TRY_USER), "true"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", SandboxError(f"bubblewrap does not run ({error})", mend="reinstall it")
    if done.returncode == 0:
        return found, SandboxError("nothing")
    return "", SandboxError(
        f"bubblewrap may not make namespaces ({done.stderr.strip()[:200]})",
        mend="run the server as root, or allow user namespaces (sysctl user.max_user_namespaces, "
        "kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0)",
    )


def _can_switch(python: str) -> bool:
    """Whether the interpreter can be run by another user."""
    if not Path(python).exists():
        return False
    try:
        done = subprocess.run(
            [python, "-I", "-S", "-c", "pass"],
            user=uids.FIRST,
            group=uids.FIRST,
            extra_groups=[],
            capture_output=True,
            timeout=30,
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return done.returncode == 0
