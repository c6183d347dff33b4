"""Faults of the database: a full disk, a lock, a read-only file, a lost connection, a second server.

Each is told to everybody who waits, by name and with its mend; none harms what was acknowledged, and the
writer goes on as soon as it can.
"""

import asyncio
import contextlib
import select
import socket
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from forge_server.domain.errors import StoreError
from forge_server.store import engines, schema, writer
from forge_server.store.database import Store
from forge_server.store.tables import events, holds


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], check=True)
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def remount(disk: Path, option: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{option}", str(disk)], check=True)


def note(size: int = 10) -> dict[str, object]:
    return {"at": 0.0, "kind": "note", "data": {"text": "x" * size}}


async def count(store: Store, table: sa.Table = events) -> int:
    return await store.read(lambda c: c.execute(sa.select(sa.func.count()).select_from(table)).scalar_one())


async def test_a_full_disk_is_told_loses_nothing_and_heals(small_disk: Path) -> None:
    store = Store.open(f"sqlite:///{small_disk / 'forge.db'}", create=True)
    try:
        acknowledged = 0
        with pytest.raises(StoreError, match=r"full.*free space"):
            for _ in range(1000):
                await store.insert(events, note(20_000))
                acknowledged += 1
        assert acknowledged > 0
        together = await asyncio.gather(
            *(store.insert(events, note(200_000)) for _ in range(8)), return_exceptions=True
        )
        assert {type(result) for result in together} == {StoreError}
        assert await count(store) == acknowledged
        remount(small_disk, "size=16m")
        await store.insert(events, note(20_000))
        assert await count(store) == acknowledged + 1
    finally:
        store.close()
    assert sqlite3.connect(small_disk / "forge.db").execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_file_system_that_turns_read_only_is_told_and_heals(small_disk: Path) -> None:
    url = f"sqlite:///{small_disk / 'forge.db'}"
    schema.upgrade(url)
    remount(small_disk, "ro")
    with pytest.raises(StoreError, match=r"forge\.db\.lock: .*Read-only.*writable"):
        Store.open(url)
    remount(small_disk, "rw")
    Store.open(url).close()


async def test_a_read_only_database_is_told_and_heals(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'forge.db'}"
    store = Store.open(url, create=True)
    connections: list[sqlite3.Connection] = []
    sa.event.listen(store._engine, "connect", lambda dbapi, _record: connections.append(dbapi))

    def refuse(connection: sa.Connection) -> None:
        # what SQLite answers on a file that it may not write
        connection.exec_driver_sql("PRAGMA query_only=ON")
        connection.execute(sa.insert(events), note())

    try:
        results = await asyncio.gather(store.write(refuse), store.insert(holds, {}), return_exceptions=True)
        assert {type(result) for result in results} == {StoreError}
        assert "read-only; make the file and its folder writable" in str(results[0])
        await store.insert(events, note())
        assert len(connections) == 1  # the one whose state was doubtful was replaced
        assert await count(store) == 1
    finally:
        store.close()


async def test_a_locked_database_is_told_and_heals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "BUSY_MS", 50)
    file = tmp_path / "forge.db"
    store = Store.open(f"sqlite:///{file}", create=True)
    other = sqlite3.connect(file, isolation_level=None)
    try:
        await store.insert(events, note())
        other.execute("BEGIN IMMEDIATE")
        waiting = [store.insert(events, note()), store.write(lambda c: c.execute(sa.select(1)).scalar())]
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(result) for result in results] == [StoreError, StoreError]
        assert "locked by another program" in str(results[0])
        assert await count(store) == 1
        other.execute("ROLLBACK")
        await store.insert(events, note())
        assert await count(store) == 2
    finally:
        other.close()
        store.close()


