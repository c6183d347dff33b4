"""Heartbeats of runners, of which thousands come every few seconds: those that arrive while others are being written
share one look and one update.

A heartbeat alone is written at once; the next write is ``GATHER_S`` later at the earliest. Each is answered once it is
durable, from the state that the attempt had in the same transaction.
"""

import asyncio
import functools
import time
from collections.abc import Callable, Sequence

import msgspec
import sqlalchemy as sa

from forge_server.domain.states import AttemptState
from forge_server.lifecycle import deadlines
from forge_server.store import rows
from forge_server.store import tables as t
from forge_server.store.database import Store
from forge_server.store.rows import AttemptRow

GATHER_S = 0.05
"""What it adds to an answer at most, beside the write; runners ask every few seconds."""

MOST = 1000
"""In one write, which others have to wait for."""


class Instruction(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a heartbeat: ``stop`` means kill the harness, then seal, verify and finish.

    ``left_s`` is what is left on the clock that the attempt is under; None when it is under none.
    """

    stop: bool
    reason: str = ""
    left_s: float | None = None
    ended: bool = False


_ENDED = Instruction(stop=True, reason="ended", ended=True)


class Heartbeats:
    """``clock`` gives unix seconds."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.time) -> None:
        self._store, self._clock = store, clock
        self._waiting: list[tuple[str, asyncio.Future[Instruction]]] = []
        self._writing: asyncio.Task[None] | None = None

    async def note(self, attempt_id: str) -> Instruction:
        """Note that the runner lives; what it should do. An unknown attempt is told that it has ended. Raises
        StoreError."""
        answer: asyncio.Future[Instruction] = asyncio.get_running_loop().create_future()
        self._waiting.append((attempt_id, answer))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write(), name="heartbeats")
        return await answer

    async def _write(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[:MOST], self._waiting[MOST:]
            ids = sorted({attempt_id for attempt_id, _ in batch})
            try:
                told = await self._store.write(functools.partial(self._noted, ids))
            except Exception as error:
                for _, answer in batch:
                    if not answer.done():
                        answer.set_exception(error)
            else:
                for attempt_id, answer in batch:
                    if not answer.done():  # its runner may have hung up
                        answer.set_result(told.get(attempt_id, _ENDED))
            await asyncio.sleep(GATHER_S)
        self._writing = None

    def _noted(self, ids: Sequence[str], connection: sa.Connection) -> dict[str, Instruction]:
        """Instructions for those of the attempts that have not ended."""
        now = self._clock()
        a = t.attempts.c
        query = rows.select(AttemptRow).where(a.id.in_(ids), a.state != AttemptState.ENDED)
        found = rows.fetch(connection, AttemptRow, query)
        alive = [attempt.id for attempt in found]
        connection.execute(sa.update(t.attempts).where(a.id.in_(alive)).values(heartbeat_at=now))
        held = deadlines.open_holds(connection, now)
        told = {}
        for attempt in found:
            reason = attempt.stop_reason or ("sealed" if attempt.sealed_at is not None else "")
            told[attempt.id] = Instruction(
                stop=bool(reason), reason=reason, left_s=deadlines.left(attempt, now, held)
            )
        return told
