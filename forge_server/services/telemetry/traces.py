"""Tells a collector of every call that ended, and of every attempt when it has.

Reads what is committed, a few seconds behind, in a reader's thread: no call waits for it and nothing is done on its
way. Each call is told once by this process; those that ended before it began are its predecessor's.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

import sqlalchemy as sa
import structlog
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace.export import SpanExportResult

from forge_server.domain.events import EventRow
from forge_server.domain.states import AttemptState
from forge_server.services.telemetry.outbox import Outbox
from forge_server.services.telemetry.spans import ATTEMPTS, CALLS, Spans
from forge_server.store import tables as t
from forge_server.store.database import Store

log = structlog.get_logger(__name__)

LOOK_S = 5.0
LATE_S = 10.0
"""So much later than its end a call's row may be committed and is still seen before its attempt ends."""
CHUNK = 500
_GOING = [state.value for state in AttemptState if state is not AttemptState.ENDED]
STOP_S = 5.0
"""The server's end waits for the collector at most so long."""


class Traces:
    """Subscribe it to the lifecycle and ``run`` it as a task; ``close`` after that task was cancelled."""

    def __init__(
        self, store: Store, spans: Spans, outbox: Outbox, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._store, self._spans, self._outbox, self._clock = store, spans, outbox, clock
        self._began = self._since = clock()
        self._ended: deque[str] = deque()
        self._told: dict[str, int] = {}
        """Attempt -> its calls that were told, as bits by seq."""
        self._looking = asyncio.Lock()

    def __call__(self, row: EventRow) -> None:
        if row.kind == "attempt_ended" and row.attempt_id is not None:
            self._ended.append(row.attempt_id)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Tell what is new. Whatever goes wrong is tried again at the next look."""
        async with self._looking:  # two at once would tell the same twice
            now = self._clock()
            ended = [self._ended.popleft() for _ in range(min(CHUNK, len(self._ended)))]
            try:
                await self._store.read(lambda c: self._tell(c, ended))
            except Exception:  # nobody's rollout is to suffer from this
                log.exception("traces cannot be read")
                self._ended.extendleft(reversed(ended))
                return
            self._since = max(self._began, now - LATE_S)
            for attempt_id in ended:
                self._told.pop(attempt_id, None)

    async def close(self) -> None:
        while True:
            left = len(self._ended)
            await self.look()
            if not 0 < len(self._ended) < left:
                break
        await asyncio.to_thread(self._outbox.close, STOP_S)

    def _tell(self, connection: sa.Connection, ended: Sequence[str]) -> None:
        live = CALLS.where(t.attempts.c.state.in_(_GOING), t.calls.c.ended_at >= self._since)
        over = CALLS.where(t.attempts.c.id.in_(ended), t.calls.c.ended_at >= self._began)
        try:
            for query in (live, over) if ended else (live,):
                for row in connection.execute(query):
                    told = self._told.get(row.attempt_id, 0)
                    if not told >> row.seq & 1:
                        self._spans.call(row)
                        self._told[row.attempt_id] = told | 1 << row.seq
            for row in connection.execute(ATTEMPTS.where(t.attempts.c.id.in_(ended))) if ended else ():
                self._spans.attempt(row)
        finally:
            self._outbox.put(self._spans.take())


def traces(store: Store, endpoint: str, instance: str, counts: Counter[str]) -> Traces:
    """To the collector at ``endpoint``; headers and the like are its exporter's environment variables."""
    exporter = OTLPSpanExporter(endpoint=traces_url(endpoint))
    outbox = Outbox(
        lambda spans: exporter.export(spans) is SpanExportResult.SUCCESS, exporter.shutdown, counts
    )
    return Traces(store, Spans(instance), outbox)


def traces_url(endpoint: str) -> str:
    """Where a collector at this address takes traces."""
    base = endpoint.rstrip("/")
    return base if base.endswith("/v1/traces") else f"{base}/v1/traces"
