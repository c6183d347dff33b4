"""Rows of calls and attempts as spans of OpenTelemetry, by its semantic conventions for generative AI.

The trace is the attempt; its ids and those of its spans follow from the ids of the rows, so that every process that
tells of an attempt tells of the same trace. Nothing of what was said is in a span.
"""

import hashlib
from typing import Any

import sqlalchemy as sa
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from forge_server import __version__
from forge_server.domain.outcome import Outcome
from forge_server.domain.states import CallEnd
from forge_server.store import tables as t

_OPERATIONS = {"completions": "text_completion", "gemini": "generate_content"}
_FAILURES = frozenset({Outcome.INFRA_FAILURE, Outcome.POLICY_FAILURE, Outcome.TASK_FAILURE})
_PHASES = ("launched", "started", "running", "sealed")

_IDS = (
    t.attempts.c.id.label("attempt_id"),
    t.attempts.c.rollout_id,
    t.rollouts.c.run_id,
    t.rollouts.c.harness,
    t.rollouts.c.mode.label("rollout_mode"),
)
_WHERE_FROM = t.attempts.join(t.rollouts, t.rollouts.c.id == t.attempts.c.rollout_id)

CALLS = (
    sa.select(*(column for column in t.calls.c if column.name != "attempt_id"), *_IDS)
    .select_from(t.calls.join(_WHERE_FROM, t.attempts.c.id == t.calls.c.attempt_id))
    .where(t.calls.c.ended_at.is_not(None))
)
"""What ``call`` wants of a call that has ended; to be narrowed."""

ATTEMPTS = sa.select(
    *_IDS,
    t.rollouts.c.group_id,
    t.rollouts.c.policy_version,
    t.tasks.c.name.label("task"),
    t.runs.c.name.label("run"),
    *(
        t.attempts.c[name]
        for name in ("number", "backend", "outcome", "kind", "reward", "exit_code", "not_trained")
    ),
    *(t.attempts.c[f"{name}_at"] for name in ("created", *_PHASES, "ended")),
).select_from(_WHERE_FROM.join(t.runs, t.runs.c.id == t.rollouts.c.run_id).outerjoin(t.tasks))
"""What ``attempt`` wants of an attempt that has ended; to be narrowed."""


class Spans:
    """Makes spans and keeps them until they are taken. Not for two threads at a time."""

    def __init__(self, instance: str) -> None:
        self._ids, self._made = _Ids(), _Made()
        resource = Resource.create(
            {
                "service.name": "forge-server",
                "service.version": __version__,
                "service.instance.id": instance,
            }
        )
        provider = TracerProvider(ALWAYS_ON, resource, shutdown_on_exit=False, id_generator=self._ids)
        provider.add_span_processor(self._made)
        self._tracer = provider.get_tracer("forge_server", __version__)

    def take(self) -> list[ReadableSpan]:
        taken, self._made.spans = self._made.spans, []
        return taken

    def call(self, row: Any) -> None:
        """``row`` is one of ``CALLS``."""
        operation = _OPERATIONS.get(row.dialect, "chat")
        failed = row.end != CallEnd.OK
        self._span(
            f"{operation} {row.forest_key}",
            trace_id(row.attempt_id),
            span_id(f"{row.attempt_id} {row.id}"),
            span_id(row.attempt_id),
            (row.began_at, row.ended_at),
            SpanKind.CLIENT,
            {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "vllm",
                "gen_ai.request.model": row.forest_key,
                "gen_ai.request.temperature": row.temperature,
                "gen_ai.response.finish_reasons": [row.finish_reason] if row.finish_reason else None,
                "gen_ai.usage.input_tokens": row.prompt_len,
                "gen_ai.usage.output_tokens": row.completion_len,
                "gen_ai.agent.id": (row.flags or {}).get("agent"),
                "http.response.status_code": row.status,
                "error.type": row.end if failed else None,
                "forge.call.id": row.id,
                "forge.call.seq": row.seq,
                "forge.call.dialect": row.dialect,
                "forge.call.end": row.end,
                "forge.call.forwarding": row.mode,
                "forge.call.label": row.label or None,
                "forge.call.retry_of": row.retry_of,
                "forge.call.engine_ms": row.engine_ms,
                "forge.call.held_ms": row.held_ms,
                "forge.policy.version": row.policy_version,
                **_whose(row),
            },
            Status(StatusCode.ERROR, row.error or row.end) if failed else Status(),
        )

    def attempt(self, row: Any) -> None:
        """The root. ``row`` is one of ``ATTEMPTS``."""
        failed = row.outcome in _FAILURES
        self._span(
            f"invoke_agent {row.harness}",
            trace_id(row.attempt_id),
            span_id(row.attempt_id),
            None,
            (row.created_at, row.ended_at),
            SpanKind.INTERNAL,
            {
                "gen_ai.operation.name": "invoke_agent",
                "gen_ai.provider.name": "vllm",
                "gen_ai.agent.name": row.harness,
                "error.type": row.kind if failed else None,
                "forge.run.name": row.run,
                "forge.group.id": row.group_id,
                "forge.task.name": row.task,
                "forge.policy.version": row.policy_version,
                "forge.attempt.number": row.number,
                "forge.attempt.backend": row.backend,
                "forge.attempt.outcome": row.outcome,
                "forge.attempt.kind": row.kind,
                "forge.attempt.reward": row.reward,
                "forge.attempt.exit_code": row.exit_code,
                "forge.attempt.not_trained": row.not_trained or None,
                **_whose(row),
            },
            Status(StatusCode.ERROR, row.kind) if failed else Status(),
            [(name, at) for name in _PHASES if (at := getattr(row, f"{name}_at")) is not None],
        )

    def _span(
        self,
        name: str,
        trace: int,
        span: int,
        parent: int | None,
        times: tuple[float, float],
        kind: SpanKind,
        attributes: dict[str, Any],
        status: Status,
        events: list[tuple[str, float]] | None = None,
    ) -> None:
        self._ids.trace, self._ids.span = trace, span
        above = SpanContext(trace, parent, is_remote=False, trace_flags=TraceFlags(1)) if parent else None
        began, ended = times
        made = self._tracer.start_span(
            name,
            set_span_in_context(NonRecordingSpan(above)) if above else None,
            kind,
            {key: value for key, value in attributes.items() if value is not None},
            start_time=_ns(began),
        )
        for what, at in events or ():
            made.add_event(what, timestamp=_ns(at))
        made.set_status(status)
        made.end(_ns(max(began, ended)))


def trace_id(attempt_id: str) -> int:
    return _number(f"trace {attempt_id}", 16)


def span_id(whose: str) -> int:
    """Of an attempt, or of a call as ``ATTEMPT CALL``."""
    return _number(f"span {whose}", 8)


def _number(text: str, size: int) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:size], "big") or 1


def _whose(row: Any) -> dict[str, Any]:
    return {
        "gen_ai.conversation.id": row.attempt_id,
        "forge.run.id": row.run_id,
        "forge.rollout.id": row.rollout_id,
        "forge.rollout.mode": row.rollout_mode,
        "forge.attempt.id": row.attempt_id,
    }


def _ns(at: float) -> int:
    return int(at * 1e6) * 1000


class _Ids(IdGenerator):
    """The ids of the next span."""

    trace = span = 0

    def generate_trace_id(self) -> int:
        return self.trace

    def generate_span_id(self) -> int:
        return self.span


class _Made(SpanProcessor):
    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self.spans.append(span)
