"""Keeps N attempts in flight.

It reacts to committed events: an ended attempt frees a slot, an admitted rollout, a resumed run or the end of
a back-off fills one. Every step is a row before it is an act (``attempt_queued``, ``attempt_launching``, then
the backend), so that a death in between leaves an attempt that ends by its startup clock or at the next
start. Invariants I6 and I7: whatever the backend reports, forgets or invents, rows and processes are made to
agree.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import msgspec
import sqlalchemy as sa
import structlog
import zstandard

from forge_server.domain import events as e
from forge_server.domain.errors import ClusterError, SpecError, TaskError
from forge_server.domain.events import Applied, DeadlinePassed, Event, EventRow
from forge_server.domain.ids import new_id
from forge_server.domain.states import AttemptState
from forge_server.harness.plan import Plan
from forge_server.scheduler import queue
from forge_server.scheduler.backend import Backend, Gone, Launch, LaunchFailed
from forge_server.store import keys
from forge_server.store import tables as t
from forge_server.store.database import Store

log = structlog.get_logger(__name__)

BACKSTOP_S = 600.0
"""Beyond an attempt's own clocks: holds and restarts of ours lengthen them."""

ROOM_S = 0.5
"""How soon a backend that had no room is asked again."""

_WAKING = frozenset({"attempt_ended", "rollout_created", "rollout_pending", "group_created", "run_resumed"})


class Lifecycle(Protocol):
    async def apply(self, event: Event) -> Applied: ...

    async def due(self, silence_s: float) -> list[DeadlinePassed]: ...

    def subscribe(self, fn: Callable[[EventRow], None]) -> None: ...


class Plans(Protocol):
    async def plan(self, attempt_id: str) -> Plan:
        """What the attempt is to do. Raises SpecError or TaskError when that cannot be told."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Times in seconds. ``missing_s``: how long a row may be without its process before it is believed
    gone; ``heartbeat_s``: how often runners report, so that a restarted server hears them before it sweeps.
    """

    in_flight: int
    startup_s: float = 120.0
    heartbeat_lost_s: float = 60.0
    stop_grace_s: float = 10.0
    missing_s: float = 30.0
    heartbeat_s: float = 5.0


