"""Runs the migrations, on the connection that forge-server hands over or on the URL of alembic.ini."""

from alembic import context

from forge_server.store import engines
from forge_server.store.tables import metadata


def run(connection) -> None:
    context.configure(
        connection=connection,
        target_metadata=metadata,
        render_as_batch=True,  # SQLite cannot alter a table: Alembic copies it
        transactional_ddl=True,
        compare_type=True,
        compare_server_default=True,
    )
    with context.begin_transaction():
        context.run_migrations()


given = context.config.attributes.get("connection")
if given is not None:
    run(given)
else:
    url = engines.parse(context.config.get_main_option("sqlalchemy.url"))
    with engines.writer(url).connect() as own:
        run(own)
