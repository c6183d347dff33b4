"""User ids for attempts: a block that no other server on this machine uses at the same time.

The id is what keeps attempts apart, and what their processes are hunted down by; so two servers must never
share one. The block is held by a file lock, which dies with the server.
"""

import fcntl
import os
from pathlib import Path

from forge_server.domain.errors import SandboxError

FIRST = 50_000  # within the range that containers usually map, above people, below systemd's own
BLOCK = 500
BLOCKS = 16


class UserIds:
    """A held block of user ids."""

    def __init__(self, base: int, fd: int) -> None:
        self._base, self._fd = base, fd
        self._taken: set[int] = set()

    @classmethod
    def hold(cls, folder: Path | None = None) -> "UserIds":
        """Hold the first free block. Raises SandboxError when there is none."""
        place = folder or next(p for p in (Path("/run/lock"), Path("/run"), Path("/tmp")) if p.is_dir())
        for number in range(BLOCKS):
            file = place / f"forge-server-uids-{number}.lock"
            fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(fd)
                continue
            return cls(FIRST + number * BLOCK, fd)
        raise SandboxError(
            f"all {BLOCKS} blocks of user ids are in use",
            where=str(place),
            mend="stop a server that runs here",
        )

    def take(self) -> int:
        """A free user id. Raises OSError when all are taken."""
        for uid in range(self._base, self._base + BLOCK):
            if uid not in self._taken:
                self._taken.add(uid)
                return uid
        raise OSError(f"all {BLOCK} user ids are in use; lower [scheduler] in_flight")

    def give_back(self, uid: int) -> None:
        self._taken.discard(uid)

    def close(self) -> None:
        os.close(self._fd)
