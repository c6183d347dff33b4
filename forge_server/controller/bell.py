"""A wake-up that cannot be missed: take the ear first, then look at the rows, then wait on the ear."""

import asyncio
from collections import defaultdict


class Bells:
    """One bell per key (a run id). Ringing wakes everyone who listens; nobody needs to listen."""

    def __init__(self) -> None:
        self._ears: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)

    def ear(self, key: str) -> asyncio.Event:
        """Set at the next ring of ``key``."""
        return self._ears[key]

    def ring(self, key: str) -> None:
        ear = self._ears.pop(key, None)
        if ear is not None:
            ear.set()

    def ring_all(self) -> None:
        for key in list(self._ears):
            self.ring(key)


async def listen(ear: asyncio.Event, timeout_s: float) -> bool:
    """Wait for the ring, at most ``timeout_s``; whether it rang."""
    try:
        async with asyncio.timeout(timeout_s):
            await ear.wait()
    except TimeoutError:
        return False
    return True
