"""Delivery through the real relay, from a real sandbox to the real proxy (I3): the harness's own end of the socket
decides, not the relay's."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from litestar import Litestar
from proxy_rig import Engine, Versions, eventually, result
from scheduler_rig import Rig, rig, script_spec

from forge_server.api.pod import pod_routes
from forge_server.api.problem import HANDLERS
from forge_server.proxy.calls import Calls
from forge_server.proxy.hold import Gate
from forge_server.proxy.ports import CallPolicy
from forge_server.proxy.routes import InferenceRoutes
from forge_server.proxy.sessions import Sessions
from forge_server.scheduler.plans import Plans
from forge_server.services.settling import Settling
from forge_server.store import keys
from forge_server.store import tables as t
from forge_server.store.rows import AttemptRow, by_id

pytestmark = pytest.mark.sandbox

ASK = """
import os, signal, socket, time
address, _, path = os.environ["BASE"].removeprefix("http://").partition("/")
host, port = address.split(":")
def ask(text):
    body = '{"messages": [{"role": "user", "content": "%s"}]}' % text
    sock = socket.create_connection((host, int(port)))
    head = "POST /%s/v1/chat/completions HTTP/1.1\\r\\nAuthorization: Bearer %s\\r\\nContent-Length: %d\\r\\n\\r\\n"
    sock.sendall((head % (path, os.environ["KEY"], len(body)) + body).encode())
    while not whole(sock.recv(65536, socket.MSG_PEEK)):  # it lies in the buffer
        time.sleep(0.01)
    return sock
def whole(data):
    head, end, body = data.partition(b"\\r\\n\\r\\n")
    return end and len(body) == int(head.lower().partition(b"content-length:")[2].split()[0])
"""
LEAVES = ASK + "ask('read').recv(65536)\nask('unread')\nos.kill(os.getpid(), signal.SIGKILL)\n"
STAYS = (
    ASK + "one = ask('read')\none.recv(65536)\ntwo = ask('unread')\nopen('ready', 'w')\ntime.sleep(1000)\n"
)


def proxied(it: Rig, plans: Plans) -> InferenceRoutes:
    """The pod-facing listener as ``app`` composes it, with a scripted engine."""

    async def policy(attempt_id: str) -> CallPolicy | None:
        row = await it.store.read(lambda c: by_id(c, AttemptRow, attempt_id))
        return None if row is None else CallPolicy(state=row.state, mode="train", model="forge")

    async def nothing(*_: Any) -> None:
        return None

    def agent(key: str) -> str | None:
        claim = keys.verify(it.secret, key)
        return claim.subject if claim is not None and claim.scope == "agent" else None

    sessions, engine = Sessions(it.store, policy), Engine()

    async def script(body: dict[str, Any]) -> Any:
        return result(body, "said to " + json.loads(bytes(body["messages"][0]))["content"])

    engine.script = script
    it.lifecycle.subscribe(sessions.on_event)
    calls = Calls(
        store=it.store,
        engine=engine,
        gate=Gate(),
        versions=Versions(),
        budget_exceeded=nothing,
        engine_gave_up=nothing,
    )
    routes = pod_routes(Settling(it.lifecycle, sessions), sessions, plans, it.store, it.secret)
    runner = Litestar(routes, exception_handlers=HANDLERS)
    return InferenceRoutes(sessions=sessions, calls=calls, keys=agent, model="forge", otherwise=runner)


@pytest.mark.parametrize("script", [LEAVES, STAYS])
async def test_i3_what_a_killed_harness_left_unread_is_not_trained(tmp_path: Path, script: str) -> None:
    """Killed by itself, or by the runner after the server's clock had sealed the attempt."""
    spec = script_spec(f"exec \"$PY\" -I -S - <<'END'\n{script}\nEND")
    async with rig(tmp_path, specs={"script": spec}, through=proxied) as it:
        await it.group(harness="script", max_attempts=1)
        if script is STAYS:
            (running,) = await it.until(lambda: it.of("attempt_running"))
            await eventually((it.backend.attempts / running.attempt_id / "work" / "ready").exists)
            over = sa.update(t.attempts).values(agent_deadline=time.time() - 1)
            await it.store.write(lambda c: c.execute(over) and None)
        (ended,) = await it.ended()
        assert ended.data["outcome"] == "policy_failure"
        query = sa.select(t.calls.c.end, t.calls.c.delivered, t.calls.c.untrainable).order_by(t.calls.c.seq)
        found = await it.store.read(lambda c: [tuple(row) for row in c.execute(query)])
        assert found == [("ok", "yes", None), ("ok", "no", "not_delivered")]


SMUGGLES = """
import os, socket, struct, time
address, _, path = os.environ["BASE"].removeprefix("http://").partition("/")
host, port = address.split(":")
def request(method, body, extra=""):
    head = "%s /%s/v1/chat/completions HTTP/1.1\\r\\nAuthorization: Bearer %s\\r\\n%sContent-Length: %d\\r\\n\\r\\n"
    return (head % (method, path, os.environ["KEY"], extra, len(body)) + body).encode()
def send(data):
    sock = socket.create_connection((host, int(port)))
    sock.settimeout(120)
    sock.sendall(data)
    print(sock.recv(65536).split()[1].decode())
    return sock
send(request("POST", '{"messages": [{"role": "user", "content": "honest"}]}'))
inner = request("POST", '{"messages": [{"role": "user", "content": "smuggled"}]}').decode()
inner = "\\r\\n" * 500000 + inner  # a parser takes it up again with what it reads next
kept = send(request("CONNECT", inner))
also = send(request("POST", inner, "Upgrade: h2c\\r\\nProxy-Connection: upgrade\\r\\n"))
time.sleep(1)
"""


async def test_no_call_hides_in_the_body_of_another(tmp_path: Path) -> None:
    """Its answer would reach the harness without a word of the relay on its delivery."""
    spec = script_spec(f"exec \"$PY\" -I -S - <<'END'\n{SMUGGLES}\nEND")
    async with rig(tmp_path, specs={"script": spec}, through=proxied) as it:
        await it.group(harness="script", max_attempts=1)
        await it.ended()
        assert (await it.log("harness")).split() == ["200", "405", "400"]
        query = sa.select(sa.func.count()).where(t.calls.c.end == "ok")
        assert await it.store.read(lambda c: c.execute(query).scalar_one()) == 1
