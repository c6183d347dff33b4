# ruff: noqa: ASYNC110, ASYNC220
"""Faults of a real cluster, each with what must come of it. A fault is a function of the cluster and a new folder;
it brings its own server and namespace, breaks something and answers with what became of the attempts.

After every fault: each rollout has ended once, no pod is left within a minute, and no infra failure has a reward.
"""

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any
from unittest import mock

import sqlalchemy as sa
from kube.cluster import Cluster
from kube_cutter import cutter
from kube_rig import BUSYBOX, KubeRig, apply, kube_rig, namespace
from ports import free_port
from runner_support import Reply, tool
from scheduler_rig import CALL, script_spec, solve

from forge_server.domain.events import RolloutCancelled
from forge_server.harness.spec import Spec
from forge_server.scheduler.kubernetes.pod import Limits
from forge_server.store import tables as t

Fault = Callable[[Cluster, Path], Awaitable[str]]
HERE = Path(__file__).parent


class Work:
    """A model that keeps its harness busy until it may finish."""

    def __init__(self, nap_s: float = 1.0) -> None:
        self.done = False
        self._nap = tool("shell", command=f"sleep {nap_s}")

    def __call__(self, attempt: str, messages: list[Any]) -> Reply:
        return tool("finish", answer="plum") if self.done else self._nap


@contextlib.asynccontextmanager
async def server(cluster: Cluster, folder: Path, **options: Any) -> AsyncIterator[KubeRig]:
    """A rig that tells what it saw when something goes wrong."""
    async with kube_rig(cluster, folder, **options) as kube:
        try:
            yield kube
        except BaseException as error:
            with contextlib.suppress(Exception):
                kept = ("id", "state", "kind", "evidence")
                error.add_note(
                    "attempts: " + str([{k: a[k] for k in kept} for a in await kube.it.attempts()])
                )
                about = [{"name": p["metadata"]["name"], **p["metadata"], **p["status"]} for p in kube.pods()]
                for pod in about:
                    pod.pop("managedFields", None)
                error.add_note("pods: " + str(about))
            raise


class Came(Counter[str]):
    """What attempts came to, by kind; ``why``: the evidence of infra failures."""

    why: list[tuple[str, Any]]


async def told(kube: KubeRig, n: int, *, within: float = 180.0) -> Came:
    """What became of the attempts of ``n`` rollouts, once what must hold after every fault was seen to hold."""
    it = kube.it
    await it.ended(n, within)
    ended = it.of("rollout_ended")
    assert len(ended) == n == len({row.rollout_id for row in ended}), "a rollout was lost or ended twice"
    await kube.until_pods(lambda pods: pods == [], within=60.0)
    attempts = await it.attempts()
    granted = sa.select(t.rewards.c.attempt_id).where(t.rewards.c.source == "minimum")
    rewarded = set(await it.store.read(lambda c: c.execute(granted).scalars().all()))
    for attempt in attempts:
        assert attempt["state"] == "ended"
        if attempt["outcome"] == "infra_failure":
            assert attempt["reward"] is None and attempt["id"] not in rewarded, (
                "an infra failure has a reward"
            )
            assert attempt["evidence"], "an infra failure without evidence"
    found = Came(f"{a['kind'] if a['kind'] != 'ok' else 'completed'}" for a in attempts)
    found.why = [(a["kind"], a["evidence"]) for a in attempts if a["outcome"] == "infra_failure"]
    return found


def expect(found: Came, wanted: dict[str, int]) -> None:
    if found != wanted:
        raise AssertionError(f"the attempts came to {dict(found)}, not to {wanted}: {found.why}")


def words(found: Came, more: str = "") -> str:
    return ", ".join(f"{n} {kind}" for kind, n in sorted(found.items())) + (f"; {more}" if more else "")