async def test_a_lost_postgres_connection_is_told_and_heals(postgres_url: str, database_url: str) -> None:
    if database_url.startswith("sqlite"):
        return
    store = Store.open(database_url, create=True)
    admin = sa.create_engine(postgres_url, isolation_level="AUTOCOMMIT")
    try:
        await store.insert(events, note())
        await count(store)
        name = sa.make_url(database_url).database
        with admin.connect() as connection:
            connection.execute(
                sa.text("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = :name"),
                {"name": name},
            )
        with pytest.raises(StoreError, match=r"Postgres|reached"):
            await store.insert(events, note())
        await store.insert(events, note())
        assert await count(store) == 2
        with pytest.raises(StoreError, match="another forge-server"):
            Store.open(database_url)  # the lock was taken again with the new connection
    finally:
        admin.dispose()
        store.close()


class Way:
    """A way to Postgres on which the next COMMIT meets ``fault``: its answer is lost, or it is itself. ``shut``: nobody
    gets through afterwards. ``heard``: what was said to Postgres."""

    def __init__(self, url: str) -> None:
        self.real = sa.make_url(url)
        self.fault, self.shut, self.heard = "", False, b""
        self.listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        at = self.real.difference_update_query(["host"]).set(
            host="127.0.0.1", port=self.listener.getsockname()[1]
        )
        return at.render_as_string(hide_password=False)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                ours, _ = self.listener.accept()
                threading.Thread(target=self._carry, args=(ours,), daemon=True).start()

    def _carry(self, ours: socket.socket) -> None:
        with ours, socket.socket(socket.AF_UNIX) as theirs, contextlib.suppress(OSError):
            if self.shut:
                return
            theirs.connect(f"{self.real.query['host']}/.s.PGSQL.5432")
            while True:
                for ready in select.select([ours, theirs], [], [])[0]:
                    data = ready.recv(1 << 16)
                    if not data:
                        return
                    self.heard += data if ready is ours else b""
                    if ready is ours and self.fault and b"COMMIT" in data:
                        if self.fault == "answer":
                            theirs.sendall(data)
                            theirs.recv(1 << 16)
                        self.fault = ""
                        return
                    (theirs if ready is ours else ours).sendall(data)


