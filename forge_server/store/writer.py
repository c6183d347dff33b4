"""The one writer: every change of the database goes through this thread, in transactions that many share.

Natural group commit: what queued while the last commit ran is one transaction, so that a lone caller
waits for one commit and sixty-four callers share it. A unit (the rows or the function of one caller) is
durable when its caller is answered, and fails alone: a batch with a failing unit is rolled back and run
again with a savepoint around each unit, so a unit's function may run more than once and must do nothing
but talk to the connection. A fault of the database itself (full disk, lock, lost connection) is told to
everybody who waits; the writer reconnects and goes on. A connection to Postgres that is lost during COMMIT leaves
open whether that was taken: Postgres is asked, and only what it did not take is told as failed (its documentation,
"Transaction ID and Snapshot Information Functions").

Units that wait at the same time may run in any order (rows for one table are gathered into one
``executemany``); whoever depends on a unit awaits it first. The queue is bounded in bytes: above it
callers wait, which holds calls.
"""

import asyncio
import collections
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import sqlalchemy as sa
import structlog

from forge_server.domain.errors import StoreError
from forge_server.domain.histogram import COMMIT_S, Histogram
from forge_server.store import statements
from forge_server.store.faults import database_fault

log = structlog.get_logger(__name__)

Row = dict[str, Any]
Rows = Sequence[tuple[sa.Executable, Row]]
Work = Callable[[sa.Connection], Any]

QUEUE_BYTES = 64 * 1024 * 1024
BATCH_UNITS = 1000
DOUBT_S = 10.0
"""How long it may take to reach Postgres again and ask what became of a COMMIT."""

_TRANSACTION = sa.text("SELECT pg_current_xact_id_if_assigned()::text")
_STATUS = sa.text("SELECT pg_xact_status(CAST(:transaction AS xid8))")


class _Unit:
    __slots__ = ("after", "error", "future", "result", "size", "work")

    def __init__(
        self, work: Work | Rows, size: int, future: asyncio.Future[Any], after: Callable[[Any], None] | None
    ) -> None:
        self.work, self.size, self.future, self.after = work, size, future, after
        self.result: Any = None
        self.error: BaseException | None = None


def row_bytes(row: Row) -> int:
    """Roughly what a row holds in memory."""
    size = 200
    for value in row.values():
        if isinstance(value, (bytes, str)):
            size += len(value)
    return size


