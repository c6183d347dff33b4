"""The lifecycle: the only writer of the state of runs, groups, rollouts and attempts.

Owns the way from an event to committed rows to whoever must act on them. One event is one transaction;
listeners hear of its state changes after COMMIT, in commit order, whatever became of the caller.
Invariant I6 lives here: every rollout ends exactly once, because every step is a compare-and-set and the
first terminal event wins.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
import structlog

from forge_server.domain import events as e
from forge_server.domain.events import Applied, DeadlinePassed, Event, EventRow, Refusal
from forge_server.lifecycle import attempts, deadlines, liveness, recover, runs
from forge_server.lifecycle.change import Change, Stale
from forge_server.lifecycle.heartbeats import Heartbeats, Instruction
from forge_server.lifecycle.recover import Recovery
from forge_server.store.database import Store

log = structlog.get_logger(__name__)

BREAKER_AFTER = 12
"""Infra failures in a row that pause a run."""

_HANDLERS: dict[type[Event], Callable[[Change, Any], Refusal | None]] = {
    e.RunCreated: runs.run_created,
    e.RunPaused: runs.run_paused,
    e.RunResumed: runs.run_resumed,
    e.RunEnded: runs.run_ended,
    e.GroupCreated: runs.group_created,
    e.GroupDropped: runs.group_dropped,
    e.BatchAssembled: runs.batch_assembled,
    e.RolloutCreated: runs.rollout_created,
    e.RolloutCancelled: runs.rollout_cancelled,
    e.RolloutRetried: runs.rollout_retried,
    e.RolloutRegistered: runs.rollout_registered,
    e.HoldBegan: runs.hold_began,
    e.HoldEnded: runs.hold_ended,
    e.Noted: runs.noted,
    e.AttemptQueued: attempts.queued,
    e.AttemptLaunching: attempts.launching,
    e.AttemptLaunched: attempts.launched,
    e.RunnerJoined: attempts.joined,
    e.HarnessStarted: attempts.harness_started,
    e.StopRequested: attempts.stop_requested,
    e.BudgetExceeded: attempts.budget_exceeded,
    e.AttemptSealed: attempts.sealed,
    e.VerifierFetched: attempts.verifier_fetched,
    e.RewardReported: attempts.reward_reported,
    e.RunnerFinished: attempts.finished,
    e.BackendFact: attempts.backend_fact,
    e.DeadlinePassed: attempts.deadline_passed,
    e.ServerLost: attempts.server_lost,
}


class Lifecycle:
    """Applies events. ``clock`` gives unix seconds."""

    def __init__(
        self, store: Store, *, clock: Callable[[], float] = time.time, breaker_after: int = BREAKER_AFTER
    ) -> None:
        self._store, self._clock, self._breaker_after = store, clock, breaker_after
        self._heartbeats = Heartbeats(store, clock)
        self._listeners: list[Callable[[EventRow], None]] = []

    def subscribe(self, fn: Callable[[EventRow], None]) -> None:
        """Call ``fn`` on the event loop with every committed state change, in commit order.

        It must return at once; what it raises is logged and does not reach the others.
        """
        self._listeners.append(fn)

    async def apply(self, event: Event, *, also: Callable[[sa.Connection], None] | None = None) -> Applied:
        """Apply one event in one transaction; see ``Applied``.

        ``also`` writes further rows in the same transaction, if the event was applied. It may run twice.
        Raises StoreError; then the event was not applied.
        """
        handler = _HANDLERS[type(event)]

        def write(connection: sa.Connection) -> Applied:
            change = Change(connection, self._clock(), self._breaker_after)
            refusal = handler(change, event)
            if refusal is None and also is not None:
                also(connection)
            return Applied(refusal=refusal, rows=tuple(change.rows))

        size = len(event.body) if isinstance(event, e.BatchAssembled) else 512
        for _ in range(9):
            try:
                return await self._store.write(write, size=size, after=self._tell)
            except Stale:
                continue
        return await self._store.write(write, size=size, after=self._tell)

    async def heartbeat(self, attempt_id: str) -> Instruction:
        """Note that the runner lives; what it should do. An unknown attempt is told that it has ended."""
        return await self._heartbeats.note(attempt_id)

    async def beat(self) -> None:
        """Note that the server lives, every ``instance.BEAT_S``; a late one tells of a downtime. Raises StoreError."""
        down_s = await self._store.write(lambda connection: liveness.beat(connection, self._clock()))
        if down_s:
            log.warning("the server stood still: no clock is charged for that", seconds=round(down_s, 1))

    async def due(self, silence_s: float) -> list[DeadlinePassed]:
        """Deadlines that are behind, to be applied one by one; ``silence_s``: heartbeats may be missing
        so long. None while the server itself stood still.
        """
        now = self._clock()

        def read(connection: sa.Connection) -> list[DeadlinePassed]:
            return [] if liveness.unsettled(connection, now) else deadlines.due(connection, now, silence_s)

        return await self._store.read(read)

    async def recover(self) -> Recovery:
        """After a start, before anything else is applied: see ``lifecycle.recover``. Safe to repeat."""
        now = self._clock()
        found = await self._store.write(lambda connection: recover.settle(connection, now))
        await asyncio.gather(*(self.apply(e.ServerLost(attempt_id=lost)) for lost in found.lost_attempts))
        reason = "its registration was interrupted"
        half = (e.RolloutCancelled(rollout_id=each, reason=reason) for each in found.half_registered)
        await asyncio.gather(*map(self.apply, half))
        return found

    def _tell(self, applied: Applied) -> None:
        for row in applied.rows:
            for listener in self._listeners:
                try:
                    listener(row)
                except Exception:
                    log.exception("a listener failed", event_id=row.id, event_kind=row.kind)
