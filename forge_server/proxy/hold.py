"""The gate between recorded intents and the engine.

Closed during a weight update: calls are held, not refused, each up to its ``max_hold_s``; then it gets 503
with Retry-After. What is past the gate is counted, so that the controller can wait until none is left (I9):
``hold`` -> ``drained`` -> swap -> ``release``.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from forge_server.proxy.dialects.base import Refusal

RETRY_AFTER_S = 5


class Gate:
    """Open from the start. ``running`` calls are past it, ``waiting`` ones before it."""

    def __init__(self) -> None:
        self._reasons: list[str] = []
        self._changed = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self.running = 0
        self.overrun = 0  # how often a hold went on although calls were past the gate
        self.waiting = 0

    @property
    def held(self) -> bool:
        return bool(self._reasons)

    async def hold(self, reason: str) -> None:
        """Let no further call pass. Holds nest: each needs its own ``release``."""
        self._reasons.append(reason)

    async def release(self) -> None:
        """Take back one hold; the last one lets every waiting call pass."""
        if not self._reasons:
            raise RuntimeError("the gate is not held")
        self._reasons.pop()
        if not self._reasons:
            self._changed.set()
            self._changed = asyncio.Event()

    async def drained(self, timeout: float) -> bool:  # noqa: ASYNC109
        """Wait until no call is past the gate; False when some still were after ``timeout`` seconds."""
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        except TimeoutError:
            self.overrun += 1
            return False
        return True

    @asynccontextmanager
    async def passage(self, max_hold_s: float) -> AsyncIterator[float]:
        """Pass the gate for the length of the block; yields the milliseconds waited. Raises ``Refusal``
        503."""
        held_ms = await self._wait(max_hold_s) if self._reasons else 0.0
        self.running += 1
        self._idle.clear()
        try:
            yield held_ms
        finally:
            self.running -= 1
            if not self.running:
                self._idle.set()

    async def _wait(self, max_hold_s: float) -> float:
        began = time.monotonic()
        self.waiting += 1
        try:
            async with asyncio.timeout(max_hold_s):
                while self._reasons:
                    await self._changed.wait()
        except TimeoutError:
            reason = ", ".join(self._reasons)
            raise Refusal(
                503, "held", f"held for {max_hold_s:g} s ({reason}); try again", retry_after=RETRY_AFTER_S
            ) from None
        finally:
            self.waiting -= 1
        return (time.monotonic() - began) * 1000.0
