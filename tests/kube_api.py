"""An API server of pods that does as it is told: for what a real one does too rarely, or only to others.

It knows one namespace, lists in pages, watches from a version, and has no scheduler and no node.
"""

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from aiohttp import web

PodDocument = dict[str, Any]


class Api:
    """Made by ``serving_api``. ``refusals``: answers to the next creates (status, reason, message); ``lose``: how many
    creates are done but not answered; ``down``: everything is answered 500; ``expire``: how many continued lists and
    watches are answered 410; ``lingering``: pods that are deleted stay until that is forced."""

    def __init__(self) -> None:
        self.pods: dict[str, PodDocument] = {}
        self.refusals: list[tuple[int, str, str]] = []
        self.lose = 0
        self.down = False
        self.expire = 0
        self.lingering = False
        self.quota: int | None = None
        self.token = ""
        self.creates = 0
        self.lists = 0
        self.deletes: list[tuple[str, int]] = []
        self.held: asyncio.Event | None = None
        self.log = "last words\n"
        self.version = 100
        self._events: list[tuple[int, str]] = []
        self._changed = asyncio.Condition()

    async def put(self, name: str, change: Callable[[PodDocument], None] = lambda pod: None) -> None:
        """Change a pod, or make one."""
        known = name in self.pods
        pod = self.pods.setdefault(name, {"metadata": {"name": name, "uid": uuid.uuid4().hex}, "status": {}})
        change(pod)
        await self._tell("MODIFIED" if known else "ADDED", pod)

    async def status(self, name: str, **status: Any) -> None:
        await self.put(name, lambda pod: pod["status"].update(status))

    async def remove(self, name: str) -> None:
        await self._tell("DELETED", self.pods.pop(name))

    async def _tell(self, kind: str, pod: PodDocument) -> None:
        self.version += 1
        pod["metadata"]["resourceVersion"] = str(self.version)
        self._events.append((self.version, json.dumps({"type": kind, "object": pod}) + "\n"))
        async with self._changed:
            self._changed.notify_all()

    async def list(self, request: web.Request) -> web.StreamResponse:
        if request.query.get("watch") in ("true", "True"):
            return await self._watch(request)
        self.lists += 1
        first = int(request.query.get("continue", 0))
        if first and self.expire:
            self.expire -= 1
            return refusal(410, "Expired", "the continue parameter is too old")
        size = int(request.query["limit"])
        names = sorted(self.pods)
        more = str(first + size) if first + size < len(names) else ""
        items = [self.pods[name] for name in names[first : first + size]]
        return web.json_response(
            {"items": items, "metadata": {"resourceVersion": str(self.version), "continue": more}}
        )

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        if self.expire:
            self.expire -= 1
            return refusal(410, "Expired", "too old resource version")
        at = int(request.query["resourceVersion"])
        response = web.StreamResponse()
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            while not self.down:
                for version, line in [event for event in self._events if event[0] > at]:
                    at = version
                    await response.write(line.encode())
                async with self._changed:
                    while not self.down and self.version <= at:
                        await self._changed.wait()
        return response

    async def create(self, request: web.Request) -> web.StreamResponse:
        if "dryRun" in request.query:  # it knows no field of today's
            return web.json_response({"spec": {}}, status=201)
        self.creates += 1
        if self.held is not None:
            await self.held.wait()
        if self.refusals:
            return refusal(*self.refusals.pop(0))
        pod = await request.json()
        name = pod["metadata"]["name"]
        if name in self.pods:
            return refusal(409, "AlreadyExists", f'pods "{name}" already exists')
        if self.quota is not None and len(self.pods) >= self.quota:
            return refusal(403, "Forbidden", "pods is forbidden: exceeded quota: few")
        pod["status"] = {"phase": "Pending"}
        pod["metadata"]["uid"] = uuid.uuid4().hex
        await self.put(name, lambda fresh: fresh.update(pod))
        if self.lose:
            self.lose -= 1
            assert request.transport is not None
            request.transport.abort()
        return web.json_response(self.pods[name], status=201)

    async def get(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        return web.json_response(self.pods[name]) if name in self.pods else refusal(404, "NotFound", name)

    async def delete(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        grace = (await request.json())["gracePeriodSeconds"]
        self.deletes.append((name, grace))
        if name not in self.pods:
            return refusal(404, "NotFound", name)
        if grace and self.lingering:
            await self.put(name, lambda pod: pod["metadata"].update(deletionTimestamp="2026-11-29T10:00:00Z"))
        else:
            await self.remove(name)
        return web.json_response({})

    async def logs(self, request: web.Request) -> web.StreamResponse:
        return web.Response(text=self.log)

    async def fail(self) -> None:
        """Answer nothing but 500 from now on."""
        self.down = True
        async with self._changed:
            self._changed.notify_all()


def refusal(status: int, reason: str, message: str) -> web.Response:
    headers = {"Retry-After": "0"} if status == 429 else {}
    return web.json_response(
        {"code": status, "reason": reason, "message": message}, status=status, headers=headers
    )


@contextlib.asynccontextmanager
async def serving_api(folder: Path) -> AsyncIterator[tuple[Api, Path]]:
    """The server and a kubeconfig for it."""
    api = Api()

    @web.middleware
    async def guard(request: web.Request, handler: Any) -> web.StreamResponse:
        if api.down:
            return refusal(500, "InternalError", "etcdserver: request timed out")
        if api.token and request.headers.get("authorization") != f"Bearer {api.token}":
            return refusal(401, "Unauthorized", "Unauthorized")
        answer: web.StreamResponse = await handler(request)
        return answer

    app = web.Application(middlewares=[guard])
    pods = "/api/v1/namespaces/n/pods"
    app.router.add_get(pods, api.list)
    app.router.add_post(pods, api.create)
    app.router.add_get(pods + "/{name}", api.get)
    app.router.add_delete(pods + "/{name}", api.delete)
    app.router.add_get(pods + "/{name}/log", api.logs)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        yield api, kubeconfig(folder, f"http://127.0.0.1:{port}", "first")
    finally:
        await api.fail()
        await runner.cleanup()


def kubeconfig(folder: Path, server: str, token: str) -> Path:
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "a",
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": {"token": token}}],
        "contexts": [{"name": "a", "context": {"cluster": "c", "user": "u", "namespace": "n"}}],
    }
    path = folder / "kubeconfig"
    path.write_text(json.dumps(content))
    return path
