"""The lifecycle as runners and backends see it: before an attempt's end is judged, its books are closed.

The judgement reads the call log, and the last end of a group lets the controller cut samples at once. So the
attempt is sealed and the ends and deliveries of its calls are written first (I3, I4): a call that a dead
runner leaves in flight has an end, and a delivery that was known in memory is not missed.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

import structlog

from forge_server.domain import events as e
from forge_server.domain.events import Applied, DeadlinePassed, Event, EventRow
from forge_server.lifecycle.heartbeats import Instruction

log = structlog.get_logger(__name__)

PATIENCE_S = 20.0


class Lifecycle(Protocol):
    async def apply(self, event: Event) -> Applied: ...

    async def heartbeat(self, attempt_id: str) -> Instruction: ...

    async def due(self, silence_s: float) -> list[DeadlinePassed]: ...

    def subscribe(self, fn: Callable[[EventRow], None]) -> None: ...


class Sessions(Protocol):
    """The proxy's, of attempts that make calls."""

    def live(self, attempt_id: str) -> bool: ...

    async def settled(self, attempt_id: str) -> None:
        """Wait until the ends and deliveries of a sealed attempt are in the database."""


class Settling:
    """Passes everything on to ``lifecycle``; what ends an attempt waits for ``sessions``."""

    def __init__(self, lifecycle: Lifecycle, sessions: Sessions) -> None:
        self._lifecycle, self._sessions = lifecycle, sessions
        self.heartbeat, self.due, self.subscribe = lifecycle.heartbeat, lifecycle.due, lifecycle.subscribe

    async def apply(self, event: Event) -> Applied:
        if isinstance(event, e.RunnerFinished | e.BackendFact):
            if self._sessions.live(event.attempt_id):
                await self._lifecycle.apply(e.AttemptSealed(attempt_id=event.attempt_id, reason="over"))
            await self._settled(event.attempt_id)
        elif isinstance(event, e.DeadlinePassed):  # it may be early: it seals by itself where it must
            await self._settled(event.attempt_id)
        return await self._lifecycle.apply(event)

    async def _settled(self, attempt_id: str) -> None:
        """Not for ever: an attempt must end (I6), and one whose calls have no ends then is not trained."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self._sessions.settled(attempt_id)
        except TimeoutError:
            log.error("the books of an attempt could not be closed in time", attempt=attempt_id)
