"""Durable acknowledgements per second: producers that each wait for every write, as the proxy's calls do.

    python benchmarks/acks.py [--url URL] [--producers 64] [--seconds 5]

A call is two acknowledgements: its intent (row, packed request, one new message) and its end (update,
token blob, answer message, reference to it), with blobs of the sizes of a 50-turn session. DESIGN §12:
at least 2,500 / s on SQLite with synchronous=FULL and 64 producers.
"""

import argparse
import asyncio
import os
import tempfile
import time
from pathlib import Path

import sqlalchemy as sa
import uvloop
from sqlalchemy.dialects import postgresql

from forge_server.domain.ids import CallIds
from forge_server.store import tables as t
from forge_server.store.database import Store

REACH = 2500
INTERN = postgresql.insert(t.messages).on_conflict_do_nothing().inline()
END = sa.update(t.calls).where(t.calls.c.id == sa.bindparam("b_id"))
RESPONSE = (
    sa.update(t.call_messages)
    .where(t.call_messages.c.call_id == sa.bindparam("b_id"))
    .values(response=sa.bindparam("b_response"))
)


async def produce(store: Store, ids: CallIds, attempt_id: str, until: float, waits: list[float]) -> None:
    seq = 0
    while time.perf_counter() < until:
        call_id, request, answer = ids.next(), os.urandom(16), os.urandom(16)
        now = time.time()
        intent = [
            (INTERN, {"digest": request, "body": os.urandom(900)}),
            (
                t.calls,
                {
                    "id": call_id,
                    "attempt_id": attempt_id,
                    "seq": seq,
                    "dialect": "chat",
                    "mode": "record",
                    "request_digest": request,
                    "began_at": now,
                    "temperature": 1.0,
                },
            ),
            (t.call_messages, {"call_id": call_id, "request": os.urandom(48)}),
        ]
        end = [
            (INTERN, {"digest": answer, "body": os.urandom(500)}),
            (
                END,
                {
                    "b_id": call_id,
                    "ended_at": now,
                    "end": "ok",
                    "status": 200,
                    "flags": None,
                    "prompt_len": 4096,
                    "completion_len": 300,
                    "finish_reason": "stop",
                    "policy_version": 3,
                    "engine_ms": 1.0,
                    "held_ms": 0.0,
                },
            ),
            (t.call_tokens, {"call_id": call_id, "data": os.urandom(3800), "prompt_digest": answer}),
            (RESPONSE, {"b_id": call_id, "b_response": answer}),
        ]
        for unit in (intent, end):
            began = time.perf_counter()
            await store.write_rows(unit)
            waits.append(time.perf_counter() - began)
        seq += 1


async def measure(url: str, producers: int, seconds: float) -> float:
    store = Store.open(url, create=True)

    def parents(connection: sa.Connection) -> list[str]:
        attempts = [f"at-bench-{time.time_ns()}-{n}" for n in range(producers)]
        run = f"ru-bench-{time.time_ns()}"
        base = {"state": "active", "created_at": 0.0}
        connection.execute(
            sa.insert(t.runs), {**base, "id": run, "name": run, "kind": "record", "settings": {}}
        )
        rollout = {**base, "id": run, "run_id": run, "harness": "bench", "mode": "record"}
        connection.execute(sa.insert(t.rollouts), rollout)
        for number, attempt in enumerate(attempts):
            row = {
                "id": attempt,
                "rollout_id": run,
                "number": number,
                "state": "running",
                "backend": "external",
            }
            connection.execute(sa.insert(t.attempts), {**row, "created_at": 0.0})
        return attempts

    attempts = await store.write(parents)
    waits: list[float] = []
    ids = CallIds()
    commits, cpu, began = store.commits, time.process_time(), time.perf_counter()
    until = began + seconds
    await asyncio.gather(*(produce(store, ids, attempt, until, waits) for attempt in attempts))
    elapsed, cpu = time.perf_counter() - began, time.process_time() - cpu
    commits = store.commits - commits
    store.close()
    waits.sort()
    rate = len(waits) / elapsed
    print(
        f"{sa.make_url(url).drivername}, {producers} producers: {rate:,.0f} acknowledgements/s, "
        f"p50 {waits[len(waits) // 2] * 1e3:.1f} ms, p99 {waits[len(waits) * 99 // 100] * 1e3:.1f} ms, "
        f"CPU {cpu / len(waits) * 1e6:.0f} us each, {len(waits) / commits:.1f} per commit, "
        f"load {os.getloadavg()[0]:.1f}"
    )
    return rate


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url")
    parser.add_argument("--producers", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=5.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        url = options.url or f"sqlite:///{Path(folder) / 'bench.db'}"
        rate = uvloop.run(measure(url, options.producers, options.seconds))
    verdict = "reached" if rate >= REACH else f"short by {1 - rate / REACH:.0%}"
    print(f"acknowledgements per second: {rate:,.0f}; to reach: {REACH:,}: {verdict}")
    return 0 if rate >= REACH else 1


if __name__ == "__main__":
    raise SystemExit(main())
