"""A stand-in for the server's trainer routes, and what else the trainer's tests need: batches, processes,
weights."""

import hashlib
import json
import os
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

from forge_server.domain.sample import BreakReason, CallSpan, Sample
from forge_server.trajectory.batchfile import BatchRollout, write_batch

TESTS = Path(__file__).parent
KEY = "fk-trainer-test"


@dataclass
class Row:
    """One row as a test writes it; ``spans`` are (start, end) of the trained tokens."""

    tokens: list[int]
    spans: list[tuple[int, int]]
    rollout: int
    temperature: float = 1.0
    logprobs: list[float] = field(default_factory=list)  # per token; filled by ``score``

    def mask(self) -> np.ndarray:
        mask = np.zeros(len(self.tokens), np.uint8)
        for start, end in self.spans:
            mask[start:end] = 1
        return mask

    def sample(self, index: int, version: int) -> Sample:
        mask = self.mask()
        return Sample(
            index=index,
            tokens=np.asarray(self.tokens, np.int32),
            loss_mask=mask,
            logprobs=np.asarray(self.logprobs, np.float32) * mask,
            versions=np.where(mask == 1, version, -1).astype(np.int32),
            prompt_len=self.spans[0][0],
            spans=tuple(
                CallSpan(n, start, end, True, version, self.temperature, "stop")
                for n, (start, end) in enumerate(self.spans)
            ),
            break_reason=BreakReason.FIRST,
        )


def batch_body(
    k: int, rows: list[Row], groups: list[int], rewards: list[float], *, version: int = 0
) -> bytes:
    """Batch ``k`` as the server writes it; ``groups`` and ``rewards`` are per rollout."""
    rollouts = [
        BatchRollout(
            rollout_id=f"ro-{index}",
            group_id=f"gr-{group}",
            reward=reward,
            samples=tuple(row.sample(n, version) for n, row in enumerate(rows) if row.rollout == index),
        )
        for index, (group, reward) in enumerate(zip(groups, rewards, strict=True))
    ]
    return write_batch("ru-test", k, rollouts, seed=0)


