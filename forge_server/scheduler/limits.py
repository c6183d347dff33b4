"""Memory and process limits of local attempts, by cgroup v1 or v2 where this process may make cgroups.

One folder per instance (named after it, so that a later life finds what an earlier one left) and below it one
per attempt. Where there are no cgroups, only the number of processes is limited (per user, by rlimit).
"""

import contextlib
import os
import signal
import time
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


class Cgroups:
    """The hierarchies in use: ``kind`` is ``cgroup v1``, ``cgroup v2`` or an empty string for none."""

    def __init__(self, kind: str, parents: list[Path]) -> None:
        self.kind, self._parents = kind, parents

    @classmethod
    def find(cls, instance: str, root: Path = ROOT) -> "Cgroups":
        """Make this instance's folders where it is allowed; otherwise there are none."""
        for kind, parents in (("cgroup v2", _v2(root)), ("cgroup v1", _v1(root))):
            made = [parent / f"forge-{instance}" for parent in parents]
            try:
                for folder in made:
                    folder.mkdir(exist_ok=True)
                    if kind == "cgroup v2":
                        (folder / "cgroup.subtree_control").write_text("+memory +pids")
            except OSError:
                continue
            if made:
                return cls(kind, made)
        return cls("", [])

    def make(self, attempt_id: str, memory_mb: int, pids: int) -> list[str]:
        """The attempt's folders, limits set (0: none); the runner puts the processes into them."""
        folders = []
        for parent in self._parents:
            folder = parent / attempt_id
            folder.mkdir(parents=True, exist_ok=True)
            folders.append(str(folder))
            for name, value in (
                ("memory.limit_in_bytes", memory_mb << 20),
                ("memory.max", memory_mb << 20),
                ("memory.swap.max", 0 if memory_mb else -1),
                ("pids.max", pids or -1),
            ):
                if (folder / name).exists() and value >= 0 and (value or name == "memory.swap.max"):
                    (folder / name).write_text(str(value))
        return folders

    def remove(self, attempt_id: str) -> None:
        """Remove the attempt's folders, which should be empty; stragglers are killed."""
        for parent in self._parents:
            clear(parent / attempt_id)

    def close(self) -> None:
        """Kill and remove whatever is left of this instance's attempts."""
        for parent in self._parents:
            clear_tree(parent)


def clear_instance(instance: str, root: Path = ROOT) -> None:
    """Clear what an earlier life of this instance left, wherever in the hierarchies that one lived."""
    name = f"forge-{instance}"
    for folder, inner, _ in os.walk(root):
        if name in inner:
            inner.remove(name)
            clear_tree(Path(folder, name))


def clear_tree(parent: Path) -> None:
    """Kill and remove the attempts' folders below an instance's folder, and that folder itself."""
    with contextlib.suppress(OSError):
        for folder in [p for p in parent.iterdir() if p.is_dir()]:
            clear(folder)
        parent.rmdir()


def clear(folder: Path, patience_s: float = 5.0) -> None:
    """Kill what runs in a cgroup and remove it."""
    give_up = time.monotonic() + patience_s
    while folder.is_dir():
        with contextlib.suppress(OSError):
            folder.rmdir()
            return
        with contextlib.suppress(OSError):
            for pid in (folder / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        if time.monotonic() > give_up:
            return
        time.sleep(0.01)


def _own(controller: str) -> str:
    """This process's cgroup in the hierarchy of ``controller`` ("" is cgroup v2)."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return path.strip("/")
    return ""


def _v1(root: Path) -> list[Path]:
    """Where folders go in cgroup v1: below our own cgroup, or at the top where our own is not to be seen."""
    parents = []
    for controller in ("memory", "pids"):
        top = root / controller
        if not (top / "cgroup.procs").exists():
            return []
        own = top / _own(controller)
        parents.append(own if own.is_dir() else top)
    return parents


def _v2(root: Path) -> list[Path]:
    """Where folders go in cgroup v2: below our own cgroup, if its controllers may be handed down."""
    base = root / _own("")
    try:
        if not {"memory", "pids"} <= set((base / "cgroup.controllers").read_text().split()):
            return []
        if (base / "cgroup.procs").read_text().split() == [str(os.getpid())]:
            # One with processes of its own may not hand controllers down: move aside (Delegate=yes).
            leaf = base / "forge-main"
            leaf.mkdir(exist_ok=True)
            (leaf / "cgroup.procs").write_text(str(os.getpid()))
        (base / "cgroup.subtree_control").write_text("+memory +pids")
    except OSError:
        return []
    return [base]
