"""The pods of this server as they are now: a list, then a watch from there, for ever.

Cut watches go on where they stopped, a version that is too old (410) means a new list, and failures are met with a
growing, jittered pause. A list that failed changes nothing: pods are believed gone only when a whole list, page by
page, was read without them.
"""

import asyncio
import random
import time
from collections.abc import Callable, Mapping

import structlog

from forge_server.scheduler.kubernetes.client import ApiError, Pods
from forge_server.scheduler.kubernetes.pod import Pod

log = structlog.get_logger(__name__)

WINDOW_S = 240.0
SILENCE_S = 90.0  # bookmarks come about once a minute
_PAUSE_MAX_S = 30.0

Changed = Callable[[Pod], None]
"""A pod is new or has changed."""

Vanished = Callable[[Pod], None]
"""A pod is no longer there; this is how it was seen last."""


class PodCache:
    """Runs ``keep`` as a task. Callbacks run on the event loop and must not wait."""

    def __init__(self, pods: Pods, selector: str, changed: Changed, vanished: Vanished) -> None:
        self._pods, self._selector = pods, selector
        self._changed, self._vanished = changed, vanished
        self._found: dict[str, Pod] = {}  # by uid
        self._version = ""
        self.synced = asyncio.Event()
        self.trouble = ""
        """Why the view may be old; empty while the API server answers."""
        self.counts = {"list": 0, "watch": 0, "event": 0, "expired": 0, "failure": 0}

    @property
    def found(self) -> Mapping[str, Pod]:
        """Pods by uid, as of the last list or event."""
        return self._found

    async def keep(self) -> None:
        """For ever."""
        failures = 0
        while True:
            began = time.monotonic()
            try:
                if not self._version:
                    await self._list()
                self.trouble = ""
                await self._watch()
                failures = 0 if time.monotonic() - began > 1.0 else failures + 1  # a watch cut at once
            except ApiError as error:
                if error.status == 410:
                    self.counts["expired"] += 1
                    self._version = ""
                    failures += 1
                else:
                    self.counts["failure"] += 1
                    failures += 1
                    self.trouble = str(error)
                    log.warning(
                        "the API server does not answer the watch", error=str(error), failures=failures
                    )
                    if error.status in (401, 403):
                        self._version = ""
            except Exception as error:  # a bug must not blind the scheduler for ever
                failures += 1
                self.trouble = f"{type(error).__name__}: {error}"
                self._version = ""
                log.exception("the watch failed")
            if failures:
                pause = min(_PAUSE_MAX_S, 0.1 * 2.0 ** min(failures, 10))
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))

    async def _list(self) -> None:
        """Read every page, then take over what changed meanwhile."""
        fresh: dict[str, Pod] = {}
        page = await self._pods.page(self._selector)
        while True:
            fresh.update((pod.metadata.uid, pod) for pod in page.items)
            if not page.metadata.continue_:
                break
            page = await self._pods.page(self._selector, page.metadata.continue_)
        self.counts["list"] += 1
        for uid in self._found.keys() - fresh.keys():
            self._vanished(self._found.pop(uid))
        for uid, pod in fresh.items():
            before = self._found.get(uid)
            self._found[uid] = pod
            if before is None or before.metadata.resource_version != pod.metadata.resource_version:
                self._changed(pod)
        self._version = page.metadata.resource_version
        self.synced.set()

    async def _watch(self) -> None:
        self.counts["watch"] += 1
        window = WINDOW_S + random.uniform(0.0, 60.0)  # servers must not all come back at once
        async for seen in self._pods.watch(self._selector, self._version, window, SILENCE_S):
            self._version = seen.pod.metadata.resource_version
            if seen.type == "BOOKMARK":
                continue
            self.counts["event"] += 1
            uid = seen.pod.metadata.uid
            if seen.type == "DELETED":
                self._found.pop(uid, None)
                self._vanished(seen.pod)
            else:
                self._found[uid] = seen.pod
                self._changed(seen.pod)
