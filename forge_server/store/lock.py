"""The server's lock: one server per database. A second one is refused before it can do harm.

SQLite: an flock on ``FILE.lock`` beside the database, held by the kernel as long as the process lives.
Postgres: an advisory lock of the writing connection itself, so that a server which has lost its
connection cannot write until it has the lock again.
"""

import fcntl
import os
from pathlib import Path

import sqlalchemy as sa

from forge_server.domain.errors import StoreError

_ADVISORY = 0x666F726765  # "forge"
_PATIENCE = "5s"
"""Postgres needs a moment to notice that the session of a server that was killed is gone."""
_TAKEN = "55P03"  # lock_not_available


class Taken(Exception):
    """Another process has the lock: ``owner`` is its id, or ``unknown``."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        super().__init__(owner)


class ProcessLock:
    """Holds an flock on ``path``, which tells this process's id, from construction to ``release``.

    Raises Taken when another process has it, OSError when the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.pread(self._fd, 32, 0).decode(errors="replace").strip()
            os.close(self._fd)
            raise Taken(owner or "unknown") from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def lock_file(database: Path) -> ProcessLock:
    """Take ``DATABASE.lock``. Raises StoreError."""
    path = database.with_name(database.name + ".lock")
    try:
        return ProcessLock(path)
    except Taken as taken:
        raise StoreError(
            f"another forge-server (process {taken.owner}) uses this database",
            where=str(database),
            mend="stop it first, or give this one its own [store] url",
        ) from None
    except OSError as error:
        raise StoreError(
            f"the lock file cannot be written ({error.strerror})",
            where=str(path),
            mend="make the folder of the database writable",
        ) from None


def take_advisory(connection: sa.Connection, where: str) -> None:
    """Take the Postgres lock for the life of ``connection``. Raises StoreError when another session has it and
    keeps it.
    """
    try:
        connection.execute(sa.text(f"SET LOCAL lock_timeout = '{_PATIENCE}'"))
        connection.execute(sa.select(sa.func.pg_advisory_lock(_ADVISORY)))
        connection.rollback()
    except sa.exc.OperationalError as error:
        connection.close()
        if getattr(error.orig, "sqlstate", None) != _TAKEN:
            raise
        raise StoreError(
            "another forge-server uses this database",
            where=where,
            mend="stop it first, or give this one its own [store] url",
        ) from None
