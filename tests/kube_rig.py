"""The scheduler's rig on a real cluster, in a namespace of its own and with the rights that forge-server asks for."""

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

from kube import images
from kube.cluster import Cluster
from scheduler_rig import Rig, rig

from forge_server import assets
from forge_server.scheduler.kubernetes.backend import KubernetesBackend, KubernetesOptions
from forge_server.scheduler.kubernetes.client import Pods
from forge_server.scheduler.kubernetes.manifests import Templates
from forge_server.scheduler.kubernetes.pod import Limits

RUNNER = "localhost/forge-runner:1"
BUSYBOX = "localhost/busybox:1"
VALUES: dict[str, Any] = {
    "cpu": "10m",
    "pull_policy": "Never",
    "pull_secrets": [],
    "runtime_class": "",
    "priority_class": "",
    "node_selector": {},
    "tolerations": [],
}


def runner_image(folder: Path) -> Path:
    """The image that brings the ``/forge`` tree."""
    return images.forge(folder, RUNNER)


@contextlib.contextmanager
def namespace(cluster: Cluster, *, jobs: bool = False) -> Iterator[str]:
    """A namespace in which the plain user may do what forge-server's role allows; gone afterwards."""
    name = f"t-{uuid.uuid4().hex[:8]}"
    cluster.call("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
    templates = Templates(assets.folder("k8s_templates"))
    for document in templates.render("rbac.yaml.j2", {"namespace": name, "account": "forge", "jobs": jobs}):
        if document["kind"] == "RoleBinding":
            document["subjects"] = [{"kind": "User", "name": "forge"}]
        apply(cluster, name, document)
    cluster.until(
        f"{name}'s account", lambda: cluster.get(f"/api/v1/namespaces/{name}/serviceaccounts/default")
    )
    try:
        yield name
    finally:
        cluster.call("DELETE", f"/api/v1/namespaces/{name}")


def apply(cluster: Cluster, namespace: str, document: dict[str, Any]) -> None:
    """Create one object of a kind that the tests use."""
    group = document["apiVersion"]
    root = "/api/v1" if group == "v1" else f"/apis/{group}"
    kinds = {"NetworkPolicy": "networkpolicies"}
    plural = kinds.get(document["kind"], document["kind"].lower() + "s")
    cluster.call("POST", f"{root}/namespaces/{namespace}/{plural}", document)


class KubeRig:
    """The rig ``it``, and the pods of its namespace as the administrator sees them."""

    def __init__(self, cluster: Cluster, namespace: str, it: Rig) -> None:
        self.cluster, self.namespace, self.it = cluster, namespace, it

    def pods(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.cluster.get(f"/api/v1/namespaces/{self.namespace}/pods")["items"]
        return found

    async def until_pods(self, holds: Callable[[list[dict[str, Any]]], Any], within: float = 120.0) -> Any:
        """Wait until the pods are as wanted."""
        until = time.monotonic() + within
        while True:
            with contextlib.suppress(OSError):
                found = await asyncio.to_thread(self.pods)
                if answer := holds(found):
                    return answer
            if time.monotonic() > until:
                raise TimeoutError(json.dumps([p["status"] for p in found])[:3000])
            await asyncio.sleep(0.1)

    def delete(self, name: str, grace_s: int = 0) -> None:
        path = f"/api/v1/namespaces/{self.namespace}/pods/{name}"
        self.cluster.call("DELETE", path, {"gracePeriodSeconds": grace_s})


@contextlib.asynccontextmanager
async def kube_rig(
    cluster: Cluster,
    folder: Path,
    *,
    limits: Limits | None = None,
    image: str = BUSYBOX,
    values: dict[str, Any] | None = None,
    templates: Path | None = None,
    within: str = "",
    kubeconfig: Path | None = None,
    keep_failed_s: float = 0.0,
    **options: Any,
) -> AsyncIterator[KubeRig]:
    """A rig whose attempts are pods of ``cluster``, in the namespace ``within`` or in one of its own."""
    with contextlib.nullcontext(within) if within else namespace(cluster) as name:

        async def backend(instance: str, url: str) -> KubernetesBackend:
            pods = await Pods.connect(str(kubeconfig or cluster.user), "", name)
            made = KubernetesOptions(
                instance=instance,
                url=url,
                image=image,
                runner_image=RUNNER,
                values={**VALUES, **(values or {})},
                limits=limits or Limits(),
                keep_failed_s=keep_failed_s,
            )
            return KubernetesBackend(pods, Templates(assets.folder("k8s_templates"), templates), made)

        async with rig(folder, elsewhere=backend, address=cluster.machine, **options) as it:
            yield KubeRig(cluster, name, it)
