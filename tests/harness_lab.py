"""A whole forge-server in this process, on a scripted engine: real store, lifecycle, proxy, local backend, sandbox,
runner and relay; real harnesses, installed by their specs. Only the model is a Python function.

``lab.run`` puts one task through one harness and tells everything about it, the requests as the harness sent them
included: those are written down between the listener's socket and the proxy, before anything of it was read.
"""

import asyncio
import base64
import contextlib
import itertools
import shlex
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import sqlalchemy as sa
from engine_fake import make_checkpoint
from sample_oracle import Asking, is_generation
from sandbox_dns import Lookups
from scripted_engine import Asked, Call, Fault, Policy, Say, ScriptedEngine

from forge_server import app as application
from forge_server import environments
from forge_server.app import Server, running
from forge_server.client.http import ForgeClient
from forge_server.client.schemas import TaskCreate
from forge_server.domain.events import EventRow
from forge_server.domain.sample import Sample
from forge_server.domain.states import CallEnd, Delivery, PolicyState
from forge_server.export import reports
from forge_server.export.records import attempts, find_run
from forge_server.harness.spec import Spec
from forge_server.settings import EngineSettings, SchedulerSettings, ServerSettings, Settings
from forge_server.store import tables as t
from forge_server.store.database import Store
from forge_server.trajectory.attempt import Cut, cut
from forge_server.trajectory.check import Violation

WINDOW = 131_072
PATIENCE = 120.0
"""Seconds that the lab waits for its own server, far more than it needs."""


@dataclass(frozen=True)
class Request:
    """A request of the harness for the model, as it came in. ``path`` begins behind the attempt's part."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    status: list[int] = field(default_factory=list)
    """What was answered, once it was."""
    pieces: list[int] = field(default_factory=list)
    """Sizes of the pieces that its body came in, keep-alives first."""

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.body) if self.body else None


@dataclass(frozen=True)
class Result:
    """What became of one task in one harness. ``calls`` are rows of the table ``calls`` by seq; ``drift`` counts the
    samples that did not continue an earlier one, by reason (the first one is ``first``)."""

    outcome: str
    kind: str
    exit_code: int | None
    reward: float | None
    log: str
    calls: list[Any]
    samples: tuple[Sample, ...]
    violations: list[Violation]
    drift: dict[str, int]
    requests: list[Request]
    asked: list[Asked]
    logs: dict[str, str]
    cut: Cut
    rollout_id: str
    seconds: float
    answers: list[dict[str, Any] | None]
    """What the model said to each call, as a chat message."""
    looked_up: tuple[str, ...]
    """Hosts that something in the sandbox tried to resolve, sorted."""
    stopped_by: str
    """Why the runner stopped the harness; empty: it ended by itself."""

    def askings(self) -> list[Asking]:
        """The requests for completions, for the oracle; which of them are side calls or came to nothing, and what was
        answered, is known when each one has become one call."""
        made = [r for r in self.requests if r.method == "POST" and is_generation(r.path)]
        if len(made) != len(self.calls):
            return [Asking(r.path, r.json, dead=r.status != [200]) for r in made]
        return [
            Asking(
                request.path,
                request.json,
                answer,
                side=bool(call.label),
                dead=call.end != CallEnd.OK or call.delivered == Delivery.NO,
            )
            for request, call, answer in zip(made, self.calls, self.answers, strict=True)
        ]

    @property
    def trained_calls(self) -> int:
        return sum(span.owned for sample in self.samples for span in sample.spans)

    @property
    def merge_ratio(self) -> float:
        return self.trained_calls / len(self.samples) if self.samples else 0.0

    def explain(self) -> str:
        """For the message of a failing assertion."""
        return (
            f"{self.outcome}/{self.kind} exit {self.exit_code} reward {self.reward}, {len(self.calls)} calls, "
            f"drift {self.drift}, violations {self.violations}\n"
            f"requests: {[(r.method, r.path, r.status) for r in self.requests]}\n"
            f"errors: {[c.error for c in self.calls if c.error]}\nlog:\n{self.log[-4000:]}\n"
            f"{self.logs.get('runner', '')[-2000:]}"
        )


class Tap:
    """The pod-facing ASGI application with a record of what came in, and faults at its door.

    ``faults``: by number of the model request, from 0; the proxy never sees a request that meets one (``slow_s`` and
    ``hold`` only delay it).
    """

    def __init__(self, app: Any) -> None:
        self.app = app
        self.requests: list[Request] = []
        self.faults: dict[int, Fault] = {}
        self.numbers = itertools.count()

    def clear(self, faults: Mapping[int, Fault]) -> None:
        self.requests, self.faults, self.numbers = [], dict(faults), itertools.count()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = model_path(scope.get("path", "")) if scope["type"] == "http" else None
        if path is None:
            return await self.app(scope, receive, send)
        body, events = b"", []
        while True:
            event = await receive()
            events.append(event)
            body += event.get("body", b"")
            if event["type"] != "http.request" or not event.get("more_body"):
                break
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        query = scope.get("query_string", b"").decode("latin-1")
        request = Request(scope["method"], f"{path}?{query}" if query else path, headers, body)
        self.requests.append(request)
        if scope["method"] == "POST" and (fault := self.faults.get(next(self.numbers))):
            if fault.hold is not None:
                await asyncio.to_thread(fault.hold.wait, 600)
            if fault.slow_s:
                await asyncio.sleep(fault.slow_s)
            if fault.drop:
                send.__self__.transport.abort()  # uvicorn's request cycle: ASGI has no word for it
                return
            if fault.status:
                request.status.append(fault.status)
                return await _refuse(send, fault)
        pending = iter(events)

        async def replay() -> Any:
            return next(pending, None) or await receive()

        async def note(event: Any) -> None:
            if event["type"] == "http.response.start":
                request.status.append(event["status"])
            elif event["type"] == "http.response.body":
                request.pieces.append(len(event.get("body", b"")))
            await send(event)

        await self.app(scope, replay, note)


def model_path(path: str) -> str | None:
    """``/v1/…`` of ``/a/ATTEMPT/v1/…``; None for the runner's own routes."""
    parts = path.split("/", 3)
    rest = f"/{parts[3]}" if len(parts) == 4 and parts[1] == "a" else path
    return rest if rest.startswith(("/v1", "/v1beta", "/v1alpha")) else None


