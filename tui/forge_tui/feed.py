"""The one event stream of the dashboard, read by a thread of its own; and the threads that ask.

The loop never waits for the network: it drains what the feed gathered, four times a second.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Literal, TypeVar

from forge_server.client.http import ApiError, EventStream, ForgeClient, WrongServer
from forge_server.client.schemas import EventView
from forge_server.domain.errors import ForgeError, Unauthorized

T = TypeVar("T")
State = Literal["connecting", "live", "gone", "denied", "other"]
KEPT = 20_000
LONGEST_PAUSE_S = 10.0
EVERY_S = 0.25


class Feed:
    """Follows the stream over any number of connections and resumes by number, so that no event is missed.

    ``lost`` counts the times that the server could not resume: what was read before must be read again.
    """

    def __init__(self, client: ForgeClient) -> None:
        self._client = client
        self._events: deque[EventView] = deque(maxlen=KEPT)
        self._wake = threading.Event()
        self._stopped = False
        self._stream: EventStream | None = None
        self._thread: threading.Thread | None = None
        self.state: State = "connecting"
        self.reason = ""
        self.last: int | None = None
        self.lost = 0

    def start(self, last: int | None) -> None:
        """Follow from after event ``last``."""
        self.last = last
        self._thread = threading.Thread(target=self._follow, name="feed", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped = True
        self._wake.set()
        if (stream := self._stream) is not None:
            stream.close()

    def hurry(self) -> None:
        """Try again now."""
        self._wake.set()

    def drain(self) -> list[EventView]:
        """What has come since the last call, in order."""
        found = []
        while self._events:
            found.append(self._events.popleft())
        return found

    def _follow(self) -> None:
        pause = 0.5
        while not self._stopped:
            try:
                with self._client.events(self.last, every=EVERY_S) as stream:
                    self._stream = stream
                    self.state, pause = "live", 0.5
                    for batch in stream:
                        if self._stopped:
                            return
                        if batch:
                            self._events.extend(batch)
                            self.last = batch[-1].id
                self.state, self.reason = "gone", "the server has stopped"
            except Unauthorized as error:
                self.state, self.reason = "denied", str(error)
            except WrongServer as error:
                self.state, self.reason = "other", str(error)
            except ApiError as error:
                if error.status == 410:
                    self.last, self.lost = None, self.lost + 1
                    continue
                self.state, self.reason = ("other" if error.status in (400, 404) else "gone"), str(error)
            except ForgeError as error:
                self.state, self.reason = "gone", str(error)
            finally:
                self._stream = None
            self._wake.wait(pause)
            self._wake.clear()
            pause = min(2 * pause, LONGEST_PAUSE_S)


class Asker:
    """Runs calls of the (blocking) client in a few threads. Leaving does not wait for their answers."""

    def __init__(self, threads: int = 3) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"ask_{i}", daemon=True) for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    async def __call__(self, fn: Callable[[], T]) -> T:
        answer: Future[T] = Future()
        self._calls.put((answer, fn))
        return await asyncio.wrap_future(answer)

    def close(self) -> None:
        for _ in self._threads:
            self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            answer, fn = call
            if not answer.set_running_or_notify_cancel():
                continue
            try:
                found = fn()
            except BaseException as error:  # to whoever asked
                answer.set_exception(error)
            else:
                answer.set_result(found)
