"""Sessions: what the proxy holds in memory of each attempt that may make calls.

A session is rebuilt from the attempt's rows when its first request comes, be it after a restart of the
server. It numbers the calls, keeps the token forest, knows which answers nobody is known to have got, and is
closed when the lifecycle says that the attempt is sealed: calls in flight are cancelled and the deliveries
are settled (I3).
"""

import asyncio
import contextlib
from collections.abc import Sequence

import sqlalchemy as sa
import structlog

from forge_server.domain.engine import ChatResult, Template
from forge_server.domain.errors import StoreError
from forge_server.domain.events import EventRow
from forge_server.domain.states import INFERENCE_STATES, AttemptState, CallEnd, Delivery
from forge_server.proxy import recall, record, splice
from forge_server.proxy.dialects.base import Refusal
from forge_server.proxy.flights import Answer, Flight
from forge_server.proxy.ports import CallPolicy, PolicyLookup, Row, Store
from forge_server.proxy.replay import Replays
from forge_server.proxy.splice_index import Answers
from forge_server.proxy.transcript import Stored, Transcript
from forge_server.trajectory.codec import PromptDigests
from forge_server.trajectory.forest import Forest

log = structlog.get_logger(__name__)

FLUSH_S = 1.0
"""How long a delivery that is known may stay unwritten."""

_LOOKS = 20  # a last answer's acknowledgements get this many times 50 ms when its attempt is sealed
_REMEMBERED = 20_000  # sealed attempts whose late calls are refused without asking the database
_CLOSING = frozenset({"attempt_sealed", "attempt_ended"})
_CLOSED_STATES = frozenset({AttemptState.SEALED, AttemptState.VERIFYING, AttemptState.ENDED})

Write = tuple[sa.Update, Row]
"""What is known of one call's delivery and not written yet."""


def sealed_refusal(attempt_id: str) -> Refusal:
    return Refusal(409, "attempt_sealed", f"attempt {attempt_id} is sealed: it takes no further call")


