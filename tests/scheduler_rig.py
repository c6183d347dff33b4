"""A server in miniature: real store, lifecycle, runner routes, scheduler, local backend; a scripted model.

Calls are recorded as the proxy would, as far as outcomes need it.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from litestar import Litestar, Request, Response, post
from runner_support import Reply, say, tool, verifier_tar

from forge_server import assets
from forge_server.api.listeners import bind_tcp, bind_unix, serving
from forge_server.api.pod import pod_routes
from forge_server.api.problem import HANDLERS
from forge_server.domain import events as e
from forge_server.domain.events import EventRow
from forge_server.domain.ids import CallIds, new_id
from forge_server.harness.load import load_all
from forge_server.harness.plan import TaskFile, TaskInput
from forge_server.harness.spec import Spec
from forge_server.lifecycle.apply import Lifecycle
from forge_server.proxy.connection import ConnectionProtocol
from forge_server.scheduler.local import LocalBackend, LocalOptions
from forge_server.scheduler.plans import PlanOptions, Plans
from forge_server.scheduler.scheduler import Options, Scheduler
from forge_server.scheduler.ticks import Ticks
from forge_server.store import instance, keys
from forge_server.store import tables as t
from forge_server.store.database import Store

CHECK = "cmp -s answer.txt /tests/expected && r=1 || r=0\necho $r > /logs/verifier/reward.txt\n"
SOLVE = [tool("shell", command="cat word.txt"), tool("finish", answer="plum")]


class Receipts:
    """Hears what runners say of answers; the model here is no proxy."""

    def __init__(self):
        self.heard = []

    async def receipts(self, attempt_id, read, lost):
        self.heard.append((attempt_id, tuple(read), tuple(lost)))


class Tasks:
    """One task for all."""

    def __init__(self, check: str = CHECK, **limits: Any) -> None:
        self.tar = verifier_tar(check, expected="plum")
        self.task = TaskInput(
            instruction="Copy the word.", files=(TaskFile(path="word.txt", content=b"plum"),), **limits
        )

    async def input(self, task_id: str) -> TaskInput:
        return self.task

    async def verifier(self, task_id: str) -> bytes | None:
        return self.tar


def script_spec(script: str, name: str = "script") -> Spec:
    """A harness that is a shell script; BASE and KEY are in its environment."""
    env = {"BASE": "{base_url}", "KEY": "{agent_key}", "PY": "{python}"}
    return Spec(name=name, summary="", api="chat", argv=("bash", "-c", script), env=env)


CALL = (
    'call() { "$PY" -I -S -c \'import os,urllib.request as u;'
    'r=u.Request(os.environ["BASE"]+"/v1/chat/completions",b"{\\"messages\\":[]}",'
    '{"authorization":"Bearer "+os.environ["KEY"]});print(u.urlopen(r).status)\'; }\n'
)
"""A shell function that makes one model call."""


class Rig:
    """What a test holds; made by ``rig``."""

    store: Store
    lifecycle: Lifecycle
    backend: Any  # a LocalBackend, unless made elsewhere
    scheduler: Scheduler
    run_id: str
    secret: bytes

    def __init__(self) -> None:
        self.rows: list[EventRow] = []
        self.changed = asyncio.Event()
        self.model: Callable[[str, list[Any]], Reply] = lambda attempt, messages: say("done")
        self._ids, self._seq = CallIds(), {}

    def heard(self, row: EventRow) -> None:
        self.rows.append(row)
        self.changed.set()

    async def until(self, what: Callable[[], Any], within: float = 120.0) -> Any:
        """Wait until ``what()`` is true; it is asked again after every event."""
        async with asyncio.timeout(within):
            while not (found := what()):
                self.changed.clear()
                await self.changed.wait()
            return found

    def of(self, kind: str, **match: Any) -> list[EventRow]:
        return [r for r in self.rows if r.kind == kind and all(r.data.get(k) == v for k, v in match.items())]

    async def group(self, n: int = 1, harness: str = "react", max_attempts: int = 3) -> str:
        """Admit one group of ``n`` rollouts."""
        group_id = new_id("gr")
        rollouts = tuple(
            e.RolloutCreated(
                rollout_id=new_id("ro"),
                run_id=self.run_id,
                harness=harness,
                mode="train",
                task_id="ta-1",
                group_id=group_id,
                slot=slot,
                max_attempts=max_attempts,
            )
            for slot in range(n)
        )
        created = e.GroupCreated(
            group_id=group_id, run_id=self.run_id, task_id="ta-1", step=1, mode="train", rollouts=rollouts
        )
        assert (await self.lifecycle.apply(created)).applied
        return group_id

    async def ended(self, n: int = 1, within: float = 180.0) -> list[EventRow]:
        """Wait for ``n`` rollouts to end."""
        await self.until(lambda: len(self.of("rollout_ended")) >= n, within)
        return self.of("rollout_ended")

    async def quiet(self, within: float = 120.0) -> None:
        """Wait until no runner is left."""
        async with asyncio.timeout(within):
            for runner in tuple(self.backend._runners.values()):
                await runner.gone.wait()

    async def attempts(self) -> list[dict[str, Any]]:
        query = sa.select(t.attempts).order_by(t.attempts.c.id)
        return await self.store.read(lambda c: [dict(row._mapping) for row in c.execute(query)])

    async def log(self, stream: str) -> str:
        import zstandard

        query = sa.select(t.attempt_logs.c.tail).where(t.attempt_logs.c.stream == stream)
        tails = await self.store.read(lambda c: [row.tail for row in c.execute(query)])
        return "".join(zstandard.decompress(tail).decode() for tail in tails)

    async def record(self, attempt_id: str) -> None:
        if attempt_id not in self._seq:  # an earlier life may have recorded some
            query = sa.select(sa.func.count()).where(t.calls.c.attempt_id == attempt_id)
            self._seq[attempt_id] = await self.store.read(lambda c: c.execute(query).scalar_one())
        now, seq = time.time(), self._seq[attempt_id]
        self._seq[attempt_id] = seq + 1
        row = {
            "id": self._ids.next(),
            "attempt_id": attempt_id,
            "seq": seq,
            "dialect": "chat",
            "mode": "record",
        }
        row |= {"request_digest": b"x", "began_at": now, "ended_at": now, "end": "ok", "status": 200}
        await self.store.insert(t.calls, row)


@contextlib.asynccontextmanager
async def rig(
    folder: Path,
    *,
    tasks: Tasks | None = None,
    specs: dict[str, Spec] | None = None,
    start: bool = True,
    min_sandbox: str = "namespaces",
    disk_mb: int = 10240,
    run: dict[str, Any] | None = None,
    plan: dict[str, Any] | None = None,
    through: Callable[[Rig, Plans], Any] | None = None,
    elsewhere: Callable[[str, str], Awaitable[Any]] | None = None,
    address: str = "",
    port: int = 0,
    clock: Callable[[], float] = time.time,
    **options: Any,
) -> AsyncIterator[Rig]:
    """The server for the length of the block; what is left running at its end fails the test.

    ``through`` makes another pod-facing application than the scripted model's; ``elsewhere`` another backend, from
    the instance and the URL of the listener, which is then at ``port`` of ``address``.
    """
    it = Rig()
    it.store = Store.open(f"sqlite:///{folder / 'forge.db'}", create=True)
    try:
        it.lifecycle = Lifecycle(it.store, clock=clock)
        it.lifecycle.subscribe(it.heard)
        me = await instance.load(it.store)
        it.secret = me.secret
        await it.lifecycle.recover()
        it.run_id = await _run_and_task(it, run or {})
        all_specs = {**load_all([assets.folder("harness_specs")]), **(specs or {})}
        limits = PlanOptions(
            model="forge",
            window=32768,
            **{"heartbeat_s": 0.5, "grace_s": 0.5, "verify_s": 60.0, **(plan or {})},
        )
        plans = Plans(it.store, all_specs, tasks or Tasks(), limits)
        path = folder / "pod.sock"
        sock = bind_tcp(address, port, "the test") if elsewhere else bind_unix(path)
        if elsewhere is not None:
            it.backend = await elsewhere(me.id, f"http://{address}:{sock.getsockname()[1]}")
        else:
            it.backend = LocalBackend(
                LocalOptions(
                    instance=me.id,
                    pod_url=f"unix:{path}",
                    folder=folder / "local",
                    min_sandbox=min_sandbox,
                    disk_mb=disk_mb,
                ),
                lambda harness: None,
            )
        it.scheduler = Scheduler(
            it.store,
            it.lifecycle,
            it.backend,
            plans,
            me.secret,
            Options(**{"in_flight": 4, "heartbeat_s": 0.0, **options}),
            clock=clock,
        )
        app = through and through(it, plans)
        app = app or Litestar(
            [*pod_routes(it.lifecycle, Receipts(), plans, it.store, me.secret), _model(it)],
            exception_handlers=HANDLERS,
        )
        async with serving(app, [sock], protocol=ConnectionProtocol):
            ticks = Ticks()
            if start:
                await it.scheduler.start()
                ticks.every(instance.BEAT_S, "liveness", it.lifecycle.beat)
                ticks.every(0.2, "deadlines", it.scheduler.sweep)
                ticks.every(1.0, "reconcile", it.scheduler.reconcile)
                ticks.start()
            yield it
            ticks.stop()
            await it.scheduler.stop()
            assert elsewhere or not await it.backend.running()
    finally:
        it.store.close()


def _model(it: Rig) -> Any:
    @post("/a/{attempt_id:str}/v1/chat/completions", status_code=200)
    async def chat(attempt_id: str, request: Request[Any, Any, Any]) -> Response[bytes]:
        claim = keys.verify(it.secret, request.headers["authorization"].removeprefix("Bearer "))
        if claim != keys.Claim("agent", attempt_id):
            return Response(b"{}", status_code=401)
        messages = (await request.json())["messages"]
        reply = it.model(attempt_id, messages)
        await it.record(attempt_id)
        choice = {"index": 0, "message": reply, "finish_reason": "stop"}
        body = {"id": "x", "object": "chat.completion", "created": 0, "model": "forge", "choices": [choice]}
        return Response(json.dumps(body).encode(), media_type="application/json")

    return chat


async def _run_and_task(it: Rig, changes: dict[str, Any]) -> str:
    run_id = new_id("ru")
    settings = {"name": run_id, "taskset": "s", "harness": "react", **changes}
    await it.lifecycle.apply(e.RunCreated(run_id=run_id, name=run_id, kind="train", settings=settings))
    row = {"id": "ta-1", "name": "copy", "taskset": "s", "digest": "d", "instruction": "i", "definition": {}}

    def write(connection: sa.Connection) -> None:
        if connection.execute(sa.select(t.tasks.c.id).where(t.tasks.c.id == "ta-1")).first() is None:
            connection.execute(sa.insert(t.tasks), {**row, "created_at": time.time()})

    await it.store.write(write)
    return run_id


def solve(attempt: str, messages: list[Any]) -> Reply:
    """A model that reads the word and answers."""
    return SOLVE[sum(m["role"] == "assistant" for m in messages)]
