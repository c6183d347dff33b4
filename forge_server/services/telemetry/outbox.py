"""What waits for the collector: bounded, sent in portions by a thread of its own, counted.

Whoever puts something in never waits. What finds no room, or is refused, is lost and counted; a collector that does
not answer keeps neither the server nor its end.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import structlog

log = structlog.get_logger(__name__)

KEPT = 16_384
"""Spans that wait at most; some 40 MB."""
PORTION = 512


class Outbox:
    """``send`` is called in the thread and says whether it could; ``abort`` makes one that hangs give up.

    ``counts``: spans that were ``sent``, that found no room (``full``) and that the collector did not take
    (``refused``).
    """

    def __init__(
        self,
        send: Callable[[Sequence[Any]], bool],
        abort: Callable[[], None],
        counts: Counter[str],
        *,
        kept: int = KEPT,
    ) -> None:
        self._send, self._abort, self._counts, self._kept = send, abort, counts, kept
        self._waiting: deque[Any] = deque()
        self._turn = threading.Condition()
        self._closing = self._failing = False
        self._thread = threading.Thread(target=self._work, name="telemetry", daemon=True)
        self._thread.start()

    def put(self, spans: Sequence[Any]) -> None:
        with self._turn:
            room = max(0, self._kept - len(self._waiting))
            self._waiting.extend(spans[:room])
            self._counts["full"] += len(spans[room:])
            self._turn.notify()

    def close(self, patience_s: float) -> None:
        """Send what waits, for so long; what is left then is lost."""
        with self._turn:
            self._closing = True
            self._turn.notify()
        self._thread.join(patience_s)
        with self._turn:
            self._counts["refused"] += len(self._waiting)
            self._waiting.clear()
        self._abort()

    def _work(self) -> None:
        while portion := self._next():
            taken = self._try(portion)
            with self._turn:
                self._counts["sent" if taken else "refused"] += len(portion)
            if taken == self._failing:
                self._failing = not taken
                if taken:
                    log.info("traces are taken again")
                else:
                    log.warning("traces are not taken", spans=len(portion))

    def _next(self) -> list[Any]:
        """Wait for spans; none when it is over."""
        with self._turn:
            self._turn.wait_for(lambda: self._waiting or self._closing)
            return [self._waiting.popleft() for _ in range(min(PORTION, len(self._waiting)))]

    def _try(self, portion: Sequence[Any]) -> bool:
        try:
            return self._send(portion)
        except Exception:  # whatever it is, the next portion may fare better
            log.exception("traces cannot be sent")
            return False
