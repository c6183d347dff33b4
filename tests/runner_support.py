"""A pod-facing listener in miniature: the runner protocol and a scripted model, for tests of the runner
alone.
"""

import base64
import io
import json
import os
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from forge_server.harness.plan import PlanLimits
from forge_server.runner.pack import pack

Reply = dict[str, Any]


def say(text: str) -> Reply:
    return {"role": "assistant", "content": text}


def tool(name: str, **arguments: str) -> Reply:
    call = {"id": "c1", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def verifier_tar(script: str, **files: str) -> bytes:
    """A verifier archive: ``test.sh`` and further files."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, text in {"test.sh": script, **files}.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(text.encode()), 0o755
            archive.addfile(info, io.BytesIO(text.encode()))
    return out.getvalue()


def plan_limits(**changes: Any) -> PlanLimits:
    """Those of a small attempt."""
    small: dict[str, Any] = {
        "model": "m",
        "heartbeat_s": 1,
        "agent_s": 60,
        "verify_s": 20,
        "grace_s": 1,
        "pids": 64,
        "memory_mb": 256,
        "window": 4096,
        "output": 1024,
    }
    return PlanLimits(**(small | changes))


def plan(argv: list[str], **changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "argv": argv,
        "env": {},
        "files": [],
        "workdir": "/workspace",
        "task_files": [],
        "stdin": None,
        "heartbeat_s": 0.2,
        "agent_s": 60,
        "verify_s": 20,
        "grace_s": 0.5,
        "verify_argv": ["bash", "/tests/test.sh"],
        "model": "forge",
        "instruction": "do it",
        "limits": {"pids": 64, "memory_mb": 256},
        "sandbox": {},
    }
    return base | changes


def task_file(path: str, text: str, mode: int = 0o644) -> dict[str, Any]:
    return {"path": path, "content_b64": base64.b64encode(text.encode()).decode(), "mode": mode}


class FakePod:
    """Serves one attempt's runner and a scripted model on a loopback port; records everything.

    ``script``: replies of the model in order (the last one repeats); ``on_call`` is told each call's body.
    """

    def __init__(
        self, plan: dict[str, Any], script: list[Reply] | None = None, verifier: bytes | None = None
    ) -> None:
        self.plan, self.script, self.verifier = plan, script or [say("done")], verifier
        self.seen: list[tuple[str, Any]] = []
        self.calls: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.heartbeat: Callable[[str], dict[str, Any]] = lambda phase: {
            "action": "continue",
            "reason": "",
            "left_s": 60,
        }
        self.on_call: Callable[[Any], None] = lambda body: None
        self.refuse: dict[str, int] = {}
        self.trouble: list[int] = []
        self.finished = threading.Event()
        self.started = threading.Event()
        self.called = threading.Event()
        self._open()

    def _open(self, port: int = 0) -> None:
        pod = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = 1 << 16  # head and body in one packet

            def log_message(self, *_: Any) -> None:
                pass

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])) or b"{}")
                pod._post(self, body)

            def do_GET(self) -> None:
                pod._get(self)

        ThreadingHTTPServer.allow_reuse_address = True
        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def __enter__(self) -> "FakePod":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def reopen(self) -> None:
        self._open(self.port)

    def of(self, route: str) -> list[Any]:
        """Bodies posted to a route, in order."""
        return [body for name, body in self.seen if name == route]

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [e for body in self.of("events") for e in body["events"] if e["kind"] == kind]

    def log(self, stream: str) -> str:
        return "".join(e["tail"] for e in self.events("log") if e["stream"] == stream)

    def _answer(self, handler: Any, status: int, body: Any, kind: str = "application/json") -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        handler.send_response(status)
        handler.send_header("content-type", kind)
        if status != 204:
            handler.send_header("content-length", str(len(data)))
        handler.end_headers()
        if status != 204:
            handler.wfile.write(data)

    def _get(self, handler: Any) -> None:
        route = handler.path.split("/", 3)[3]
        self.seen.append((route, None))
        if route == "verifier" and self.verifier is not None:
            return self._answer(handler, 200, self.verifier, "application/x-tar")
        self._answer(handler, 204, b"")

    def _post(self, handler: Any, body: Any) -> None:
        route = handler.path.split("/", 3)[3]
        if route == "v1/chat/completions" and self.trouble:
            return self._answer(handler, self.trouble.pop(0), {})
        if route == "v1/chat/completions":
            self.headers.append({k.lower(): v for k, v in handler.headers.items()})
            self.calls.append(body)
            self.called.set()
            self.on_call(body)
            reply = self.script[min(len(self.calls), len(self.script)) - 1]
            finish = "tool_calls" if reply.get("tool_calls") else "stop"
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            choice = {"index": 0, "message": reply, "finish_reason": finish}
            answer = {"id": "x", "object": "chat.completion", "created": int(time.time()), "model": "forge"}
            return self._answer(handler, 200, {**answer, "choices": [choice], "usage": usage})
        self.seen.append((route, body))
        answer = {}
        if route == "start":
            answer = {"runner_key": "runner-secret", "agent_key": "agent-key", "plan": self.plan}
        elif handler.headers.get("authorization") != "Bearer runner-secret":
            return self._answer(handler, 401, {})
        elif route in self.refuse:
            return self._answer(handler, self.refuse[route], {})
        elif route == "heartbeat":
            answer = self.heartbeat(body["phase"])
        if route == "events" and body["events"][0]["kind"] == "harness_started":
            self.started.set()
        self._answer(handler, 200, answer)
        if route == "finish":
            self.finished.set()


def order(pod: FakePod, root: Path, forge: Path, **changes: Any) -> dict[str, Any]:
    """The launch order of an attempt, as the local backend gives it."""
    base: dict[str, Any] = {
        "attempt": "at-1",
        "url": pod.url,
        "token": "join",
        "level": "namespaces",
        "uid": 49001,
        "python": PYTHON,
        "forge": str(forge),
        "env": "",
        "read_only": [PREFIX],
        "root": str(root),
        "cgroups": [],
        "tidy": False,
    }
    return base | changes


PREFIX = os.path.realpath(sys.base_prefix)
PYTHON = os.path.realpath(getattr(sys, "_base_executable", "") or sys.executable)


class Lab:
    """Runs the packed runner over a ``FakePod``, as the local backend would."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.forge = folder, pack(folder / "forge")
        self.process: subprocess.Popen[bytes] | None = None

    def begin(self, pod: FakePod, **changes: Any) -> subprocess.Popen[bytes]:
        """Start the runner; the caller waits."""
        user = changes.pop("runner_user", None)
        given = order(pod, self.folder / "attempt", self.forge, **changes)
        self.process = subprocess.Popen(
            [given["python"], "-I", "-S", str(self.forge / "runner.pyz")],
            stdin=subprocess.PIPE,
            env={"PATH": "/usr/bin:/bin"},
            user=user,
            group=user,
            extra_groups=None if user is None else [],
        )
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(given).encode() + b"\n")
        self.process.stdin.flush()
        return self.process

    def run(self, pod: FakePod, *, code: int = 0, within: float = 300.0, **changes: Any) -> FakePod:
        """Run the attempt to its end."""
        process = self.begin(pod, **changes)
        assert process.wait(within) == code
        return pod

    def close(self) -> None:
        if self.process is not None:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait(60)
            assert self.process.stdin is not None
            self.process.stdin.close()
