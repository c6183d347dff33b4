"""What a server that was killed left behind: runner processes and attempt folders, found by this instance's
id.

A process is ours only if its own environment says so, in the words that only a backend of this instance
writes; a process that cannot be asked is not ours.
"""

import contextlib
import os
import select
import signal
from pathlib import Path

import structlog

from forge_server.runner.place import remove_tree

log = structlog.get_logger(__name__)
MARK = "FORGE_RUNNER_OF"


def marks(instance: str, attempt_id: str) -> dict[str, str]:
    """The environment that marks a runner's process."""
    return {MARK: instance, "FORGE_ATTEMPT": attempt_id}


def started_at(pid: int) -> int:
    """When a process started, in clock ticks since boot: with the pid it names a process for good."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def kill_runners(instance: str, wait_s: float = 10.0) -> int:
    """SIGKILL every process marked as a runner of ``instance``; returns how many there were.

    What runs inside their sandboxes dies with them.
    """
    found = 0
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            fd = os.pidfd_open(int(name))  # first: the answer below is then about this very process
            try:
                if _is_marked(int(name), instance):
                    found += 1
                    signal.pidfd_send_signal(fd, signal.SIGKILL)
                    poll = select.poll()
                    poll.register(fd, select.POLLIN)
                    poll.poll(int(wait_s * 1000))
            finally:
                os.close(fd)
    return found


def remove_folders(root: Path) -> int:
    """Delete what attempts left below ``root``; returns how many there were. What cannot be deleted is in nobody's
    way.
    """
    folders = [p for p in root.iterdir() if p.is_dir()] if root.is_dir() else []
    for folder in folders:
        try:
            remove_tree(str(folder))
        except OSError as error:
            log.warning("an attempt's folder stays", error=str(error))
    return len(folders)


def _is_marked(pid: int, instance: str) -> bool:
    environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return f"{MARK}={instance}".encode() in environ