def details(attempt: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = attempt["evidence"]["details"]
    return found


async def seen(holds: Callable[[], object], within: float = 150.0) -> None:
    """Wait for what no event tells."""
    async with asyncio.timeout(within):
        while not holds():
            await asyncio.sleep(0.05)


def ended_as(kube: KubeRig, kind: str) -> list[str | None]:
    return [row.attempt_id for row in kube.it.of("attempt_ended") if row.data["kind"] == kind]


async def running(kube: KubeRig, n: int, within: float = 150.0) -> None:
    await kube.it.until(lambda: len(kube.it.of("attempt_running")) >= n, within)


async def called(kube: KubeRig, n: int) -> None:
    """Wait until ``n`` attempts have made a call: what follows is not a harness without calls."""
    query = sa.select(sa.func.count(sa.distinct(t.calls.c.attempt_id)))
    async with asyncio.timeout(150):
        while await kube.it.store.read(lambda c: c.execute(query).scalar_one()) < n:
            await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def busy(
    cluster: Cluster, folder: Path, n: int, *, nap_s: float = 1.0, max_attempts: int = 1, **options: Any
) -> AsyncIterator[tuple[KubeRig, Work]]:
    """``n`` attempts that work."""
    async with server(cluster, folder, in_flight=n, **options) as kube:
        work = kube.it.model = Work(nap_s)
        await kube.it.group(n=n, max_attempts=max_attempts)
        await running(kube, n)
        await called(kube, n)
        yield kube, work


# Faults that keep to their own namespace.


async def pods_deleted(cluster: Cluster, folder: Path) -> str:
    async with busy(cluster, folder, 2, max_attempts=2) as (kube, work):
        first, second = [pod["metadata"]["name"] for pod in kube.pods()]
        kube.delete(first)
        kube.delete(second, grace_s=20)
        await running(kube, 4)
        work.done = True
        found = await told(kube, 2)
        expect(found, {"pod_lost": 2, "completed": 2})
        lost = [details(a) for a in await kube.it.attempts() if a["kind"] == "pod_lost"]
        assert all("node" in evidence for evidence in lost), lost
        return words(found)


async def quota_exceeded(cluster: Cluster, folder: Path) -> str:
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "few"},
        "spec": {"hard": {"pods": "2"}},
    }
    with namespace(cluster) as name:
        apply(cluster, name, quota)
        path = f"/api/v1/namespaces/{name}/resourcequotas/few"
        counts = lambda: cluster.get(path).get("status", {}).get("used")  # noqa: E731
        await asyncio.to_thread(cluster.until, "the quota counts", counts)
        async with server(cluster, folder, within=name, in_flight=6) as kube:
            kube.it.model = solve
            await kube.it.group(n=6, max_attempts=1)
            # creates at the same moment may be refused for another reason first: the quota's count has moved
            await seen(lambda: "exceeded quota" in kube.it.backend.full)
            assert not kube.it.backend.trouble
            found = await told(kube, 6)
            expect(found, {"completed": 6})
            return words(found, "2 at a time")


async def image_missing(cluster: Cluster, folder: Path) -> str:
    async with server(cluster, folder, image="localhost/none:1") as kube:
        await kube.it.group(n=1, max_attempts=2)
        found = await told(kube, 1)
        expect(found, {"image_pull": 2})
        evidence = details((await kube.it.attempts())[0])
        assert "ErrImageNeverPull" in str(evidence["containers"]), evidence
        return words(found)


async def image_slow(cluster: Cluster, folder: Path) -> str:
    """A registry that takes the connection and says nothing."""
    with socket.create_server((cluster.machine, 0)) as registry:
        image = f"{cluster.machine}:{registry.getsockname()[1]}/slow:1"
        values = {"pull_policy": "IfNotPresent"}
        async with server(cluster, folder, image=image, values=values, startup_s=25.0) as kube:
            await kube.it.group(n=1, max_attempts=1)
            found = await told(kube, 1)
            expect(found, {"startup_timeout": 1})
            evidence = details((await kube.it.attempts())[0])
            assert evidence["phase"] == "Pending" and "waiting" in str(evidence["containers"]), evidence
            return words(found)


async def out_of_memory(cluster: Cluster, folder: Path) -> str:
    hungry = pod_script(CALL + 'call; "$PY" -I -S -c "x = b\'x\' * (1 << 30)"')
    plan = {"memory_mb": 96}
    async with server(cluster, folder, specs={"script": hungry}, plan=plan) as kube:
        await kube.it.group(n=1, harness="script", max_attempts=2)
        found = await told(kube, 1)
        expect(found, {"oom_agent": 1})
        (attempt,) = await kube.it.attempts()
        assert attempt["outcome"] == "policy_failure" and attempt["reward"] == 0.0
        return words(found, "its minimum reward")


