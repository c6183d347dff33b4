"""What this account may do in the namespace, and whether the cluster would take a pod: asked without doing it."""

import msgspec
from kubernetes.aio import client as k8s

from forge_server.scheduler.kubernetes.client import Pods
from forge_server.scheduler.kubernetes.manifests import Manifest


class Right(msgspec.Struct, frozen=True):
    """``resource`` may name a subresource: ``pods/log``."""

    group: str
    resource: str
    verb: str

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}"


ATTEMPTS = (
    *(Right("", "pods", verb) for verb in ("create", "get", "list", "watch", "delete")),
    Right("", "pods/log", "get"),
)
TRAINERS = (
    *(Right("", "pods", verb) for verb in ("list",)),
    Right("", "pods/log", "get"),
    *(Right("batch", "jobs", verb) for verb in ("create", "get", "delete")),
    *(Right("", "secrets", verb) for verb in ("create", "delete")),
)
"""As ``rbac.yaml.j2`` gives them."""


class _Version(msgspec.Struct, frozen=True, rename="camel"):
    git_version: str


class _Allowed(msgspec.Struct, frozen=True):
    allowed: bool = False


class _Review(msgspec.Struct, frozen=True):
    status: _Allowed = _Allowed()


async def version(pods: Pods) -> str:
    """Of the API server. Raises ApiError."""
    data = await pods.ask(k8s.VersionApi(pods.api).get_code_without_preload_content)
    return msgspec.json.decode(data, type=_Version).git_version


async def allowed(pods: Pods, right: Right) -> bool:
    """By a SelfSubjectAccessReview, which every account may ask for. Raises ApiError."""
    resource, _, sub = right.resource.partition("/")
    attributes = {
        "namespace": pods.namespace,
        "group": right.group,
        "resource": resource,
        "subresource": sub,
        "verb": right.verb,
    }
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes},
    }
    api = k8s.AuthorizationV1Api(pods.api)
    data = await pods.ask(api.create_self_subject_access_review_without_preload_content, review)
    return msgspec.json.decode(data, type=_Review).status.allowed


async def rehearse(pods: Pods, manifest: Manifest) -> None:
    """Let the cluster judge a pod (namespace, admission, quota) without creating it. Raises ApiError."""
    api = k8s.CoreV1Api(pods.api)
    await pods.ask(api.create_namespaced_pod_without_preload_content, pods.namespace, manifest, dry_run="All")
