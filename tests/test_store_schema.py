"""Migrations make exactly the metadata; a wrong revision is named with its mend."""

from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext

from forge_server.domain.errors import StoreError
from forge_server.store import batch_bodies, engines, schema
from forge_server.store.database import Store
from forge_server.store.tables import metadata


def _defaults_differ(*given: Any) -> bool:
    """Alembic renders an empty default of SQLite in parentheses and then finds that it differs from
    itself.
    """
    found, wanted = given[3], given[5]
    return (found or "").strip("(')") != (wanted or "").strip("(')") or (found is None) != (wanted is None)


def test_the_migrations_make_exactly_the_metadata(database_url: str) -> None:
    schema.upgrade(database_url)
    engine = engines.reader(engines.parse(database_url), 1)
    with engine.connect() as connection:
        defaults = _defaults_differ if connection.dialect.name == "sqlite" else True
        context = MigrationContext.configure(
            connection, opts={"compare_type": True, "compare_server_default": defaults}
        )
        assert compare_metadata(context, metadata) == []
        indexes = {
            (table, index["name"])
            for table in metadata.tables
            for index in sa.inspect(connection).get_indexes(table)
            if "duplicates_constraint" not in index
        }
    engine.dispose()
    assert indexes == {
        (table.name, index.name) for table in metadata.tables.values() for index in table.indexes
    }


def test_up_and_down_and_up_again(database_url: str) -> None:
    assert schema.current(database_url) is None
    schema.upgrade(database_url)
    assert schema.current(database_url) == schema.head()
    schema.downgrade(database_url, "base")
    assert schema.current(database_url) is None
    schema.upgrade(database_url)
    schema.upgrade(database_url)
    Store.open(database_url).close()


async def test_a_batch_in_parts_is_whole_in_every_revision(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_bodies, "PART_BYTES", 7)
    body = bytes(range(100))
    store = Store.open(database_url, create=True)
    for k in (1, 2):
        await store.write(lambda c, k=k: batch_bodies.write(c, "ru", k, body[: 50 * k]))
    store.close()
    schema.downgrade(database_url, "0005")
    engine = engines.writer(engines.parse(database_url))
    with engine.begin() as connection:
        rows = connection.execute(sa.text("SELECT k, body FROM batch_bodies ORDER BY k")).all()
    assert [(k, bytes(whole)) for k, whole in rows] == [(1, body[:50]), (2, body)]
    schema.upgrade(database_url)
    store = Store.open(database_url)
    for k in (1, 2):
        assert await store.read(lambda c, k=k: batch_bodies.read(c, "ru", k)) == body[: 50 * k]
    assert await store.read(lambda c: batch_bodies.read(c, "ru", 3)) == b""
    store.close()


def test_a_missing_or_empty_database_names_the_mend(database_url: str) -> None:
    with pytest.raises(StoreError, match="forge-server db upgrade"):
        Store.open(database_url)


def test_a_database_of_a_newer_version_is_left_alone(database_url: str) -> None:
    schema.upgrade(database_url)
    engine = engines.writer(engines.parse(database_url))
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = 'ffff'"))
    with pytest.raises(StoreError, match="newer version: upgrade forge-server"):
        Store.open(database_url)
    with pytest.raises(StoreError, match="newer version: upgrade forge-server"):
        Store.open(database_url, create=True)


def test_an_unknown_target_of_a_downgrade_is_refused(database_url: str) -> None:
    schema.upgrade(database_url)
    with pytest.raises(StoreError, match="no revision 9999"):
        schema.downgrade(database_url, "9999")


def test_a_migration_that_fails_leaves_the_old_schema(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from alembic import op

    def broken(*_args: object, **_named: object) -> None:
        raise RuntimeError("the power went")

    with monkeypatch.context() as patch:
        patch.setattr(op, "batch_alter_table", broken)
        with pytest.raises(RuntimeError):
            schema.upgrade(database_url)
    assert schema.current(database_url) is None
    schema.upgrade(database_url)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("mysql://x/y", "mysql is not supported"),
        ("sqlite:///:memory:", "must be a file"),
        ("sqlite://", "must be a file"),
        ("nonsense", "cannot be read"),
        ("sqlite:////proc/nowhere/forge.db", "folder cannot be made"),
        ("postgresql://nobody@127.0.0.1:1/none", "cannot be reached"),
    ],
)
def test_urls_that_cannot_be_opened(url: str, message: str) -> None:
    with pytest.raises(StoreError, match=message):
        Store.open(url, create=True)
