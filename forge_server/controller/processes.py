"""Processes of this machine that outlive their parent: found again by pid and start time, ended with
their kin.

A pid alone is no identity (it is given again); pid and start time are.
"""

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path

PROC = Path("/proc")
_EXEC_S = 0.5
"""Longest wait for a process that is between two programs: its environment is empty until the second one's is there."""


def start_time(pid: int) -> int | None:
    """Clock ticks since boot at which ``pid`` started; None when there is no such process, or only its
    zombie."""
    try:
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else int(fields[19])


def with_environment(entry: str) -> list[int]:
    """Pids whose initial environment holds ``NAME=value`` exactly (those of other users are not seen)."""
    needle = b"\0" + entry.encode() + b"\0"
    found = []
    for folder in PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if needle in b"\0" + _environment(folder):
                found.append(int(folder.name))
    return [pid for pid in found if pid != os.getpid() and start_time(pid) is not None]


def _environment(folder: Path) -> bytes:
    """Raises OSError for what has none: a zombie, a thread of the kernel, a process of somebody else's."""
    end = time.monotonic() + _EXEC_S
    while not (found := (folder / "environ").read_bytes()) and time.monotonic() < end:
        os.readlink(folder / "exe")
        time.sleep(0.001)
    return found


async def gone(pid: int, started: int, timeout_s: float | None = None) -> bool:
    """Wait until the process is gone; False when it is not after ``timeout_s``."""
    if start_time(pid) != started:
        return True
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(handle, ended.set)
    try:
        if start_time(pid) != started:
            return True
        async with asyncio.timeout(timeout_s):
            await ended.wait()
        return True
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(handle)
        os.close(handle)


async def end_all(pids: list[int], grace_s: float) -> None:
    """TERM, then KILL after ``grace_s``; returns when all are gone."""
    alive = [(pid, started) for pid in pids if (started := start_time(pid)) is not None]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid, started in alive:
            if start_time(pid) == started:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        left = await asyncio.gather(*(gone(pid, started, grace_s) for pid, started in alive))
        alive = [process for process, is_gone in zip(alive, left, strict=True) if not is_gone]
        if not alive:
            return
