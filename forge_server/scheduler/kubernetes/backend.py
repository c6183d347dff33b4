"""The Kubernetes backend: one bare pod per attempt, never a Job (a Job may start the same program twice).

Level-triggered: what is wanted are rows, what there is are pods in the cache; every step may be lost and is made
again. Invariants I6 and I7: names are the attempts', so that a create whose answer was lost finds its own pod; an
attempt that was given up on stays doomed until its pod is gone; a fact is a row before its pod is deleted; nothing
is concluded from a list that failed. All waiting is measured by this machine's own clock.
"""

import asyncio
import contextlib
import time
import zlib
from collections.abc import Coroutine
from typing import Any, Literal

import msgspec
import structlog

from forge_server.domain.errors import ClusterError, ConfigError
from forge_server.domain.events import Fact
from forge_server.scheduler.backend import Gone, Launch, LaunchFailed, Look, OnGone
from forge_server.scheduler.kubernetes import pod as pods_of
from forge_server.scheduler.kubernetes.client import ApiError, Pods
from forge_server.scheduler.kubernetes.manifests import DOMAIN, Labels, Templates, selector
from forge_server.scheduler.kubernetes.pod import Finding, Pod
from forge_server.scheduler.kubernetes.rate import Capacity, Gate, Rate
from forge_server.scheduler.kubernetes.volumes import ImageVolumes
from forge_server.scheduler.kubernetes.watch import PodCache

log = structlog.get_logger(__name__)

LOG_TAIL = 64 * 1024
_AGENTS = range(20_000, 60_000)
"""User ids of agents in pods: no image's own, and within what a pod's user namespace maps."""

RUNNER = "runner"
"""Name of the container whose log is kept."""

_LEAVING_S = 30.0  # beyond the grace period: then a pod's node is not waited for
_GRACE_S = 5.0  # of pods that end by themselves, or by others
_AGAIN_S = 1.0  # when a pod of the name is leaving
_CREATES = 16  # at a time
_DELETES = 16


def user_of(attempt_id: str) -> int:
    """The agent's user id. Pods of a node share the numbers, and limits of processes are counted by them."""
    return _AGENTS[zlib.crc32(attempt_id.encode()) % len(_AGENTS)]


class KubernetesOptions(msgspec.Struct, frozen=True, kw_only=True):
    """``url``: the pod-facing listener as pods reach it. ``image``: of tasks that name none; ``runner_image``
    brings the ``/forge`` tree, ``harness_images`` bring it with the harness that is named. ``values``: what the
    template is filled with besides. ``disk_mb``: what an attempt may write, in MiB. ``image_volumes``: use them where
    the cluster has them. Times in seconds.
    """

    instance: str
    url: str
    image: str
    runner_image: str
    values: dict[str, Any]
    harness_images: dict[str, str] = {}
    create_per_s: float = 20.0
    keep_failed_s: float = 0.0
    disk_mb: int = 10240
    image_volumes: bool = True
    limits: pods_of.Limits = pods_of.Limits()


