"""The pull protocol with the server: this process asks, the server never connects to it.

A session carries a fencing token: when another session takes over, every call answers 409 and this process
must stop at once. A thread keeps the lease; it also learns whether to stop, which step the engine has
acknowledged and whether a person wants the state saved. Calls are idempotent, so they are repeated while the
server is away, for ``PATIENCE_S`` at most.
"""

import hashlib
import http.client
import json
import os
import sys
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from forge_server.trainer.errors import BatchInvalid, Fenced, LinkFailed, RunEnded

PATIENCE_S = 600.0
POLL_S = 60.0  # the server answers a long poll within 25 s
CALL_S = 30.0
_TRANSIENT = (408, 425, 429, 500, 502, 503, 504)


@dataclass(frozen=True)
class Session:
    """What the server says when a session opens."""

    session: str
    fence: int
    lease_s: float
    next_batch: int
    live_version: int
    model_path: str
    checkpoint_dir: str
    overrides: list[str]
    total_steps: int
    export_every: int
    save_every: int
    seed: int


class Link:
    """One run's trainer routes. Only rank 0 has one."""

    def __init__(self, url: str, key: str) -> None:
        self.url = url.rstrip("/")
        self.key = key
        self.session = ""
        self.phase = "starting"
        self.step = 0
        self.acked_step = 0
        self.save = ""
        self.stop = threading.Event()
        # No proxies from the environment: the server is on loopback or inside the cluster.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def open(self, *, world_size: int, resume_step: int, resume_manifest_sha256: str | None) -> Session:
        """Open a session; an older one of this run is fenced off."""
        body = {
            "world_size": world_size,
            "resume_step": resume_step,
            "resume_manifest_sha256": resume_manifest_sha256,
        }
        reply = self._json("POST", "sessions", body)
        session = Session(**{name: reply[name] for name in Session.__annotations__})
        self.session = session.session
        return session

    def keep_lease(self, lease_s: float) -> None:
        """Start the heartbeat thread. A 409 there ends the process: it no longer owns the run."""
        interval = max(0.5, lease_s / 3)

        def beat() -> None:
            while not self.stop.wait(interval):
                try:
                    self.beat()
                except Fenced as error:
                    print(f"Error: {error}", file=sys.stderr, flush=True)
                    os._exit(Fenced.exit_code)
                except (LinkFailed, OSError, http.client.HTTPException):
                    continue  # the main thread's calls decide when the server has been away for too long

        threading.Thread(target=beat, name="lease", daemon=True).start()

    def enter(self, phase: str, step: int) -> None:
        """Tell the server what this job does now; also the check of the fence before anything is written."""
        self.phase, self.step = phase, step
        self.beat(patience_s=PATIENCE_S)

    def beat(self, *, patience_s: float = 0.0) -> None:
        body = {"session": self.session, "phase": self.phase, "step": self.step}
        try:
            reply = self._json("POST", "heartbeat", body, patience_s=patience_s)
        except RunEnded:
            self.stop.set()
            return
        self.acked_step = max(self.acked_step, int(reply["acked_step"] or 0))
        self.save = str(reply["save"])
        if reply["action"] == "stop":
            self.stop.set()

    def poll_batch(self, k: int) -> bytes | None:
        """Batch ``k``, or None when the server has none yet. Raises RunEnded."""
        status, headers, body = self._call(
            "GET", f"batches/{k}?session={self.session}", None, timeout_s=POLL_S, patience_s=PATIENCE_S
        )
        if status == 204:
            return None
        announced = headers.get("X-Batch-Sha256")
        if announced is None or hashlib.sha256(body).hexdigest() != announced:
            raise BatchInvalid(f"batch {k}: the body does not have the digest the server announced")
        return body

    def report_metrics(self, k: int, metrics: dict[str, float], saved: str = "") -> None:
        """``saved``: the wish for a save that this step's state answers."""
        body = {"session": self.session, "metrics": metrics, "saved": saved}
        self._json("POST", f"steps/{k}/metrics", body)

    def report_checkpoint(self, k: int, path: str, manifest_sha256: str) -> int:
        """Hand checkpoint ``k`` over; returns the policy version the server gave it."""
        body = {"session": self.session, "k": k, "path": path, "manifest_sha256": manifest_sha256}
        return int(self._json("POST", "checkpoints", body)["version"])

    def _json(
        self, method: str, path: str, body: dict[str, Any], *, patience_s: float = PATIENCE_S
    ) -> dict[str, Any]:
        _, _, answer = self._call(method, path, body, timeout_s=CALL_S, patience_s=patience_s)
        reply: dict[str, Any] = json.loads(answer) if answer else {}
        return reply

    def _call(
        self, method: str, path: str, body: dict[str, Any] | None, *, timeout_s: float, patience_s: float
    ) -> tuple[int, Any, bytes]:
        """One call, repeated while the server is away. Raises Fenced, RunEnded, LinkFailed."""
        give_up = time.monotonic() + patience_s
        pause = 0.2
        while True:
            try:
                return self._once(method, path, body, timeout_s)
            except (LinkFailed, OSError, http.client.HTTPException) as error:
                if isinstance(error, LinkFailed) or time.monotonic() + pause > give_up:
                    if isinstance(error, LinkFailed):
                        raise
                    raise LinkFailed(f"{method} {self.url}/{path}: the server is away: {error}") from error
            time.sleep(pause)
            pause = min(pause * 2, 10.0)

    def _once(
        self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float
    ) -> tuple[int, Any, bytes]:
        request = urllib.request.Request(
            f"{self.url}/{path}",
            data=None if body is None else json.dumps(body, allow_nan=False).encode(),
            headers={"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"},
            method=method,
        )
        try:
            with self._opener.open(request, timeout=timeout_s) as response:
                return response.status, response.headers, response.read()
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace")[:500]
            if error.code == 409:
                raise Fenced(f"another session has taken over this run: {said}") from None
            if error.code == 410:
                raise RunEnded(said) from None
            if error.code in _TRANSIENT:
                raise ConnectionError(f"HTTP {error.code}: {said}") from None
            raise LinkFailed(f"{method} {self.url}/{path}: HTTP {error.code}: {said}") from None
