"""Keeps one trainer running for one run: starts it, restarts it with back-off, gives up with a reason.

A trainer is gone when its process is, or when it has let its lease run out. Both are answered alike:
what is left of it is ended and a new one started, which goes on from its last complete checkpoint. A lease that could
not be renewed because the server stood still, or its database took no writes, has not run out: a whole one is given
from when it is heard again.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import TypeVar

import sqlalchemy as sa
import structlog
from sqlalchemy import Connection

from forge_server.controller.launcher import Launcher, Trainer, TrainerJob
from forge_server.domain.errors import ForgeError, StoreError, TrainerError
from forge_server.lifecycle import liveness
from forge_server.store import tables as t
from forge_server.store.database import Store

log = structlog.get_logger(__name__)

FIRST_BACKOFF_S = 1.0
LAST_BACKOFF_S = 60.0
MAX_DEATHS = 5

LOOK_S = 5.0
"""How often it is looked whether a session was opened, and whether its lease still runs."""

AGAIN_S = 1.0
"""Between two tries of a database in trouble."""

T = TypeVar("T")


class Keeper:
    """``start_s`` bounds the time from the start of a trainer to its first session; ``lease_s`` is that of sessions.

    ``changed`` is called when it has given up; ``fault`` then says why.
    """

    def __init__(
        self,
        store: Store,
        launcher: Launcher,
        job: TrainerJob,
        changed: Callable[[], None],
        *,
        lease_s: float = 60.0,
        start_s: float = 900.0,
        first_backoff_s: float = FIRST_BACKOFF_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store, self._launcher, self._job = store, launcher, job
        self._lease_s, self._start_s, self._first_backoff_s = lease_s, start_s, first_backoff_s
        self._clock = clock
        self._trainer: Trainer | None = None
        self.fault: ForgeError | None = None
        self._let_go = False
        self._task = asyncio.create_task(self._run(changed))

    @property
    def over(self) -> bool:
        """Whether no trainer is kept any more: it was let go, or there is a ``fault``."""
        return self._task.done()

    def let_go(self) -> None:
        """The trainer has done all its steps: when it leaves, no other is started."""
        self._let_go = True

    async def stop(self, grace_s: float = 0.0) -> bool:
        """Stop keeping; the trainer may leave by itself within ``grace_s``, then it is ended. Whether it is."""
        self._task.cancel()
        await asyncio.wait({self._task})
        if self._trainer is not None and grace_s > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self._trainer.wait()
        return await self._launcher.sweep(self._job.run_id)

    async def _run(self, changed: Callable[[], None]) -> None:
        try:
            await self._keep()
        except ForgeError as error:
            self.fault = error
        except Exception as error:
            log.exception("the trainer cannot be kept", run=self._job.run_id)
            self.fault = TrainerError(f"unexpected error: {error!r}", where=self._job.run_id)
        finally:
            changed()

    async def _keep(self) -> None:
        """Until cancelled or let go. Raises TrainerError when the trainer dies again and again without progress."""
        deaths, trained = 0, await self._trained()
        while not self._let_go:
            trainer = self._trainer = await self._launcher.launch(self._job)
            reason = await self._watch(trainer)
            await self._launcher.sweep(self._job.run_id)
            if self._let_go:
                return
            now_trained = await self._trained()
            deaths = deaths + 1 if now_trained == trained else 1
            trained = now_trained
            log.warning("the trainer is gone", run=self._job.run_id, reason=reason, deaths=deaths)
            if deaths >= MAX_DEATHS:
                raise TrainerError(
                    f"the trainer died {deaths} times without finishing a step ({reason})",
                    where=str(self._job.folder / "trainer.log"),
                    mend="read its log, then resume the run",
                )
            await asyncio.sleep(min(self._first_backoff_s * 2 ** (deaths - 1), LAST_BACKOFF_S))

    async def _watch(self, trainer: Trainer) -> str:
        """Until the trainer is gone or has lost its lease; why.

        A session that was there before counts only once it is renewed: until then it may be a dead
        trainer's.
        """
        exited = asyncio.ensure_future(trainer.wait())
        try:
            before, _, begun = await self._session()
            while True:
                session, heard_since, now = await self._session()
                lease_until = max(session[1], heard_since + self._lease_s)
                left = (lease_until if session != before else begun + self._start_s) - now
                if left <= 0:
                    await trainer.stop()
                    return "its lease ran out" if session != before else "it opened no session"
                await asyncio.wait({exited}, timeout=min(left, LOOK_S) + 0.05)
                if exited.done():
                    return exited.result()
        finally:
            exited.cancel()

    async def _session(self) -> tuple[tuple[int, float], float, float]:
        """Fence and lease of the newest session, since when its renewals can be heard, and when that was so."""
        c = t.trainer_sessions.c
        query = (
            sa.select(c.fence, c.lease_until)
            .where(c.run_id == self._job.run_id)
            .order_by(c.fence.desc())
            .limit(1)
        )

        def read(connection: Connection) -> tuple[tuple[int, float], float, float]:
            now, row = self._clock(), connection.execute(query).one_or_none()
            session = (0, 0.0) if row is None else (row.fence, row.lease_until)
            return session, liveness.heard_since(connection, now), now

        return await self._read(read)

    async def _trained(self) -> int:
        def read(connection: Connection) -> int:
            c = t.batches.c
            query = sa.select(sa.func.count()).where(c.run_id == self._job.run_id, c.trained_at.is_not(None))
            return connection.execute(query).scalar_one()

        return await self._read(read)

    async def _read(self, fn: Callable[[Connection], T]) -> T:
        """However long it takes: a database in trouble is no reason to end a trainer."""
        while True:
            try:
                return await self._store.read(fn)
            except StoreError as error:
                log.error("the database is in trouble, trying again", run=self._job.run_id, reason=str(error))
                await asyncio.sleep(AGAIN_S)
