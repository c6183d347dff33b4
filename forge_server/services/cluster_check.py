"""``forge-server check`` of a cluster: rights and templates are asked about, the network is tried by a pod.

The probe is a pod like an attempt's, from the same template and with the same labels, so that the same policies apply
to it. From inside it must reach the pod-facing listener, and nothing else: not the API server, not another port of
this machine that is open for the length of the check, not the engine, not the database. That a forbidden place is not
reached proves something only together with one that is: the listener and the open port are on the same machine.
"""

import asyncio
import contextlib
import json
import socket
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import msgspec
import sqlalchemy as sa

from forge_server.api.listeners import bind_tcp
from forge_server.client.schemas import Check
from forge_server.domain.errors import ForgeError
from forge_server.scheduler.kubernetes import access
from forge_server.scheduler.kubernetes import pod as pods_of
from forge_server.scheduler.kubernetes.backend import RUNNER, KubernetesBackend
from forge_server.scheduler.kubernetes.client import ApiError, Pods
from forge_server.scheduler.kubernetes.manifests import Manifest
from forge_server.services import cluster
from forge_server.settings import Settings

PROBE_S = 180.0
"""Longest life of the probe pod, the pull of its images included."""

_PROGRAM = """\
import json, os, socket
def reach(host, port, ask):
    try:
        with socket.create_connection((host, port), 3) as s:
            if not ask:
                return "reached"
            s.sendall(b"GET / HTTP/1.0\\r\\n\\r\\n")
            return "reached" if s.recv(5) == b"HTTP/" else "no HTTP"
    except OSError as e:
        return type(e).__name__ + ": " + str(e)
order = json.loads(os.environ["FORGE_PROBE"])
host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT")
if host and port:
    order["forbidden"].append(["the cluster's address of the API server", host, int(port)])
said = json.dumps({
    "listener": reach(*order["listener"], True),
    "forbidden": [[*t, reach(*t[1:], False)] for t in order["forbidden"]],
})
with open(order["answer"], "w") as file:
    file.write(said)
"""


async def check(settings: Settings, *, probe: bool) -> list[Check]:
    """One line per finding; with ``probe`` a pod is run."""
    try:
        pods = await cluster.connect(settings)
    except ForgeError as error:
        return [Check("cluster", False, str(error))]
    try:
        return await _examine(settings, pods, probe)
    except ApiError as error:
        return [Check("cluster", False, f"{pods.server} does not answer: {error}")]
    finally:
        await pods.close()


async def _examine(settings: Settings, pods: Pods, probe: bool) -> list[Check]:
    found = await access.version(pods)
    checks = [Check("cluster", True, f"{pods.server}, Kubernetes {found}, namespace {pods.namespace}")]
    on_pods, by_job = settings.scheduler.backend == "kubernetes", settings.trainer.launcher == "kubernetes"
    wanted = {*(access.ATTEMPTS if on_pods else ()), *(access.TRAINERS if by_job else ())}
    missing = [str(right) for right in sorted(wanted, key=str) if not await access.allowed(pods, right)]
    told = f"not allowed: {', '.join(missing)}; apply rbac.yaml of `forge-server render`"
    checks.append(
        Check("rights", not missing, told if missing else ", ".join(sorted(str(right) for right in wanted)))
    )
    if by_job:
        checks.append(_trainer(settings))
    if not on_pods:
        return checks
    checks += _images(settings)
    instance = f"check-{uuid.uuid4().hex[:8]}"  # another than any server's, which would clear the pod away
    try:
        async with _listener(settings) as url:
            backend = await cluster.backend(settings, pods, instance, url)
            name = f"at-{instance}"
            manifest = backend.manifest(cluster.specimen(name))
            checks.append(
                Check("template", True, f"pod.yaml.j2 gives a pod that reaches the server at {url}")
            )
            checks.append(await _rehearsed(pods, manifest))
            if all(check.ok for check in checks):
                checks += await _egress(settings, pods, backend, name, url, probe)
    except ForgeError as error:
        checks.append(Check("template", False, str(error)))
    return checks


def _trainer(settings: Settings) -> Check:
    try:
        cluster.trainer(settings, "check")
    except ForgeError as error:
        return Check("trainer template", False, str(error))
    return Check("trainer template", True, f"Jobs of {settings.kubernetes.trainer_image}")


def _images(settings: Settings) -> list[Check]:
    kubernetes = settings.kubernetes
    harnesses = "".join(f", {name} {image}" for name, image in sorted(kubernetes.harness_images.items()))
    tasks = kubernetes.image or "none: every task must name its own"
    return [Check("images", True, f"runner {kubernetes.runner_image}{harnesses}; tasks {tasks}")]


async def _rehearsed(pods: Pods, manifest: Manifest) -> Check:
    for container in manifest["spec"]["containers"]:
        container["image"] = container["image"] or "a-tasks-own"
    try:
        await access.rehearse(pods, manifest)
    except ApiError as error:
        if error.over_quota:
            return Check("admission", True, f"the quota is used up at the moment: {error.message}")
        return Check("admission", False, f"the cluster would not take an attempt's pod: {error}")
    return Check(
        "admission", True, "the cluster would take an attempt's pod (a create that was only rehearsed)"
    )


