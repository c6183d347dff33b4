"""I12: what was acknowledged survives a SIGKILL of the process, whatever it was doing."""

import signal
import sqlite3
import subprocess
import sys

import sqlalchemy as sa

from forge_server.store import engines, schema
from forge_server.store.database import Store
from forge_server.store.tables import events, messages

WRITER = """
import asyncio, itertools, os, sys
import sqlalchemy as sa
from forge_server.store.database import Store
from forge_server.store.tables import events, messages

async def main():
    store = Store.open(sys.argv[1])
    numbers = itertools.count()

    async def produce():
        while True:
            n = next(numbers)
            row = {"at": float(n), "kind": "note", "data": {"text": "x" * 500}}
            if n % 3 == 0:
                await store.insert(events, row)
            elif n % 3 == 1:
                await store.write(lambda c: c.execute(sa.insert(events), row))
            else:
                body = {"digest": n.to_bytes(16, "big"), "body": b"y" * 3000}
                await store.write_rows([(events, row), (messages, body)])
            os.write(1, b"%d\\n" % n)

    await asyncio.gather(*(produce() for _ in range(32)))

asyncio.run(main())
"""


def test_i12_kill_loses_no_acknowledged_write(database_url: str) -> None:
    schema.upgrade(database_url)
    for round_ in range(3):
        told = _write_until_killed(database_url, lines=300 + 100 * round_)
        store = Store.open(database_url)
        rows = store.read_now(lambda c: [int(at) for at in c.execute(sa.select(events.c.at)).scalars()])
        keys = store.read_now(lambda c: list(c.execute(sa.select(messages.c.digest)).scalars()))
        store.close()
        assert len(told) >= 300
        assert told <= set(rows)
        # a unit is there whole or not at all
        assert {n for n in rows if n % 3 == 2} == {int.from_bytes(key, "big") for key in keys}
        file = engines.sqlite_file(engines.parse(database_url))
        if file is not None:
            assert sqlite3.connect(file).execute("PRAGMA integrity_check").fetchone() == ("ok",)
        _clear(database_url)


def _write_until_killed(url: str, lines: int) -> set[int]:
    """The numbers that a writer acknowledged before it was killed in full flight."""
    with subprocess.Popen([sys.executable, "-c", WRITER, url], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        said = [writer.stdout.readline() for _ in range(lines)]
        writer.kill()
        said += writer.stdout.read().splitlines()
        assert writer.wait(120) == -signal.SIGKILL
    return {int(line) for line in said if line.strip()}


def _clear(url: str) -> None:
    """Every round counts from 0 again."""
    engine = engines.writer(engines.parse(url))
    with engine.begin() as connection:
        connection.execute(sa.delete(events))
        connection.execute(sa.delete(messages))
