"""What the controller needs of others, stated here and handed in by the composition root."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from sqlalchemy import Connection

from forge_server.domain.engine import SwapReport
from forge_server.domain.events import Applied, Event, EventRow
from forge_server.domain.run import RunSettings


class Events(Protocol):
    """The lifecycle: one event and what else belongs into its transaction."""

    async def apply(self, event: Event, *, also: Callable[[Connection], None] | None = None) -> Applied: ...


class Lifecycle(Events, Protocol):
    """The lifecycle, listened to as well."""

    def subscribe(self, fn: Callable[[EventRow], None]) -> None:
        """Call ``fn`` on the loop with every committed state change, in commit order."""


class Weights(Protocol):
    """The engine, as far as its weights go."""

    async def swap(self, path: Path, version: int, manifest_sha256: str) -> SwapReport:
        """Load the checkpoint and serve it as ``version``.

        Raises CheckpointError when the checkpoint is at fault, EngineError or EngineUnavailable when
        the engine is. Either way what it served before is served again, or nothing is until it has come
        up anew with that.
        """


class Gate(Protocol):
    """The proxy's hold on calls. Each hold needs its release."""

    async def hold(self, reason: str) -> None:
        """Let no further call through to the engine."""

    async def drained(self, seconds: float, /) -> bool:
        """Wait until no call is in flight; False when some still are after so many seconds."""

    async def release(self) -> None:
        """Let the held calls go."""


class Evaluator(Protocol):
    """Evaluation rounds."""

    async def advance(self, run_id: str, settings: RunSettings, step: int, version: int) -> bool:
        """Take the round of ``step`` one act further; True once its result is stored."""
