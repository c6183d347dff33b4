"""The life of a call: admitted, recorded as intended, held, answered by the engine, recorded as ended (I1,
I2, I9).

The intent is durable before anything is forwarded, and the end before a byte of the answer leaves. When the
database fails in between, no answer leaves; the missing rows are written as soon as it works again.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any, NoReturn

import msgspec
import sqlalchemy as sa
import structlog

from forge_server.domain.classify import RECORD_ERROR
from forge_server.domain.engine import ChatResult, EngineRefused, EngineUnavailable
from forge_server.domain.errors import StoreError
from forge_server.domain.ids import CallIds
from forge_server.domain.media import Media
from forge_server.domain.outcome import Kind
from forge_server.domain.states import CallEnd, Delivery, Fallback, Untrainable
from forge_server.domain.turn import Turn, as_message, from_message
from forge_server.proxy import record, rules, sampling, splice
from forge_server.proxy.dialects.base import Refusal
from forge_server.proxy.flights import Answer, Flight
from forge_server.proxy.hold import Gate
from forge_server.proxy.identity import Headers
from forge_server.proxy.ports import BudgetExceeded, Engine, EngineGaveUp, Store, VersionSource
from forge_server.proxy.recall import completion_id
from forge_server.proxy.replay import choice_of, marks_of
from forge_server.proxy.sessions import Session
from forge_server.proxy.splice_align import Unspliceable
from forge_server.proxy.splice_index import Asked
from forge_server.proxy.tally import Tally
from forge_server.store import messages
from forge_server.store.tables import call_messages, call_tokens, calls
from forge_server.trajectory.media import locate

log = structlog.get_logger(__name__)

RESAMPLES = 5
"""How often a call is sampled again after weight updates that aborted it."""

ENGINE_FAILURES = 4
"""So many times in a row that the engine fails with calls of an attempt end it: what kills the engine again and
again is this attempt's request."""

_RETRY_S = 2


class _Ended(Exception):
    """A call ends without an answer: what its row says, what the harness gets, and whether the engine failed
    while it had the request (``sent``)."""

    def __init__(self, end: CallEnd, refusal: Refusal, *, sent: bool = False) -> None:
        self.end, self.refusal, self.sent = end, refusal, sent


