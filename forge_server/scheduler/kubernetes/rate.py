"""How fast the cluster is asked for pods, and how many: by what it took and what it refused. Own clock, no I/O."""

import asyncio
import contextlib
import random
import time


class Rate:
    """A token bucket: at most ``per_s`` per second on average, ``burst`` at once."""

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


class Gate:
    """Lets requests pass while they are welcome. After a refusal one passes at a time, ever more rarely; each that
    is taken lets the next one pass at once, and some in a row open the gate again."""

    OPENING = 3
    FIRST_S = 0.25

    def __init__(self, longest_s: float = 15.0) -> None:
        self._longest_s = longest_s
        self._pause = 0.0  # 0: open
        self._next = 0.0  # when the next may pass
        self._turn = 0  # counts refusals: those of one burst are one
        self._taken = 0
        self._hinted = asyncio.Event()

    @property
    def shut(self) -> bool:
        return self._pause > 0.0

    async def enter(self) -> int:
        """Wait until one may pass; the answer is what ``refused`` wants to know."""
        while self.shut:
            left = self._next - time.monotonic()
            if left <= 0:
                self._next = time.monotonic() + self._pause  # whoever comes now waits for a whole pause
                break
            self._hinted.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._hinted.wait(), left)
        return self._turn

    def refused(self, turn: int, wait_s: float = 0.0) -> None:
        """A request that passed in ``turn`` was refused; ``wait_s``: what the refusal asks for."""
        now = time.monotonic()
        if turn == self._turn:
            self._turn += 1
            self._taken = 0
            self._pause = min(max(2 * self._pause, self.FIRST_S), self._longest_s)
            self._next = now + self._pause * random.uniform(0.75, 1.0)
        self._next = max(self._next, now + wait_s)

    def taken(self) -> None:
        """A request was taken."""
        if not self.shut:
            return
        self._taken += 1
        self._pause = 0.0 if self._taken >= self.OPENING else self.FIRST_S
        self.hint()

    def hint(self) -> None:
        """Something has changed: the next may pass at once."""
        self._next = 0.0
        self._hinted.set()


class Capacity:
    """How many pods find a node, learnt from those that found none: as many as had one then, and one more now and
    then, to see whether there is more room by now."""

    FIRST_S = 15.0
    LONGEST_S = 300.0
    ENDLESS = 1 << 30

    def __init__(self) -> None:
        self._ceiling = self.ENDLESS
        self._pause = 0.0
        self._probe_at = 0.0

    def full(self, placed: int) -> None:
        """A pod found no node while ``placed`` others had one."""
        now = time.monotonic()
        self._ceiling = max(1, placed)
        if now >= self._probe_at:
            self._pause = min(max(2 * self._pause, self.FIRST_S), self.LONGEST_S)
            self._probe_at = now + self._pause

    def grown(self, placed: int) -> None:
        """``placed`` pods have a node now."""
        if placed > self._ceiling:
            self._ceiling = placed + max(1, placed // 8)
            self._pause = 0.0

    def room(self, count: int) -> int:
        """How many pods more than ``count`` are worth a try."""
        now = time.monotonic()
        if count >= self._ceiling and now >= self._probe_at:
            self._probe_at = now + max(self._pause, self.FIRST_S)
            return 1
        return max(0, self._ceiling - count)
