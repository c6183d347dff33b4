"""Tells a fault of the database (full disk, lock, read-only, lost connection) from a fault of the statement.

The first kind concerns everybody who waits and may pass; it becomes a ``StoreError`` with its mend. The
second kind belongs to the one who wrote the statement and is passed on unchanged.
"""

import sqlite3

import sqlalchemy as sa

from forge_server.domain.errors import StoreError

_SQLITE = {
    "SQLITE_FULL": ("the disk that holds the database is full", "free space; the server goes on by itself"),
    "SQLITE_READONLY": ("the database is read-only", "make the file and its folder writable"),
    "SQLITE_BUSY": ("the database is locked by another program", "close the other program"),
    "SQLITE_LOCKED": ("the database is locked by another program", "close the other program"),
    "SQLITE_IOERR": ("reading or writing the database failed (I/O error)", "check the disk"),
    "SQLITE_CANTOPEN": ("the database cannot be opened", "check that its folder exists and is writable"),
    "SQLITE_CORRUPT": ("the database file is damaged", "restore a copy"),
    "SQLITE_NOTADB": ("the file is not a database", "point [store] url at a forge-server database"),
    "SQLITE_NOMEM": ("out of memory in the database", "free memory"),
}

_POSTGRES = {
    "08": (
        "the connection to Postgres was lost",
        "check that Postgres runs; the server reconnects by itself",
    ),
    "25006": ("Postgres accepts no writes (read-only)", "connect to the primary"),
    "28": ("Postgres refused the login", "check user and password in [store] url"),
    "3D": ("there is no such Postgres database", "create it, or correct [store] url"),
    "53": ("Postgres is out of resources (disk, memory or connections)", "free them"),
    "55P03": ("a table is locked by another program", "close the other program"),
    "57": ("Postgres is shutting down or was stopped", "start it; the server reconnects by itself"),
    "58": ("Postgres met a system error", "see its log"),
}


def database_fault(error: BaseException, where: str) -> StoreError | None:
    """The StoreError that ``error`` stands for, or None when the fault is the statement's own."""
    origin = error.orig if isinstance(error, sa.exc.DBAPIError) else error
    if isinstance(origin, sqlite3.Error):
        name = getattr(origin, "sqlite_errorname", "") or ""
        for code, (what, mend) in _SQLITE.items():
            if name.startswith(code):
                return StoreError(what, where=where, mend=mend)
        return None
    state = getattr(origin, "sqlstate", None)
    if isinstance(state, str):
        for code, (what, mend) in _POSTGRES.items():
            if state.startswith(code):
                return StoreError(what, where=where, mend=mend)
        return None
    if isinstance(error, sa.exc.OperationalError) or (
        isinstance(error, sa.exc.DBAPIError) and error.connection_invalidated
    ):
        first = str(origin).strip().splitlines()[:1]
        return StoreError(
            f"the database cannot be reached ({first[0] if first else origin})",
            where=where,
            mend="check that it runs; the server reconnects by itself",
        )
    return None
