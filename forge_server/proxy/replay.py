"""Retries within one attempt: which request gets an answer that exists, or is being made, already.

1. The same relay call id or idempotency key with the same request: the same call, whatever became of it, unless
   it was cancelled or its answer withdrawn.
2. A twin in flight is joined only if nobody waits for it any more, or if the request says that it is a retry.
3. A recorded answer that nobody is known to have got is given to the same request.

Anything else is a call of its own: two live connections with equal bodies are best-of-n, not a retry, and an
answer that was taken and asked for again was the policy's act.
"""

import hashlib

import msgspec

from forge_server.domain.states import Delivery
from forge_server.proxy.flights import Answer, Flight
from forge_server.proxy.identity import Headers

_KEPT = 256  # marks remembered per attempt


class Marks(msgspec.Struct, frozen=True):
    """What a request says about being a retry. ``names`` are ids that a retry of it would carry again."""

    names: tuple[str, ...] = ()
    retried: bool = False


def marks_of(headers: Headers) -> Marks:
    """Read the relay's call id, ``Idempotency-Key`` and ``x-stainless-retry-count``."""
    names = []
    if relay := headers.get(b"x-forge-relay-call"):
        names.append("relay:" + relay.decode("latin-1"))
    if key := headers.get(b"idempotency-key"):
        names.append("key:" + key.decode("latin-1"))
    count = headers.get(b"x-stainless-retry-count", b"0")
    return Marks(names=tuple(names), retried=count.isdigit() and int(count) > 0)


def choice_of(digest: bytes, marks: Marks, index: int, of: int) -> tuple[bytes, Marks]:
    """Digest and marks of one of the ``of`` calls that a request wants: the same choice of the same request
    repeats it, and no other does.
    """
    if of == 1:
        return digest, marks
    own = hashlib.blake2b(digest + b"%d of %d" % (index, of), digest_size=len(digest)).digest()
    return own, Marks(tuple(f"{name}#{index}" for name in marks.names), marks.retried)


class Replays:
    """What of one attempt can be given again."""

    def __init__(self) -> None:
        self._marked: dict[str, Flight | Answer] = {}
        self._flights: dict[bytes, list[Flight]] = {}
        self._answers: dict[bytes, list[Answer]] = {}

    def find(self, digest: bytes, marks: Marks) -> Flight | Answer | None:
        """The call that a request with this digest repeats, or None when it is a call of its own."""
        for name in marks.names:
            known = self._marked.get(name)
            if known is not None and known.joinable and known.digest == digest:
                return known
        for flight in self._flights.get(digest, ()):
            if flight.joinable and (marks.retried or not flight.watchers):
                return flight
        for answer in self._answers.get(digest, ()):
            if answer.lost:
                return answer
        return None

    def took_off(self, flight: Flight, marks: Marks) -> None:
        """A call of its own has begun."""
        self._flights.setdefault(flight.digest, []).append(flight)
        for name in marks.names:
            self._marked[name] = flight
        while len(self._marked) > _KEPT:
            del self._marked[next(iter(self._marked))]

    def landed(self, flight: Flight, answer: Answer | None) -> None:
        """A call has ended, with an answer or without."""
        twins = self._flights[flight.digest]
        twins.remove(flight)
        if not twins:
            del self._flights[flight.digest]
        for name in [name for name, known in self._marked.items() if known is flight]:
            if answer is None:
                del self._marked[name]
            else:
                self._marked[name] = answer
        if answer is not None:
            self.keep(answer)

    def keep(self, answer: Answer) -> None:
        """An answer is recorded and nobody is known to have it."""
        self._answers.setdefault(answer.digest, []).append(answer)

    def settled(self, answer: Answer) -> None:
        """The delivery of an answer has changed."""
        kept = self._answers.get(answer.digest)
        if answer.delivery is Delivery.YES and kept and answer in kept:
            kept.remove(answer)
            if not kept:
                del self._answers[answer.digest]
