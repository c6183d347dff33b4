"""Finding, watching and ending processes that may not be our children, without ever hitting a stranger.

A pid alone proves nothing: pids are used again. A process is known by pid, start time and boot; the processes
it started are known by the session they share and by the working folder they were given.
"""

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import msgspec


class Identity(msgspec.Struct, frozen=True):
    """One process for all time: pid, start time in clock ticks since boot, boot id."""

    pid: int
    start_ticks: int
    boot: str


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def identify(pid: int) -> Identity | None:
    """The identity of the running process ``pid``; None when there is none or it is a zombie."""
    fields = _stat(pid)
    if fields is None or fields[0] in "ZX":
        return None
    return Identity(pid, int(fields[19]), boot_id())


def is_alive(identity: Identity) -> bool:
    return identify(identity.pid) == identity


def members(session: int, folder: Path) -> list[int]:
    """Running processes of session ``session`` whose working folder is ``folder``."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        fields = _stat(int(entry))
        if fields is None or fields[0] in "ZX" or int(fields[3]) != session:
            continue
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{entry}/cwd") == str(folder):
                found.append(int(entry))
    return found


def sessions(folder: Path, program: str) -> set[int]:
    """Session leaders that run ``program`` (part of their command line) in the working folder ``folder``."""
    found = set()
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{entry}/cwd") != str(folder):
                continue
            fields = _stat(int(entry))
            command = (
                Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
            )
            if fields is not None and fields[3] == entry and program in command:
                found.add(int(entry))
    return found


async def end_session(session: int, folder: Path, *, grace_s: float) -> None:
    """TERM, then after ``grace_s`` KILL, every member; returns when none is left (KILL is not refused)."""
    for number, limit_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 10.0)):
        for pid in members(session, folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = asyncio.get_running_loop().time() + limit_s
        while members(session, folder):
            if asyncio.get_running_loop().time() > deadline:
                break
            await asyncio.sleep(0.05)
        else:
            return


async def exited(identity: Identity) -> None:
    """Return when the process has ended; it need not be our child."""
    try:
        handle = os.pidfd_open(identity.pid)
    except ProcessLookupError:
        return
    try:
        if not is_alive(identity):
            return
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        loop.add_reader(handle, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(handle)
    finally:
        os.close(handle)


def _stat(pid: int) -> list[str] | None:
    """Fields of ``/proc/PID/stat`` after the command name: [0] state, [3] session, [19] start time."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (OSError, UnicodeDecodeError):
        return None
    return text[text.rindex(")") + 2 :].split()
