"""The pods of this server as they are now: a list, then a watch from there, for ever.

Cut watches go on where they stopped, a version that is too old (410) means a new list, and failures are met with a
growing, jittered pause. A list that failed changes nothing: pods are believed gone only when a whole list, page by
page, was read without them.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Mapping

import structlog

from forge_server.scheduler.kubernetes.client import ApiError, Pods, Seen
from forge_server.scheduler.kubernetes.pod import Pod

log = structlog.get_logger(__name__)

WINDOW_S = 240.0
SILENCE_S = 90.0  # bookmarks come about once a minute
_PAUSE_MAX_S = 10.0
_CUT_MAX_S = 1.0  # a watch that is opened and cut again and again still tells what has changed
_BREATH = 250  # pods of a list that are taken over at a time

Changed = Callable[[Pod], None]
"""A pod is new or has changed."""

Vanished = Callable[[Pod], None]
"""A pod is no longer there; this is how it was seen last."""


class PodCache:
    """Runs ``keep`` as a task. Callbacks run on the event loop and must not wait."""

    def __init__(
        self,
        pods: Pods,
        selector: str,
        changed: Changed,
        vanished: Vanished,
        well: Callable[[], None] = lambda: None,
    ) -> None:
        """``well``: called when the API server answers again."""
        self._pods, self._selector = pods, selector
        self._changed, self._vanished, self._well = changed, vanished, well
        self._found: dict[str, Pod] = {}
        self._version = ""
        self._stale = True
        self._watching: asyncio.Timeout | None = None
        self.synced = asyncio.Event()
        self.trouble = ""
        """Why the view may be old; empty while the API server answers."""
        self.counts = {"list": 0, "watch": 0, "event": 0, "expired": 0, "failure": 0}

    @property
    def found(self) -> Mapping[str, Pod]:
        """Pods by name, as of the last list or event."""
        return self._found

    def relist(self) -> None:
        """Somebody knows better: list again, now."""
        self._stale = True
        if self._watching is not None:
            self._watching.reschedule(asyncio.get_running_loop().time())

    async def keep(self) -> None:
        """For ever."""
        failures = cuts = 0
        while True:
            began = time.monotonic()
            pause = 0.0
            try:
                if self._stale:
                    self._stale = False
                    try:
                        await self._list()
                    except BaseException:
                        self._stale = True
                        raise
                    self._answered()
                await self._watch()
                cuts = cuts + 1 if time.monotonic() - began < 1.0 else 0
                failures, pause = 0, _pause(cuts, _CUT_MAX_S)
            except ApiError as error:
                failures += 1
                pause = _pause(failures, _PAUSE_MAX_S)
                if error.status == 410:
                    self.counts["expired"] += 1
                    self._stale = True
                else:
                    self.counts["failure"] += 1
                    self.trouble = str(error)
                    log.warning(
                        "the API server does not answer the watch", error=str(error), failures=failures
                    )
            except Exception as error:  # a bug must not blind the scheduler for ever
                failures += 1
                pause = _pause(failures, _PAUSE_MAX_S)
                self.trouble = f"{type(error).__name__}: {error}"
                self._stale = True
                log.exception("the watch failed")
            await asyncio.sleep(pause)

    def _answered(self) -> None:
        if self.trouble:
            log.info("the API server answers again")
        self.trouble = ""
        self._well()

    async def _list(self) -> None:
        """Read every page, then take over what changed meanwhile."""
        fresh: dict[str, Pod] = {}
        page = await self._pods.page(self._selector)
        while True:
            fresh.update((pod.metadata.name, pod) for pod in page.items)
            if not page.metadata.continue_:
                break
            page = await self._pods.page(self._selector, page.metadata.continue_)
        self.counts["list"] += 1
        for name, before in tuple(self._found.items()):
            now = fresh.get(name)
            if now is None or now.metadata.uid != before.metadata.uid:
                self._vanished(self._found.pop(name))
        for number, (name, pod) in enumerate(fresh.items()):
            known = self._found.get(name)
            self._found[name] = pod
            if known is None or known.metadata.resource_version != pod.metadata.resource_version:
                self._changed(pod)
            if number % _BREATH == _BREATH - 1:
                await asyncio.sleep(0)
        self._version = page.metadata.resource_version
        self.synced.set()

    async def _watch(self) -> None:
        self.counts["watch"] += 1
        window = WINDOW_S + random.uniform(0.0, 60.0)  # servers must not all come back at once
        batches = self._pods.watch(self._selector, self._version, window, SILENCE_S)
        try:
            async with asyncio.timeout(None) as self._watching, contextlib.aclosing(batches):
                async for batch in batches:
                    if not batch:
                        self._answered()
                    for seen in batch:
                        self._take(seen)
        except TimeoutError:  # ``relist``
            pass
        finally:
            self._watching = None

    def _take(self, seen: Seen) -> None:
        pod = seen.pod
        self._version = pod.metadata.resource_version
        if seen.type == "BOOKMARK":
            return
        self.counts["event"] += 1
        if seen.type == "DELETED":
            self._found.pop(pod.metadata.name, None)
            self._vanished(pod)
        else:
            self._found[pod.metadata.name] = pod
            self._changed(pod)


def _pause(failures: int, longest: float) -> float:
    """Seconds before the next try; none after a success."""
    return min(longest, 0.1 * 2.0 ** min(failures, 10)) * random.uniform(0.5, 1.0) if failures else 0.0
