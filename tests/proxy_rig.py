"""A whole proxy on a real socket and a real database; only the engine is scripted, for faults and timing."""

import asyncio
import contextlib
import itertools
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import httpx
import msgspec
import numpy as np
import sqlalchemy as sa
import uvicorn

from forge_server.domain import events as e
from forge_server.domain.engine import ChatResult
from forge_server.domain.errors import StoreError
from forge_server.domain.ids import new_id
from forge_server.domain.outcome import Kind
from forge_server.domain.states import AttemptState
from forge_server.lifecycle.apply import Lifecycle
from forge_server.proxy.calls import Calls
from forge_server.proxy.connection import ConnectionProtocol
from forge_server.proxy.hold import Gate
from forge_server.proxy.ports import CallPolicy
from forge_server.proxy.record import Rows
from forge_server.proxy.routes import InferenceRoutes
from forge_server.proxy.sessions import Session, Sessions
from forge_server.store import tables as t
from forge_server.store.database import Store
from forge_server.store.keys import attempt_key, verify
from forge_server.store.rows import AttemptRow, by_id

SECRET = b"s" * 32
PATIENCE = 120.0
"""Seconds that any wait of a test may take; far more than it needs."""

PLACEHOLDER = 6
"""The id that stands for a piece of an image."""

Script = Callable[[dict[str, Any]], Awaitable[ChatResult]]


def words(text: str) -> list[int]:
    """A stand-in for a tokenizer: one id per character."""
    return [ord(c) for c in text]


def _piece(part: dict[str, Any]) -> list[int]:
    """An image is three placeholders between the ids that enclose it."""
    return [5, PLACEHOLDER, PLACEHOLDER, PLACEHOLDER, 7] if "image_url" in part else words(part["text"])


def prompt_of(body: dict[str, Any]) -> list[int]:
    """Prefix-preserving: what the harness echoes of an answer gives the ids that were sampled for it."""
    out: list[int] = []
    for raw in body["messages"]:
        message = msgspec.json.decode(raw)
        if message["role"] == "assistant":
            out += [1, *words(str(message.get("content") or "")), 2]
        elif isinstance(message.get("content"), list):
            out += [3, *(id for part in message["content"] for id in _piece(part)), 4]
        else:
            out += [3, *words(str(message.get("content") or "")), 4]
    return out


def result(body: dict[str, Any], text: str = "ok", **changes: Any) -> ChatResult:
    """The engine's answer ``text``; the prompt ends with the opening id 1, the completion with id 2."""
    prompt = np.array([*prompt_of(body), 1], np.int32)
    completion = np.array([*words(text), 2], np.int32)
    fields: dict[str, Any] = {
        "prompt_ids": prompt,
        "completion_ids": completion,
        "logprobs": np.full(completion.size, -0.5, np.float32),
        "message": {"role": "assistant", "content": text},
        "finish_reason": "stop",
        "usage_prompt": prompt.size,
        "usage_completion": completion.size,
        "model": "forge",
    }
    return ChatResult(**(fields | changes))


class Engine:
    """Answers ``answer N``, unless a script is given. ``asked``: bodies; ``aborted``: cancelled calls."""

    template = None  # it takes no tokens

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.aborted = 0
        self.busy = asyncio.Semaphore(0)  # released once per call that arrived
        self.gone = asyncio.Event()  # set at every abort
        self._numbers = itertools.count(1)
        self.script: Script = self.answer

    async def answer(self, body: dict[str, Any]) -> ChatResult:
        return result(body, f"answer {next(self._numbers)}")

    def blocked(self) -> asyncio.Event:
        """From now on answers wait for the event."""
        event = asyncio.Event()

        async def script(body: dict[str, Any]) -> ChatResult:
            await event.wait()
            return await self.answer(body)

        self.script = script
        return event

    async def arrived(self) -> None:
        """Wait until one more call has reached the engine."""
        async with asyncio.timeout(PATIENCE):
            await self.busy.acquire()

    async def chat(
        self, body: dict[str, Any], *, request_id: str, affinity: str, known: ChatResult | None = None
    ) -> ChatResult:
        msgspec.json.encode(body)
        self.asked.append(body)
        self.busy.release()
        try:
            return await self.script(body)
        except asyncio.CancelledError:
            self.aborted += 1
            self.gone.set()
            raise

    async def count_tokens(self, messages: Sequence[Any], tools: Sequence[Any]) -> int:
        """Of the stand-in for a tokenizer; a tool has as many tokens as bytes."""
        return len(prompt_of({"messages": messages})) + 1 + sum(len(bytes(tool)) for tool in tools)


class Versions:
    current = 0