async def _refuse(send: Callable[[Any], Awaitable[None]], fault: Fault) -> None:
    body = b'{"error": {"message": "scripted trouble", "type": "server_error", "code": null}}'
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if fault.retry_after is not None:
        headers.append((b"retry-after", f"{fault.retry_after:g}".encode()))
    await send({"type": "http.response.start", "status": fault.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class Lab:
    """Use ``harness_lab``."""

    def __init__(self, settings: Settings, engine: ScriptedEngine, forwarding: str) -> None:
        self.settings, self.engine, self.forwarding = settings, engine, forwarding
        self.server: Server
        self.tap: Tap
        self._numbers = itertools.count(1)
        self._ended: dict[str, threading.Event] = {}
        self._loop = asyncio.new_event_loop()
        self._up = threading.Event()
        self._stop: asyncio.Event
        self._fault: BaseException | None = None
        self._thread = threading.Thread(target=self._live, name="lab", daemon=True)

    # --- life ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()
        assert self._up.wait(PATIENCE), "the server does not start"
        if self._fault is not None:
            raise self._fault
        self.client = ForgeClient(self.server.listening.control_url, self.server.admin_key)
        deadline = time.monotonic() + PATIENCE
        while not self.server.engine.ready:
            assert time.monotonic() < deadline, self.server.engine.reason
            time.sleep(0.02)

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(PATIENCE)
        if self._fault is not None:
            raise self._fault

    def _live(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:
            self._fault = error
        finally:
            self._up.set()
            self._loop.close()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        plain = Server.pod_app

        def tapped(server: Server) -> Any:
            app = plain(server)
            if server.settings is not self.settings:  # of a lab within this one
                return app
            self.tap = Tap(app)
            return self.tap

        with mock.patch.object(application.Server, "pod_app", tapped):
            async with running(self.settings) as self.server:
                self.server.lifecycle.subscribe(self._on_event)
                self._up.set()
                await self._stop.wait()

    def _on_event(self, row: EventRow) -> None:
        if row.kind == "run_ended" and row.run_id is not None:
            self._ended.setdefault(row.run_id, threading.Event()).set()

    # --- runs ---------------------------------------------------------------------------------------------------

    def run(
        self,
        harness: str,
        policy: Policy,
        *,
        instruction: str,
        files: Mapping[str, str] | None = None,
        expect: Mapping[str, str] | None = None,
        max_seconds: float = 120.0,
        max_calls: int = 60,
        faults: Mapping[int, Fault] | None = None,
        door_faults: Mapping[int, Fault] | None = None,
        **settings: Any,
    ) -> Result:
        """One task in one harness, to its end. ``faults`` happen in the engine, ``door_faults`` between relay and
        proxy. ``settings`` are further keys of the run."""
        name = f"{harness}-{next(self._numbers)}"
        self.engine.policy, self.engine.asked = policy, []
        self.engine.faults, self.engine.generations = dict(faults or {}), 0
        self.tap.clear(door_faults or {})
        task = {
            "name": name,
            "instruction": instruction,
            "files": dict(files or {}),
            "verify": {"script": verifier(expect or {})},
        }
        self.client.create_tasks(TaskCreate(taskset="lab", tasks=[task]))
        plain: dict[str, Any] = {
            "name": name,
            "kind": "record",
            "taskset": "lab",
            "tasks": [name],
            "harness": harness,
            "steps": 1,
            "groups": 1,
            "n": 1,
            "max_attempts": 1,
            "max_seconds": max_seconds,
            "max_calls": max_calls,
            "max_tokens": 10_000_000,
            "max_completion_tokens": 8192,
        }
        plain["forwarding"] = settings.pop("forwarding", self.forwarding)
        began = time.monotonic()
        with Lookups().noted() as lookups:
            run = self.client.create_run(plain | settings)
            over = self._ended.setdefault(run.id, threading.Event())
            assert over.wait(max_seconds + PATIENCE), f"the run never ended\n{self._logs(run.id)}"
        result = self._result(run.name, time.monotonic() - began, lookups)
        if self.settings.scheduler.backend == "local" and result.calls:
            assert lookups.listening.is_set(), "no sandbox was found to listen in"
        return result

    def export(self, folder: Path) -> int:
        """Have a further version of the weights: a checkpoint in ``folder``, for ``swap``; its number. The lab must
        have been given a ``model``."""
        version = 1 + max(row.version for row in self.client.policies())
        path, sha256 = make_checkpoint(folder, version)
        row = {
            "name": self.settings.engine.policy,
            "version": version,
            "state": PolicyState.EXPORTED.value,
            "path": str(path),
            "manifest_sha256": sha256,
            "created_at": time.time(),
        }
        writing = self.server.store.write(lambda c: c.execute(sa.insert(t.policies), row).rowcount)
        asyncio.run_coroutine_threadsafe(writing, self._loop).result(PATIENCE)
        return version

    def swap(self, version: int) -> None:
        """Put the version live, as an operator does; returns when it serves."""
        self.client.activate(version)

    def _logs(self, run_id: str) -> dict[str, str]:
        rollouts = list(self.client.rollouts(run=run_id))
        return {log.stream: log.text for rollout in rollouts for log in self.client.logs(rollout.id)}

    def _result(self, run: str, seconds: float, lookups: Lookups) -> Result:
        store: Store = self.server.store
        found = find_run(store, run, self.settings.engine.max_model_len)
        rollout = next(iter(self.client.rollouts(run=found.id)))
        detail = self.client.rollout(rollout.id)
        attempt = detail.attempts[-1]
        recorded = [a for a in attempts(store, found) if a.id == attempt.id]
        cut_up = cut([call.row for a in recorded for call in a.calls], found.limit)
        calls = store.read_now(
            lambda c: c.execute(
                sa.select(t.calls).where(t.calls.c.attempt_id == attempt.id).order_by(t.calls.c.seq)
            ).all()
        )
        logs = {log.stream: log.text for log in self.client.logs(rollout.id)}
        return Result(
            outcome=rollout.outcome or "",
            kind=rollout.kind or "",
            exit_code=attempt.exit_code,
            reward=rollout.reward,
            log=logs.get("harness", ""),
            calls=list(calls),
            samples=cut_up.samples,
            violations=reports.check(store, found).violations,
            drift=dict(Counter(sample.break_reason.value for sample in cut_up.samples)),
            requests=self.tap.requests,
            asked=self.engine.asked,
            logs=logs,
            cut=cut_up,
            rollout_id=rollout.id,
            seconds=seconds,
            looked_up=tuple(sorted({host for host in lookups.hosts if host != "localhost"})),
            stopped_by=((attempt.evidence or {}).get("finish") or {}).get("stopped_by", ""),
            answers=[view.response for view in self.client.calls(rollout.id, messages=True)],
        )


def installed(spec: Spec) -> bool:
    """Whether the harness needs nothing more to be installed."""
    install = spec.install
    return install is None or environments.is_complete(environments.harness_recipe(spec.name, install))


def verifier(expect: Mapping[str, str]) -> str:
    """A script that gives 1 iff each file in the work folder has exactly this text."""
    lines = ["#!/bin/bash", "r=1"]
    for path, text in expect.items():
        packed = base64.b64encode(text.encode()).decode()
        lines.append(
            f"echo {packed} | base64 -d | cmp -s - {shlex.quote(path)} || "
            f"{{ r=0; echo {shlex.quote(path)} differs; head -c 500 {shlex.quote(path)}; }}"
        )
    return "\n".join([*lines, "echo $r > /logs/verifier/reward.txt", ""])


@contextlib.contextmanager
def harness_lab(
    tmp_path: Path,
    *,
    forwarding: str = "record",
    window: int = WINDOW,
    engine: ScriptedEngine | None = None,
    model: Path | None = None,
    **settings: Any,
) -> Iterator[Lab]:
    """A lab for the length of the block; one per test module is enough. ``settings`` replace sections of the
    server's settings; ``model`` is the folder that it is told the engine serves."""
    made = engine or ScriptedEngine(window=window)
    with made.serving():
        tree = Settings(
            server=ServerSettings(port=0, control_port=0, data_dir="data"),
            engine=EngineSettings(
                kind="attach", url=made.url, max_model_len=made.window, model=str(model) if model else ""
            ),
            scheduler=SchedulerSettings(heartbeat_s=1.0, grace_s=2.0),
            folder=str(tmp_path),
        )
        lab = Lab(msgspec.structs.replace(tree, **settings), made, forwarding)
        lab.start()
        try:
            yield lab
        finally:
            lab.stop()


__all__ = [
    "Asked",
    "Call",
    "Fault",
    "Lab",
    "Policy",
    "Request",
    "Result",
    "Say",
    "ScriptedEngine",
    "harness_lab",
]