def weights(folder: Path) -> dict[str, np.ndarray]:
    """The float32 tensors of ``folder/huggingface/model.safetensors``."""
    data = (folder / "huggingface" / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    found = {}
    for name, tensor in header.items():
        assert tensor["dtype"] == "F32"
        start, end = tensor["data_offsets"]
        found[name] = np.frombuffer(data[8 + size + start : 8 + size + end], np.float32).reshape(
            tensor["shape"]
        )
    return found


class FakeServer:
    """The trainer routes of one run over real HTTP; everything that happens is kept for the test to look at.

    ``on`` maps an event (``("heartbeat", phase, step)``, ``("metrics", k)``, ``("checkpoints", k)``) to a
    function called once, before the answer: what it returns, when not None, is the status answered instead.
    """

    def __init__(self, model: Path, checkpoints: Path, batches: dict[int, bytes], **session: Any) -> None:
        self.batches = batches
        self.ended = False
        self.fence = 0
        self.next_batch = 1
        self.send_back_to = 10**6
        self.acked_step = 0
        self.acknowledge = True
        self.save = ""
        self.saved: dict[int, str] = {}
        self.sessions: list[dict[str, Any]] = []
        self.phases: list[tuple[str, int]] = []
        self.metrics: dict[int, dict[str, float]] = {}
        self.checkpoints: list[dict[str, Any]] = []
        self.served: list[int] = []
        self.on: dict[tuple[Any, ...], Callable[[], int | None]] = {}
        self.session = {
            "lease_s": 60,
            "live_version": 0,
            "model_path": str(model),
            "checkpoint_dir": str(checkpoints),
            "overrides": [],
            "total_steps": max(batches, default=1),
            "export_every": 1,
            "save_every": 1,
            "seed": 0,
        } | session
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_port}/api/v1/runs/ru-test/trainer"

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def token(self) -> str:
        return f"session-{self.fence}"

    def answer(self, method: str, path: str, query: str, body: dict[str, Any]) -> tuple[int, bytes]:
        if path == "sessions":
            self.sessions.append(body)
            self.fence += 1
            self.next_batch = min(body["resume_step"] + 1, self.send_back_to)
            reply = self.session | {
                "session": self.token(),
                "fence": self.fence,
                "next_batch": self.next_batch,
            }
            return 200, json.dumps(reply).encode()
        claimed = body.get("session") or query.removeprefix("session=")
        if claimed != self.token():
            return 409, b'{"detail":"fenced"}'
        if path == "heartbeat":
            self.phases.append((body["phase"], body["step"]))
            status = self._event("heartbeat", body["phase"], body["step"])
            reply = {"action": "continue", "acked_step": self.acked_step, "save": self.save}
            return status or 200, json.dumps(reply).encode()
        if path.startswith("batches/"):
            k = int(path.split("/")[1])
            self.served.append(k)
            return (200, self.batches[k]) if k in self.batches else (410, b'{"reason":"done"}')
        if path.startswith("steps/"):
            k = int(path.split("/")[1])
            self.metrics[k] = body["metrics"]
            if body["saved"]:
                self.saved[k] = body["saved"]
                self.save = ""
            return self._event("metrics", k) or 200, b"{}"
        if path == "checkpoints":
            status = self._event("checkpoints", body["k"])
            if status is None:
                self.checkpoints.append(body)
                if self.acknowledge:
                    self.acked_step = body["k"]
            return status or 200, json.dumps({"version": body["k"]}).encode()
        return 404, b"{}"

    def _event(self, *event: Any) -> int | None:
        action = self.on.pop(event, None)
        return action() if action is not None else None

    def _handler(server) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def _serve(self, method: str) -> None:
                assert self.headers["Authorization"] == f"Bearer {KEY}"
                route, _, query = self.path.partition("?")
                path = route.partition("/trainer/")[2]
                size = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(size)) if size else {}
                status, answer = server.answer(method, path, query, body)
                self.send_response(status)
                if path.startswith("batches/") and status == 200:
                    self.send_header("X-Batch-Sha256", hashlib.sha256(answer).hexdigest())
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def do_GET(self) -> None:
                self._serve("GET")

            def do_POST(self) -> None:
                self._serve("POST")

        return Handler


@dataclass
class Trainer:
    """Starts the trainer's programs in veRL's environment, from a staged copy of the package."""

    env: Path
    staged: Path

    def environ(self) -> dict[str, str]:
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
        return kept | {"PYTHONPATH": str(self.staged), "OMP_NUM_THREADS": "1", "FORGE_TRAINER_DEVICE": "cpu"}

    def run(self, *arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """``python ARGUMENTS`` to its end."""
        return subprocess.run(
            [str(self.env / "bin" / "python"), *arguments],
            env=self.environ(),
            cwd=self.staged,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def work(
        self,
        server: FakeServer,
        *,
        ranks: int = 1,
        started: Callable[[subprocess.Popen[str]], None] = lambda _: None,
        timeout: float = 300,
    ) -> subprocess.CompletedProcess[str]:
        """The worker against ``server`` until it exits; ``started`` gets the process."""
        python = self.env / "bin" / "python"
        launcher = (
            [str(python), "-m"]
            if ranks == 1
            else [str(self.env / "bin" / "torchrun"), "--standalone", "--nproc-per-node", str(ranks), "-m"]
        )
        environ = self.environ() | {"FORGE_TRAINER_URL": server.url, "FORGE_TRAINER_KEY": KEY}
        with subprocess.Popen(
            [*launcher, "forge_server.trainer.worker"],
            env=environ,
            cwd=self.staged,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            started(process)
            try:
                out, err = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                out, err = process.communicate()
                raise AssertionError(f"the worker did not end:\n{out}\n{err}") from None
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def score(self, model: Path, rows: list[Row]) -> list[list[float]]:
        """log p of every token of ``rows`` at the row's temperature, by transformers alone."""
        asked = json.dumps([{"tokens": row.tokens, "temperature": row.temperature} for row in rows])
        done = subprocess.run(
            [str(self.env / "bin" / "python"), str(TESTS / "trainer_score.py"), str(model)],
            env=self.environ(),
            input=asked,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        scores: list[list[float]] = json.loads(done.stdout)
        return scores
