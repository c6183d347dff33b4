"""Jobs of the cluster and the Secrets that they read: created, looked at, deleted with everything of theirs.

For what runs long and may be started twice without harm, which attempts may not: the trainer, whose session's fence
tells which of two is in charge.
"""

import asyncio
import time
from datetime import datetime
from typing import Any

import msgspec
import structlog
from kubernetes.aio import client as k8s

from forge_server.domain.errors import ClusterError, ConfigError
from forge_server.domain.events import Fact
from forge_server.scheduler.kubernetes import pod as pods_of
from forge_server.scheduler.kubernetes.client import ApiError, Pods
from forge_server.scheduler.kubernetes.manifests import Manifest

log = structlog.get_logger(__name__)

LOG_TAIL = 64 * 1024
_LOOK_S = 0.5
_LEAVING_S = 90.0
_REFUSED_S = 10.0
_STUCK = (Fact.IMAGE_PULL, Fact.LAUNCH_FAILED)


class _Metadata(msgspec.Struct, frozen=True, rename="camel"):
    annotations: dict[str, str] = {}
    deletion_timestamp: datetime | None = None


class _Status(msgspec.Struct, frozen=True):
    conditions: tuple[pods_of.Condition, ...] = ()


class _Job(msgspec.Struct, frozen=True):
    metadata: _Metadata = _Metadata()
    status: _Status = _Status()


class JobState(msgspec.Struct, frozen=True, kw_only=True):
    """``ended``: how it ended, or why it never will begin; empty while it goes on."""

    annotations: dict[str, str]
    ended: str = ""


_JOB = msgspec.json.Decoder(_Job)


class Jobs:
    """The Jobs of the namespace that ``pods`` is of."""

    def __init__(self, pods: Pods, limits: pods_of.Limits) -> None:
        self._pods, self._limits = pods, limits
        self._batch, self._core = k8s.BatchV1Api(pods.api), k8s.CoreV1Api(pods.api)

    async def create(self, manifests: list[Manifest]) -> None:
        """Create what a template gave, in order; a Secret of the name is replaced.

        Raises ClusterError when that may succeed later, ConfigError when not.
        """
        for manifest in manifests:
            try:
                await self._create(manifest)
            except ApiError as error:
                raise self._told(error, f"{manifest['kind']} cannot be created") from None

    async def _create(self, manifest: Manifest) -> None:
        namespace = self._pods.namespace
        if manifest["kind"] == "Job":
            await self._pods.ask(
                self._batch.create_namespaced_job_without_preload_content, namespace, manifest
            )
        elif manifest["kind"] == "Secret":
            await self._delete_secret(manifest["metadata"]["name"])
            await self._pods.ask(
                self._core.create_namespaced_secret_without_preload_content, namespace, manifest
            )
        else:
            raise ConfigError(
                f"a Job's template may give Jobs and Secrets, not {manifest['kind']}",
                mend="create it beside the server",
            )

    async def state(self, name: str) -> JobState | None:
        """The Job now; None when there is none, or it is being deleted. Raises ClusterError and ConfigError."""
        try:
            data = await self._pods.ask(
                self._batch.read_namespaced_job_without_preload_content, name, self._pods.namespace
            )
            job = _JOB.decode(data)
            if job.metadata.deletion_timestamp is not None:
                return None
            ended = ""
            for condition in job.status.conditions:
                if condition.type in ("Complete", "Failed") and condition.status == "True":
                    ended = " ".join(filter(None, (condition.type, condition.reason, condition.message)))
            return JobState(annotations=job.metadata.annotations, ended=ended or await self._stuck(name))
        except ApiError as error:
            if error.status == 404:
                return None
            raise self._told(error, "the Job cannot be looked at") from None

    async def _stuck(self, name: str) -> str:
        """Why a pod of the Job cannot begin, when waiting will not mend it."""
        for pod in await self._of(name):
            finding = pods_of.find(pod, time.time(), self._limits, ours=False)
            if finding is not None and finding.fact in _STUCK:
                return f"{finding.fact}: {_brief(finding.evidence)}"
        return ""

    async def evidence(self, name: str) -> tuple[str, str]:
        """What became of the Job's pods in one line, and the last lines of the first that failed, else ran."""
        try:
            pods = await self._of(name)
        except ApiError as error:
            return f"its pods cannot be seen: {error}", ""
        pods.sort(key=lambda pod: (pod.status.phase != "Failed", pod.metadata.name))
        if not pods:
            return "its pod is gone", ""
        first = pods[0]
        text = await self._pods.log(first.metadata.name, "trainer", LOG_TAIL)
        return _brief(pods_of.evidence_of(first)), text

    async def delete(self, name: str, secret: str) -> bool:
        """Delete the Job, its pods and its Secret; none is left on return, unless the cluster does not answer for
        long: then what is left is told in the log. False when the cluster has not even heard of it. Raises ConfigError
        when it goes on refusing."""
        began, heard = time.monotonic(), False
        while True:
            try:
                if not await self._delete_job(name):
                    await self._delete_secret(secret)
                    return True
                why, heard = "it is still there", True
            except ApiError as error:
                if not error.transient and time.monotonic() - began > _REFUSED_S:
                    raise self._told(error, "the Job cannot be deleted") from None
                why = str(error)
            if time.monotonic() - began > _LEAVING_S:
                log.warning("a trainer's Job could not be deleted", job=name, reason=why)
                return heard
            await asyncio.sleep(_LOOK_S)

    async def _delete_job(self, name: str) -> bool:
        """Ask for the deletion; False once there is neither Job nor pod."""
        try:
            body = {"propagationPolicy": "Foreground"}
            await self._pods.ask(
                self._batch.delete_namespaced_job_without_preload_content,
                name,
                self._pods.namespace,
                body=body,
            )
        except ApiError as error:
            if error.status != 404:
                raise
            return bool(await self._of(name))
        return True

    async def _delete_secret(self, name: str) -> None:
        try:
            await self._pods.ask(
                self._core.delete_namespaced_secret_without_preload_content, name, self._pods.namespace
            )
        except ApiError as error:
            if error.status != 404:
                raise

    async def _of(self, name: str) -> list[pods_of.Pod]:
        return list((await self._pods.page(f"job-name={name}")).items)

    def _told(self, error: ApiError, what: str) -> ClusterError | ConfigError:
        if error.transient:
            return ClusterError(f"{what} now: {error}", where=self._pods.server)
        return ConfigError(
            f"{what}: {error}",
            where=f"namespace {self._pods.namespace}",
            mend="`forge-server check` tells which rights are missing",
        )


def _brief(evidence: dict[str, Any]) -> str:
    return msgspec.json.encode(evidence).decode()[:500]
