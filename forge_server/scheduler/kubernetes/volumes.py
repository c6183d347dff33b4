"""Whether the cluster mounts images as volumes, so that nothing need be copied into a pod: asked, not assumed.

Image volumes came with Kubernetes 1.31, with sub-paths in 1.33, switched on in 1.35; a cluster without them drops the
field in silence and gives an empty folder. So a pod that has one is created with ``dryRun``, and must come back whole.
"""

import asyncio
from collections.abc import Callable

import msgspec
import structlog
from kubernetes.aio import client as k8s

from forge_server.scheduler.kubernetes.client import ApiError, Pods
from forge_server.scheduler.kubernetes.manifests import Manifest

log = structlog.get_logger(__name__)


class _Volume(msgspec.Struct, frozen=True):
    image: dict[str, str] | None = None


class _Spec(msgspec.Struct, frozen=True):
    volumes: tuple[_Volume, ...] = ()


class _Pod(msgspec.Struct, frozen=True):
    spec: _Spec


class ImageVolumes:
    """Remembers the answer. Until the API server has given one, images are copied."""

    def __init__(self, pods: Pods, *, wanted: bool) -> None:
        self._pods = pods
        self._known: bool | None = None if wanted else False
        self._asking = asyncio.Lock()

    async def usable(self, manifest: Callable[[], Manifest]) -> bool:
        """``manifest`` makes a pod with an image volume, to ask with."""
        if self._known is None:
            async with self._asking:
                if self._known is None:
                    await self._ask(manifest())
        return self._known or False

    async def _ask(self, manifest: Manifest) -> None:
        api = k8s.CoreV1Api(self._pods.api)
        create = api.create_namespaced_pod_without_preload_content
        try:
            answer = await self._pods.ask(create, self._pods.namespace, manifest, dry_run="All")
        except ApiError as error:
            if error.transient:
                return
            self._known = False
        else:
            pod = msgspec.json.decode(answer, type=_Pod)
            self._known = any(volume.image for volume in pod.spec.volumes)
        log.info("how pods get the runner", by="an image volume" if self._known else "copying")
