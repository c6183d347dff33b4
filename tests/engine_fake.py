"""A small HTTP engine that obeys vLLM's control endpoints and can be told to fail at any of them.

It holds "weights" as a checkpoint folder: its prompt logprobs are those of that folder's manifest, and so are
spoiled, delayed or refused exactly where a test says so.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

CHAT: dict[str, Any] = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "model": "forge",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hi", "reasoning": None},
            "logprobs": {"content": [{"token": "hi", "logprob": -0.5}, {"token": "", "logprob": -0.25}]},
            "finish_reason": "stop",
            "token_ids": [7, 8],
        }
    ],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
    "prompt_token_ids": [1, 2, 3],
}


class FakeEngine:
    """State is public: tests read ``log`` (one entry a request) and set the fields that make it fail."""

    def __init__(self, initial: Path | None = None) -> None:
        self.loaded = initial
        self.label = "default"
        self.paused = False
        self.log: list[str] = []
        self.chat_answer: dict[str, Any] | str = CHAT
        self.chat_status = 200
        self.chat_hang = asyncio.Event()
        self.chat_hang.set()
        self.cancelled = asyncio.Event()
        self.arrived = asyncio.Event()
        self.fault = ""  # what the worker says of the next checkpoint
        self.load_failures = 0
        self.reset_failures = 0
        self.spoil: set[str] = set()  # folder names whose logprobs come out wrong
        self.running = asyncio.Event()  # clear: a request runs and /pause?mode=wait blocks
        self.running.set()
        self.dev_mode = True
        self.hidden = False  # dev_mode, while it serves: /weight_info is no more
        self.url = ""

    @asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator["FakeEngine"]:
        app = web.Application(middlewares=[self._note])
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._prompt_logprobs)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._plain)
        app.router.add_get("/version", self._version)
        if self.dev_mode:
            app.router.add_get("/weight_info", self._weight_info)
            app.router.add_post("/update_weight_version", self._set_label)
            app.router.add_post("/pause", self._pause)
            app.router.add_post("/resume", self._resume)
            app.router.add_get("/is_paused", self._is_paused)
            app.router.add_post("/collective_rpc", self._rpc)
            app.router.add_post("/reset_prefix_cache", self._reset)
            app.router.add_post("/reset_mm_cache", self._plain)
            app.router.add_post("/reset_encoder_cache", self._plain)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        self.port = runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}"
        try:
            yield self
        finally:
            await runner.cleanup()

    def acts(self) -> list[str]:
        """What was asked of it, without the watching."""
        quiet = ("GET ", "POST /v1/completions")
        return [entry for entry in self.log if not entry.startswith(quiet)]

    @web.middleware
    async def _note(self, request: web.Request, handler: Any) -> web.StreamResponse:
        entry = f"{request.method} {request.path_qs}"
        if request.path == "/collective_rpc":
            entry += f" {(await request.json())['method']}"
        if request.path == "/update_weight_version":
            entry += f" {(await request.json())['new_version']}"
        self.log.append(entry)
        response: web.StreamResponse = await handler(request)
        return response

    async def _chat(self, request: web.Request) -> web.Response:
        self.arrived.set()
        self.last_body = await request.json()
        self.last_headers = request.headers
        try:
            await self.chat_hang.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        if isinstance(self.chat_answer, str):
            return web.Response(text=self.chat_answer, status=self.chat_status)
        return web.json_response(self.chat_answer, status=self.chat_status)

    async def _prompt_logprobs(self, request: web.Request) -> web.Response:
        ids = (await request.json())["prompt"]
        values = [0.0] * len(ids)
        manifest = self.loaded / "manifest.json" if self.loaded else None
        if manifest and manifest.exists():
            values = json.loads(manifest.read_text())["probe"]["logprobs"][: len(ids)]
        if self.loaded and self.loaded.name in self.spoil:
            values = [v + 0.5 for v in values]
        entries = [None, *({str(i): {"logprob": v}} for i, v in zip(ids[1:], values[1:], strict=True))]
        return web.json_response({"choices": [{"prompt_logprobs": entries}]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        """One token per message, and one per tool."""
        body = await request.json()
        count = len(body["messages"]) + len(body.get("tools", ()))
        return web.json_response({"count": count, "max_model_len": 4096, "tokens": [0] * count})

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "forge", "max_model_len": 2048}]})

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "0.0.fake"})

    async def _plain(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _weight_info(self, request: web.Request) -> web.Response:
        if self.hidden:
            raise web.HTTPNotFound
        return web.json_response({"weight_version": self.label})

    async def _set_label(self, request: web.Request) -> web.Response:
        self.label = (await request.json())["new_version"]
        return web.json_response({"success": True})

    async def _pause(self, request: web.Request) -> web.Response:
        if request.query["mode"] == "wait":
            await self.running.wait()
        self.running.set()
        self.paused = True
        return web.json_response({"status": "paused"})

    async def _resume(self, request: web.Request) -> web.Response:
        self.paused = False
        return web.json_response({"status": "resumed"})

    async def _is_paused(self, request: web.Request) -> web.Response:
        return web.json_response({"is_paused": self.paused})

    async def _reset(self, request: web.Request) -> web.Response:
        if self.reset_failures:
            self.reset_failures -= 1
            return web.json_response({"success": False})
        return web.json_response({"success": True})

    async def _rpc(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body["method"] == "forge_describe":
            return web.json_response({"results": [{"path": "", "dtype": "float32", "tensors": 1}]})
        if body["method"] == "forge_check_checkpoint":
            return web.json_response({"results": [{"fault": self.fault}]})
        assert self.paused, "weights must never change under running requests"
        if self.load_failures:
            self.load_failures -= 1
            return web.json_response({"error": {"message": "disk on fire", "param": None}}, status=500)
        weights = Path(body["args"][0])
        self.loaded = weights.parent if weights.name == "huggingface" else weights
        return web.json_response({"results": [{"path": str(weights)}]})


async def until(condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
    """Wait until ``condition`` holds; AssertionError when it does not in time."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "the condition never held"
        await asyncio.sleep(0.01)


def make_checkpoint(folder: Path, number: int) -> tuple[Path, str]:
    """A checkpoint with small made-up files and a right manifest; (folder, sha256 of the manifest)."""
    import hashlib
    import struct

    path = folder / f"step_{number:05d}"
    weights = path / "huggingface"
    weights.mkdir(parents=True)
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    body = struct.pack("<ff", number, number + 0.5)
    (weights / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + body)
    (weights / "config.json").write_text("{}")
    files = {
        f"huggingface/{f.name}": {
            "sha256": hashlib.sha256(f.read_bytes()).hexdigest(),
            "size": f.stat().st_size,
        }
        for f in weights.iterdir()
    }
    manifest = {
        "schema": 1,
        "step": number,
        "run": "ru-test",
        "world_size": 1,
        "files": files,
        "tensors": {"w": {"shape": [2], "dtype": "F32"}},
        "probe": {"token_ids": list(range(8)), "logprobs": [0.0, *[-float(number + 1)] * 7]},
    }
    text = json.dumps(manifest).encode()
    (path / "manifest.json").write_bytes(text)
    return path, hashlib.sha256(text).hexdigest()
