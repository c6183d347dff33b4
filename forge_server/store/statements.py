"""Rows in, one driver call out: the few statements that are run again and again, compiled once.

What SQLAlchemy does per row of an ``executemany`` costs more than SQLite takes to store it. Here a statement's
text and the conversion of each of its values are worked out once, and rows go to the driver as tuples. The
transaction, the connection and the errors stay SQLAlchemy's.
"""

import functools
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from sqlalchemy.sql.compiler import SQLCompiler

Row = dict[str, Any]

_KEPT = 256  # statements remembered; the server has about twenty

_Bind = tuple[str, Callable[[Any], Any] | None]


def execute(
    connection: sa.Connection, statement: sa.Executable, names: tuple[str, ...], rows: list[Row]
) -> None:
    """Run ``statement`` for each of ``rows``, which all have the keys ``names``."""
    text, binds = _compiled(statement, names, connection.dialect)
    if text is None:
        connection.execute(statement, rows)
        return
    values = [
        tuple([row[name] if convert is None else convert(row[name]) for name, convert in binds])
        for row in rows
    ]
    connection.exec_driver_sql(text, values)


@functools.lru_cache(_KEPT)
def _compiled(
    statement: sa.Executable, names: tuple[str, ...], dialect: sa.Dialect
) -> tuple[str | None, tuple[_Bind, ...]]:
    """SQL and its parameters in order; no SQL where they are not exactly the columns of a row, or not
    positional."""
    compiled = statement.compile(dialect=dialect, column_keys=list(names))  # type: ignore[attr-defined]
    assert isinstance(compiled, SQLCompiler)
    order = compiled.positiontup
    if order is None or not set(order) <= set(names):
        return None, ()
    return compiled.string, tuple((name, _convert(compiled.binds[name].type, dialect)) for name in order)


def _convert(type_: sa.types.TypeEngine[Any], dialect: sa.Dialect) -> Callable[[Any], Any] | None:
    if isinstance(type_, sa.LargeBinary):
        return None  # the driver takes bytes as they are
    return type_.dialect_impl(dialect).bind_processor(dialect)
