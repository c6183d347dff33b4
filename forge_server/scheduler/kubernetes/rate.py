"""A token bucket for requests that change the cluster."""

import asyncio
import time


class Rate:
    """At most ``per_s`` per second on average, ``burst`` at once."""

    def __init__(self, per_s: float, burst: int) -> None:
        self._per_s, self._burst = per_s, float(burst)
        self._left, self._at = float(burst), time.monotonic()

    async def take(self) -> None:
        """Wait for a turn; turns are given in the order in which they were asked for."""
        now = time.monotonic()
        self._left = min(self._burst, self._left + (now - self._at) * self._per_s) - 1.0
        self._at = now
        if self._left < 0:
            await asyncio.sleep(-self._left / self._per_s)
