"""Holds calls and launches while the engine is away, so that its restart costs time and not attempts.

The agent clocks stand still meanwhile (``HoldBegan``). A call that was in flight when the engine died is refused
with Retry-After by the proxy; the harness's retry then waits at the gate.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Literal, Protocol

import structlog

from forge_server.domain.errors import StoreError
from forge_server.domain.events import Applied, Event, HoldBegan, HoldEnded

log = structlog.get_logger(__name__)

REASON: Literal["engine_down"] = "engine_down"
LOOK_S = 0.25


class Engine(Protocol):
    @property
    def ready(self) -> bool: ...

    @property
    def reason(self) -> str: ...


class Gate(Protocol):
    async def hold(self, reason: str) -> None: ...

    async def release(self) -> None: ...


class EngineWatch:
    """``launches`` is told whether new attempts make sense. Look once before calls come in, then run it as a task,
    until cancelled."""

    def __init__(
        self,
        engine: Engine,
        gate: Gate,
        apply: Callable[[Event], Awaitable[Applied]],
        launches: Callable[[bool], Any],
    ) -> None:
        self._engine, self._gate, self._apply, self._launches = engine, gate, apply, launches
        self._held = False

    async def run(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """On return calls are held if the engine is away."""
        if self._engine.ready == self._held:
            try:
                await self._turn(self._held)
                self._held = not self._held
            except StoreError as error:  # the hold is a row first; the next look tries again
                log.error("the engine's hold is not written", error=str(error))

    async def _turn(self, held: bool) -> None:
        if held:
            await self._apply(HoldEnded(reason=REASON))
            await self._gate.release()
        else:
            await self._apply(HoldBegan(reason=REASON))
            await self._gate.hold(REASON)
        self._launches(held)
        log.info("engine", ready=held, reason=self._engine.reason)