class Calls:
    """Makes calls; one per server. ``placeholder``: the id that the engine repeats in a prompt for an image, where
    that is known."""

    def __init__(
        self,
        *,
        store: Store,
        engine: Engine,
        gate: Gate,
        versions: VersionSource,
        budget_exceeded: BudgetExceeded,
        engine_gave_up: EngineGaveUp,
        placeholder: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store, self._engine, self._gate, self._versions = store, engine, gate, versions
        self._budget_exceeded, self._engine_gave_up = budget_exceeded, engine_gave_up
        self._placeholder, self._clock = placeholder, clock
        self._ids = CallIds()
        self.tally = Tally()
        self._late: set[asyncio.Task[None]] = set()

    async def begin(
        self, session: Session, dialect: str, turn: Turn, headers: Headers
    ) -> list[tuple[Flight | Answer, bool]]:
        """The call that serves each choice of this request, and whether it is its own (or an earlier one's).

        Raises ``Refusal`` when they are not all admitted. The caller is counted as a watcher of each.
        """
        if session.refusal is not None:
            raise session.refusal.again()
        harness = session.policy.rules
        turn, label = rules.apply(turn, harness)
        marks = marks_of(headers)
        digest, keys = session.transcript.identify(turn)
        wanted = [choice_of(digest, marks, index, turn.choices) for index in range(turn.choices)]
        repeated = [session.replays.find(*one) for one in wanted]
        fresh = repeated.count(None)
        if fresh and session.calls + fresh > session.policy.max_calls:
            await self._stop(
                session, Kind.BUDGET_CALLS, f"the budget of {session.policy.max_calls} calls is used up"
            )
        if fresh and session.tokens >= session.policy.max_tokens:
            await self._stop(
                session, Kind.BUDGET_TOKENS, f"the budget of {session.policy.max_tokens} tokens is used up"
            )
        session.calls += fresh
        served: list[tuple[Flight | Answer, bool]] = []
        for index, ((own_digest, own_marks), known) in enumerate(zip(wanted, repeated, strict=True)):
            if known is not None:
                known.watchers += 1
                served.append((known, False))
                continue
            flight = Flight(self._ids.next(), session.take_seq(), dialect, own_digest, turn, self._clock())
            flight.label, flight.watchers = label, 1
            if harness is not None:
                flight.flags |= harness.agent(headers)
            if turn.choices > 1:
                flight.flags["choice"] = index
            session.flights.add(flight)
            session.replays.took_off(flight, own_marks)
            flight.task = asyncio.create_task(self._fly(session, flight, keys), name=f"call {flight.id}")
            flight.task.add_done_callback(_retrieved)
            served.append((flight, True))
        return served

    async def count(self, session: Session, turn: Turn) -> int:
        """How many tokens the prompt of a turn has; no call is made and nothing is recorded."""
        if session.refusal is not None:
            raise session.refusal.again()
        turn, _ = rules.apply(turn, session.policy.rules)
        try:
            return await self._engine.count_tokens(turn.messages, turn.tools)
        except EngineRefused as error:
            raise Refusal(400, error.code, error.message) from error
        except EngineUnavailable as error:
            raise _engine_away(str(error)) from error

    async def repeat(self, session: Session, dialect: str, turn: Turn, answer: Answer) -> int:
        """Record that a request is given the answer of an earlier call; returns the id of its row."""
        flight = Flight(self._ids.next(), session.take_seq(), dialect, answer.digest, turn, self._clock())
        row = record.replayed(session.attempt_id, flight, answer.call_id, session.policy, self._clock())
        try:
            await self._store.write_rows([(calls, row)])
        except StoreError as error:
            why = f"{RECORD_ERROR}: {error}"
            withheld = record.withheld(flight.id, 503, why, Untrainable.DUPLICATE)
            self._write_late(flight.id, [(calls, row)], [(record.WITHHELD, withheld)])
            raise _unavailable(error) from error
        self.tally.repeats += 1
        return flight.id

    async def _stop(self, session: Session, kind: Kind, message: str) -> NoReturn:
        """The policy has used up a budget: 400 now and for every later call, once that is written."""
        await self._budget_exceeded(session.attempt_id, kind)
        session.refusal = session.refusal or Refusal(400, str(kind), f"the rollout has ended: {message}")
        raise session.refusal.again()

    async def _engine_failed(self, session: Session, asked_at: float, failure: Refusal) -> None:
        """Too many calls in a row that the engine had and did not answer end the attempt. Those that were with
        it at the same time met one failure."""
        if asked_at < session.engine_failed_at:
            return
        session.engine_failed_at = time.monotonic()
        session.engine_failures += 1
        if session.engine_failures >= ENGINE_FAILURES and session.refusal is None:
            await self._engine_gave_up(session.attempt_id)
            session.refusal = Refusal(400, "engine_error", f"the rollout has ended: {failure.message}")

    async def _fly(self, session: Session, flight: Flight, keys: tuple[bytes, ...]) -> Answer:
        answer = None
        try:
            answer = await self._make(session, flight, keys)
            return answer
        finally:
            session.flights.discard(flight)
            session.replays.landed(flight, answer)

    async def _make(self, session: Session, flight: Flight, keys: tuple[bytes, ...]) -> Answer:
        policy = session.policy
        pinned = sampling.pin(
            flight.turn,
            policy,
            attempt_id=session.attempt_id,
            seq=flight.seq,
            tokens_left=policy.max_tokens - session.tokens,
        )
        pinned.flags.update(flight.flags)
        packed, fresh = session.transcript.pack(flight.turn, keys)
        intent: record.Rows = fresh
        intent.append((calls, record.intent(session.attempt_id, flight, policy)))
        intent.append((call_messages, {"call_id": flight.id, "request": packed}))
        try:
            await self._store.write_rows(intent)
        except StoreError as error:
            end = record.failed(
                flight,
                CallEnd.REJECTED,
                503,
                f"{RECORD_ERROR}: {error}",
                at=self._clock(),
                flags=pinned.flags,
                held_ms=0.0,
            )
            session.calls -= 1
            self._write_late(flight.id, intent, [(record.FAILED, end)])
            raise _unavailable(error) from error
        session.transcript.committed(flight.id, keys)
        images = session.transcript.images(keys)
        if images:
            pinned.flags["images"] = len(images)

        passage = _Passage(pinned.flags)
        try:
            result = await self._sample(session, flight, keys, pinned, passage)
            completion = from_message(
                result.message,
                id=completion_id(flight.id),
                created=int(flight.began_at),
                finish_reason=result.finish_reason,
                prompt_tokens=result.usage_prompt,
                completion_tokens=result.usage_completion,
            )
        except msgspec.ValidationError as error:
            away = _engine_away(f"its message cannot be read ({error})")
            ended = _Ended(CallEnd.UPSTREAM_ERROR, away, sent=True)
            await self._failed(session, flight, ended, passage)
        except _Ended as ended:
            await self._failed(session, flight, ended, passage)

        session.engine_failures = 0
        session.tokens += result.usage_completion
        placement = None
        media: Media | None = None
        if result.prompt_ids is not None and result.completion_ids is not None:
            media = locate(result.prompt_ids, self._placeholder, images)
            placement = session.forest.add(
                flight.id, result.prompt_ids, result.completion_ids, Delivery.UNKNOWN, media or ()
            )
            session.confirmed(placement.confirmed)
            session.known = result
        reason = record.untrainable(
            result,
            policy,
            label=flight.label,
            constrained=passage.guided or passage.flags.get("fallback") == Fallback.CONSTRAINED,
            mixed=passage.mixed,
            versions=passage.versions,
            media=media,
        )
        end_row = record.answered(
            flight,
            result,
            placement,
            reason,
            at=self._clock(),
            version=passage.version,
            spliced=passage.served is not None,
            flags=passage.flags,
            engine_ms=passage.engine_ms,
            held_ms=passage.held_ms,
        )
        body = msgspec.json.encode(as_message(completion))
        key = messages.digest(body)
        rows: record.Rows = [
            (messages.INTERN, messages.row(body, key)),
            (record.ANSWERED, end_row),
        ]
        if placement is not None:
            row = record.tokens(flight, result, placement, passage.version, session.digests, media or ())
            rows.append((call_tokens, row))
        rows.append((record.RESPONSE, {"b_id": flight.id, "b_response": key}))
        answer = Answer(flight.id, flight.digest, completion, Delivery.UNKNOWN)
        try:
            await self._store.write_rows(rows)
        except StoreError as error:
            session.calls -= 1
            session.settle(answer, Delivery.NO)
            rows.append((record.WITHHELD, record.withheld(flight.id, 503, f"{RECORD_ERROR}: {error}")))
            self._write_late(flight.id, [], rows)
            raise _unavailable(error) from error
        self.tally.ended(flight.dialect, flight.began_at, end_row)
        if passage.asked is not None:
            splice.remember(session.answers, flight.id, passage.asked, passage.served, result, completion)
        session.landed(answer)
        answer.watchers = flight.watchers
        if not flight.watchers:
            session.settle(answer, Delivery.NO)
        return answer

    async def _sample(
        self,
        session: Session,
        flight: Flight,
        keys: tuple[bytes, ...],
        pinned: sampling.Pinned,
        passage: "_Passage",
    ) -> ChatResult:
        """Wait for the gate, ask the engine, and ask again when a weight update aborted the answer."""
        try:
            for _ in range(RESAMPLES):
                with flight:
                    async with self._gate.passage(session.policy.max_hold_s) as held_ms:
                        passage.held_ms += held_ms
                        passage.version, overrun = self._versions.current, self._gate.overrun
                        passage.asked_at = time.monotonic()
                        result = await self._ask(session, flight, keys, pinned, passage)
                        passage.engine_ms = (time.monotonic() - passage.asked_at) * 1000.0
                        # a call that an update did not wait for may have been answered by either version
                        passage.mixed = (self._versions.current, self._gate.overrun) != (
                            passage.version,
                            overrun,
                        )
                        passage.versions = frozenset((passage.version, self._versions.current))
                if result.finish_reason != "abort":
                    flight.recording()
                    return result
                passage.flags["resampled"] = passage.flags.get("resampled", 0) + 1
            away = _engine_away(f"it aborted the answer {RESAMPLES} times")
            raise _Ended(CallEnd.UPSTREAM_ERROR, away, sent=True)
        except asyncio.CancelledError:
            if flight.stopped is None:
                raise  # the server is stopping: the next start ends the call as server_lost
            asyncio.current_task().uncancel()  # type: ignore[union-attr]
            raise _Ended(*flight.stopped) from None
        except Refusal as refusal:
            raise _Ended(*(flight.stopped or (CallEnd.REJECTED, refusal))) from None
        except EngineRefused as error:
            raise _Ended(CallEnd.REJECTED, Refusal(400, error.code, error.message)) from error
        except EngineUnavailable as error:
            raise _Ended(CallEnd.UPSTREAM_ERROR, _engine_away(str(error)), sent=error.sent) from error

    async def _ask(
        self,
        session: Session,
        flight: Flight,
        keys: tuple[bytes, ...],
        pinned: sampling.Pinned,
        passage: "_Passage",
    ) -> ChatResult:
        """Ask the engine: with the tokens that were sampled before where that can be done, else with messages."""
        policy, request_id = session.policy, f"forge-{flight.id}"
        passage.served = passage.asked = None
        passage.flags.pop("fallback", None)
        template = self._engine.template
        guides = template is not None and template.guides_tools
        passage.guided = pinned.constrained or (guides and bool(pinned.body.get("tools")))
        if policy.forwarding == "splice" or (policy.forwarding == "auto" and template is not None):
            session.recover(template)
            passage.asked = asked = session.answers.asked(policy.model, flight.turn, keys)
            ask = splice.Ask(
                asked=asked,
                body=pinned.body,
                constrained=passage.guided,
                images=bool(session.transcript.images(keys)),
                answers=session.answers,
                forest=session.forest,
                policy=policy,
                attempt_id=session.attempt_id,
                request_id=request_id,
            )
            try:
                passage.served = await splice.serve(self._engine, template, ask)
                result = passage.served.result
                # without a live version of the policy the engine's labels mean nothing
                return result if passage.version >= 0 else msgspec.structs.replace(result, versions=())
            except Unspliceable as error:
                passage.flags["fallback"] = error.reason
        return await self._engine.chat(
            pinned.body, request_id=request_id, affinity=session.attempt_id, known=session.known
        )

    async def _failed(self, session: Session, flight: Flight, ended: _Ended, passage: "_Passage") -> NoReturn:
        flight.recording()
        refusal = ended.refusal
        row = record.failed(
            flight,
            ended.end,
            refusal.status,
            f"{refusal.code}: {refusal.message}",
            at=self._clock(),
            flags=passage.flags,
            held_ms=passage.held_ms,
        )
        self.tally.ended(flight.dialect, flight.began_at, row)
        try:
            await self._store.write_rows([(record.FAILED, row)])
        except StoreError as error:
            log.error("end of call not written yet", call=flight.id, error=str(error))
            self._write_late(flight.id, [], [(record.FAILED, row)])
        if refusal.status >= 500:
            session.calls -= 1  # not the policy's doing: it is not charged
        if ended.sent:
            await self._engine_failed(session, passage.asked_at, refusal)
        raise refusal

    def _write_late(self, call_id: int, intent: record.Rows, end: record.Rows) -> None:
        self.tally.unrecorded += 1
        task = asyncio.create_task(self._late_rows(call_id, intent, end), name=f"late rows of call {call_id}")
        self._late.add(task)
        task.add_done_callback(self._late.discard)

    async def _late_rows(self, call_id: int, intent: record.Rows, end: record.Rows) -> None:
        """Write what a failing database did not take. It may have taken it before it failed."""

        def write(connection: sa.Connection) -> None:
            found = connection.execute(sa.select(calls.c.end).where(calls.c.id == call_id)).one_or_none()
            rows = (*(intent if found is None else ()), *end)
            if found is not None and found.end is not None:  # all but the news that the answer was not given
                rows = tuple(each for each in rows if each[0] is record.WITHHELD)
            for what, row in rows:
                connection.execute(sa.insert(what) if isinstance(what, sa.Table) else what, row)

        pause = 0.2
        while True:
            await asyncio.sleep(pause)
            pause = min(2 * pause, 5.0)
            with contextlib.suppress(StoreError):
                await self._store.write(write)
                return

    async def close(self) -> None:
        """Give up on late rows: the next start ends their calls as server_lost."""
        for task in self._late:
            task.cancel()


class _Passage:
    """What is measured between intent and end."""

    def __init__(self, flags: dict[str, Any]) -> None:
        self.flags = flags
        self.version = 0
        self.held_ms = self.engine_ms = 0.0
        self.asked_at = 0.0  # monotonic
        self.guided = self.mixed = False  # sampled under a grammar; perhaps by two versions
        self.versions: frozenset[int] = frozenset()  # those that can have been in force
        self.asked: Asked | None = None
        self.served: splice.Served | None = None


def _engine_away(why: str) -> Refusal:
    return Refusal(503, "engine_unavailable", f"the model is not available: {why}", retry_after=_RETRY_S)


def _unavailable(error: StoreError) -> Refusal:
    log.error("call not recorded", error=str(error))
    return Refusal(
        503, "store_unavailable", "the server cannot record calls at the moment", retry_after=_RETRY_S
    )


def _retrieved(task: asyncio.Task[Answer]) -> None:
    """Whoever waited has seen the error; a bug is logged even if nobody did."""
    if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, Refusal):
        log.error("call failed", exc_info=error)
