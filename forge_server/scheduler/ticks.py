"""What happens by the clock: a thin face of APScheduler's AsyncIOScheduler with its memory store.

A tick that is late runs once, never twice at a time; a tick that fails is logged and comes again.
"""

from collections.abc import Awaitable, Callable

import structlog
from apscheduler.schedulers.asyncio import AsyncIOScheduler  # type: ignore[import-untyped]

log = structlog.get_logger(__name__)


class Ticks:
    """Made once per server; ``every`` before or after ``start``."""

    def __init__(self) -> None:
        self._scheduler = AsyncIOScheduler(
            job_defaults={"coalesce": True, "max_instances": 1, "misfire_grace_time": None}
        )

    def every(self, seconds: float, what: str, fn: Callable[[], Awaitable[None]]) -> None:
        """Run ``fn`` every ``seconds``, the first time after one such pause."""

        async def tick() -> None:
            try:
                await fn()
            except Exception:
                log.exception("a tick failed", tick=what)

        self._scheduler.add_job(tick, "interval", seconds=seconds, id=what)

    def start(self) -> None:
        self._scheduler.start()

    def stop(self) -> None:
        if self._scheduler.running:
            self._scheduler.shutdown(wait=False)
