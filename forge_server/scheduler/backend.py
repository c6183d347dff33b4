"""What the scheduler asks of a backend: start one runner per attempt, stop it, say what became of it.

A backend keeps no state of its own that matters: rows are written before it acts, and what it reports are
facts, which the lifecycle turns into outcomes.
"""

from collections.abc import Awaitable, Callable
from typing import Any, Literal, Protocol

import msgspec

from forge_server.domain.events import Fact
from forge_server.harness.plan import WORKDIR

PLENTY = 1 << 30
"""More attempts than anybody wants."""


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt to be launched. ``memory_mb`` and ``pids`` are its limits; it needs ``lifetime_s`` at most.

    ``workdir``: where its work folder is to be. ``image``: of its task; empty: the backend's default.
    """

    attempt_id: str
    rollout_id: str
    run_id: str
    harness: str
    join_token: str
    memory_mb: int
    pids: int
    lifetime_s: float
    workdir: str = WORKDIR
    image: str = ""


class Gone(msgspec.Struct, frozen=True, kw_only=True):
    """A runner's process or pod is no more. ``independent``: see ``BackendFact``. ``log``: its last words."""

    attempt_id: str
    fact: Fact
    evidence: dict[str, Any]
    independent: bool
    log: str = ""


OnGone = Callable[[Gone], Awaitable[object]]
"""Called on the event loop. What it returns is done once the fact is written; it need not be awaited."""


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """What a closer look at an attempt has shown. ``fact``: what ends it; None when it may go on."""

    evidence: dict[str, Any]
    fact: Fact | None = None
    independent: bool = False


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
    def trouble(self) -> str:
        """Why attempts cannot start now, through no fault of theirs; empty when all is well."""
        ...

    @property
    def full(self) -> str:
        """Why no further attempt is launched now although all is well; empty when there is room."""
        ...

    def room(self) -> int:
        """How many further attempts are worth a try now; those held back are not spent."""
        ...

    async def start(self, on_gone: OnGone) -> None:
        """Take over or clear away what an earlier life left; from now on call ``on_gone`` on the event loop.

        Raises SandboxError when attempts cannot be run as safely as demanded.
        """

    async def launch(self, launch: Launch) -> dict[str, Any]:
        """Start the runner; returns the handle by which it can be found again. Waits for as long as there is no
        room. Launching again what was launched before finds it. Raises LaunchFailed."""

    async def stop(self, attempt_id: str, grace_s: float) -> None:
        """End the runner and everything it started, by force after ``grace_s``; nothing left on return."""

    async def running(self) -> frozenset[str]:
        """The attempts that something is running for. Raises ClusterError when that cannot be known."""

    async def look(self, attempt_id: str, *, silent: bool = False) -> Look:
        """Look afresh at an attempt that is late or missing, or ``silent``: its runner had joined and is not heard
        any more. Raises ClusterError when nothing can be seen."""

    async def close(self, grace_s: float) -> None:
        """Stop whatever must not outlive the server."""
