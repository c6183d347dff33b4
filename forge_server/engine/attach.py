"""An engine that somebody else runs, at a fixed URL."""

import asyncio

from forge_server.engine.checkpoint import Policy
from forge_server.engine.hosts import Address


class AttachedHost:
    """The engine at ``url``. Whether it listens is found out by asking it."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    async def up(self, policy: Policy) -> Address:
        return Address(self._url, loaded=None)

    async def gone(self) -> None:
        await asyncio.Event().wait()

    async def discard(self) -> None:
        """It is not ours to end."""