class Rig:
    """``url`` is the listener; ``attempt`` a running attempt with its ``key``."""

    def __init__(self, store: Store) -> None:
        self.store, self.lifecycle = store, Lifecycle(store)
        self.engine, self.gate, self.versions = Engine(), Gate(), Versions()
        self.policy: dict[str, Any] = {"mode": "train", "model": "forge"}
        self.keepalive_after_s = 60.0
        self.placeholder: int | None = PLACEHOLDER
        self.max_body = 64 * 1024 * 1024
        self.attempt = ""
        self.url = ""
        self.sessions = Sessions(self.store, self.lookup)
        # of two lives of a server only the later one hears of the sealing: the one before is gone by then
        self.lifecycle.subscribe(lambda row: self.sessions.on_event(row))

    @property
    def key(self) -> str:
        return attempt_key(SECRET, self.attempt, "agent")

    @property
    def base(self) -> str:
        return f"{self.url}/a/{self.attempt}/v1"

    async def lookup(self, attempt_id: str) -> CallPolicy | None:
        row = await self.store.read(lambda c: by_id(c, AttemptRow, attempt_id))
        return None if row is None else CallPolicy(state=row.state, **self.policy)

    async def budget_exceeded(self, attempt_id: str, kind: Kind) -> None:
        await self.lifecycle.apply(e.BudgetExceeded(attempt_id=attempt_id, kind=kind))  # type: ignore[arg-type]

    async def engine_gave_up(self, attempt_id: str) -> None:
        await self.lifecycle.apply(e.StopRequested(attempt_id=attempt_id, reason="engine_error"))

    async def new_attempt(self, *, running: bool = True) -> str:
        run, rollout, attempt = new_id("ru"), new_id("ro"), new_id("at")
        await self.lifecycle.apply(e.RunCreated(run_id=run, name=run, kind="record", settings={}))
        await self.lifecycle.apply(
            e.RolloutCreated(rollout_id=rollout, run_id=run, harness="react", mode="record")
        )
        await self.lifecycle.apply(
            e.AttemptQueued(attempt_id=attempt, rollout_id=rollout, backend="external")
        )
        if running:
            await self.lifecycle.apply(e.RunnerJoined(attempt_id=attempt, nonce="n"))
            await self.lifecycle.apply(e.HarnessStarted(attempt_id=attempt, agent_s=600))
        return attempt

    async def seal(self) -> None:
        await self.lifecycle.apply(e.AttemptSealed(attempt_id=self.attempt, reason="exited"))
        async with asyncio.timeout(PATIENCE):
            await self.sessions.settled(self.attempt)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """The proxy composed as ``app`` does it, listening on loopback."""
        self.sessions = Sessions(self.store, self.lookup)
        self.calls = Calls(
            store=self.store,
            engine=self.engine,
            gate=self.gate,
            versions=self.versions,
            budget_exceeded=self.budget_exceeded,
            engine_gave_up=self.engine_gave_up,
            placeholder=self.placeholder,
        )
        self.routes = InferenceRoutes(
            sessions=self.sessions,
            calls=self.calls,
            keys=_agent,
            model="forge",
            keepalive_after_s=self.keepalive_after_s,
            max_body=self.max_body,
        )
        flusher = asyncio.create_task(self.sessions.run())
        try:
            async with listening(self.routes) as self.url:
                yield
        finally:
            flusher.cancel()
            await self.calls.close()
            await self.sessions.close()

    def client(self, **headers: str) -> httpx.AsyncClient:
        """A client with connections of its own."""
        return httpx.AsyncClient(
            base_url=self.url, timeout=PATIENCE, headers={"Authorization": f"Bearer {self.key}", **headers}
        )

    async def ask(
        self, client: httpx.AsyncClient, body: dict[str, Any] | None = None, **options: Any
    ) -> httpx.Response:
        return await client.post(f"/a/{self.attempt}/v1/chat/completions", json=body or hello(), **options)

    def refuse_writes(self, these: Callable[[Rows], bool] = lambda rows: True) -> asyncio.Event:
        """The database refuses the rows for which ``these`` holds, until the event is set."""
        write_rows, works = self.store.write_rows, asyncio.Event()

        async def failing(rows: Any) -> None:
            rows = list(rows)
            if these(rows) and not works.is_set():
                raise StoreError("the disk that holds the database is full")
            await write_rows(rows)

        self.store.write_rows = failing  # type: ignore[method-assign]
        return works

    async def rows(self) -> list[Any]:
        query = sa.select(t.calls).where(t.calls.c.attempt_id == self.attempt).order_by(t.calls.c.seq)
        return await self.store.read(lambda c: list(c.execute(query).all()))

    async def until(self, holds: Callable[[list[Any]], bool]) -> list[Any]:
        """The rows of the attempt once they satisfy ``holds``."""
        async with asyncio.timeout(PATIENCE):
            while not holds(rows := await self.rows()):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        return rows

    def sessions_now(self) -> list[Session]:
        return list(self.sessions._live.values())


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait until something that has no event of its own holds."""
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def listening(app: Any, **config: Any) -> AsyncIterator[str]:
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    sock.listen(512)
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            **{
                "http": ConnectionProtocol,
                "ws": "none",
                "lifespan": "off",
                "log_config": None,
                "access_log": False,
                "timeout_graceful_shutdown": 1,
                **config,
            },
        )
    )
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
    task = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        await eventually(lambda: server.started)
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        await asyncio.wait({task}, timeout=PATIENCE)
        sock.close()


@contextlib.asynccontextmanager
async def rig(
    url: str, *, keepalive_after_s: float = 60.0, engine: Any = None, **policy: Any
) -> AsyncIterator[Rig]:
    """A proxy with one running attempt on a fresh database at ``url``; ``engine`` in place of the scripted one."""
    store = Store.open(url, create=True)
    try:
        made = Rig(store)
        made.keepalive_after_s = keepalive_after_s
        made.engine = engine or made.engine
        made.policy |= policy
        made.attempt = await made.new_attempt()
        async with made.serving():
            yield made
    finally:
        store.close()


def _agent(key: str) -> str | None:
    claim = verify(SECRET, key)
    return claim.subject if claim is not None and claim.scope == "agent" else None


def hello(text: str = "hello", **more: Any) -> dict[str, Any]:
    return {"model": "gpt-x", "messages": [{"role": "user", "content": text}], **more}


def follow(body: dict[str, Any], answer: dict[str, Any], text: str = "and then?") -> dict[str, Any]:
    """The next request of a harness that got ``answer``."""
    message = answer["choices"][0]["message"]
    return {**body, "messages": [*body["messages"], message, {"role": "user", "content": text}]}


SEALED = AttemptState.SEALED
