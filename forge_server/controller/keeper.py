"""Keeps one trainer running for one run: starts it, restarts it with back-off, gives up with a reason.

A trainer is gone when its process is, or when it has let its lease run out. Both are answered alike:
what is left of it is ended and a new one started, which goes on from its last complete checkpoint.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable

import sqlalchemy as sa
import structlog
from sqlalchemy import Connection

from forge_server.controller.launcher import Launcher, Trainer, TrainerJob
from forge_server.domain.errors import ForgeError, TrainerError
from forge_server.store import tables as t
from forge_server.store.database import Store

log = structlog.get_logger(__name__)

FIRST_BACKOFF_S = 1.0
LAST_BACKOFF_S = 60.0
MAX_DEATHS = 5


class Keeper:
    """``start_s`` bounds the time from the start of a trainer to its first session.

    ``changed`` is called when it has given up; ``fault`` then says why.
    """

    def __init__(
        self,
        store: Store,
        launcher: Launcher,
        job: TrainerJob,
        changed: Callable[[], None],
        *,
        start_s: float = 900.0,
        first_backoff_s: float = FIRST_BACKOFF_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store, self._launcher, self._job = store, launcher, job
        self._start_s, self._first_backoff_s = start_s, first_backoff_s
        self._clock = clock
        self._trainer: Trainer | None = None
        self.fault: ForgeError | None = None
        self._let_go = False
        self._task = asyncio.create_task(self._run(changed))

    def let_go(self) -> None:
        """The trainer has done all its steps: when it leaves, no other is started."""
        self._let_go = True

    async def stop(self, grace_s: float = 0.0) -> None:
        """Stop keeping; the trainer may leave by itself within ``grace_s``, then it is ended."""
        self._task.cancel()
        await asyncio.wait({self._task})
        if self._trainer is not None and grace_s > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self._trainer.wait()
        await self._launcher.sweep(self._job.run_id)

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
            begun, before = self._clock(), await self._session()
            while True:
                session = await self._session()
                lease_until = session[1] if session != before else begun + self._start_s
                left = lease_until - self._clock()
                if left <= 0:
                    await trainer.stop()
                    return "its lease ran out" if session != before else "it opened no session"
                await asyncio.wait({exited}, timeout=left + 0.05)
                if exited.done():
                    return exited.result()
        finally:
            exited.cancel()

    async def _session(self) -> tuple[int, float]:
        """Fence and lease of the newest session."""
        c = t.trainer_sessions.c
        query = (
            sa.select(c.fence, c.lease_until)
            .where(c.run_id == self._job.run_id)
            .order_by(c.fence.desc())
            .limit(1)
        )
        row = await self._store.read(lambda connection: connection.execute(query).one_or_none())
        return (0, 0.0) if row is None else (row.fence, row.lease_until)

    async def _trained(self) -> int:
        def read(connection: Connection) -> int:
            c = t.batches.c
            query = sa.select(sa.func.count()).where(c.run_id == self._job.run_id, c.trained_at.is_not(None))
            return connection.execute(query).scalar_one()

        return await self._store.read(read)
