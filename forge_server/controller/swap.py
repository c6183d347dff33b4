"""Puts a policy version behind the proxy: hold, drain, load, live, release.

Invariant I9: no call is answered while weights change. The row says ``loading`` before the first call
is held, and ``live`` before the gate opens again. A checkpoint at fault is rejected; when the engine
fails, the version goes back to where it came from. In both cases the old version serves on. A kill in
between leaves ``loading``: the swap is done again.
"""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import structlog

from forge_server.controller.checkpoint import identify
from forge_server.controller.policies import Policies
from forge_server.controller.ports import Events, Gate, Weights
from forge_server.domain import policy
from forge_server.domain.engine import SwapReport
from forge_server.domain.errors import CheckpointError, ForgeError, StoreError
from forge_server.domain.events import HoldBegan, HoldEnded
from forge_server.domain.policy import Version
from forge_server.domain.states import PolicyState

log = structlog.get_logger(__name__)

FIRST_WAIT_S, LAST_WAIT_S = 0.2, 5.0  # between tries to write what must be written
HOLD_REASON: Literal["weight_update"] = "weight_update"


class Swapper:
    """One swap at a time. ``drain_s`` bounds the wait for calls in flight; the engine then aborts them."""

    def __init__(
        self,
        policies: Policies,
        events: Events,
        weights: Weights,
        gate: Gate,
        *,
        drain_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._policies, self._events, self._weights, self._gate = policies, events, weights, gate
        self._drain_s, self._clock = drain_s, clock
        self._lock = asyncio.Lock()
        self._holding = False
        self.held_s: dict[int, float] = {}
        """How long calls were held for each version that this process has loaded."""

    async def load(self, version: int) -> SwapReport | None:
        """Make ``version`` live; None when it already is.

        Raises CheckpointError (the version was rejected), EngineError or EngineUnavailable (try again);
        the old version serves on.
        """
        async with self._lock:
            row = await self._policies.get(version)
            if row.state is PolicyState.LIVE:
                return None
            return await self._load(row)

    async def restore(self) -> None:
        """After a start: do the swap again that the last stop interrupted. Raises as ``load`` does."""
        async with self._lock:
            row = policy.interrupted(await self._policies.versions())
            if row is not None:
                log.info("doing an interrupted weight update again", policy=row.name, version=row.version)
                await self._load(row)

    async def _load(self, row: Version) -> SwapReport:
        try:
            if row.run_id is not None and row.step is not None:
                identify(Path(row.path), row.manifest_sha256, row.run_id, row.step)
        except CheckpointError as error:
            await self._refuse(row, error)
            raise
        if row.state is not PolicyState.LOADING:
            row = await self._move(row, PolicyState.LOADING)
        began = self._clock()
        await self._hold()
        try:
            report = await self._weights.swap(Path(row.path), row.version, row.manifest_sha256)
        except CheckpointError as error:
            await self._refuse(row, error)
            await self._release()
            raise
        except ForgeError as error:
            back = PolicyState.EXPORTED if row.live_at is None else PolicyState.RETIRED
            await self._move(row, back, str(error))
            await self._release()
            raise
        await self._move(row, PolicyState.LIVE)
        await self._release()
        self.held_s[row.version] = self._clock() - began
        return report

    async def _move(self, row: Version, to: PolicyState, reason: str = "") -> Version:
        """A step that must be written before anything else happens, however long the database takes: with
        new weights under the old number, or a hold that nobody ends, nothing could go on.
        """
        wait = FIRST_WAIT_S
        while True:
            try:
                if wait > FIRST_WAIT_S and await self._policies.stands(row, to):
                    return await self._policies.get(row.version)  # a write that seemed to fail was made
                return await self._policies.move(row, to, reason)
            except StoreError as error:
                log.error("a step of the weight update is not written yet", step=to, reason=str(error))
                await asyncio.sleep(wait)
                wait = min(2 * wait, LAST_WAIT_S)

    async def _hold(self) -> None:
        await self._events.apply(HoldBegan(reason=HOLD_REASON))
        if not self._holding:  # an update that broke off unexpectedly holds calls until it is done again
            self._holding = True
            await self._gate.hold(HOLD_REASON)
        if not await self._gate.drained(self._drain_s):
            log.warning("calls still in flight are aborted by the weight update")

    async def _release(self) -> None:
        self._holding = False
        await self._gate.release()
        wait = FIRST_WAIT_S
        while True:
            try:
                await self._events.apply(HoldEnded(reason=HOLD_REASON))
                return
            except StoreError as error:  # an open hold would stop every agent's clock
                log.error("the end of a hold is not written yet", reason=str(error))
                await asyncio.sleep(wait)
                wait = min(2 * wait, LAST_WAIT_S)

    async def _refuse(self, row: Version, error: CheckpointError) -> None:
        """The checkpoint is at fault. One that was live before stays what it was."""
        log.error("checkpoint refused", policy=row.name, version=row.version, reason=str(error))
        if row.live_at is None:
            await self._move(row, PolicyState.REJECTED, str(error))
        elif row.state is PolicyState.LOADING:
            await self._move(row, PolicyState.RETIRED, str(error))
