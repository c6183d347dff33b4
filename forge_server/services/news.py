"""Lets event streams sleep until something is committed."""

import asyncio

from forge_server.domain.events import EventRow


class News:
    """Hears committed events (subscribe it to the lifecycle); ``close`` ends every stream."""

    def __init__(self) -> None:
        self.count = 0
        self.over = False
        self._changed = asyncio.Event()

    def __call__(self, _: EventRow) -> None:
        self.count += 1
        self._wake()

    async def beyond(self, count: int, timeout_s: float) -> bool:
        """Wait until more than ``count`` commits were heard of, or the end; False when that took too long."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.count <= count and not self.over:
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        self.over = True
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