class Session:
    """One attempt's live state. ``refusal`` is set once no further call is admitted, ``closed`` once it is
    sealed."""

    def __init__(
        self, attempt_id: str, policy: CallPolicy, unwritten: dict[int, Write], stored: Stored
    ) -> None:
        self.attempt_id, self.policy = attempt_id, policy
        self.refusal: Refusal | None = None
        self.closed = False
        self.forest = Forest()
        self.digests = PromptDigests()
        self.replays = Replays()
        self.transcript = Transcript(stored)
        self.flights: set[Flight] = set()
        self.next_seq = 0
        self.calls = 0  # calls of their own, replays not counted, nor what the engine did not answer
        self.engine_failures = 0  # in a row, with calls that it had
        self.engine_failed_at = 0.0  # monotonic: the last of them
        self.tokens = 0  # completion tokens sampled so far
        self.known: ChatResult | None = None
        self.answers = Answers()
        self._said: tuple[recall.Said, ...] = ()
        self._open: dict[int, Answer] = {}  # answers whose delivery may still become known from a connection
        self._unwritten = unwritten

    def restore(self, past: recall.Past) -> None:
        """Take up what earlier lives of the server recorded."""
        self.next_seq, self.calls, self.tokens = past.taken, past.own, past.tokens
        for call in past.calls:
            self.confirmed(
                self.forest.add(call.id, call.prompt, call.completion, call.delivered, call.media).confirmed
            )
        self._said, self.answers.incomplete = past.said, past.forgotten
        for call_id, digest, delivery, completion in past.undelivered:
            if call_id in self.forest:
                delivery = self.forest.delivery(call_id)
            if delivery is not Delivery.YES:
                self.landed(answer := Answer(call_id, digest, completion, delivery))
                self.replays.keep(answer)

    def recover(self, template: Template | None) -> None:
        """Take up which answers earlier lives of the server gave, once the engine's template is known."""
        if self._said and template is not None:
            said, self._said = self._said, ()
            splice.recover(self.answers, self.policy.model, said, self.forest, template)

    def take_seq(self) -> int:
        seq = self.next_seq
        self.next_seq += 1
        return seq

    def landed(self, answer: Answer) -> None:
        """An answer is recorded."""
        self._open[answer.call_id] = answer

    def settle(self, answer: Answer, delivery: Delivery, row_id: int | None = None) -> None:
        """A connection, or its loss, tells about a delivery. ``row_id``: the row of a replay of ``answer``.

        Yes is final. No holds until a replay arrives. Unknown says nothing.
        """
        answer.line = None
        if row_id is not None and delivery is not Delivery.UNKNOWN:
            self._mark(row_id, delivery)
        if answer.delivery is Delivery.YES or delivery is Delivery.UNKNOWN or answer.withdrawn:
            return
        if answer.call_id in self.forest:
            if delivery is Delivery.YES:
                self.forest.confirm_delivery(answer.call_id)
            else:
                delivery = self.forest.deny_delivery(answer.call_id)
        if delivery is not answer.delivery:
            answer.delivery = delivery
            self._mark(answer.call_id, delivery)
            self.replays.settled(answer)
        if delivery is Delivery.YES:
            self._open.pop(answer.call_id, None)

    def confirmed(self, call_ids: tuple[int, ...]) -> None:
        """A later prompt contains these calls' completions: the harness got them."""
        for call_id in call_ids:
            self._mark(call_id, Delivery.YES)
            answer = self._open.pop(call_id, None)
            if answer is not None:
                answer.delivery = Delivery.YES
                self.replays.settled(answer)

    def receipts(self, read: Sequence[int], lost: Sequence[int]) -> None:
        """The relay's word on answers that went through it."""
        for call_ids, delivery in ((read, Delivery.YES), (lost, Delivery.NO)):
            for call_id in call_ids:
                answer = self._open.get(call_id)
                if answer is not None and (delivery is Delivery.YES or not answer.watchers):
                    self.settle(answer, delivery)

    def withdraw(self, answer: Answer, refusal: Refusal) -> None:
        """A relay was told to expect this answer and got ``refusal`` in its place. It will say that the answer was
        read: nobody is given it from now on, so that this is never true.
        """
        self.settle(answer, Delivery.NO)
        if answer.delivery is Delivery.YES:
            return
        answer.withdrawn = True
        self._open.pop(answer.call_id, None)
        if refusal.status >= 500:
            self.calls -= 1  # not the policy's doing: it is not charged
        row = record.withheld(answer.call_id, refusal.status, f"{refusal.code}: {refusal.message}")
        self._unwritten[answer.call_id] = record.WITHHELD, row

    def close(self, refusal: Refusal) -> None:
        """Admit nothing more and cancel what is in flight."""
        self.refusal, self.closed = self.refusal or refusal, True
        for flight in self.flights:
            flight.stop(CallEnd.REJECTED, refusal)

    def look(self) -> bool:
        """Settle what connections can tell now; whether some cannot tell yet, or are about to get an answer."""
        waiting = [a for a in self._open.values() if a.line is not None and not a.relayed]
        for answer in waiting:
            if answer.line is not None and answer.line.taken():
                self.settle(answer, Delivery.YES)
        return any(a.line is not None for a in waiting) or any(a.watchers for a in self._open.values())

    def _mark(self, call_id: int, delivery: Delivery) -> None:
        self._unwritten[call_id] = record.DELIVERED, {"b_id": call_id, "b_delivered": delivery}


