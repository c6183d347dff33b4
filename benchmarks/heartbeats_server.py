"""A whole server in this process whose attempts wait for their runners; for ``heartbeats.py``.

    python benchmarks/heartbeats_server.py FOLDER N

Prints its process, the address of the pod-facing listener and each attempt with its join token; after a line on
standard input, what has become of the attempts. The attempts are of another backend than the server's own, so that
nobody looks for their processes: what it hears of them, it hears from their runners. The settings are the defaults.
"""

import asyncio
import json
import os
import sys
import time
from typing import Any

import sqlalchemy as sa
import uvloop

from forge_server import logs
from forge_server.app import running
from forge_server.client.http import ForgeClient
from forge_server.client.schemas import TaskCreate
from forge_server.commands.serve import collect_less_garbage
from forge_server.domain.ids import new_id
from forge_server.settings import LocalSettings, ServerSettings, Settings
from forge_server.store import keys
from forge_server.store import tables as t

AGENT_S = 86_400.0
TASK = {"name": "task", "instruction": "Wait.", "verify": {"answer_file": "answer.txt", "equals": "1"}}
RUN = {"name": "bench", "kind": "record", "taskset": "s", "harness": "react", "max_seconds": AGENT_S}


def create_task(url: str, key: str) -> str:
    with ForgeClient(url, key) as client:
        client.create_tasks(TaskCreate(taskset="s", tasks=[TASK]))
        (task,) = client.tasks("s")
        return task.id


def seed(connection: sa.Connection, n: int, task: str) -> list[str]:
    """A run with ``n`` attempts that have been launched."""
    now = time.time()
    run = new_id("ru")
    connection.execute(
        sa.insert(t.runs),
        {"id": run, "name": "bench", "kind": "record", "state": "active", "settings": RUN, "created_at": now},
    )
    ids = [(new_id("ro"), new_id("at")) for _ in range(n)]
    rollout = {"run_id": run, "task_id": task, "harness": "react", "mode": "record", "state": "active"}
    connection.execute(
        sa.insert(t.rollouts),
        [{**rollout, "id": id, "attempts": 1, "max_attempts": 1, "created_at": now} for id, _ in ids],
    )
    attempt = {"number": 1, "state": "launching", "backend": "kubernetes", "startup_deadline": now + AGENT_S}
    connection.execute(
        sa.insert(t.attempts),
        [{**attempt, "id": id, "rollout_id": rollout_id, "created_at": now} for rollout_id, id in ids],
    )
    return [id for _, id in ids]


def became(connection: sa.Connection) -> dict[str, Any]:
    """Attempts by state and kind."""
    a = t.attempts.c
    query = sa.select(a.state, a.kind, sa.func.count()).group_by(a.state, a.kind)
    return {" ".join(filter(None, (state, kind))): n for state, kind, n in connection.execute(query)}


async def main(folder: str, n: str) -> None:
    settings = Settings(
        server=ServerSettings(port=0, control_port=0),
        local=LocalSettings(min_sandbox="none"),
        folder=folder,
    )
    async with running(settings) as server:
        task = await asyncio.to_thread(create_task, server.listening.control_url, server.admin_key)
        ids = await server.store.write(lambda connection: seed(connection, int(n), task))
        secret = server.instance.secret
        hello = {
            "pid": os.getpid(),
            "url": server.listening.pod_url,
            "lost_s": settings.scheduler.heartbeat_lost_s,
            "attempts": [[id, keys.attempt_key(secret, id, "join")] for id in ids],
        }
        print(json.dumps(hello), flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps(await server.store.read(became)), flush=True)


if __name__ == "__main__":
    logs.configure("error", "json")
    collect_less_garbage()
    uvloop.run(main(*sys.argv[1:]))
