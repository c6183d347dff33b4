"""The data folder of one server: private, locked against a second server, and where clients find its address.

Every file that outlives the server lies in it: database, keys, checkpoints, logs.
"""

import contextlib
import fcntl
import os
from pathlib import Path
from typing import Self

from forge_server.domain.errors import ConfigError
from forge_server.store.lock import ProcessLock, Taken

ADDRESS = "control.url"
SOCKET = "pod.sock"
_LOCK = "server.lock"
_MEND = "stop it first, or give this one its own [server] data_dir"


class DataFolder:
    """Holds the folder at ``path`` from construction to ``close``; made when missing.

    Raises ConfigError: it cannot be written, or another server has it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        make(path)
        try:
            self._lock = ProcessLock(path / _LOCK)
        except Taken as taken:
            raise ConfigError(
                f"another forge-server (process {taken.owner}) uses this folder", where=str(path), mend=_MEND
            ) from None
        except OSError as error:
            raise _unusable(path, error) from None
        self._held = True
        (path / ADDRESS).unlink(missing_ok=True)  # of a server that was killed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def socket(self) -> Path:
        """Where local runners reach the pod-facing listener."""
        return self.path / SOCKET

    def hide_database(self) -> None:
        """The SQLite files are for their owner's eyes."""
        for file in self.path.glob("forge.db*"):
            file.chmod(0o600)

    def tell(self, control_url: str) -> None:
        """Let clients that run beside the folder find the server."""
        fresh = self.path / f"{ADDRESS}.new"
        fresh.write_text(f"{control_url}\n")
        fresh.replace(self.path / ADDRESS)

    def close(self) -> None:
        """The server is gone. Idempotent."""
        if self._held:
            (self.path / ADDRESS).unlink(missing_ok=True)
            self._lock.release()
            self._held = False


def holder(path: Path) -> str | None:
    """The process id of the server that has the folder, or None. Raises ConfigError: it cannot be written."""
    try:
        if not path.exists():
            parent = next(p for p in path.parents if p.exists())
            if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
                raise PermissionError(0, f"{parent} is not writable")
            return None
        if not path.is_dir():
            raise NotADirectoryError(0, "not a folder")
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(0, "not writable")
        with contextlib.suppress(FileNotFoundError), (path / _LOCK).open() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                return lock.read().strip() or "unknown"
    except OSError as error:
        raise _unusable(path, error) from None
    return None


def make(path: Path) -> None:
    """Make the folder when it is missing. Raises ConfigError.

    It is ours alone, save that under root the users of sandboxed agents may pass to the folders given to them.
    """
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(mode=0o711 if os.geteuid() == 0 else 0o700)
    except OSError as error:
        raise _unusable(path, error) from None


def _unusable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"the data folder cannot be used ({error.strerror})",
        where=str(path),
        mend="make it writable, or set [server] data_dir",
    )
