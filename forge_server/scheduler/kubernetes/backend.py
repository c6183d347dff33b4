"""The Kubernetes backend: one bare pod per attempt, never a Job (a Job may start the same program twice).

Level-triggered: what is wanted are rows, what there is are pods in the cache; every step may be lost and is made
again. Invariants I6 and I7: names are the attempts', so that a create whose answer was lost finds its own pod; an
attempt that was given up on stays doomed until its pod is gone; nothing is concluded from a list that failed.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from typing import Any, Literal

import msgspec
import structlog

from forge_server.domain.errors import ClusterError, ConfigError
from forge_server.domain.events import Fact
from forge_server.scheduler.backend import Gone, Launch, LaunchFailed
from forge_server.scheduler.kubernetes import pod as pods_of
from forge_server.scheduler.kubernetes.client import ApiError, Pods
from forge_server.scheduler.kubernetes.manifests import DOMAIN, Labels, Templates, selector
from forge_server.scheduler.kubernetes.pod import Finding, Pod
from forge_server.scheduler.kubernetes.rate import Rate
from forge_server.scheduler.kubernetes.watch import PodCache

log = structlog.get_logger(__name__)

LOG_TAIL = 64 * 1024
AGENT = 10001
"""User id of the agent in a pod: no image's own."""

RUNNER = "runner"
"""Name of the container whose log is kept."""

_PAUSE_MAX_S = 15.0
_LEAVING_S = 60.0  # beyond the grace period: a kubelet needs its time
_CREATES = 16  # at a time
_DELETES = 16


class KubernetesOptions(msgspec.Struct, frozen=True, kw_only=True):
    """``url``: the pod-facing listener as pods reach it. ``image``: of tasks that name none; ``runner_image``
    brings the ``/forge`` tree, ``harness_images`` bring it with the harness that is named. ``values``: what the
    template is filled with besides. Times in seconds.
    """

    instance: str
    url: str
    image: str
    runner_image: str
    values: dict[str, Any]
    harness_images: dict[str, str] = {}
    create_per_s: float = 20.0
    keep_failed_s: float = 0.0
    limits: pods_of.Limits = pods_of.Limits()


