"""A whole forge-server in this process, without an engine, and an HTTP client with its admin key."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec

from forge_server.app import Server, running
from forge_server.client.schemas import Problem
from forge_server.settings import EngineSettings, LocalSettings, ServerSettings, Settings, StoreSettings


def settings(folder: Path, **sections: Any) -> Settings:
    made: dict[str, Any] = {
        "server": ServerSettings(port=0, control_port=0),
        "local": LocalSettings(min_sandbox="none"),
    }
    return Settings(**(made | sections), folder=str(folder))


class Rig:
    """``http`` carries the admin key."""

    def __init__(self, server: Server, http: httpx.AsyncClient) -> None:
        self.server, self.http = server, http

    async def refused(self, status: int, kind: str, method: str, path: str, **request: Any) -> Problem:
        """The request must be answered by a problem document of this status and type."""
        return problem(await self.http.request(method, path, **request), status, kind)

    async def create_run(self, name: str = "run", **changes: Any) -> dict[str, Any]:
        answer = await self.http.post("/api/v1/runs", json={"settings": run_table(name, **changes)})
        assert answer.status_code == 201, answer.text
        return dict(answer.json())

    async def ready(self) -> None:
        await eventually(lambda: self.server.engine.ready)

    async def register(self, **body: Any) -> dict[str, Any]:
        answer = await self.http.post("/api/v1/rollouts", json=body)
        assert answer.status_code == 201, answer.text
        return dict(answer.json())

    async def items(self, path: str, **params: Any) -> list[dict[str, Any]]:
        answer = await self.http.get(path, params=params)
        assert answer.status_code == 200, answer.text
        return list(answer.json()["items"])


async def eventually(holds: Callable[[], bool], limit_s: float = 120.0) -> None:
    """Wait until it holds; TimeoutError after ``limit_s``."""
    async with asyncio.timeout(limit_s):
        while not holds():  # noqa: ASYNC110 - the state of something that tells nobody
            await asyncio.sleep(0.02)


def problem(answer: httpx.Response, status: int, kind: str) -> Problem:
    assert answer.headers["content-type"] == "application/problem+json", answer.text
    found = msgspec.json.decode(answer.content, type=Problem)
    assert (answer.status_code, found.status, found.type) == (status, status, kind), answer.text
    assert found.title and found.detail and found.instance == answer.url.path
    return found


def run_table(called: str, **changes: Any) -> dict[str, Any]:
    return {"name": called, "kind": "record", "taskset": "set", "harness": "react", "steps": 1} | changes


def line(called: str, **changes: Any) -> dict[str, Any]:
    verify = {"answer_file": "a.txt", "equals": "hello"}
    made = {"name": called, "instruction": "Say hello.", "verify": verify}
    return made | changes


@asynccontextmanager
async def rig(folder: Path, **sections: Any) -> AsyncIterator[Rig]:
    async with running(settings(folder, **sections)) as server, client(server) as http:
        yield Rig(server, http)


def client(server: Server, key: str | None = None) -> httpx.AsyncClient:
    key = server.admin_key if key is None else key
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.AsyncClient(
        base_url=server.listening.control_url, headers=headers, trust_env=False, timeout=120.0
    )


def attached(url: str) -> dict[str, Any]:
    """Sections for a server with this engine."""
    return {"engine": EngineSettings(kind="attach", url=url)}


def on(url: str) -> dict[str, Any]:
    """Sections for a server on this database."""
    return {"store": StoreSettings(url=url)}