class KubernetesBackend:
    """Lives as long as the server; its pods live on. See ``scheduler.backend.Backend``."""

    name: Literal["kubernetes"] = "kubernetes"

    def __init__(self, pods: Pods, templates: Templates, options: KubernetesOptions) -> None:
        self._pods, self._templates, self._options = pods, templates, options
        self._cache = PodCache(
            pods, selector(options.instance), self._changed, self._vanished, self._answers_again
        )
        self._volumes = ImageVolumes(pods, wanted=options.image_volumes)
        self._keeping: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._on_gone: OnGone | None = None
        # attempts
        self._launching: set[str] = set()
        self._waiting: dict[str, asyncio.Future[int]] = {}  # for their turn to create a pod
        self._doomed: dict[str, float] = {}  # given up on -> grace of their pods
        self._told: dict[str, Finding] = {}  # their end was seen
        self._writing: set[str] = set()  # it is no row yet
        self._unsaid: set[str] = set()  # their end could not be written, and is looked at again
        self._kept: set[str] = set()  # their pods are kept for a while, to be looked at
        self._left: dict[str, asyncio.Event] = {}  # set when the pod is gone
        self._stuck: dict[str, tuple[str, float]] = {}  # what their pods wait for, since when
        self._leaving: dict[str, float] = {}  # their pods are being deleted, since when
        self._placed: set[str] = set()  # their pods have a node
        # the cluster
        self._rate = Rate(options.create_per_s, _CREATES)
        self._gate, self._capacity = Gate(), Capacity()
        self._creates, self._deletes = asyncio.Semaphore(_CREATES), asyncio.Semaphore(_DELETES)
        self._refusal: ApiError | None = None

    @property
    def blind(self) -> str:
        """Why the pods cannot be seen now; empty when they are."""
        return self._cache.trouble or ("" if self._cache.synced.is_set() else "the pods were not listed yet")

    @property
    def trouble(self) -> str:
        """Why pods cannot be seen or made now; empty when all is well. A quota that is used up is no fault."""
        refusal = self._waited_out
        return self.blind or (str(refusal) if refusal is not None and not refusal.over_quota else "")

    @property
    def full(self) -> str:
        """Why no further pod is made now although all is well; empty when there is room."""
        return str(self._waited_out or "")

    @property
    def _waited_out(self) -> ApiError | None:
        """The refusal that launches wait out now. Without them the gate stays shut, and its refusal is an old one."""
        return self._refusal if self._gate.shut and self._launching else None

    def room(self) -> int:
        if self.blind:
            return 0
        if self._gate.shut:  # one that is under way tries it, or a new one does: else it would stay shut
            return 0 if self._launching else 1
        going = self._doomed.keys() & self._cache.found.keys()
        return self._capacity.room(len(self._cache.found) - len(going) + len(self._launching))

    async def start(self, on_gone: OnGone) -> None:
        self._on_gone = on_gone
        self._keeping = asyncio.create_task(self._cache.keep(), name="pods")
        log.info("kubernetes backend", server=self._pods.server, namespace=self._pods.namespace)

    async def launch(self, launch: Launch) -> dict[str, Any]:
        self._launching.add(launch.attempt_id)
        try:
            volumes = await self._volumes.usable(lambda: self.manifest(launch, image_volumes=True))
            made = await self._create(launch.attempt_id, self.manifest(launch, image_volumes=volumes))
        except ConfigError as error:
            raise LaunchFailed(Fact.LAUNCH_FAILED, {"error": str(error)}) from None
        finally:
            self._launching.discard(launch.attempt_id)
        return {"pod": made.metadata.name, "uid": made.metadata.uid, "namespace": self._pods.namespace}

    def manifest(self, launch: Launch, *, image_volumes: bool = False) -> dict[str, Any]:
        """The pod of an attempt; the runner's image is copied into it, or mounted. Raises ConfigError when the
        template cannot be filled."""
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
            "uid": user_of(launch.attempt_id),
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
            "disk_mb": options.disk_mb,
            "image_volumes": image_volumes,
        }
        return self._templates.pod(labels, {f"{DOMAIN}/join": launch.join_token}, values)

    async def _create(self, attempt_id: str, manifest: dict[str, Any]) -> Pod:
        """Create the pod, however often it takes while that is sensible; what ends the attempt ends the wait.
        Raises LaunchFailed."""
        while True:
            turn = await self._turn(attempt_id)
            try:
                made = await self._pods.create(manifest)
                self._gate.taken()
                return made
            except ApiError as error:
                if error.reason == "AlreadyExists":  # the answer to an earlier try was lost
                    found = await self._own(attempt_id)
                    if found is not None:
                        self._gate.taken()
                        return found
                    await asyncio.sleep(_AGAIN_S)
                    continue
                if not error.transient:
                    raise LaunchFailed(_blame(error), {"error": str(error), "status": error.status}) from None
                if not self._gate.shut:
                    log.warning("the cluster takes no further pod now", error=str(error))
                self._refusal = error
                self._gate.refused(turn, error.retry_after)
            finally:
                self._creates.release()

    async def _turn(self, attempt_id: str) -> int:
        """Wait until a pod may be created, and hold one of the places for it. Raises LaunchFailed when the attempt
        is given up on meanwhile."""

        async def wait() -> int:
            await self._creates.acquire()
            try:
                turn = await self._gate.enter()
                await self._rate.take()
            except BaseException:
                self._creates.release()
                raise
            return turn

        if attempt_id not in self._doomed:
            waiting = self._waiting[attempt_id] = asyncio.ensure_future(wait())
            try:
                return await waiting
            except asyncio.CancelledError:
                if attempt_id not in self._doomed:
                    raise
            finally:
                del self._waiting[attempt_id]
        raise LaunchFailed(Fact.LAUNCH_FAILED, {"error": "given up on before its pod was created"})

    async def _own(self, attempt_id: str) -> Pod | None:
        """The attempt's pod; None when it is not to be seen now, or is on its way out. Raises LaunchFailed when
        the pod of its name is somebody else's."""
        with contextlib.suppress(ApiError):
            found = await self._pods.get(attempt_id)
            if found is not None and found.metadata.labels.instance != self._options.instance:
                raise LaunchFailed(Fact.LAUNCH_FAILED, {"error": "another server's pod has its name"})
            if found is not None and found.metadata.deletion_timestamp is None:
                return found
        return None

    async def stop(self, attempt_id: str, grace_s: float) -> None:
        """Returns when the pod is gone, or when it should be: it stays doomed, and is deleted whenever it is
        seen."""
        if attempt_id in self._kept:
            return
        self._doomed[attempt_id] = grace_s
        if (waiting := self._waiting.get(attempt_id)) is not None:
            waiting.cancel()
        left = self._left.setdefault(attempt_id, asyncio.Event())
        if not await self._delete(attempt_id, grace_s) and attempt_id not in self._launching:
            self._forget(attempt_id)
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(left.wait(), grace_s + 2 * _LEAVING_S)

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
        if self.blind:
            raise ClusterError(
                f"the pods cannot be seen: {self.blind}",
                where=self._pods.server,
                mend="see whether the API server answers",
            )
        found = self._cache.found
        again, self._unsaid = self._unsaid | self._stuck.keys(), set()
        for attempt_id in again:
            if attempt_id in found:
                self._examine(found[attempt_id])
        for attempt_id in tuple(self._doomed):
            if attempt_id not in found and attempt_id not in self._launching:
                self._forget(attempt_id)
            elif attempt_id in found:
                self._insist(found[attempt_id])
        return frozenset((found.keys() - self._kept) | self._launching)

    async def look(self, attempt_id: str, *, silent: bool = False) -> Look:
        if (told := self._told.get(attempt_id)) is not None:  # writing it down may take longer than a clock
            return _shown(told)
        try:
            pod = await self._pods.get(attempt_id)
        except ApiError as error:
            raise ClusterError(f"its pod cannot be seen: {error}", where=self._pods.server) from None
        if pod is None:
            finding: Finding | None = pods_of.vanished(self._cache.found.get(attempt_id))
        else:
            finding = pods_of.judge(pod, self._waited(pod), self._options.limits)
            if finding is None and silent:
                finding = pods_of.silent(pod)
        if (pod is None) == (attempt_id in self._cache.found):
            self._cache.relist()  # the watch has gone silent: it does not show what there is
        if finding is None:
            assert pod is not None
            return Look(evidence=pods_of.evidence_of(pod))
        return _shown(finding)

    async def close(self, grace_s: float) -> None:
        """Pods live on: the next start finds them."""
        tasks = {*self._tasks, *([self._keeping] if self._keeping else [])}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=grace_s)
        await self._pods.close()

    # What the cache tells must be handled without waiting.

    def _answers_again(self) -> None:
        self._gate.hint()

    def _changed(self, pod: Pod) -> None:
        attempt_id = pod.metadata.name
        if not pods_of.placed(pod):
            self._placed.discard(attempt_id)
        elif attempt_id not in self._placed:
            self._placed.add(attempt_id)
            self._capacity.grown(len(self._placed))
        if pod.metadata.deletion_timestamp is not None:
            self._leaving.setdefault(attempt_id, time.monotonic())
        if attempt_id in self._doomed:
            self._insist(pod)
        else:
            self._examine(pod)

    def _vanished(self, pod: Pod) -> None:
        attempt_id = pod.metadata.name
        if attempt_id not in self._doomed and attempt_id not in self._told:
            finding = self._told[attempt_id] = pods_of.vanished(pod)
            self._writing.add(attempt_id)
            self._spawn(self._report(attempt_id, finding, ""))
        else:
            self._forget(attempt_id)
        self._placed.discard(attempt_id)
        self._gate.hint()  # there may be room now

    def _examine(self, pod: Pod) -> None:
        """Whether this pod's attempt has ended by what is seen of it."""
        attempt_id = pod.metadata.name
        if attempt_id in self._told or attempt_id in self._doomed:
            return
        finding = pods_of.judge(pod, self._waited(pod), self._options.limits)
        if finding is None:
            return
        if finding.fact is Fact.UNSCHEDULABLE:
            self._capacity.full(len(self._placed))
        self._told[attempt_id] = finding
        self._writing.add(attempt_id)
        self._spawn(self._conclude(attempt_id, pod, finding))

    def _waited(self, pod: Pod) -> float:
        """Seconds for which the pod has been seen waiting for what it waits for."""
        wait, now = pods_of.waits_for(pod), time.monotonic()
        if wait is None:
            self._stuck.pop(pod.metadata.name, None)
            return 0.0
        what, since = self._stuck.setdefault(pod.metadata.name, (wait.what, now))
        if what != wait.what:
            self._stuck[pod.metadata.name] = (wait.what, since := now)
        return now - since

    def _insist(self, pod: Pod) -> None:
        """A doomed pod is to be deleted, and one that does not leave is not asked any more: its node may be dead,
        and its keys are worthless by now."""
        attempt_id = pod.metadata.name
        grace_s = self._doomed[attempt_id]
        if pod.metadata.deletion_timestamp is None:
            self._spawn(self._delete_again(attempt_id, grace_s))
        elif time.monotonic() - self._leaving.get(attempt_id, time.monotonic()) > grace_s + _LEAVING_S:
            log.warning("a pod does not leave and is removed by force", attempt=attempt_id)
            self._leaving[attempt_id] = time.monotonic()
            self._spawn(self._delete_again(attempt_id, 0.0))

    async def _conclude(self, attempt_id: str, pod: Pod, finding: Finding) -> None:
        """Keep the runner's last words, report, and clear the pod away."""
        if pod.status.phase == "Failed" and self._options.keep_failed_s:
            self._kept.add(attempt_id)
        text = ""
        if pod.status.container_statuses and pod.status.phase not in ("Pending", "Succeeded"):
            text = await self._pods.log(attempt_id, RUNNER, LOG_TAIL)
        await self._report(attempt_id, finding, text)
        if attempt_id in self._kept:
            await asyncio.sleep(self._options.keep_failed_s)
            self._kept.discard(attempt_id)
        if attempt_id in self._cache.found:
            grace_s = _GRACE_S if pods_of.placed(pod) else 0.0
            self._doomed.setdefault(attempt_id, grace_s)
            await self._delete_again(attempt_id, grace_s)

    async def _report(self, attempt_id: str, finding: Finding, text: str) -> None:
        """Returns when the fact is a row. If it cannot be written it is found again."""
        assert self._on_gone is not None
        gone = Gone(
            attempt_id=attempt_id,
            fact=finding.fact,
            evidence=finding.evidence,
            independent=finding.independent,
            log=text,
        )
        try:
            await self._on_gone(gone)
        except Exception:
            del self._told[attempt_id]
            self._unsaid.add(attempt_id)
            raise
        finally:
            self._writing.discard(attempt_id)
        if attempt_id not in self._cache.found:
            self._forget(attempt_id)

    async def _delete_again(self, attempt_id: str, grace_s: float) -> None:
        if not await self._delete(attempt_id, grace_s):
            self._forget(attempt_id)

    def _forget(self, attempt_id: str) -> None:
        """There is no pod of this attempt any more, and there will be none; what is being told is told first."""
        if attempt_id in self._writing:
            return
        self._told.pop(attempt_id, None)
        self._doomed.pop(attempt_id, None)
        self._kept.discard(attempt_id)
        self._stuck.pop(attempt_id, None)
        self._leaving.pop(attempt_id, None)
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


def _shown(finding: Finding) -> Look:
    return Look(evidence=finding.evidence, fact=finding.fact, independent=finding.independent)


def _blame(error: ApiError) -> Fact:
    """A pod that the API server will never take: the task's doing when it is about the task's image."""
    about_image = error.status == 422 and "image" in error.message
    return Fact.BAD_SPEC if about_image else Fact.LAUNCH_FAILED