class KubernetesBackend:
    """Lives as long as the server; its pods live on. See ``scheduler.backend.Backend``."""

    name: Literal["kubernetes"] = "kubernetes"
    missing = Fact.POD_LOST  # no agent can delete a pod

    def __init__(
        self,
        pods: Pods,
        templates: Templates,
        options: KubernetesOptions,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._pods, self._templates, self._options, self._clock = pods, templates, options, clock
        self._cache = PodCache(pods, selector(options.instance), self._changed, self._vanished)
        self._keeping: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._launching: set[str] = set()
        self._doomed: dict[str, float] = {}  # attempts given up on -> grace of their pods
        self._told: set[str] = set()  # attempts whose end was reported
        self._left: dict[str, asyncio.Event] = {}  # set when the attempt's pod is gone
        self._on_gone: Callable[[Gone], None] = lambda gone: None
        self._create_rate = Rate(options.create_per_s, _CREATES)
        self._creates, self._deletes = asyncio.Semaphore(_CREATES), asyncio.Semaphore(_DELETES)
        self._refused_until = 0.0
        self._refusal = ""

    @property
    def blind(self) -> str:
        """Why the pods cannot be seen now; empty when they are."""
        return self._cache.trouble or ("" if self._cache.synced.is_set() else "the pods were not listed yet")

    @property
    def trouble(self) -> str:
        """Why pods cannot be seen or made now; empty when all is well. A quota that is used up is no fault."""
        return self.blind or (self._refusal if self._full else "")

    @property
    def _full(self) -> bool:
        return self._clock() < self._refused_until

    def room(self) -> bool:
        """Whether a further pod is worth a try: the cluster did not refuse one just now."""
        return not self._full and not self._cache.trouble

    async def start(self, on_gone: Callable[[Gone], None]) -> None:
        self._on_gone = on_gone
        self._keeping = asyncio.create_task(self._cache.keep(), name="pods")
        log.info("kubernetes backend", server=self._pods.server, namespace=self._pods.namespace)

    async def launch(self, launch: Launch) -> dict[str, Any]:
        try:
            manifest = self.manifest(launch)
        except ConfigError as error:
            raise LaunchFailed(Fact.LAUNCH_FAILED, {"error": str(error)}) from None
        self._launching.add(launch.attempt_id)
        try:
            made = await self._create(launch.attempt_id, manifest)
        finally:
            self._launching.discard(launch.attempt_id)
        return {"pod": made.metadata.name, "uid": made.metadata.uid, "namespace": self._pods.namespace}

    def manifest(self, launch: Launch) -> dict[str, Any]:
        """The pod of an attempt. Raises ConfigError when the template cannot be filled."""
        labels = Labels(
            instance=self._options.instance,
            run=launch.run_id,
            rollout=launch.rollout_id,
            attempt=launch.attempt_id,
            harness=launch.harness,
        )
        options = self._options
        order = {
            "attempt": launch.attempt_id,
            "url": options.url,
            "token_file": "/forge-join/token",
            "level": "pod",
            "uid": AGENT,
            "python": "/forge/bin/python3",
            "forge": "/forge",
            "env": "/forge/env" if launch.harness in options.harness_images else "",
            "root": "/forge-attempt",
        }
        values = {
            **options.values,
            **msgspec.structs.asdict(launch),
            "image": launch.image or options.image,
            "runner_image": options.harness_images.get(launch.harness, options.runner_image),
            "order": msgspec.json.encode(order).decode(),
        }
        return self._templates.pod(labels, {f"{DOMAIN}/join": launch.join_token}, values)

    async def _create(self, attempt_id: str, manifest: dict[str, Any]) -> Pod:
        """Create the pod, however often it takes while that is sensible. The attempt's startup clock, which dooms
        it, bounds the wait. Raises LaunchFailed."""
        pause = 0.25
        while True:
            if attempt_id in self._doomed:
                raise LaunchFailed(
                    Fact.LAUNCH_FAILED, {"error": "given up on while its pod was being created"}
                )
            try:
                async with self._creates:
                    await self._create_rate.take()
                    return await self._pods.create(manifest)
            except ApiError as error:
                if error.reason == "AlreadyExists" and (found := await self._own(attempt_id)) is not None:
                    return found  # the answer to an earlier try was lost
                if not error.transient:
                    raise LaunchFailed(_blame(error), {"error": str(error), "status": error.status}) from None
                wait = max(error.retry_after, pause)
                self._refused(error, wait)
            await asyncio.sleep(wait)
            pause = min(2 * pause, _PAUSE_MAX_S)

    async def _own(self, attempt_id: str) -> Pod | None:
        """The attempt's pod when it is there, is this server's, and is not on its way out."""
        with contextlib.suppress(ApiError):
            found = await self._pods.get(attempt_id)
            if found is not None and found.metadata.deletion_timestamp is None:
                labels = found.metadata.labels
                if labels.get(f"{DOMAIN}/instance") == self._options.instance:
                    return found
        return None

    def _refused(self, error: ApiError, wait: float) -> None:
        if not self._full:
            log.warning("the cluster takes no further pod now", error=str(error))
        self._refused_until = self._clock() + wait
        self._refusal = str(error)

    async def stop(self, attempt_id: str, grace_s: float) -> None:
        """Returns when the pod is gone, or when it should be: it stays doomed, and is deleted whenever it is
        seen."""
        self._doomed[attempt_id] = grace_s
        left = self._left.setdefault(attempt_id, asyncio.Event())
        if not await self._delete(attempt_id, grace_s) and attempt_id not in self._launching:
            self._forget(attempt_id)
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(left.wait(), grace_s + _LEAVING_S)

    async def _delete(self, attempt_id: str, grace_s: float) -> bool:
        """Ask for the pod's deletion; False when there is none. An API server that does not answer is asked
        again by the next reconcile."""
        try:
            async with self._deletes:
                return await self._pods.delete(attempt_id, grace_s)
        except ApiError as error:
            log.warning("a pod could not be deleted yet", attempt=attempt_id, error=str(error))
            return True

    async def running(self) -> frozenset[str]:
        if not self._cache.synced.is_set() or self._cache.trouble:
            raise ClusterError(
                f"the pods cannot be seen: {self._cache.trouble or 'not listed yet'}",
                where=self._pods.server,
                mend="see whether the API server answers",
            )
        found = set()
        for pod in tuple(self._cache.found.values()):
            attempt_id = _attempt_of(pod)
            found.add(attempt_id)
            if attempt_id in self._doomed and pod.metadata.deletion_timestamp is None:
                self._spawn(self._delete_again(attempt_id))
            else:
                self._examine(pod)
        for attempt_id in self._doomed.keys() - found - self._launching:
            self._forget(attempt_id)
        return frozenset(found | self._launching)

    async def close(self, grace_s: float) -> None:
        """Pods live on: the next start finds them."""
        tasks = {*self._tasks, *([self._keeping] if self._keeping else [])}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=grace_s)
        await self._pods.close()

    # What the cache tells must be handled without waiting.

    def _changed(self, pod: Pod) -> None:
        attempt_id = _attempt_of(pod)
        if attempt_id in self._doomed and pod.metadata.deletion_timestamp is None:
            self._spawn(self._delete_again(attempt_id))
        self._examine(pod)

    def _vanished(self, pod: Pod) -> None:
        attempt_id = _attempt_of(pod)
        if attempt_id not in self._doomed and attempt_id not in self._told:
            self._tell(attempt_id, pods_of.vanished(pod), "")
        self._forget(attempt_id)

    def _examine(self, pod: Pod) -> None:
        attempt_id = _attempt_of(pod)
        if attempt_id in self._told:
            return
        finding = pods_of.find(pod, self._clock(), self._options.limits, ours=attempt_id in self._doomed)
        if finding is not None:
            self._told.add(attempt_id)
            self._spawn(self._conclude(attempt_id, pod, finding))

    async def _conclude(self, attempt_id: str, pod: Pod, finding: Finding) -> None:
        """Keep the runner's last words, report, and clear the pod away."""
        text = ""
        if pod.status.container_statuses and pod.status.phase != "Pending":
            text = await self._pods.log(pod.metadata.name, RUNNER, LOG_TAIL)
        self._tell(attempt_id, finding, text)
        if pod.status.phase == "Failed" and self._options.keep_failed_s:
            await asyncio.sleep(self._options.keep_failed_s)
        self._doomed.setdefault(attempt_id, 0.0)
        await self._delete_again(attempt_id)

    async def _delete_again(self, attempt_id: str) -> None:
        if not await self._delete(attempt_id, self._doomed.get(attempt_id, 0.0)):
            self._forget(attempt_id)

    def _tell(self, attempt_id: str, finding: Finding, text: str) -> None:
        self._told.add(attempt_id)
        self._on_gone(
            Gone(
                attempt_id=attempt_id,
                fact=finding.fact,
                evidence=finding.evidence,
                independent=finding.independent,
                log=text,
            )
        )

    def _forget(self, attempt_id: str) -> None:
        """There is no pod of this attempt any more, and there will be none."""
        self._doomed.pop(attempt_id, None)
        self._told.discard(attempt_id)
        if (left := self._left.pop(attempt_id, None)) is not None:
            left.set()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a step of the kubernetes backend failed", exc_info=task.exception())


def _attempt_of(pod: Pod) -> str:
    return pod.metadata.labels.get(f"{DOMAIN}/attempt", pod.metadata.name)


def _blame(error: ApiError) -> Fact:
    """A pod that the API server will never take: the task's doing when it is about the task's image."""
    about_image = error.status == 422 and "image" in error.message
    return Fact.BAD_SPEC if about_image else Fact.LAUNCH_FAILED