async def nothing_called(cluster: Cluster, folder: Path) -> str:
    async with server(cluster, folder, specs={"script": pod_script("exit 0")}) as kube:
        await kube.it.group(n=1, harness="script", max_attempts=1)
        found = await told(kube, 1)
        expect(found, {"harness_no_call": 1})
        return words(found)


async def watch_cut(cluster: Cluster, folder: Path) -> str:
    async with cutter(cluster, folder) as through:
        cutting = asyncio.create_task(through.cut_every(1.0))
        async with server(cluster, folder, kubeconfig=through.kubeconfig, in_flight=3) as kube:
            kube.it.model = solve
            await kube.it.group(n=6, max_attempts=1)
            found = await told(kube, 6)
            expect(found, {"completed": 6})
            counts = kube.it.backend._cache.counts
            assert counts["watch"] >= 4 and counts["list"] <= 2, counts
        cutting.cancel()
        return words(found, f"{counts['watch']} watches, {counts['list']} list")


async def watch_silent(cluster: Cluster, folder: Path) -> str:
    """Half-open: the connection stays, nothing comes."""
    silence = mock.patch("forge_server.scheduler.kubernetes.watch.SILENCE_S", 4.0)
    async with cutter(cluster, folder) as through:
        with silence:
            async with busy(cluster, folder, 1, kubeconfig=through.kubeconfig, max_attempts=2) as (
                kube,
                work,
            ):
                through.silence()
                kube.delete(kube.pods()[0]["metadata"]["name"])
                await running(kube, 2)
                work.done = True
                found = await told(kube, 1)
        expect(found, {"pod_lost": 1, "completed": 1})
        return words(found)


async def two_servers(cluster: Cluster, folder: Path) -> str:
    """In one namespace, with a stray pod of each."""
    slow = 5.0  # a harness makes thirty calls at most: it works until the pods of the other are gone
    with namespace(cluster) as name:
        for which in ("one", "two"):
            (folder / which).mkdir()
        async with (
            busy(cluster, folder / "one", 2, within=name) as (one, work),
            busy(cluster, folder / "two", 2, within=name, nap_s=slow) as (two, other),
        ):
            for kube in (one, two, one, two):
                await kube.it.scheduler.reconcile()
            work.done = True
            theirs = lambda kube: {r.attempt_id for r in kube.it.of("attempt_running")}  # noqa: E731
            await one.it.ended(2)
            await two.until_pods(lambda pods: {p["metadata"]["name"] for p in pods} == theirs(two))
            other.done = True
            await two.it.ended(2)
            for kube in (one, two):
                found = await told(kube, 2)
                expect(found, {"completed": 2})
    return "2 completed each, none touched by the other"


# Faults of the whole cluster: one at a time.


async def drained(cluster: Cluster, folder: Path) -> str:
    """A node is cordoned and its pods are evicted."""
    async with busy(cluster, folder, 4, max_attempts=2) as (kube, work):
        node = kube.pods()[0]["spec"]["nodeName"]
        path = f"/api/v1/nodes/{node}"
        cluster.call("PATCH", path, {"spec": {"unschedulable": True}})
        try:
            evicted = [p["metadata"]["name"] for p in kube.pods() if p["spec"]["nodeName"] == node]
            for name in evicted:
                body = {"apiVersion": "policy/v1beta1", "kind": "Eviction", "metadata": {"name": name}}
                cluster.call("POST", f"/api/v1/namespaces/{kube.namespace}/pods/{name}/eviction", body)
            await running(kube, 4 + len(evicted))
            assert all(
                p["spec"]["nodeName"] != node for p in kube.pods() if p["metadata"]["name"] not in evicted
            )
        finally:
            cluster.call("PATCH", path, {"spec": {"unschedulable": None}})
        work.done = True
        found = await told(kube, 4)
        expect(found, {"pod_lost": len(evicted), "completed": 4})
        return words(found)


async def nodes_full(cluster: Cluster, folder: Path) -> str:
    """Each node has room for one; an attempt that found none is not charged."""
    free = min(_allocatable_mb(node) for node in cluster.get("/api/v1/nodes")["items"])
    limits, plan = Limits(unschedulable_s=3.0), {"memory_mb": int(free * 0.6)}
    async with server(cluster, folder, in_flight=4, limits=limits, plan=plan) as kube:
        work = kube.it.model = Work()
        await kube.it.group(n=4, max_attempts=1)
        await kube.it.until(lambda: len(ended_as(kube, "unschedulable")) >= 2, 150)
        work.done = True
        found = await told(kube, 4, within=240)
        assert found["completed"] == 4 and set(found) == {"completed", "unschedulable"}, found
        return words(found, "unschedulable ones uncharged")


