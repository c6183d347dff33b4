"""What the scheduler asks of a backend: start one runner per attempt, stop it, say what became of it.

A backend keeps no state of its own that matters: rows are written before it acts, and what it reports are
facts, which the lifecycle turns into outcomes.
"""

from collections.abc import Callable
from typing import Any, Literal, Protocol

import msgspec

from forge_server.domain.events import Fact


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt to be launched. ``memory_mb`` and ``pids`` are its limits; it needs ``lifetime_s`` at most.

    ``image``: of its task; empty: the backend's default.
    """

    attempt_id: str
    rollout_id: str
    run_id: str
    harness: str
    join_token: str
    memory_mb: int
    pids: int
    lifetime_s: float
    image: str = ""


class Gone(msgspec.Struct, frozen=True, kw_only=True):
    """A runner's process or pod is no more. ``independent``: see ``BackendFact``. ``log``: its last words."""

    attempt_id: str
    fact: Fact
    evidence: dict[str, Any]
    independent: bool
    log: str = ""


class LaunchFailed(Exception):
    """The attempt could not be launched; ``fact`` and ``evidence`` go into its outcome."""

    def __init__(self, fact: Fact, evidence: dict[str, Any]) -> None:
        self.fact, self.evidence = fact, evidence
        super().__init__(f"{fact}: {evidence}")


class Backend(Protocol):
    """One way of running attempts."""

    @property
    def name(self) -> Literal["local", "kubernetes"]: ...

    @property
    def missing(self) -> Fact:
        """What it means when nothing runs for an attempt that was launched."""
        ...

    def room(self) -> bool:
        """Whether a further attempt is worth a try now; False holds launches back and spends none."""
        ...

    async def start(self, on_gone: Callable[[Gone], None]) -> None:
        """Take over or clear away what an earlier life left; from now on call ``on_gone`` on the event loop.

        Raises SandboxError when attempts cannot be run as safely as demanded.
        """

    async def launch(self, launch: Launch) -> dict[str, Any]:
        """Start the runner; returns the handle by which it can be found again. Raises LaunchFailed."""

    async def stop(self, attempt_id: str, grace_s: float) -> None:
        """End the runner and everything it started, by force after ``grace_s``; nothing left on return."""

    async def running(self) -> frozenset[str]:
        """The attempts that something is running for. Raises ClusterError when that cannot be known."""

    async def close(self, grace_s: float) -> None:
        """Stop whatever must not outlive the server."""
