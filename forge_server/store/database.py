"""The store: one database, one writer, a few readers.

Owns the life of both: it locks the database against a second server, checks the schema's revision, and is
the only thing that hands out connections. What is written is durable when ``write``, ``insert`` or
``write_rows`` returns (invariants I1 and I12 rest on it).
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Self, TypeVar

import sqlalchemy as sa

from forge_server.domain.errors import StoreError
from forge_server.store import engines, schema
from forge_server.store.faults import database_fault
from forge_server.store.lock import ProcessLock, lock_file, take_advisory
from forge_server.store.writer import Row, Writer, row_bytes

T = TypeVar("T")

READERS = 4
_INSERTS: dict[sa.Table, sa.Insert] = {}


class Store:
    """Made by ``open``; used from any event loop of the process; closed once."""

    def __init__(self, url: sa.URL, lock: ProcessLock | None, *, writes: bool, create: bool) -> None:
        self.url, self.where = url, engines.place(url)
        self._lock = lock
        self._reader = engines.reader(url, READERS)
        self._pool = ThreadPoolExecutor(READERS, thread_name_prefix="store-reader")
        self._engine = engines.writer(url)
        self._writer: Writer | None = None
        self._closed = False
        try:
            if writes:
                self._writer = Writer(self._connect, self.where, self._prepared(create))
            else:
                self.read_now(lambda connection: schema.check(connection, self.where))
        except BaseException:
            self._reader.dispose()
            raise

    @classmethod
    def open(cls, url: str, *, create: bool = False, lock: bool = True) -> Self:
        """Open the database at ``url``.

        ``create``: make it when it is missing and migrate it when it is old; otherwise both are errors
        that name the mend. ``lock=False`` opens it for reading only, beside the server that may be
        running. Raises StoreError.
        """
        parsed = engines.parse(url)
        file, where = engines.sqlite_file(parsed), engines.place(parsed)
        if file is not None and not file.exists():
            if not create:
                raise StoreError("there is no database", where=where, mend="run `forge-server db upgrade`")
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise StoreError(f"its folder cannot be made ({error.strerror})", where=where) from None
        held = lock_file(file) if file is not None and lock else None
        try:
            return cls(parsed, held, writes=lock, create=create)
        except BaseException:
            if held is not None:
                held.release()
            raise

    async def write(
        self, fn: Callable[[sa.Connection], T], *, size: int = 512, after: Callable[[T], None] | None = None
    ) -> T:
        """Run ``fn`` in the writer's transaction; returns its result after COMMIT.

        ``fn`` may run twice and fails alone. ``size``: bytes it holds, for the bound of the queue.
        ``after`` is called on the loop after COMMIT, in commit order, even if the caller was cancelled
        meanwhile.
        """
        result: T = await self._writing().submit(fn, size, after)
        return result

    async def insert(self, table: sa.Table, row: Row) -> None:
        """Insert one row; returns after COMMIT. Rows of one table that wait together become one statement."""
        await self._writing().submit(((_insert(table), row),), row_bytes(row))

    async def write_rows(self, rows: Iterable[tuple[sa.Table | sa.Executable, Row]]) -> None:
        """Several rows as one durable unit, in this order.

        Besides tables (insert) it takes statements with bind parameters (an update by id, an insert that
        ignores conflicts); build a statement once, since rows are gathered by the identity of their
        statement.
        """
        unit = tuple((_insert(what) if isinstance(what, sa.Table) else what, row) for what, row in rows)
        if unit:
            await self._writing().submit(unit, sum(row_bytes(row) for _, row in unit))

    async def read(self, fn: Callable[[sa.Connection], T]) -> T:
        """Run ``fn`` on a read-only connection in a thread: one consistent view of what is committed."""
        if self._closed:
            raise StoreError("the store is closed", where=self.where)
        return await asyncio.get_running_loop().run_in_executor(self._pool, self.read_now, fn)

    def read_now(self, fn: Callable[[sa.Connection], T]) -> T:
        """Like ``read``, in this thread: for programs without an event loop."""
        with self._told(), self._reader.connect() as connection:
            return fn(connection)

    @property
    def commits(self) -> int:
        """Transactions committed so far (the batching of the writer is rows / commits)."""
        return self._writing().commits

    @property
    def writer(self) -> Writer:
        """Whoever wants to know how it does. Raises StoreError when the database is open for reading only."""
        return self._writing()

    def close(self) -> None:
        """Write what is queued, then let go of connections and lock. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._writer is not None:
            self._writer.close()
        self._pool.shutdown(wait=True)
        self._reader.dispose()
        if self._lock is not None:
            self._lock.release()

    def _writing(self) -> Writer:
        if self._writer is None:
            raise StoreError("the database is open for reading only", where=self.where)
        return self._writer

    def _connect(self) -> sa.Connection:
        """The writing connection; on Postgres it carries the server's lock."""
        with self._told():
            connection = self._engine.connect()
            if self._lock is None:
                take_advisory(connection, self.where)
            return connection

    def _prepared(self, create: bool) -> sa.Connection:
        connection = self._connect()
        try:
            with self._told():
                if create:
                    schema.migrate(connection, self.where)
                schema.check(connection, self.where)
        except BaseException:
            connection.close()
            raise
        return connection

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Faults of the database as StoreError."""
        try:
            yield
        except sa.exc.SQLAlchemyError as error:
            raise database_fault(error, self.where) or error from error


def _insert(table: sa.Table) -> sa.Insert:
    statement = _INSERTS.get(table)
    if statement is None:
        statement = _INSERTS.setdefault(table, sa.insert(table).inline())
    return statement