async def clock_ahead(cluster: Cluster, folder: Path) -> str:
    return await _skewed(cluster, folder, 90.0)


async def clock_behind(cluster: Cluster, folder: Path) -> str:
    return await _skewed(cluster, folder, -90.0)


async def _skewed(cluster: Cluster, folder: Path, seconds: float) -> str:
    """Our clock is off, and pods have to wait for a node for a while."""
    nodes = [f"/api/v1/nodes/{node}" for node in cluster.nodes]
    for node in nodes:
        cluster.call("PATCH", node, {"spec": {"unschedulable": True}})
    try:
        async with server(cluster, folder, clock=lambda: time.time() + seconds, startup_s=60.0) as kube:
            kube.it.model = solve
            await kube.it.group(n=2, max_attempts=1)
            stuck = lambda pods: len(pods) == 2 and all(p["status"].get("conditions") for p in pods)  # noqa: E731
            await kube.until_pods(stuck)
            await kube.it.scheduler.reconcile()
            for node in nodes:
                cluster.call("PATCH", node, {"spec": {"unschedulable": None}})
            found = await told(kube, 2)
            expect(found, {"completed": 2})
            return words(found)
    finally:
        for node in nodes:
            cluster.call("PATCH", node, {"spec": {"unschedulable": None}})


async def api_killed(cluster: Cluster, folder: Path) -> str:
    """It is started again at once: attempts go on, end, and are launched as if nothing had happened. What we have seen
    last is too old for it: 410."""
    async with server(cluster, folder, in_flight=3) as kube:
        work = kube.it.model = Work()
        await kube.it.group(n=6, max_attempts=1)
        await running(kube, 3)
        await asyncio.to_thread(cluster.kill, "apiserver", hold=True)
        cache = kube.it.backend._cache
        await seen(lambda: cache.trouble)
        cache._version = "1"
        await asyncio.to_thread(cluster.release, "apiserver")
        work.done = True
        found = await told(kube, 6, within=240)
        assert found == {"completed": 6} and cache.counts["expired"] >= 1, (found, cache.counts)
        return words(found, f"{cache.counts['expired']} x 410, {cache.counts['list']} lists")


async def server_killed(cluster: Cluster, folder: Path, n: int = 6, up: int = 3, nap_s: float = 1.0) -> str:
    """SIGKILL while some pods are up and others are being launched; the next life finds them all."""
    with namespace(cluster) as name:
        port = free_port(cluster.machine)
        command = [sys.executable, str(HERE / "kube_victim.py"), str(folder), str(cluster.state), name]
        victim = subprocess.Popen([*command, str(port), str(n), str(up), str(nap_s)], stdout=subprocess.PIPE)
        try:
            assert victim.stdout is not None
            async with asyncio.timeout(200):
                while (line := await asyncio.to_thread(victim.stdout.readline)) != b"up\n":
                    assert line, "the victim died by itself"
        finally:
            victim.kill()
            victim.wait(30)
        before = {p["metadata"]["name"]: p["metadata"]["uid"] for p in _pods(cluster, name)}
        async with server(cluster, folder, within=name, port=port, in_flight=n) as kube:
            work = kube.it.model = Work(nap_s)
            early = ("queued", "launching", "starting")
            async with asyncio.timeout(180):
                while any(a["state"] in early for a in await kube.it.attempts()):
                    await asyncio.sleep(0.2)
            after = {p["metadata"]["name"]: p["metadata"]["uid"] for p in kube.pods()}
            assert before.items() <= after.items(), "a pod was replaced"
            work.done = True
            found = await told(kube, n, within=150)
            expect(found, {"completed": n})
            return words(found, f"{len(before)} pods adopted")


# Faults that take minutes.