@pytest.mark.parametrize("database_url", ["postgres"], indirect=True)
@pytest.mark.parametrize(
    ("fault", "shut", "taken", "told"),
    [("answer", False, True, False), ("question", False, False, True), ("answer", True, True, True)],
)
async def test_what_became_of_a_commit_whose_answer_was_lost_is_asked(
    database_url: str, fault: str, shut: bool, taken: bool, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever hears of a failure has written nothing, unless nobody can be asked."""
    monkeypatch.setattr(writer, "DOUBT_S", 0.5 if shut else 60.0)
    way = Way(database_url)
    store = Store.open(way.url, create=True)
    heard: list[int] = []
    try:
        way.fault, way.shut = fault, shut

        def write(connection: sa.Connection) -> int:
            connection.execute(sa.insert(events), note())
            return 7

        if told:
            with pytest.raises(StoreError, match="cannot be reached"):
                await store.write(write, after=heard.append)
        else:
            assert await store.write(write, after=heard.append) == 7
        assert heard == ([] if told else [7])
        way.shut = False
        assert await count(store) == taken
        await store.insert(events, note())
        assert await count(store) == taken + 1
    finally:
        store.close()
        way.listener.close()


def test_a_postgres_that_does_not_answer_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(engines.PATIENCE, "connect_timeout", 2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        # the kernel takes the connection, nobody reads from it
        url = f"postgresql://somebody@127.0.0.1:{silent.getsockname()[1]}/forge"
        with pytest.raises(StoreError, match=r"cannot be reached.*timeout"):
            Store.open(url)


@pytest.mark.parametrize("database_url", ["postgres"], indirect=True)
def test_the_urls_own_bounds_stay(database_url: str) -> None:
    with engines.writer(sa.make_url(database_url + "&keepalives_idle=77")).connect() as connection:
        given = connection.connection.driver_connection.info.get_parameters()  # type: ignore[union-attr]
    assert (given["keepalives_idle"], given["keepalives_count"]) == ("77", "3")
    assert given["tcp_user_timeout"] == "30000"


@pytest.mark.parametrize("database_url", ["postgres"], indirect=True)
def test_postgres_gives_up_a_session_as_soon_as_we_do(database_url: str) -> None:
    """Else the one that a cut network left behind has the lock, for two hours, and nobody writes. Over a Unix socket,
    as here, the values cannot be read back."""
    way = Way(database_url)
    for engine in (engines.writer(sa.make_url(way.url)), engines.reader(sa.make_url(way.url), 1)):
        way.heard = b""
        with engine.connect() as connection:
            connection.rollback()
        ours, theirs = engines.PATIENCE, engines.SERVER_PATIENCE
        assert theirs == {
            name.replace("keep", "tcp_keep"): ours[name] for name in ours if name != "connect_timeout"
        }
        before, *_, last = (
            way.heard.find(f"SET SESSION {name} = {value}".encode()) for name, value in theirs.items()
        )
        assert 0 < before < last < way.heard.find(b"COMMIT", last)
        engine.dispose()
    way.listener.close()


def test_a_second_server_is_refused_and_a_reader_is_not(database_url: str) -> None:
    first = Store.open(database_url, create=True)
    try:
        with pytest.raises(StoreError, match=r"another forge-server .*uses this database"):
            Store.open(database_url)
        with pytest.raises(StoreError, match=r"another forge-server .*uses this database"):
            schema.upgrade(database_url)
        reader = Store.open(database_url, lock=False)
        assert reader.read_now(lambda c: c.execute(sa.select(sa.func.count(holds.c.id))).scalar()) == 0
        reader.close()
    finally:
        first.close()
    Store.open(database_url).close()


@pytest.mark.parametrize("database_url", ["postgres"], indirect=True)
def test_a_server_waits_for_the_session_of_one_that_was_killed(database_url: str) -> None:
    """Postgres notices a moment later that nobody is there any more."""
    first = Store.open(database_url, create=True)
    leaving = threading.Timer(0.5, first.close)
    leaving.start()
    try:
        Store.open(database_url).close()
    finally:
        leaving.join()


async def test_a_reader_cannot_write(database_url: str) -> None:
    Store.open(database_url, create=True).close()
    reader = Store.open(database_url, lock=False)
    try:
        with pytest.raises(StoreError, match="for reading only"):
            await reader.insert(events, note())
        with pytest.raises(StoreError, match="read-only"):
            await reader.read(lambda c: c.execute(sa.insert(events), note()))
    finally:
        reader.close()


def test_the_lock_of_a_killed_server_is_gone(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'forge.db'}"
    program = (
        "import sys, time; from forge_server.store.database import Store\n"
        f"s = Store.open({url!r}, create=True); print('open', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None and server.stdout.readline() == b"open\n"
        with pytest.raises(StoreError, match=f"process {server.pid}"):
            Store.open(url)
        server.kill()
        server.wait(120)
    Store.open(url).close()


async def test_a_closed_store_refuses(database_url: str) -> None:
    store = Store.open(database_url, create=True)
    jobs = [asyncio.ensure_future(store.insert(events, note())) for _ in range(5)]
    await asyncio.sleep(0)
    store.close()
    store.close()
    await asyncio.gather(*jobs)  # what was queued is written
    with pytest.raises(StoreError, match="closed"):
        await store.insert(events, note())
    with pytest.raises(StoreError, match="closed"):
        await store.read(lambda c: None)


async def test_the_queue_is_bounded_and_callers_wait(tmp_path: Path) -> None:
    from forge_server.store.writer import Writer

    url = engines.parse(f"sqlite:///{tmp_path / 'forge.db'}")
    schema.upgrade(str(url))
    engine = engines.writer(url)
    writer = Writer(engine.connect, "here", queue_bytes=1000)
    most = 0

    def look(_connection: sa.Connection) -> None:
        nonlocal most
        most = max(most, writer._bytes)

    await asyncio.gather(*(writer.submit(look, 300, None) for _ in range(200)))
    writer.close()
    assert 300 <= most <= 1200
