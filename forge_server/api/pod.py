"""The runner's routes on the pod-facing listener: ``/a/{attempt_id}/start|heartbeat|events|seal|verifier|
reward|finish``.

Invariant I10: the join token opens ``start`` once (for one nonce), the runner key the rest, both only for
their own attempt. Every route may be repeated: the lifecycle answers what has been said before with success.
"""

import contextlib
import functools
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, Literal, Protocol

import msgspec
import sqlalchemy as sa
import zstandard
from litestar import Request, Response, get, post
from litestar.params import FromPath, JSONBody

from forge_server.api.auth import bearer
from forge_server.domain import events as e
from forge_server.domain.errors import Conflict, InvalidRequest, NotFound, SpecError, TaskError, Unauthorized
from forge_server.domain.events import Applied, Event, Refusal
from forge_server.domain.outcome import Kind
from forge_server.harness.plan import Plan
from forge_server.lifecycle.heartbeats import Instruction
from forge_server.scheduler.plans import fact_of
from forge_server.store import keys
from forge_server.store import tables as t
from forge_server.store.database import Store

TAIL_BYTES = 64 * 1024
CallId = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
ExitCode = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**32 - 1)]
"""Of 32 bits, signed or not: Windows tells 0xC0000005 as 3221225477."""


class Lifecycle(Protocol):
    async def apply(self, event: Event) -> Applied: ...

    async def heartbeat(self, attempt_id: str) -> Instruction: ...


class Receipts(Protocol):
    """What the proxy is told of answers that went through a runner's relay."""

    async def receipts(self, attempt_id: str, read: Sequence[int], lost: Sequence[int]) -> None:
        """Durable on return. Raises StoreError."""


class Plans(Protocol):
    """What the attempts are to do."""

    async def plan(self, attempt_id: str) -> Plan:
        """The attempt's plan. Raises SpecError or TaskError when it cannot be made."""

    async def verifier(self, attempt_id: str) -> bytes | None:
        """The tar of the task's ``tests`` folder; None when the task has no verifier."""


class Start(msgspec.Struct, forbid_unknown_fields=True):
    token: str
    nonce: Annotated[str, msgspec.Meta(min_length=16, max_length=64)]


class Started(msgspec.Struct):
    runner_key: str
    agent_key: str
    plan: Plan


class Heartbeat(msgspec.Struct, forbid_unknown_fields=True):
    phase: Literal["starting", "running", "sealed", "verifying"]


class Orders(msgspec.Struct):
    action: Literal["continue", "stop"]
    reason: str = ""
    left_s: float | None = None


