"""Lets event streams sleep until something is committed, and hands them the newest events without a read."""

import asyncio
from collections import deque
from itertools import islice

from forge_server.domain.events import EventRow

KEPT = 4096
_TURNS = ("run_", "mixture_", "evaluation_", "save_", "state_", "policy_", "hold_")


class News:
    """Hears committed events in commit order (subscribe it to the lifecycle); ``close`` ends every stream."""

    def __init__(self) -> None:
        self.count = 0
        self.turns = 0  # of them, those after which a run, what is asked of it or a policy is not as it was
        self.over = False
        self._changed = asyncio.Event()
        self._newest: deque[EventRow] = deque(maxlen=KEPT)

    def __call__(self, row: EventRow) -> None:
        self.count += 1
        self.turns += row.kind.startswith(_TURNS)
        self._newest.append(row)
        self._wake()

    def after(self, count: int) -> list[EventRow] | None:
        """What was heard after the first ``count``; None when that is no longer kept."""
        missed = self.count - count
        if missed > len(self._newest):
            return None
        return list(islice(self._newest, len(self._newest) - missed, None))

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
