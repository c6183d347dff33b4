"""A kubelet that runs nothing, for ``pods.py``: it registers nodes, keeps them ready, and moves the pods bound to them.

    python benchmarks/pods_kubelet.py KUBECONFIG NAMESPACE NODES SOCKET

A pod with a node becomes Running at once, one marked for deletion is gone at once. The runner in it is played by the
server that listens at SOCKET: it is told ``run NAME`` and ``end NAME``, and answers ``left NAME`` when its runner has
had its last word; then the pod is Succeeded. Orders come by standard input, one line of JSON each, and are answered:

    {"do": "churn", "per_s": 10, "failed": 0.02, "seconds": 60}   ends pods that run, some as Failed without a word
    {"do": "stir", "per_s": 500, "seconds": 20}                   changes conditions that mean nothing
"""

import asyncio
import base64
import contextlib
import json
import random
import ssl
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import uvloop
import yaml

AT_ONCE = 32
LEASE_S = 5.0
STEP_S = 0.02


class Metadata(msgspec.Struct, rename="camel", gc=False):
    name: str = ""
    resource_version: str = ""
    deletion_timestamp: str | None = None
    continue_: str = msgspec.field(default="", name="continue")


class Spec(msgspec.Struct, rename="camel", gc=False):
    node_name: str = ""


class Status(msgspec.Struct, gc=False):
    phase: str = ""


class Pod(msgspec.Struct, gc=False):
    metadata: Metadata
    spec: Spec = msgspec.field(default_factory=Spec)
    status: Status = msgspec.field(default_factory=Status)


class Event(msgspec.Struct):
    type: str
    object: Pod


class PodList(msgspec.Struct):
    metadata: Metadata
    items: list[Pod] = []


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


