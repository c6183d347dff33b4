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
from forge_server.scheduler.backend import Backend, Gone, Launch, LaunchFailed, Look
from forge_server.scheduler.plans import fact_of
from forge_server.store import keys
from forge_server.store import tables as t
from forge_server.store.database import Store

log = structlog.get_logger(__name__)

BACKSTOP_S = 600.0
"""Beyond an attempt's own clocks: holds and restarts of ours lengthen them."""

LAUNCHES = 64
"""Launches under way at a time: an attempt's startup clock runs from its row, not from when the backend gets to it."""

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
        self._unfinished: set[asyncio.Task[None]] = set()  # tasks that the next start would take up again
        self._launching: set[str] = set()
        self._orphans: frozenset[str] = frozenset()
        self._wake = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._dispatcher: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._accepting = False
        self._suspended = False
        self._stopping: set[str] = set()
        self._sweep_from = float("inf")
        self._startups_from = 0.0
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
        """Start the backend and begin to launch, first what an earlier life did not get to the end of. Raises
        SandboxError; then nothing was started."""
        await self._backend.start(self._gone)
        name = self._backend.name
        live, again = await self._store.read(lambda c: (queue.live(c, name), queue.unlaunched(c, name)))
        self._live = {attempt.attempt_id for attempt in live}
        self._lifecycle.subscribe(self._heard)
        self._accepting = True
        self._sweep_from = self._clock() + self._options.heartbeat_s
        self._note_idle()
        for attempt_id, item in again:
            self._launching.add(attempt_id)
            self._spawn(self._launch(attempt_id, item), unfinished=True)
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
        launching = tuple(self._launching)
        for task in self._unfinished:
            task.cancel()
        await self._settle()
        if self._backend.name == "local":  # no next start goes on with these launches
            for attempt_id in launching:
                await self._lifecycle.apply(e.ServerLost(attempt_id=attempt_id))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), drain_s)
        if self._backend.name == "local":  # pods outlive us and are adopted
            for attempt_id in tuple(self._live):
                await self._lifecycle.apply(e.ServerLost(attempt_id=attempt_id))
        await self._backend.close(self._options.stop_grace_s)
        await self._settle()

    async def sweep(self) -> None:
        """Tick: apply the deadlines that are behind. Of an attempt that is silent or late, a closer look is taken
        first: what explains it goes before the clock (I5), and while nothing can be seen nothing is concluded. The
        agent's clock only seals, which says nothing of the runner."""
        now = self._clock()
        if now < self._sweep_from:
            return
        if self._backend.trouble:  # attempts cannot start now: they get a whole startup time after that
            self._startups_from = now + self._options.startup_s
        doubtful = []
        for passed in await self._lifecycle.due(self._options.heartbeat_lost_s):
            if passed.clock is e.Clock.AGENT or passed.attempt_id not in self._live:
                await self._lifecycle.apply(passed)
            elif passed.clock is not e.Clock.STARTUP or not (
                passed.attempt_id in self._launching or now < self._startups_from
            ):
                doubtful.append(passed)
        for passed in doubtful:
            try:
                silent = passed.clock is not e.Clock.STARTUP
                look = await self._backend.look(passed.attempt_id, silent=silent)
            except ClusterError as error:
                log.warning("nothing is concluded while the backend is blind", error=str(error))
                return
            if look.fact is None:
                await self._lifecycle.apply(msgspec.structs.replace(passed, evidence=look.evidence))
            else:
                await self._lifecycle.apply(_fact(passed.attempt_id, look.fact, look))

    async def reconcile(self) -> None:
        """Tick: make rows and processes agree. The rows are read after the processes, so none is missed; what
        seems to be missing is looked for by its name (I7)."""
        try:
            running = await self._backend.running()
            known = self._live - self._launching  # a launch may begin and end while the rows are read
            rows = {
                a.attempt_id: a for a in await self._store.read(lambda c: queue.live(c, self._backend.name))
            }
            orphans = running - rows.keys()
            for attempt_id in orphans & self._orphans - self._stopping:
                self._stop(attempt_id)  # one that has just finished may still be leaving
            self._orphans = orphans
            self._live -= known - rows.keys()
            self._note_idle()
            overdue = self._clock() - self._options.missing_s
            there = running | self._launching
            for attempt in rows.values():
                if attempt.attempt_id in there or attempt.since > overdue:
                    continue
                look = await self._backend.look(attempt.attempt_id)
                if look.fact is not None:
                    launched = attempt.state is not AttemptState.QUEUED
                    fact = look.fact if launched else e.Fact.LAUNCH_FAILED
                    await self._lifecycle.apply(_fact(attempt.attempt_id, fact, look))
        except ClusterError as error:
            log.warning("nothing is concluded while the backend is blind", error=str(error))
        self._wake.set()

    # What is heard must be handled without waiting.

    def _heard(self, row: EventRow) -> None:
        if row.kind == "attempt_ended" and row.attempt_id is not None:
            self._live.discard(row.attempt_id)
            self._note_idle()
            if not row.data.get("finished"):  # a runner that has finished leaves by itself
                self._stop(row.attempt_id)
        if row.kind in _WAKING:
            self._wake.set()

    def _gone(self, gone: Gone) -> asyncio.Task[None]:
        return self._spawn(self._report(gone))

    def _stop(self, attempt_id: str) -> None:
        self._stopping.add(attempt_id)
        self._spawn(self._stopped(attempt_id), unfinished=True)

    async def _stopped(self, attempt_id: str) -> None:
        try:
            await self._backend.stop(attempt_id, self._options.stop_grace_s)
        finally:
            self._stopping.discard(attempt_id)

    async def _settle(self) -> None:
        """Let steps under way come to their end, within bounds."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=3 * self._options.stop_grace_s)

    def _note_idle(self) -> None:
        if self._live:
            self._idle.clear()
        else:
            self._idle.set()

    def _spawn(self, work: Coroutine[Any, Any, None], *, unfinished: bool = False) -> asyncio.Task[None]:
        """``unfinished``: with a backend that outlives us, the next start takes it up where it was left."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        if unfinished:
            self._unfinished.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._unfinished.discard(task)
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
        """Launch as many pending rollouts as there are free slots, and as can be under way."""
        free = min(self._in_flight - len(self._live), LAUNCHES - len(self._launching))
        if free <= 0 or not self._accepting or self._suspended:
            return
        room = self._backend.room()
        if room < free:
            self._wake_at(ROOM_S)
            free = room
        if free <= 0:
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
            self._spawn(self._launch(attempt_id, item), unfinished=True)

    def _wake_at(self, seconds: float) -> None:
        """Fill again after ``seconds``, or before that for another reason."""
        loop = asyncio.get_running_loop()
        at = loop.time() + max(0.0, seconds) + 0.001
        if self._timer is not None:
            if loop.time() < self._timer.when() <= at and not self._timer.cancelled():
                return
            self._timer.cancel()
        self._timer = loop.call_at(at, self._wake.set)

    async def _launch(self, attempt_id: str, item: queue.Pending) -> None:
        try:
            if not await self._admit(attempt_id, item):
                return
            plan = await self._plans.plan(attempt_id)
            handle = await self._backend.launch(self._order(attempt_id, item, plan))
            launched = e.AttemptLaunched(
                attempt_id=attempt_id, handle=handle, startup_s=self._options.startup_s
            )
            await self._lifecycle.apply(launched)
        except (SpecError, TaskError) as error:
            await self._fail(attempt_id, fact_of(error), {"error": str(error)})
        except LaunchFailed as error:
            await self._fail(attempt_id, error.fact, error.evidence)
        finally:
            self._launching.discard(attempt_id)
            self._wake.set()
        if attempt_id not in self._live:  # it was ended while it was being launched
            await self._backend.stop(attempt_id, self._options.stop_grace_s)

    async def _admit(self, attempt_id: str, item: queue.Pending) -> bool:
        """Write the attempt's row; False when the rollout was taken, cancelled or paused meanwhile, or when the
        attempt of an earlier life has ended or its runner has joined."""
        queued = e.AttemptQueued(
            attempt_id=attempt_id, rollout_id=item.rollout_id, backend=self._backend.name
        )
        launching = e.AttemptLaunching(attempt_id=attempt_id, startup_s=self._options.startup_s)
        if not (await self._lifecycle.apply(queued)).ok:
            self._live.discard(attempt_id)
            self._note_idle()
            return False
        return (await self._lifecycle.apply(launching)).ok

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
            workdir=plan.workdir,
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


def _fact(attempt_id: str, fact: e.Fact, look: Look) -> e.BackendFact:
    return e.BackendFact(
        attempt_id=attempt_id, fact=fact, evidence=look.evidence, independent=look.independent
    )


def _replace_log(connection: sa.Connection, row: dict[str, str], tail: bytes) -> None:
    logs = t.attempt_logs
    which = (logs.c.attempt_id == row["attempt_id"]) & (logs.c.stream == row["stream"])
    connection.execute(sa.delete(logs).where(which))
    connection.execute(sa.insert(logs), {**row, "tail": tail})
