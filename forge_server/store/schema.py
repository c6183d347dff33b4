"""The schema's revision: checked when a database is opened, changed only on request (Alembic,
``migrations/``).

A migration that is killed half-way leaves the old schema: each runs in one transaction, on SQLite too.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

import sqlalchemy as sa

from forge_server import assets
from forge_server.domain.errors import StoreError
from forge_server.store import engines
from forge_server.store.faults import database_fault
from forge_server.store.lock import lock_file, take_advisory

if TYPE_CHECKING:
    from alembic.config import Config


def head() -> str:
    """The revision that this version of forge-server works with."""
    from alembic.script import ScriptDirectory

    revision = ScriptDirectory.from_config(_config()).get_current_head()
    assert revision is not None
    return revision


def revision(connection: sa.Connection) -> str | None:
    """The revision of the database, or None for an empty one."""
    if not sa.inspect(connection).has_table("alembic_version"):
        return None
    return connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalar()


def check(connection: sa.Connection, where: str) -> None:
    """Raise StoreError unless the database has exactly the revision of this version."""
    found, wanted = _familiar(connection, where), head()
    if found is None:
        raise StoreError("the database is empty", where=where, mend="run `forge-server db upgrade`")
    if found != wanted:
        raise StoreError(
            f"the database has revision {found}, this forge-server needs {wanted}",
            where=where,
            mend="run `forge-server db upgrade`",
        )


def migrate(connection: sa.Connection, where: str) -> None:
    """Bring the schema up to date on a connection of the writing kind. Raises StoreError."""
    if _familiar(connection, where) != head():
        _alembic(connection, "upgrade", "head")


def current(url: str) -> str | None:
    """The revision of the database at ``url``; None when it is empty or, for SQLite, missing."""
    parsed = engines.parse(url)
    file = engines.sqlite_file(parsed)
    if file is not None and not file.exists():
        return None
    engine = engines.reader(parsed, 1)
    try:
        with engine.connect() as connection:
            return revision(connection)
    except sa.exc.SQLAlchemyError as error:
        raise database_fault(error, engines.place(parsed)) or error from None
    finally:
        engine.dispose()


def upgrade(url: str) -> None:
    """Create the database's tables or bring them up to date. Raises StoreError, also while a server runs."""
    parsed = engines.parse(url)
    _exclusively(parsed, lambda connection: migrate(connection, engines.place(parsed)))


def downgrade(url: str, target: str) -> None:
    """Take the schema back to revision ``target`` (``base``: no tables). Data of newer tables is lost."""
    if target != "base" and not _known(target):
        raise StoreError(f"there is no revision {target}", mend="see `forge-server db current`")
    _exclusively(engines.parse(url), lambda connection: _alembic(connection, "downgrade", target))


def _familiar(connection: sa.Connection, where: str) -> str | None:
    """The revision of the database; raises StoreError when this version has never heard of it."""
    found = revision(connection)
    connection.rollback()
    if found is not None and not _known(found):
        raise StoreError(
            f"the database has revision {found}, which this forge-server does not know",
            where=where,
            mend="it was written by a newer version: upgrade forge-server",
        )
    return found


def _exclusively(url: sa.URL, work: Callable[[sa.Connection], None]) -> None:
    file, where = engines.sqlite_file(url), engines.place(url)
    with ExitStack() as stack:
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            lock = lock_file(file)
            stack.callback(lock.release)
        engine = engines.writer(url)
        try:
            with engine.connect() as connection:
                if file is None:
                    take_advisory(connection, where)
                work(connection)
        except sa.exc.SQLAlchemyError as error:
            raise database_fault(error, where) or error from None


def _config() -> "Config":
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(assets.folder("migrations")).replace("%", "%%"))
    return config


def _known(revision: str) -> bool:
    from alembic.script import ScriptDirectory

    return any(s.revision == revision for s in ScriptDirectory.from_config(_config()).walk_revisions())


def _alembic(connection: sa.Connection, command: str, target: str) -> None:
    from alembic import command as commands

    config = _config()
    config.attributes["connection"] = connection
    getattr(commands, command)(config, target)
