"""Connections to SQLite and Postgres: pragmas, transactions, and the place named in errors.

SQLite: WAL with synchronous=FULL, so that a commit survives power loss; writers begin IMMEDIATE, since a
deferred transaction that reads first and writes later fails with SQLITE_BUSY_SNAPSHOT whatever the busy
timeout.

Errors do not show the parameters of their statements: those may be a batch, or what somebody said to a model.
"""

from pathlib import Path
from typing import Any

import sqlalchemy as sa

from forge_server.domain.errors import StoreError

BUSY_MS = 5000
"""How long a statement waits for another program's lock on the file."""

PATIENCE = {
    "connect_timeout": 10,
    "tcp_user_timeout": 30_000,
    "keepalives_idle": 15,
    "keepalives_interval": 5,
    "keepalives_count": 3,
}
"""libpq's parameters, in seconds, ``tcp_user_timeout`` in ms: without them a Postgres whose machine is gone is waited
for a quarter of an hour, or two hours. What the URL states itself stays. A long statement is not cut short."""

SERVER_PATIENCE = {
    "tcp_user_timeout": 30_000,
    "tcp_keepalives_idle": 15,
    "tcp_keepalives_interval": 5,
    "tcp_keepalives_count": 3,
}
"""The same at the other end of each session: when a network that was cut is whole again, the session that we gave up
must be gone, since it has the lock. Postgres would keep it for two hours."""


def parse(url: str) -> sa.URL:
    """Check the URL: an SQLite file or Postgres through psycopg. Raises StoreError."""
    mend = "use sqlite:///path/to/forge.db or postgresql://user@host/database"
    try:
        parsed = sa.make_url(url)
    except sa.exc.ArgumentError:
        raise StoreError("the database URL cannot be read", where="[store] url", mend=mend) from None
    if parsed.drivername == "sqlite":
        if not parsed.database or parsed.database == ":memory:":
            raise StoreError("an SQLite database must be a file", where="[store] url", mend=mend)
        return parsed
    if parsed.drivername in ("postgresql", "postgres", "postgresql+psycopg"):
        return parsed.set(drivername="postgresql+psycopg")
    raise StoreError(f"{parsed.drivername} is not supported", where="[store] url", mend=mend)


def sqlite_file(url: sa.URL) -> Path | None:
    """The SQLite file, or None for Postgres."""
    return Path(str(url.database)) if url.drivername == "sqlite" else None


def place(url: sa.URL) -> str:
    """What an error names: the file, or the URL without its password."""
    return str(sqlite_file(url) or url.render_as_string(hide_password=True))


def writer(url: sa.URL) -> sa.Engine:
    """An engine whose transactions may write; every checkout is a fresh connection."""
    if sqlite_file(url) is None:
        return _postgres(url, poolclass=sa.NullPool)
    engine = sa.create_engine(
        url,
        poolclass=sa.NullPool,
        hide_parameters=True,
        connect_args={"isolation_level": None, "check_same_thread": False},
    )
    sa.event.listen(engine, "connect", _writer_pragmas)
    sa.event.listen(engine, "begin", _begin_immediate)
    return engine


def reader(url: sa.URL, connections: int) -> sa.Engine:
    """An engine that cannot write, with at most ``connections`` connections."""
    if sqlite_file(url) is None:
        engine = _postgres(url, pool_size=connections, max_overflow=0, pool_pre_ping=True)
        return engine.execution_options(postgresql_readonly=True, isolation_level="REPEATABLE READ")
    engine = sa.create_engine(
        url,
        pool_size=connections,
        max_overflow=0,
        hide_parameters=True,
        connect_args={"isolation_level": None, "check_same_thread": False},
    )
    sa.event.listen(engine, "connect", _reader_pragmas)
    sa.event.listen(engine, "begin", _begin_deferred)
    return engine


def _postgres(url: sa.URL, **options: Any) -> sa.Engine:
    bounds = {name: value for name, value in PATIENCE.items() if name not in url.query}
    try:
        engine = sa.create_engine(url, hide_parameters=True, connect_args=bounds, **options)
    except ModuleNotFoundError as error:
        raise StoreError(
            f"the driver of Postgres is missing ({error.name})",
            where="[store] url",
            mend="pip install 'forge-server[postgres]'",
        ) from None
    sa.event.listen(engine, "connect", _bound_session)
    return engine


def _bound_session(dbapi: Any, _record: Any) -> None:
    with dbapi.cursor() as cursor:
        for name, value in SERVER_PATIENCE.items():
            cursor.execute(f"SET SESSION {name} = {value}")
    dbapi.commit()


def _writer_pragmas(dbapi: Any, _record: Any) -> None:
    cursor = dbapi.cursor()
    cursor.execute(f"PRAGMA busy_timeout={BUSY_MS}")
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.execute("PRAGMA cache_size=-65536")
    cursor.close()


def _reader_pragmas(dbapi: Any, _record: Any) -> None:
    cursor = dbapi.cursor()
    cursor.execute(f"PRAGMA busy_timeout={BUSY_MS}")
    cursor.execute("PRAGMA query_only=ON")
    cursor.execute("PRAGMA mmap_size=268435456")
    cursor.close()


def _begin_immediate(connection: sa.Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def _begin_deferred(connection: sa.Connection) -> None:
    connection.exec_driver_sql("BEGIN")