class Scheduler:
    """Made by ``app``; ``start`` after the lifecycle has recovered, ``stop`` before the store is closed."""

    def __init__(
        self,
        store: Store,
        lifecycle: Lifecycle,
        backend: Backend,
        plans: Plans,
        secret: bytes,
        options: Options,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store, self._lifecycle, self._backend, self._plans = store, lifecycle, backend, plans
        self._secret, self._options, self._clock = secret, options, clock
        self._in_flight = options.in_flight
        self._live: set[str] = set()
        self._launching: set[str] = set()
        self._orphans: frozenset[str] = frozenset()
        self._wake = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._dispatcher: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._accepting = False
        self._suspended = False
        self._sweep_from = float("inf")
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def in_flight(self) -> int:
        """How many attempts are to be kept in flight."""
        return self._in_flight

    @property
    def live(self) -> frozenset[str]:
        """The attempts in flight now."""
        return frozenset(self._live)

    def set_in_flight(self, n: int) -> None:
        """Keep ``n`` attempts in flight from now on; those above it run to their end."""
        self._in_flight = n
        self._wake.set()

    def suspend(self, suspended: bool) -> None:
        """Launch nothing while ``suspended``: an attempt without an engine would only wait."""
        self._suspended = suspended
        self._wake.set()

    async def start(self) -> None:
        """Start the backend and begin to launch. Raises SandboxError; then nothing was started."""
        await self._backend.start(self._gone)
        live = await self._store.read(lambda c: queue.live(c, self._backend.name))
        self._live = {attempt.attempt_id for attempt in live}
        self._lifecycle.subscribe(self._heard)
        self._accepting = True
        self._sweep_from = self._clock() + self._options.heartbeat_s
        self._note_idle()
        self._wake.set()
        self._dispatcher = asyncio.create_task(self._dispatch(), name="dispatcher")

    async def stop(self, *, drain_s: float = 0.0) -> None:
        """Launch nothing more, let attempts end for up to ``drain_s``, then end the rest; none is left on
        return.

        What was cut short is an infra failure of ours and is attempted again at the next start.
        """
        self._accepting = False
        if self._dispatcher is not None:
            self._dispatcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._dispatcher
        if self._timer is not None:
            self._timer.cancel()
        await self._settle()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), drain_s)
        if self._backend.name == "local":  # pods outlive us and are adopted
            for attempt_id in tuple(self._live):
                await self._lifecycle.apply(e.ServerLost(attempt_id=attempt_id))
        await self._backend.close(self._options.stop_grace_s)
        await self._settle()

    async def sweep(self) -> None:
        """Tick: apply the deadlines that are behind."""
        if self._clock() < self._sweep_from:
            return
        for passed in await self._lifecycle.due(self._options.heartbeat_lost_s):
            await self._lifecycle.apply(passed)

    async def reconcile(self) -> None:
        """Tick: make rows and processes agree. The rows are read after the processes, so none is missed
        (I7)."""
        try:
            running = await self._backend.running()
        except ClusterError as error:
            log.warning("nothing is concluded while the backend is blind", error=str(error))
            return
        rows = {a.attempt_id: a for a in await self._store.read(lambda c: queue.live(c, self._backend.name))}
        orphans = running - rows.keys()
        for attempt_id in orphans & self._orphans:  # one that has just finished may still be leaving
            self._spawn(self._backend.stop(attempt_id, self._options.stop_grace_s))
        self._orphans = orphans
        self._live &= rows.keys() | self._launching
        self._note_idle()
        overdue = self._clock() - self._options.missing_s
        for attempt in rows.values():
            if attempt.attempt_id in running | self._launching or attempt.since > overdue:
                continue
            launched = attempt.state is not AttemptState.QUEUED
            fact = self._backend.missing if launched else e.Fact.LAUNCH_FAILED
            evidence = {"reconcile": "the backend has nothing for it"}
            await self._lifecycle.apply(
                e.BackendFact(attempt_id=attempt.attempt_id, fact=fact, evidence=evidence)
            )
        self._wake.set()

    # What is heard must be handled without waiting.

    def _heard(self, row: EventRow) -> None:
        if row.kind == "attempt_ended" and row.attempt_id is not None:
            self._live.discard(row.attempt_id)
            self._note_idle()
            if not row.data.get("finished"):  # a runner that has finished leaves by itself
                self._spawn(self._backend.stop(row.attempt_id, self._options.stop_grace_s))
        if row.kind in _WAKING:
            self._wake.set()

    def _gone(self, gone: Gone) -> None:
        self._spawn(self._report(gone))

    async def _settle(self) -> None:
        """Let steps under way come to their end, within bounds."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=3 * self._options.stop_grace_s)

    def _note_idle(self) -> None:
        if self._live:
            self._idle.clear()
        else:
            self._idle.set()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a step of the scheduler failed", exc_info=task.exception())
            self._wake.set()

    async def _dispatch(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                await self._fill()
            except Exception:
                log.exception("dispatch failed")
                asyncio.get_running_loop().call_later(1.0, self._wake.set)

    async def _fill(self) -> None:
        """Launch as many pending rollouts as there are free slots."""
        free = self._in_flight - len(self._live)
        if free <= 0 or not self._accepting or self._suspended:
            return
        if not self._backend.room():
            self._wake_at(ROOM_S)
            return
        now = self._clock()
        found, moment = await self._store.read(
            lambda c: (queue.pending(c, now, free), queue.next_moment(c, now))
        )
        if moment is not None:
            self._wake_at(moment - now)
        launches = [(new_id("at"), item) for item in found]
        self._live.update(attempt_id for attempt_id, _ in launches)
        self._launching.update(attempt_id for attempt_id, _ in launches)
        self._note_idle()
        for attempt_id, item in launches:
            self._spawn(self._launch(attempt_id, item))

    def _wake_at(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(max(0.0, seconds) + 0.001, self._wake.set)

    async def _launch(self, attempt_id: str, item: queue.Pending) -> None:
        try:
            if not await self._admit(attempt_id, item):
                self._live.discard(attempt_id)
                self._note_idle()
                return
            plan = await self._plans.plan(attempt_id)
            handle = await self._backend.launch(self._order(attempt_id, item, plan))
            await self._lifecycle.apply(e.AttemptLaunched(attempt_id=attempt_id, handle=handle))
        except (SpecError, TaskError) as error:
            await self._fail(attempt_id, e.Fact.BAD_SPEC, {"error": str(error)})
        except LaunchFailed as error:
            await self._fail(attempt_id, error.fact, error.evidence)
        finally:
            self._launching.discard(attempt_id)
        if attempt_id not in self._live:  # it was ended while it was being launched
            await self._backend.stop(attempt_id, self._options.stop_grace_s)

    async def _admit(self, attempt_id: str, item: queue.Pending) -> bool:
        """Write the attempt's row; False when the rollout was taken, cancelled or paused meanwhile."""
        queued = e.AttemptQueued(
            attempt_id=attempt_id, rollout_id=item.rollout_id, backend=self._backend.name
        )
        launching = e.AttemptLaunching(attempt_id=attempt_id, startup_s=self._options.startup_s)
        if not (await self._lifecycle.apply(queued)).applied:
            return False
        return (await self._lifecycle.apply(launching)).applied

    async def _fail(self, attempt_id: str, fact: e.Fact, evidence: dict[str, Any]) -> None:
        log.warning("launch failed", attempt=attempt_id, fact=fact.value, **evidence)
        await self._lifecycle.apply(
            e.BackendFact(attempt_id=attempt_id, fact=fact, evidence=evidence, independent=True)
        )

    def _order(self, attempt_id: str, item: queue.Pending, plan: Plan) -> Launch:
        return Launch(
            attempt_id=attempt_id,
            rollout_id=item.rollout_id,
            run_id=item.run_id,
            harness=item.harness,
            join_token=keys.attempt_key(self._secret, attempt_id, "join"),
            memory_mb=plan.limits.memory_mb,
            pids=plan.limits.pids,
            lifetime_s=self._options.startup_s + plan.agent_s + plan.verify_s + plan.grace_s + BACKSTOP_S,
            image=plan.image,
        )

    async def _report(self, gone: Gone) -> None:
        if gone.log:
            row = {"attempt_id": gone.attempt_id, "stream": "runner"}
            tail = zstandard.compress(gone.log.encode("utf-8", "replace"))
            await self._store.write(lambda c: _replace_log(c, row, tail))
        fact = e.BackendFact(
            attempt_id=gone.attempt_id,
            fact=gone.fact,
            evidence=gone.evidence,
            independent=gone.independent,
        )
        await self._lifecycle.apply(fact)


def _replace_log(connection: sa.Connection, row: dict[str, str], tail: bytes) -> None:
    logs = t.attempt_logs
    which = (logs.c.attempt_id == row["attempt_id"]) & (logs.c.stream == row["stream"])
    connection.execute(sa.delete(logs).where(which))
    connection.execute(sa.insert(logs), {**row, "tail": tail})
