"""Where an engine comes from: a URL that somebody else looks after, or (``managed.py``) a process of
our own."""

from pathlib import Path
from typing import Protocol

import msgspec

from forge_server.engine.checkpoint import Policy


class Address(msgspec.Struct, frozen=True):
    """A listening engine. ``loaded`` is the folder it was started with, None when that is not known."""

    url: str
    loaded: Path | None


class Host(Protocol):
    """Provides one listening engine, as often as it is asked."""

    async def up(self, policy: Policy) -> Address:
        """Return once an engine listens, started with ``policy`` if it had to be started. Raises
        EngineError."""

    async def gone(self) -> None:
        """Return when the engine's process has ended; never, when that cannot be seen."""

    async def discard(self) -> None:
        """End the engine, so that the next ``up`` gives a fresh one; nothing, when it is not ours to end."""