async def _egress(
    settings: Settings, pods: Pods, backend: KubernetesBackend, name: str, url: str, probe: bool
) -> list[Check]:
    if not probe:
        return [Check("network", True, "not tried; `forge-server check --probe` runs a pod that tries it")]
    at = urlsplit(url)
    async with _open_port(pods.server) as decoy:
        order = {
            "listener": [at.hostname, at.port or 80],
            "forbidden": [["an open port of the machine that checks", *decoy], *_forbidden(settings, pods)],
        }
        manifest = backend.manifest(cluster.specimen(name))
        _turn_into_probe(manifest, settings, order)
        try:
            text = await _run(pods, manifest, cluster.limits(settings))
        except ApiError as error:
            return [Check("network", False, f"the probe pod could not be run: {error}")]
    try:
        said = json.loads(text)
    except ValueError:
        return [
            Check("network", False, f"the probe pod did not end well: {text[-500:] or 'it said nothing'}")
        ]
    return _judged(said, url)


def _judged(said: dict[str, Any], url: str) -> list[Check]:
    way = said["listener"] == "reached"
    inward = Check(
        "network: server",
        way,
        f"a pod reaches {url}" if way else f"a pod does not reach {url}: {said['listener']}; mend pod_url",
    )
    open_ = [f"{name} ({host}:{port})" for name, host, port, end in said["forbidden"] if end == "reached"]
    shut = [f"{name} ({host}:{port}: {end})" for name, host, port, end in said["forbidden"]]
    if open_:
        told = (
            f"NetworkPolicy is not enforced here: a pod with the labels of an attempt reached {'; '.join(open_)}. "
            "Apply network-policy.yaml of `forge-server render`; if that is done, the cluster's network plugin does "
            "not enforce it, and whatever listens on an address that pods can reach is open to every agent"
        )
    else:
        told = f"a pod did not reach {'; '.join(shut)}"
    return [inward, Check("network: egress", not open_, told)]


def _forbidden(settings: Settings, pods: Pods) -> list[list[Any]]:
    """Name, host and port of what an agent must never reach, as far as it is not on loopback."""
    found = [("the API server", pods.server)]
    if settings.engine.kind == "attach":
        found.append(("the engine", settings.engine.url))
    if settings.kubernetes.control_url:
        found.append(("the control listener", settings.kubernetes.control_url))
    places = [(name, urlsplit(url).hostname, urlsplit(url).port, urlsplit(url).scheme) for name, url in found]
    store = sa.make_url(settings.store_url)
    if store.host:
        places.append(("the database", store.host, store.port or 5432, ""))
    return [
        [name, host, port or (443 if scheme == "https" else 80)]
        for name, host, port, scheme in places
        if host and host != "localhost" and not host.startswith("127.")
    ]


def _turn_into_probe(manifest: Manifest, settings: Settings, order: dict[str, Any]) -> None:
    container = next(c for c in manifest["spec"]["containers"] if c["name"] == RUNNER)
    container["image"] = settings.kubernetes.runner_image
    container["command"] = ["/forge/bin/python3", "-I", "-S", "-c", _PROGRAM]
    order["answer"] = container.get("terminationMessagePath", "/dev/termination-log")
    container["env"] = [{"name": "FORGE_PROBE", "value": msgspec.json.encode(order).decode()}]


async def _run(pods: Pods, manifest: Manifest, limits: pods_of.Limits) -> str:
    """What the pod said at its end, or why it said nothing; it is deleted. Raises ApiError.

    The message comes with the pod's status: the log of a pod that has ended may be gone before it is asked for.
    """
    made = await pods.create(manifest)
    name, until = made.metadata.name, time.monotonic() + PROBE_S
    try:
        while True:
            seen = await pods.get(name)
            if seen is None:
                return "the pod was deleted"
            if seen.status.phase == "Succeeded":
                return pods_of.last_words(seen, RUNNER)
            finding = pods_of.find(seen, time.time(), limits, ours=False)
            if finding is not None or time.monotonic() > until:
                told = msgspec.json.encode(pods_of.evidence_of(seen)).decode()
                return f"{finding.fact if finding else 'it does not end'} {told}"
            await asyncio.sleep(0.5)
    finally:
        with contextlib.suppress(ApiError):
            await pods.delete(name, 0)


@contextlib.asynccontextmanager
async def _listener(settings: Settings) -> AsyncIterator[str]:
    """The URL of the pod-facing listener: a running server's, else one that is opened for as long."""
    server, kubernetes = settings.server, settings.kubernetes
    try:
        sock = bind_tcp(server.host, server.port, "[server] port")
    except ForgeError:  # a server has it
        yield kubernetes.pod_url or f"http://{server.host}:{server.port}"
        return
    async with _serving(sock):
        yield kubernetes.pod_url or f"http://{server.host}:{sock.getsockname()[1]}"


@contextlib.asynccontextmanager
async def _open_port(server: str) -> AsyncIterator[tuple[str, int]]:
    """A port that listens, at the address by which this machine talks to the cluster."""
    at = urlsplit(server)
    with socket.socket(
        socket.AF_INET6 if ":" in (at.hostname or "") else socket.AF_INET, socket.SOCK_DGRAM
    ) as way:
        way.connect((at.hostname, at.port or 443))  # sends nothing
        address = str(way.getsockname()[0])
    sock = bind_tcp(address, 0, "the check")
    async with _serving(sock):
        yield address, int(sock.getsockname()[1])


@contextlib.asynccontextmanager
async def _serving(sock: socket.socket) -> AsyncIterator[None]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.0 204 No Content\r\n\r\n")
        with contextlib.suppress(OSError):
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, sock=sock)
    try:
        yield
    finally:
        server.close()