class RunnerEvent(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    kind: Literal["harness_started", "harness_exited", "receipts", "oom", "log"]
    exit_code: ExitCode | None = None
    stopped_by: str = ""
    stream: Literal["runner", "harness", "verifier"] = "runner"
    tail: str = ""
    read: list[CallId] = []
    lost: list[CallId] = []


class RunnerEvents(msgspec.Struct, forbid_unknown_fields=True):
    events: list[RunnerEvent]


class Seal(msgspec.Struct, forbid_unknown_fields=True):
    reason: str = ""


class Reward(msgspec.Struct, forbid_unknown_fields=True):
    value: float
    source: Literal["verifier", "external"]
    call_id: CallId | None = None
    detail: dict[str, Any] | None = None


class Finish(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    exit_code: ExitCode | None = None
    signal: int | None = None
    stopped_by: str = ""
    verifier: e.VerifierReport = e.VerifierReport()
    runner_error: str = ""


AttemptId = FromPath[str]
_Request = Request[Any, Any, Any]


def pod_routes(
    lifecycle: Lifecycle, receipts: Receipts, plans: Plans, store: Store, secret: bytes
) -> list[Any]:
    """The handlers, to be served on the pod-facing listener without a prefix."""

    def check(request: _Request, attempt_id: str) -> None:
        if keys.verify(secret, bearer(request)) != keys.Claim("runner", attempt_id):
            raise Unauthorized("the runner key is missing or wrong", where=attempt_id)

    async def apply(event: Event, attempt_id: str) -> None:
        applied = await lifecycle.apply(event)
        if not applied.ok:
            raise _refused(applied.refusal, attempt_id)

    @contextlib.asynccontextmanager
    async def planned(attempt_id: str) -> AsyncIterator[None]:
        """The task or the harness may be gone since: that ends the attempt, and is not the policy's doing."""
        try:
            yield
        except (SpecError, TaskError) as error:
            evidence = {"error": str(error)}
            await lifecycle.apply(
                e.BackendFact(attempt_id=attempt_id, fact=fact_of(error), evidence=evidence, independent=True)
            )
            raise Conflict(f"the attempt cannot be run: {error}", where=attempt_id) from None

    @post("/a/{attempt_id:str}/start", status_code=200)
    async def start(attempt_id: AttemptId, data: JSONBody[Start]) -> Started:
        if keys.verify(secret, data.token) != keys.Claim("join", attempt_id):
            raise Unauthorized("the join token is wrong", where=attempt_id)
        await apply(e.RunnerJoined(attempt_id=attempt_id, nonce=data.nonce), attempt_id)
        async with planned(attempt_id):
            plan = await plans.plan(attempt_id)
        return Started(
            runner_key=keys.attempt_key(secret, attempt_id, "runner"),
            agent_key=keys.attempt_key(secret, attempt_id, "agent"),
            plan=plan,
        )

    @post("/a/{attempt_id:str}/heartbeat", status_code=200)
    async def heartbeat(attempt_id: AttemptId, data: JSONBody[Heartbeat], request: _Request) -> Orders:
        check(request, attempt_id)
        told = await lifecycle.heartbeat(attempt_id)
        if told.ended:
            raise Conflict("the attempt has ended", where=attempt_id)
        # Once the harness is dead there is nothing left to stop: the verifier has its own clock.
        stop = told.stop and data.phase in ("starting", "running")
        return Orders("stop" if stop else "continue", told.reason if stop else "", told.left_s)

    @post("/a/{attempt_id:str}/events", status_code=200)
    async def events(
        attempt_id: AttemptId, data: JSONBody[RunnerEvents], request: _Request
    ) -> dict[str, Any]:
        check(request, attempt_id)
        for event in data.events:
            if event.kind == "harness_started":
                async with planned(attempt_id):
                    plan = await plans.plan(attempt_id)
                await apply(e.HarnessStarted(attempt_id=attempt_id, agent_s=plan.agent_s), attempt_id)
            elif event.kind == "receipts":
                await receipts.receipts(attempt_id, event.read, event.lost)
            elif event.kind == "oom":
                # Best effort: the attempt may have been stopped for another reason already.
                await lifecycle.apply(e.BudgetExceeded(attempt_id=attempt_id, kind=Kind.OOM_AGENT))
            elif event.kind == "log":
                await store.write(functools.partial(_write_log, attempt_id, event.stream, event.tail))
        return {}

    @post("/a/{attempt_id:str}/seal", status_code=200)
    async def seal(attempt_id: AttemptId, data: JSONBody[Seal], request: _Request) -> dict[str, Any]:
        check(request, attempt_id)
        await apply(e.AttemptSealed(attempt_id=attempt_id, reason=data.reason), attempt_id)
        return {}

    @get("/a/{attempt_id:str}/verifier")
    async def verifier(attempt_id: AttemptId, request: _Request) -> Response[bytes]:
        check(request, attempt_id)
        async with planned(attempt_id):
            plan, archive = await plans.plan(attempt_id), await plans.verifier(attempt_id)
        if archive is None:
            return Response(b"", status_code=204)
        await apply(e.VerifierFetched(attempt_id=attempt_id, verify_s=plan.verify_s), attempt_id)
        return Response(archive, media_type="application/x-tar")

    @post("/a/{attempt_id:str}/reward", status_code=200)
    async def reward(attempt_id: AttemptId, data: JSONBody[Reward], request: _Request) -> dict[str, Any]:
        check(request, attempt_id)
        event = e.RewardReported(
            attempt_id=attempt_id,
            value=data.value,
            source=data.source,
            call_id=data.call_id,
            detail=data.detail,
        )
        await apply(event, attempt_id)
        return {}

    @post("/a/{attempt_id:str}/finish", status_code=200)
    async def finish(attempt_id: AttemptId, data: JSONBody[Finish], request: _Request) -> dict[str, Any]:
        check(request, attempt_id)
        event = e.RunnerFinished(
            attempt_id=attempt_id,
            exit_code=None if data.exit_code is None else _signed(data.exit_code),
            signal=data.signal,
            stopped_by=data.stopped_by,
            verifier=data.verifier,
            runner_error=data.runner_error,
        )
        await apply(event, attempt_id)
        return {}

    return [start, heartbeat, events, seal, verifier, reward, finish]


def _refused(refusal: Refusal | None, attempt_id: str) -> Exception:
    if refusal is Refusal.UNKNOWN:
        return NotFound("there is no such attempt", where=attempt_id)
    if refusal is Refusal.BAD_REWARD:
        return InvalidRequest("the reward is not a finite number of sensible size", where=attempt_id)
    return Conflict(f"refused: {refusal}", where=attempt_id)


def _signed(exit_code: int) -> int:
    """As the column holds it."""
    return (exit_code + 2**31) % 2**32 - 2**31


def _write_log(attempt_id: str, stream: str, tail: str, connection: sa.Connection) -> None:
    data = zstandard.compress(tail.encode("utf-8", "replace")[-TAIL_BYTES:])
    logs = t.attempt_logs
    connection.execute(sa.delete(logs).where(logs.c.attempt_id == attempt_id, logs.c.stream == stream))
    connection.execute(sa.insert(logs), {"attempt_id": attempt_id, "stream": stream, "tail": data})