class Writer:
    """Owns the writing connection and its thread.

    ``connect`` opens the connection (and, on Postgres, takes the server's lock with it); it raises
    StoreError.
    """

    def __init__(
        self,
        connect: Callable[[], sa.Connection],
        where: str,
        connection: sa.Connection | None = None,
        *,
        queue_bytes: int = QUEUE_BYTES,
    ) -> None:
        self._connect, self._where, self._limit = connect, where, queue_bytes
        self._queue: collections.deque[_Unit] = collections.deque()
        self._bytes = 0
        self._blocked: collections.deque[asyncio.Future[None]] = collections.deque()
        self._wake = threading.Condition()
        self._closing = False
        self._connection = connection
        self._committing: str | None = None  # the transaction that Postgres is told to commit
        self.commits = self.units = 0
        self.commit_s = Histogram(COMMIT_S)
        self._thread = threading.Thread(target=self._run, name="store-writer", daemon=True)
        self._thread.start()

    # --- callers' side (event loop) ----------------------------------------------------------------------

    async def submit(self, work: Work | Rows, size: int, after: Callable[[Any], None] | None = None) -> Any:
        """Queue a unit and return its result after COMMIT.

        ``after`` is called on the loop with the result, in commit order, also when the caller has been
        cancelled meanwhile. Raises StoreError, or what the unit raised.
        """
        loop = asyncio.get_running_loop()
        while True:
            with self._wake:
                if self._closing:
                    raise StoreError("the store is closed", where=self._where)
                if self._bytes < self._limit:
                    unit = _Unit(work, size, loop.create_future(), after)
                    self._bytes += size
                    self._queue.append(unit)
                    if len(self._queue) == 1:
                        self._wake.notify()
                    break
                turn: asyncio.Future[None] = loop.create_future()
                self._blocked.append(turn)
            await turn
        return await unit.future

    @property
    def queued(self) -> tuple[int, int]:
        """Units that wait, and about how many bytes they hold."""
        return len(self._queue), self._bytes

    def close(self) -> None:
        """Write what is queued, then stop. Later units are refused."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    # --- writer thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._queue and not self._closing:
                    self._wake.wait()
                if not self._queue:
                    break
                batch = [self._queue.popleft() for _ in range(min(len(self._queue), BATCH_UNITS))]
            began = time.perf_counter()
            self._commit(batch)
            self.commit_s.observe(time.perf_counter() - began)
            self.units += len(batch)
            self._answer(batch)
        if self._connection is not None:
            self._connection.close()

    def _commit(self, batch: list[_Unit]) -> None:
        try:
            connection = self._opened()
            try:
                with connection.begin():
                    _execute_together(connection, batch)
                    self._committing = _transaction(connection)
                self.commits += 1
            except Exception as error:
                if database_fault(error, self._where) is not None:
                    raise
                if len(batch) == 1:
                    batch[0].error = error
                else:
                    with connection.begin():
                        _execute_apart(connection, batch, self._where)
                        self._committing = _transaction(connection)
                    self.commits += 1
        except BaseException as error:
            self._drop_connection()
            if self._committing is not None and self._taken(self._committing):
                self.commits += 1
                return
            fault = error if isinstance(error, StoreError) else database_fault(error, self._where) or error
            for unit in batch:
                unit.error = fault
        finally:
            self._committing = None

    def _taken(self, transaction: str) -> bool:
        """Whether Postgres took a COMMIT that it gave no answer to. The new connection has the server's lock, so the
        session before it has ended, and with it the transaction."""
        until = time.monotonic() + DOUBT_S
        while True:
            try:
                connection = self._opened()
                with connection.begin():
                    status = connection.execute(_STATUS, {"transaction": transaction}).scalar()
                return bool(status == "committed")
            except Exception as error:
                self._drop_connection()
                away = isinstance(error, StoreError) or database_fault(error, self._where) is not None
                if not away or time.monotonic() > until:  # another server after a failover does not know it
                    log.error(
                        "what became of a COMMIT is not known", transaction=transaction, error=str(error)
                    )
                    return False
                time.sleep(0.2)

    def _opened(self) -> sa.Connection:
        if self._connection is None or self._connection.closed:
            self._connection = self._connect()
        return self._connection

    def _drop_connection(self) -> None:
        """After a database fault the connection's state is unknown; the next batch starts on a fresh one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(Exception):  # it is being thrown away
                connection.invalidate()
                connection.close()

    def _answer(self, batch: list[_Unit]) -> None:
        with self._wake:
            self._bytes -= sum(unit.size for unit in batch)
            turns = []
            if self._bytes < self._limit:
                turns = list(self._blocked)
                self._blocked.clear()
        for loop in {unit.future.get_loop() for unit in batch}:
            mine = [unit for unit in batch if unit.future.get_loop() is loop]
            _on_loop(loop, _settle, mine)
        for loop in {turn.get_loop() for turn in turns}:
            _on_loop(loop, _let_go, [turn for turn in turns if turn.get_loop() is loop])


def _execute_together(connection: sa.Connection, batch: list[_Unit]) -> None:
    """Run all units. Rows between two functions are gathered by statement, each unit's own order kept."""
    stages: list[tuple[sa.Executable, tuple[str, ...], list[Row]]] = []

    def flush() -> None:
        for stage in stages:
            statements.execute(connection, *stage)
        stages.clear()

    for unit in batch:
        if callable(unit.work):
            flush()
            unit.result = unit.work(connection)
            continue
        at = 0
        for statement, row in unit.work:
            names = tuple(row)
            while at < len(stages) and not (stages[at][0] is statement and stages[at][1] == names):
                at += 1
            if at == len(stages):
                stages.append((statement, names, []))
            stages[at][2].append(row)
    flush()


def _transaction(connection: sa.Connection) -> str | None:
    """What Postgres knows the transaction by afterwards; None when it has written nothing, and on SQLite, whose
    COMMIT is not lost on a way."""
    if connection.dialect.name != "postgresql":
        return None
    found: str | None = connection.execute(_TRANSACTION).scalar()
    return found


def _execute_apart(connection: sa.Connection, batch: list[_Unit], where: str) -> None:
    """Run each unit in a savepoint of its own; a failing one keeps its error. Database faults end it all."""
    for unit in batch:
        unit.result = None
        try:
            with connection.begin_nested():
                _execute_together(connection, [unit])
        except Exception as error:
            if database_fault(error, where) is not None:
                raise
            unit.error = error


def _settle(batch: list[_Unit]) -> None:
    for unit in batch:
        future = unit.future
        if unit.error is not None:
            if not future.done():
                future.set_exception(unit.error)
                future.exception()  # a cancelled caller reads it no more: that is no news
            continue
        if unit.after is not None:
            try:
                unit.after(unit.result)
            except Exception:
                log.exception("a listener of a committed write failed")
        if not future.done():
            future.set_result(unit.result)


def _let_go(turns: list[asyncio.Future[None]]) -> None:
    for turn in turns:
        if not turn.done():
            turn.set_result(None)


def _on_loop(loop: asyncio.AbstractEventLoop, fn: Callable[..., None], argument: Any) -> None:
    with contextlib.suppress(RuntimeError):  # a closed loop: nobody waits there any more
        loop.call_soon_threadsafe(fn, argument)
