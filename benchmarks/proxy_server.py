"""The proxy as forge-server composes it, for ``proxy.py``: a real SQLite store, the real engine client, one
policy.

    python benchmarks/proxy_server.py DATABASE PORT UPSTREAM_URL ATTEMPTS [splice]

With ``splice`` the upstream takes token ids (``splice_upstream.py``), else it is asked with messages. Prints one
agent key per attempt, then an empty line, and serves until SIGTERM.
"""

import asyncio
import signal
import socket
import sys
from typing import Any

import sqlalchemy as sa
import uvicorn
import uvloop

from forge_server.commands.serve import collect_less_garbage
from forge_server.domain.engine import ChatResult, Generated, Rendered, Template
from forge_server.domain.ids import new_id
from forge_server.domain.outcome import Kind
from forge_server.domain.states import AttemptState
from forge_server.engine import scale_out
from forge_server.engine.client import EngineClient
from forge_server.proxy.calls import Calls
from forge_server.proxy.connection import ConnectionProtocol
from forge_server.proxy.hold import Gate
from forge_server.proxy.ports import CallPolicy
from forge_server.proxy.routes import InferenceRoutes
from forge_server.proxy.sessions import Sessions
from forge_server.store import instance, keys
from forge_server.store import tables as t
from forge_server.store.database import Store

POLICY = CallPolicy(
    state=AttemptState.RUNNING,
    mode="train",
    model="forge",
    max_calls=1 << 30,
    max_tokens=1 << 40,
    window=131072,
)


class Versions:
    current = 0


class Direct(EngineClient):
    """One engine without the pool around it; ``template`` as ``splice_upstream.py`` writes answers."""

    template: Template | None = None

    async def chat(self, body: Any, *, request_id: str, affinity: str = "", known: Any = None) -> ChatResult:
        return await super().chat(body, request_id=request_id, known=known)

    async def render(self, body: Any, *, request_id: str, affinity: str, known: Any = None) -> Rendered:
        return await scale_out.render(self, body, request_id=request_id, known=known)

    async def generate(
        self, prompt: bytes, rendered: Rendered, max_tokens: int, *, request_id: str, affinity: str
    ) -> Generated:
        return await scale_out.generate(self, prompt, rendered, max_tokens, request_id=request_id)

    async def message(
        self, found: Generated, rendered: Rendered, body: Any, tail: Any, *, request_id: str, affinity: str
    ) -> dict[str, object]:
        return await scale_out.message(self, found, rendered, body, tail, request_id=request_id)

    async def detokenize(self, ids: Any) -> str:
        return await scale_out.detokenize(self, ids)


async def attempts(store: Store, count: int) -> list[str]:
    """Running attempts of one rollout."""
    run, rollout, ids = new_id("ru"), new_id("ro"), [new_id("at") for _ in range(count)]

    def write(connection: sa.Connection) -> None:
        connection.execute(
            sa.insert(t.runs),
            {"id": run, "name": run, "kind": "train", "state": "active", "settings": {}, "created_at": 0.0},
        )
        connection.execute(
            sa.insert(t.rollouts),
            {
                "id": rollout,
                "run_id": run,
                "harness": "x",
                "mode": "train",
                "state": "active",
                "created_at": 0.0,
            },
        )
        connection.execute(
            sa.insert(t.attempts),
            [
                {
                    "id": id,
                    "rollout_id": rollout,
                    "number": number,
                    "state": "running",
                    "backend": "external",
                    "created_at": 0.0,
                }
                for number, id in enumerate(ids)
            ],
        )

    await store.write(write)
    return ids


async def main(database: str, port: str, upstream: str, count: str, mode: str = "record") -> None:
    store = Store.open(f"sqlite:///{database}", create=True)
    secret = (await instance.load(store)).secret

    async def lookup(attempt_id: str) -> CallPolicy | None:
        return POLICY

    async def budget_exceeded(attempt_id: str, kind: Kind) -> None:
        raise AssertionError(kind)

    async def engine_gave_up(attempt_id: str) -> None:
        raise AssertionError(attempt_id)

    def agent(key: str) -> str | None:
        claim = keys.verify(secret, key)
        return claim.subject if claim is not None and claim.scope == "agent" else None

    engine = Direct(upstream, "forge")
    if mode == "splice":
        engine.template = Template(closing=2, marker="</end>")
    sessions = Sessions(store, lookup)
    calls = Calls(
        store=store,
        engine=engine,
        gate=Gate(),
        versions=Versions(),
        budget_exceeded=budget_exceeded,
        engine_gave_up=engine_gave_up,
    )
    routes = InferenceRoutes(sessions=sessions, calls=calls, keys=agent, model="forge")
    flusher = asyncio.create_task(sessions.run())
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", int(port)))
    sock.listen(4096)
    config = uvicorn.Config(
        routes,
        http=ConnectionProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        date_header=False,
        timeout_keep_alive=90,
        timeout_graceful_shutdown=2,
    )
    for attempt_id in await attempts(store, int(count)):
        print(keys.attempt_key(secret, attempt_id, "agent"))
    print(flush=True)
    await uvicorn.Server(config).serve(sockets=[sock])
    flusher.cancel()
    await sessions.close()
    await engine.close()
    store.close()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    collect_less_garbage()
    uvloop.run(main(*sys.argv[1:]))