class Kubelet:
    """All nodes at once. ``alive``: pods that are there and have not ended."""

    def __init__(self, http: aiohttp.ClientSession, server: str, namespace: str) -> None:
        self._http, self._server, self._namespace = http, server, namespace
        self._pods = f"/api/v1/namespaces/{namespace}/pods"
        self._turn = asyncio.Semaphore(AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()
        self._started: set[str] = set()
        self.running: set[str] = set()
        self.alive: set[str] = set()
        self._ending: set[str] = set()
        self.failures = 0
        self.writer: asyncio.StreamWriter | None = None

    async def ask(self, method: str, path: str, body: Any = None) -> Any:
        kinds = {"PATCH": "application/merge-patch+json"}
        headers = {"Content-Type": kinds.get(method, "application/json")}
        data = None if body is None else msgspec.json.encode(body)
        async with self._http.request(method, self._server + path, data=data, headers=headers) as answer:
            text = await answer.read()
            if answer.status >= 300 and answer.status not in (404, 409):
                raise RuntimeError(f"{method} {path}: {answer.status} {text[:300]!r}")
            return answer.status

    # --- nodes ------------------------------------------------------------------------------------------

    async def register(self, count: int) -> None:
        for number in range(count):
            name = f"node{number}"
            metadata = {"name": name, "labels": {"kubernetes.io/hostname": name}}
            await self.ask("POST", "/api/v1/nodes", {"metadata": metadata})
            room = {"cpu": "1000", "memory": "8000Gi", "pods": "2000", "ephemeral-storage": "8000Gi"}
            condition = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": ""}
            condition |= {"lastHeartbeatTime": now(), "lastTransitionTime": now()}
            status = {"capacity": room, "allocatable": room, "conditions": [condition]}
            await self.ask("PATCH", f"/api/v1/nodes/{name}/status", {"status": status})
            await self._renew(name, "POST")
        self.spawn(self._leases(count))

    async def _leases(self, count: int) -> None:
        while True:
            await asyncio.sleep(LEASE_S)
            for number in range(count):
                await self._renew(f"node{number}", "PATCH")

    async def _renew(self, node: str, method: str) -> None:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S.000000Z", time.gmtime())
        spec = {"holderIdentity": node, "leaseDurationSeconds": 40, "renewTime": moment}
        path = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
        metadata = {"name": node, "namespace": "kube-node-lease"}
        await self.ask(
            method, path + (f"/{node}" if method == "PATCH" else ""), {"metadata": metadata, "spec": spec}
        )

    # --- pods -------------------------------------------------------------------------------------------

    async def keep(self) -> None:
        version = ""
        while True:
            if not version:
                version = await self._list()
            query = f"?watch=1&allowWatchBookmarks=true&timeoutSeconds=3000&resourceVersion={version}"
            async with self._http.get(self._server + self._pods + query) as answer:
                rest = b""
                async for chunk in answer.content.iter_any():
                    *lines, rest = (rest + chunk).split(b"\n")
                    for line in lines:
                        event = msgspec.json.decode(line, type=Event)
                        if event.type == "ERROR":
                            raise RuntimeError(line[:300])
                        version = event.object.metadata.resource_version
                        if event.type != "BOOKMARK":
                            self._seen(event.type, event.object)

    async def _list(self) -> str:
        after = ""
        while True:
            path = f"{self._pods}?limit=500" + (f"&continue={after}" if after else "")
            async with self._http.get(self._server + path) as answer:
                page = msgspec.json.decode(await answer.read(), type=PodList)
            for pod in page.items:
                self._seen("ADDED", pod)
            after = page.metadata.continue_
            if not after:
                return page.metadata.resource_version

    def _seen(self, kind: str, pod: Pod) -> None:
        name = pod.metadata.name
        if kind == "DELETED":
            for known in (self._started, self.running, self.alive, self._ending):
                known.discard(name)
            return
        if pod.metadata.deletion_timestamp is not None:
            self.running.discard(name)
            self.alive.discard(name)
            self.spawn(self._remove(name))
            return
        if pod.status.phase in ("Succeeded", "Failed"):
            self.alive.discard(name)
        else:
            self.alive.add(name)
        if pod.spec.node_name and pod.status.phase == "Pending" and name not in self._started:
            self._started.add(name)
            self.spawn(self._run(name))

    async def _run(self, name: str) -> None:
        await self._status(name, "Running", {"running": {"startedAt": now()}})
        if name in self._started:
            self.running.add(name)
            self.say(f"run {name}")

    async def _remove(self, name: str) -> None:
        async with self._turn:
            await self.ask("DELETE", f"{self._pods}/{name}", {"gracePeriodSeconds": 0})

    async def _status(self, name: str, phase: str, state: dict[str, Any]) -> None:
        going = "True" if phase == "Running" else "False"
        conditions = [
            {"type": kind, "status": status, "lastProbeTime": None, "lastTransitionTime": now()}
            for kind, status in (
                ("Initialized", "True"),
                ("Ready", going),
                ("ContainersReady", going),
                ("PodScheduled", "True"),
            )
        ]
        container = {"name": "runner", "state": state, "ready": phase == "Running", "restartCount": 0}
        container |= {
            "image": "x",
            "imageID": "sha256:" + "0" * 64,
            "containerID": "containerd://" + "0" * 64,
        }
        done = {"terminated": {"exitCode": 0, "reason": "Completed", "startedAt": now(), "finishedAt": now()}}
        before = {**container, "name": "forge", "state": done, "ready": True}
        status = {
            "phase": phase,
            "conditions": conditions,
            "containerStatuses": [container],
            "initContainerStatuses": [before],
            "hostIP": "10.0.0.1",
            "podIP": "10.1.2.3",
            "startTime": now(),
        }
        async with self._turn:
            await self.ask("PATCH", f"{self._pods}/{name}/status", {"status": status})

    def left(self, name: str) -> None:
        """The runner in the pod has had its last word."""
        end = {"terminated": {"exitCode": 0, "reason": "Completed", "startedAt": now(), "finishedAt": now()}}
        self.spawn(self._status(name, "Succeeded", end))

    # --- orders -----------------------------------------------------------------------------------------

    async def churn(self, per_s: float, failed: float, seconds: float) -> dict[str, Any]:
        """End pods at a steady pace. ``alive``: how many were in flight, seen four times a second."""
        rng, alive, ended, died = random.Random(1), [], 0, 0
        began = look = time.monotonic()
        while (passed := time.monotonic() - began) < seconds:
            while ended < passed * per_s and (names := self.running - self._ending):
                name = rng.choice(sorted(names)) if len(names) < 100 else _some(names, rng)
                self._ending.add(name)
                ended += 1
                if rng.random() < failed:
                    died += 1
                    self.running.discard(name)
                    end = {"exitCode": 137, "reason": "Error", "startedAt": now(), "finishedAt": now()}
                    self.spawn(self._status(name, "Failed", {"terminated": end}))
                else:
                    self.say(f"end {name}")
            if time.monotonic() >= look:
                alive.append(len(self.alive))
                look += 0.25
            await asyncio.sleep(STEP_S)
        return {"alive": alive, "ended": ended, "died": died, "seconds": time.monotonic() - began}

    async def stir(self, per_s: float, seconds: float) -> dict[str, Any]:
        names = sorted(self.running)
        began, sent = time.monotonic(), 0
        while (passed := time.monotonic() - began) < seconds:
            while sent < passed * per_s and len(self._tasks) < 4 * AT_ONCE:
                self.spawn(self._touch(names[sent % len(names)], sent))
                sent += 1
            await asyncio.sleep(STEP_S)
        await asyncio.sleep(1.0)
        return {"sent": sent}

    async def _touch(self, name: str, number: int) -> None:
        patch = {"status": {"message": f"look {number}"}}
        async with self._turn:
            await self.ask("PATCH", f"{self._pods}/{name}/status", patch)

    # --- the rest ---------------------------------------------------------------------------------------

    def say(self, line: str) -> None:
        if self.writer is not None:
            self.writer.write(line.encode() + b"\n")

    def spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.failures += 1
            if self.failures <= 5:
                print(f"kubelet: {task.exception()!r}", file=sys.stderr, flush=True)


def _some(names: set[str], rng: random.Random) -> str:
    """Some member of a large set, cheaply."""
    skip = rng.randrange(50)
    found = iter(names)
    for _ in range(skip):
        next(found)
    return next(found)


async def main(kubeconfig: str, namespace: str, nodes: str, path: str) -> None:
    config = yaml.safe_load(Path(kubeconfig).read_bytes())  # noqa: ASYNC240 - before anything runs
    cluster = config["clusters"][0]["cluster"]
    authority = base64.b64decode(cluster["certificate-authority-data"]).decode()
    context = ssl.create_default_context(cadata=authority)
    headers = {"Authorization": "Bearer " + config["users"][0]["user"]["token"]}
    connector = aiohttp.TCPConnector(ssl=context, limit=AT_ONCE + 8)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout) as http:
        kubelet = Kubelet(http, cluster["server"], namespace)
        await kubelet.register(int(nodes))
        reader, kubelet.writer = await asyncio.open_unix_connection(path)
        keeping = asyncio.create_task(kubelet.keep())

        async def heard() -> None:
            while line := await reader.readline():
                word, _, name = line.decode().strip().partition(" ")
                if word == "left":
                    kubelet.left(name)

        hearing = asyncio.create_task(heard())
        orders = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
        print(json.dumps({"nodes": int(nodes)}), flush=True)
        while line := await orders.readline():
            order = json.loads(line)
            what = getattr(kubelet, order.pop("do"))
            print(json.dumps(await what(**order)), flush=True)
        for task in (keeping, hearing):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))
