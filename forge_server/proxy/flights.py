"""A call in flight and the answer it leaves behind."""

import asyncio
from typing import Any, Protocol

from forge_server.domain.states import CallEnd, Delivery
from forge_server.domain.turn import Completion, Turn
from forge_server.proxy.dialects.base import Refusal


class Line(Protocol):
    """The connection that an answer was sent on (``connection.Connection``)."""

    def taken(self) -> bool: ...


class Answer:
    """A recorded completion and what is known about its delivery.

    ``watchers`` connections are about to get it; ``line`` is the one that it was last sent on, None before
    that and once nothing more can be learned from it. What a ``relayed`` line has taken is with the relay, not
    yet with the harness. ``withdrawn``: it is never given, whatever is said of its delivery.
    """

    __slots__ = ("call_id", "completion", "delivery", "digest", "line", "relayed", "watchers", "withdrawn")

    def __init__(self, call_id: int, digest: bytes, completion: Completion, delivery: Delivery) -> None:
        self.call_id, self.digest, self.completion, self.delivery = call_id, digest, completion, delivery
        self.line: Line | None = None
        self.relayed = self.withdrawn = False
        self.watchers = 0

    @property
    def lost(self) -> bool:
        """Whether nobody is known to have got it, and nobody is getting it now."""
        return (
            self.delivery is not Delivery.YES
            and not self.watchers
            and self.line is None
            and not self.withdrawn
        )

    @property
    def joinable(self) -> bool:
        return not self.withdrawn


class Flight:
    """One call between its intent and its end.

    Connections that wait for it are its ``watchers``. It passes three phases: its intent is written, it waits
    for the gate and the engine, its answer is recorded. A stop takes effect in the second phase; once there
    is an answer it is recorded whoever has left.
    """

    __slots__ = (
        "_phase",
        "began_at",
        "dialect",
        "digest",
        "flags",
        "id",
        "label",
        "seq",
        "stopped",
        "task",
        "turn",
        "watchers",
    )

    def __init__(self, id: int, seq: int, dialect: str, digest: bytes, turn: Turn, began_at: float) -> None:
        self.id, self.seq, self.dialect, self.digest = id, seq, dialect, digest
        self.turn, self.began_at = turn, began_at
        self.label = ""
        self.flags: dict[str, Any] = {}
        self.watchers = 0
        self.stopped: tuple[CallEnd, Refusal] | None = None
        self.task: asyncio.Task[Answer]
        self._phase = "intent"

    @property
    def answer(self) -> Answer | None:
        """What it has landed with; None while it flies, and when it was refused."""
        if not self.task.done() or self.task.cancelled() or self.task.exception() is not None:
            return None
        return self.task.result()

    @property
    def joinable(self) -> bool:
        return self.stopped is None

    def stop(self, end: CallEnd, refusal: Refusal) -> None:
        """End the call as ``end`` unless it is being recorded; whoever waits gets ``refusal``."""
        if self.stopped is None and self._phase != "record":
            self.stopped = (end, refusal.again())
            if self._phase == "engine":
                self.task.cancel()

    def __enter__(self) -> None:
        """The second phase. Raises what an earlier stop says."""
        if self.stopped is not None:
            raise self.stopped[1]
        self._phase = "engine"

    def __exit__(self, *_: object) -> None:
        self._phase = "intent" if self.stopped is None else "record"

    def recording(self) -> None:
        """The third phase: from here on nothing stops it."""
        self._phase = "record"
