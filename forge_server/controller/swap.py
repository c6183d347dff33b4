"""Puts a policy version behind the proxy: hold, drain, load, live, release.

Invariant I9: no call is answered while it is unknown what the engine serves. The row says ``loading``
before the first call is held and ``live`` only after the engine has passed its probe; the gate is
released after that, or after the engine refused the checkpoint and still serves the old version. When
the engine itself fails, the row stays ``loading`` and the gate stays shut: the same load is tried again
until it succeeds.
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
from forge_server.domain.errors import CheckpointError
from forge_server.domain.events import HoldBegan, HoldEnded
from forge_server.domain.policy import Version
from forge_server.domain.states import PolicyState

log = structlog.get_logger(__name__)

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
        self.seconds: dict[int, float] = {}
        """How long the calls were held for each version that was loaded by this process."""

    async def load(self, version: int) -> SwapReport | None:
        """Make ``version`` live; None when it already is.

        Raises CheckpointError after the version was rejected (the old one serves), EngineError or
        EngineUnavailable when the engine failed (nothing serves; call again).
        """
        async with self._lock:
            row = await self._policies.get(version)
            if row.state is PolicyState.LIVE:
                return None
            return await self._load(row)

    async def restore(self) -> None:
        """After a restart of this process or of the engine: let the engine serve what the rows say.

        Raises as ``load`` does.
        """
        async with self._lock:
            row = policy.to_load(await self._policies.versions(), await self._weights.version())
            if row is None:
                return
            log.info("restoring the policy", policy=row.name, version=row.version, state=row.state)
            if row.state is PolicyState.LIVE:
                await self._serve(row)
                await self._release()
            else:
                await self._load(row)

    async def _load(self, row: Version) -> SwapReport:
        interrupted = row.state is PolicyState.LOADING
        began = self._clock()
        try:
            if row.run_id is not None and row.step is not None:
                identify(Path(row.path), row.manifest_sha256, row.run_id, row.step)
            if not interrupted:
                row = await self._policies.move(row, PolicyState.LOADING)
            began = self._clock()
            report = await self._serve(row)
        except CheckpointError as error:
            await self._refuse(row, error, reload=interrupted)
            raise
        await self._policies.move(row, PolicyState.LIVE)
        await self._release()
        self.seconds[row.version] = self._clock() - began
        return report

    async def _serve(self, row: Version) -> SwapReport:
        """Hold, drain, swap. The gate is left shut."""
        await self._events.apply(HoldBegan(reason=HOLD_REASON))
        await self._gate.hold(HOLD_REASON)
        if not await self._gate.drained(self._drain_s):
            log.warning("calls still in flight are aborted by the weight update", version=row.version)
        return await self._weights.swap(Path(row.path), row.version, row.manifest_sha256)

    async def _release(self) -> None:
        await self._gate.release()
        await self._events.apply(HoldEnded(reason=HOLD_REASON))

    async def _refuse(self, row: Version, error: CheckpointError, *, reload: bool) -> None:
        """The checkpoint is at fault. The live version serves on.

        With ``reload`` it is loaded again first: an interrupted swap may have left anything in the
        engine.
        """
        log.error("checkpoint refused", policy=row.name, version=row.version, reason=str(error))
        if row.state is PolicyState.EXPORTED:
            await self._policies.move(row, PolicyState.REJECTED, str(error))
        elif row.state is PolicyState.LOADING:
            serving = policy.live(await self._policies.versions())
            if reload and serving is not None:
                await self._serve(serving)
            to = PolicyState.REJECTED if row.live_at is None else PolicyState.RETIRED
            await self._policies.move(row, to, str(error))
            await self._release()