class Sessions:
    """All live sessions, and the writing of deliveries."""

    def __init__(self, store: Store, lookup: PolicyLookup) -> None:
        self._store, self._lookup = store, lookup
        self._live: dict[str, Session] = {}
        self._opening: dict[str, asyncio.Task[Session]] = {}
        self._sealed: dict[str, Refusal] = {}
        self._unwritten: dict[int, Write] = {}
        self._flushing = asyncio.Lock()
        self._settling: dict[str, asyncio.Task[None]] = {}
        self._stored = Stored()
        self._closing = False

    def __len__(self) -> int:
        return len(self._live)

    def live(self, attempt_id: str) -> bool:
        """Whether the attempt may have calls in flight, or deliveries that are not written."""
        return attempt_id in self._live or attempt_id in self._opening

    async def open(self, attempt_id: str) -> Session:
        """The session of an attempt. Raises ``Refusal`` when the attempt may not make calls."""
        session = self._live.get(attempt_id)
        if session is not None:
            return session
        if attempt_id in self._sealed:
            raise self._sealed[attempt_id].again()
        task = self._opening.get(attempt_id)
        if task is None:
            task = asyncio.create_task(self._load(attempt_id), name=f"session {attempt_id}")
            self._opening[attempt_id] = task
            task.add_done_callback(lambda _: self._opening.pop(attempt_id, None))
        return await asyncio.shield(task)

    async def _load(self, attempt_id: str) -> Session:
        try:
            policy = await self._lookup(attempt_id)
            if policy is None:
                raise Refusal(401, "unknown_attempt", f"there is no attempt {attempt_id}")
            if policy.state in _CLOSED_STATES:
                raise sealed_refusal(attempt_id)
            if policy.state not in INFERENCE_STATES:
                raise Refusal(503, "not_started", f"attempt {attempt_id} has not started yet", retry_after=1)
            splices = policy.forwarding != "record"
            past = await self._store.read(
                lambda connection: recall.past_calls(connection, attempt_id, with_messages=splices)
            )
        except StoreError as error:
            log.error("session not loaded", attempt=attempt_id, error=str(error))
            raise Refusal(
                503, "store_unavailable", "the server cannot read its database", retry_after=2
            ) from error
        if attempt_id in self._sealed:  # sealed while we read
            raise self._sealed[attempt_id].again()
        session = Session(attempt_id, policy, self._unwritten, self._stored)
        session.restore(past)
        self._live[attempt_id] = session
        return session

    def on_event(self, row: EventRow) -> None:
        """Called by the lifecycle on the loop after each commit: an attempt that left the states in which
        calls are taken is closed.
        """
        attempt_id = row.attempt_id
        if attempt_id is None or row.kind not in _CLOSING or attempt_id in self._sealed:
            return
        session = self._live.pop(attempt_id, None)
        refusal = session.refusal if session is not None else None
        self._sealed[attempt_id] = refusal or sealed_refusal(attempt_id)
        while len(self._sealed) > _REMEMBERED:
            del self._sealed[next(iter(self._sealed))]
        if session is not None:
            session.close(sealed_refusal(attempt_id))
        task = asyncio.create_task(self._settle(attempt_id, session), name=f"settle {attempt_id}")
        self._settling[attempt_id] = task
        task.add_done_callback(lambda _: self._settling.pop(attempt_id, None))

    async def settled(self, attempt_id: str) -> None:
        """Wait until the ends and deliveries of a sealed attempt are in the database."""
        task = self._settling.get(attempt_id)
        if task is not None:
            await asyncio.shield(task)

    async def receipts(self, attempt_id: str, read: Sequence[int], lost: Sequence[int]) -> None:
        """Take the runner's word on what its harness has read; durable on return. Raises StoreError.

        It comes when the harness is dead, and the attempt may have been sealed by its deadline before.
        """
        session = self._live.get(attempt_id)
        if session is None:
            await self.settled(attempt_id)
            await self._store.write(lambda c: record.settle_receipts(c, attempt_id, read, lost))
            return
        session.receipts(read, lost)
        if not await self._flush():
            raise StoreError("the deliveries are not written", where=attempt_id)

    async def withdraw(self, session: Session, answers: Sequence[Answer], refusal: Refusal) -> None:
        """Take back answers that were announced to a relay; on return that is written, if the database works."""
        for answer in answers:
            session.withdraw(answer, refusal)
        await self._flush()

    async def run(self) -> None:
        """Write deliveries as they become known, until cancelled."""
        while True:
            await asyncio.sleep(FLUSH_S)
            await self._flush()

    async def close(self) -> None:
        """Write what is known; calls in flight are left to the next start, which ends them as server_lost."""
        self._closing = True
        if self._settling:
            await asyncio.wait(set(self._settling.values()), timeout=5.0)
        await self._flush()

    async def _flush(self) -> bool:
        """Write what is known; whether all that was known before is written."""
        async with self._flushing:
            if not self._unwritten:
                return True
            batch = dict(self._unwritten)
            self._unwritten.clear()
            try:
                await self._store.write_rows(list(batch.values()))
            except StoreError as error:
                self._unwritten.update(batch | self._unwritten)  # the same dict: the sessions write into it
                log.error("deliveries not written", error=str(error))
                return False
            return True

    async def _settle(self, attempt_id: str, session: Session | None) -> None:
        if session is not None:
            if session.flights:
                await asyncio.wait({flight.task for flight in session.flights})
            for _ in range(_LOOKS):
                if not session.look():
                    break
                await asyncio.sleep(0.05)
        pause = 0.1
        while not self._closing:
            if await self._flush():
                with contextlib.suppress(StoreError):
                    await self._store.write(lambda connection: record.settle_attempt(connection, attempt_id))
                    return
            await asyncio.sleep(pause)
            pause = min(2 * pause, 5.0)
