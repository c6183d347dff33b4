"""What an attempt may take of this machine's disk, which is often that of the server's database too.

An agent that fills it would make its own bad result look like a failure of ours (I5). So while the agent runs we look:
often and cheaply at the disk, and at the attempt's own folder only when the disk runs low, or has lost so much that the
attempt may be above its limit. What is unlinked and still open counts.
"""

import contextlib
import os
import stat
import threading

from .confine import processes_of

LOOK_S = 0.5  # between two looks
PAUSE_S = 10.0  # at most, when they take long
ADD_UP_S = 60.0  # longest adding up
RESERVE = 1 << 30  # the disk runs low when less than this is free
LEAST = 2 << 30  # an attempt that finds less, and may write more, does not begin: that is not its doing
EXCESS = "disk_excess"  # why a harness was stopped that took more


def short(root: str, most: int) -> str:
    """Why an attempt that may write ``most`` bytes would find too little room there; empty when it finds enough."""
    free, need = _free(root), min(most, LEAST)
    if free >= need:
        return ""
    return (
        f"there are only {free >> 20} MiB left on the disk of {root}, and an attempt needs"
        f" {need >> 20}: make room, or lower [local] disk_mb to what attempts need"
    )


def _free(root: str) -> int:
    found = os.statvfs(root)
    return found.f_bavail * found.f_frsize


class Disk:
    """Of the attempt whose folder is ``root``. ``most`` in bytes, 0 for no limit."""

    def __init__(self, root: str, uid: int, most: int) -> None:
        self._root, self._uid, self.most = root, uid, most
        self._limit = 0
        self._lock = threading.Lock()

    def begin(self) -> None:
        """The folder is there. Of a small disk the attempt gets no more than what is free now, less a reserve. Raises
        OSError when that is too little."""
        if why := short(self._root, self.most):
            raise OSError(why)
        free = _free(self._root)
        self._reserve = min(RESERVE, free // 4)
        self._used, self._free_then = 0, free  # when it was last added up
        self._limit = min(self.most, free - self._reserve)

    def exceeded(self) -> bool:
        """Whether the attempt holds more than its limit now."""
        if not self._limit:
            return False
        with self._lock:
            free = _free(self._root)
            if free >= self._reserve and self._free_then - free <= self._limit - self._used:
                return False
            self._used, self._free_then = self._in_folder() + self._unlinked(), free
            return self._used > self._limit

    def _in_folder(self) -> int:
        """By a program, which bears folders nested without end. Too many files to add up in time count as none."""
        import subprocess  # seldom needed

        command = ("du", "-sx", "--block-size=1", "--", self._root)
        with contextlib.suppress(subprocess.TimeoutExpired):
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=ADD_UP_S)
            # files may vanish meanwhile: its exit says nothing
            return int((done.stdout.split() or [b"0"])[0])
        return 0

    def _unlinked(self) -> int:
        """What processes of the attempt's own user hold open, or mapped, that has no name any more."""
        device, sizes = os.stat(self._root).st_dev, {}
        for pid in processes_of(self._uid) if self._uid >= 0 else ():
            for place in (f"/proc/{pid}/fd", f"/proc/{pid}/map_files"):
                with contextlib.suppress(OSError), os.scandir(place) as entries:
                    for entry in entries:
                        with contextlib.suppress(OSError):
                            found = os.stat(entry.path)
                            if not found.st_nlink and found.st_dev == device and stat.S_ISREG(found.st_mode):
                                sizes[found.st_ino] = found.st_blocks * 512
        return sum(sizes.values())