async def api_away(cluster: Cluster, folder: Path) -> str:
    """The API server is dead for 60 s, longer than an attempt may take to start."""
    async with server(cluster, folder, in_flight=4, startup_s=25.0) as kube:
        work = kube.it.model = Work(nap_s=4.0)
        await kube.it.group(n=8, max_attempts=1)
        await running(kube, 4)
        await called(kube, 4)
        await asyncio.to_thread(cluster.kill, "apiserver", hold=True)
        gone = time.monotonic()
        await asyncio.sleep(10)
        work.done = True  # they end, and others are to be launched that cannot
        await kube.it.ended(4)
        assert kube.it.backend.trouble
        await asyncio.sleep(max(0.0, gone + 60 - time.monotonic()))
        await asyncio.to_thread(cluster.release, "apiserver")
        found = await told(kube, 8, within=180)
        expect(found, {"completed": 8})
        return words(found)


async def api_frozen(cluster: Cluster, folder: Path) -> str:
    """SIGSTOP for 60 s: connections stay open, nothing is answered."""
    async with server(cluster, folder, in_flight=4, startup_s=25.0) as kube:
        work = kube.it.model = Work(nap_s=4.0)
        await kube.it.group(n=8, max_attempts=1)
        await running(kube, 4)
        await called(kube, 4)
        await asyncio.to_thread(cluster.signal, "apiserver", signal.SIGSTOP)
        work.done = True
        await kube.it.ended(4)
        await asyncio.sleep(60)
        await asyncio.to_thread(cluster.signal, "apiserver", signal.SIGCONT)
        found = await told(kube, 8, within=240)
        expect(found, {"completed": 8})
        return words(found)


async def etcd_killed(cluster: Cluster, folder: Path) -> str:
    """Killed and started again after 20 s: the API server answers, but knows nothing."""
    async with server(cluster, folder, in_flight=4, startup_s=25.0) as kube:
        work = kube.it.model = Work(nap_s=4.0)
        await kube.it.group(n=8, max_attempts=1)
        await running(kube, 4)
        await called(kube, 4)
        await asyncio.to_thread(cluster.kill, "etcd", hold=True)
        work.done = True
        await kube.it.ended(4)
        await asyncio.sleep(20)
        await asyncio.to_thread(cluster.release, "etcd")
        found = await told(kube, 8, within=240)
        expect(found, {"completed": 8})
        return words(found)


TOLERATIONS = [
    {"key": f"node.kubernetes.io/{what}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 5}
    for what in ("not-ready", "unreachable")
]


async def kubelet_killed(cluster: Cluster, folder: Path) -> str:
    """The node is lost to the cluster, its containers live on: they are fenced off."""
    values = {"tolerations": TOLERATIONS}
    async with busy(cluster, folder, 4, nap_s=4.0, max_attempts=2, values=values) as (kube, work):
        await kube.until_pods(lambda pods: all(p["status"]["phase"] == "Running" for p in pods))
        node = kube.pods()[0]["spec"]["nodeName"]
        there = sum(p["spec"]["nodeName"] == node for p in kube.pods())
        await asyncio.to_thread(cluster.kill, f"kubelet-{node}", hold=True)
        try:
            await kube.it.until(lambda: len(ended_as(kube, "node_lost")) >= there, 240)
            await running(kube, 4 + there, 180)
            work.done = True
            found = await told(kube, 4, within=240)
        finally:
            await asyncio.to_thread(cluster.release, f"kubelet-{node}")
            await asyncio.to_thread(cluster.until_ready)
        expect(found, {"node_lost": there, "completed": 4})
        return words(found)


async def node_dead(cluster: Cluster, folder: Path) -> str:
    """Kubelet and containers die at once, and no toleration makes the cluster act: the runner's silence is looked
    into, and is not held against the agent."""
    return await _dead(cluster, folder, untold=False)


async def node_dead_early(cluster: Cluster, folder: Path) -> str:
    """The same, but the kubelet had not yet told that the containers run. That it tells late cannot be forced, so what
    it told before is put back."""
    return await _dead(cluster, folder, untold=True)


async def _dead(cluster: Cluster, folder: Path, *, untold: bool) -> str:
    async with busy(cluster, folder, 4, nap_s=4.0, max_attempts=2, heartbeat_lost_s=40.0) as (kube, work):
        await kube.until_pods(lambda pods: all(p["status"]["phase"] == "Running" for p in pods))
        node = kube.pods()[0]["spec"]["nodeName"]
        there = [p["metadata"]["name"] for p in kube.pods() if p["spec"]["nodeName"] == node]
        await asyncio.to_thread(cluster.kill, f"kubelet-{node}", hold=True)
        try:
            await asyncio.to_thread(cluster.kill_containers, node)
            for name in there if untold else ():
                cluster.call("PATCH", f"/api/v1/namespaces/{kube.namespace}/pods/{name}/status", _BEGINNING)
            await kube.it.until(lambda: len(ended_as(kube, "node_lost")) >= len(there), 240)
            await running(kube, 4 + len(there), 180)
            work.done = True
            found = await told(kube, 4, within=240)
        finally:
            await asyncio.to_thread(cluster.release, f"kubelet-{node}")
            await asyncio.to_thread(cluster.until_ready)
        expect(found, {"node_lost": len(there), "completed": 4})
        return words(found)


_UNREADY = {
    "status": "False",
    "reason": "ContainersNotReady",
    "message": "containers with unready status: [runner]",
}
_BEGINNING = {
    "status": {
        "phase": "Pending",
        "conditions": [
            {"type": "Initialized", "status": "True"},
            {"type": "Ready", **_UNREADY},
            {"type": "ContainersReady", **_UNREADY},
            {"type": "PodScheduled", "status": "True"},
        ],
        "containerStatuses": [
            {
                "name": "runner",
                "state": {"waiting": {"reason": "PodInitializing"}},
                "ready": False,
                "restartCount": 0,
                "image": BUSYBOX,
                "imageID": "",
            }
        ],
    }
}


async def too_many_requests(cluster: Cluster, folder: Path) -> str:
    """An API server that takes two changes at a time, in a cluster without nodes: 429 for most of 60 creates."""
    api = ["--max-mutating-requests-inflight=2", "--enable-priority-and-fairness=false"]
    narrow = Cluster(folder / "narrow", nodes=0, api=api)
    try:
        await asyncio.to_thread(narrow.up)
        async with server(narrow, folder, in_flight=60, limits=Limits(unschedulable_s=600)) as kube:
            await kube.it.group(n=60, max_attempts=1)
            await kube.it.until(lambda: len(kube.it.of("attempt_launched")) == 60, 240)
            await kube.until_pods(lambda pods: len(pods) == 60)
            assert not kube.it.of("attempt_ended")
            for row in kube.it.of("attempt_launched"):
                await kube.it.lifecycle.apply(RolloutCancelled(rollout_id=row.rollout_id))
            found = await told(kube, 60)
            expect(found, {"cancelled": 60})
            return "60 of 60 created"
    finally:
        await asyncio.to_thread(narrow.down)


async def server_killed_20(cluster: Cluster, folder: Path) -> str:
    return await server_killed(cluster, folder, n=20, up=20, nap_s=8.0)


def pod_script(script: str, name: str = "script") -> Spec:
    """Like ``script_spec``, with the shell that busybox has."""
    spec = script_spec(script, name)
    return Spec(name=name, summary="", api="chat", argv=("sh", "-c", script), env=spec.env)


def _allocatable_mb(node: dict[str, Any]) -> int:
    memory: str = node["status"]["allocatable"]["memory"]
    assert memory.endswith("Ki"), memory
    return int(memory.removesuffix("Ki")) >> 10


def _pods(cluster: Cluster, name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = cluster.get(f"/api/v1/namespaces/{name}/pods")["items"]
    return found


APART: dict[str, Fault] = {
    "pods deleted by hand": pods_deleted,
    "quota exceeded": quota_exceeded,
    "image missing": image_missing,
    "image slow": image_slow,
    "pod out of memory": out_of_memory,
    "harness calls nothing": nothing_called,
    "watch cut every second": watch_cut,
    "watch half-open": watch_silent,
    "two servers in a namespace": two_servers,
}
"""At the same time, in one cluster."""

WHOLE: dict[str, Fault] = {
    "node drained": drained,
    "nodes full": nodes_full,
    "our clock 90 s ahead": clock_ahead,
    "our clock 90 s behind": clock_behind,
    "API server killed, 410 Gone": api_killed,
    "our process killed": server_killed,
}

LONG: dict[str, Fault] = {
    "API server away for 60 s": api_away,
    "API server frozen for 60 s": api_frozen,
    "etcd killed, back after 20 s": etcd_killed,
    "kubelet killed, node lost": kubelet_killed,
    "node dead with its containers": node_dead,
    "node dead before it told of them": node_dead_early,
    "our process killed, 20 pods up": server_killed_20,
    "429 for most creates": too_many_requests,
}
