"""The runner's side of the runner protocol: one request at a time, retried while the server is away.

Every route is idempotent, so a request whose answer was lost is simply sent again.
"""

from __future__ import annotations

import binascii
import json
import socket
import time

from . import wire

TYPE_CHECKING = False  # without importing typing: every attempt would pay for it
if TYPE_CHECKING:
    from typing import Any

PATIENCE_S = 300.0  # a server that stays away longer than this ends the attempt
BODY_LIMIT = 1 << 30
TRIAL_MARK = "trial: "


class Refused(Exception):
    """The server will not have this (it knows better: the attempt has ended, the key is wrong...)."""

    def __init__(self, status: int, body: bytes) -> None:
        self.status = status
        super().__init__(f"HTTP {status}: {body[:300].decode('utf-8', 'replace')}")


class Unreachable(Exception):
    """The server stayed away for longer than the patience."""


class Control:
    """One connection to the pod-facing listener. Not shared between threads: each makes its own."""

    def __init__(self, url: str, attempt: str, key: str = "") -> None:
        self.url, self.attempt, self.key = url, attempt, key
        self._reader: wire.Reader | None = None

    def clone(self) -> Control:
        return Control(self.url, self.attempt, self.key)

    def post(self, route: str, body: dict[str, Any], *, patience: float = PATIENCE_S) -> dict[str, Any]:
        """POST ``/a/ATTEMPT/route``; returns the JSON answer. Raises ``Refused`` or ``Unreachable``."""
        status, answer = self._retried("POST", route, json.dumps(body).encode(), patience)
        if status >= 300:
            raise Refused(status, answer)
        parsed: dict[str, Any] = json.loads(answer or b"{}")
        return parsed

    def get(self, route: str, *, patience: float = PATIENCE_S) -> bytes | None:
        """GET ``/a/ATTEMPT/route``; returns the body, None for 204."""
        status, answer = self._retried("GET", route, b"", patience)
        if status >= 300:
            raise Refused(status, answer)
        return None if status == 204 else answer

    def _retried(self, method: str, route: str, body: bytes, patience: float) -> tuple[int, bytes]:
        give_up, pause = time.monotonic() + patience, 0.1
        while True:
            fresh = self._reader is None
            try:
                status, answer = self._once(method, route, body)
                fault = f"HTTP {status}"
                if status < 500 and status != 429:
                    return status, answer
            except (OSError, ValueError) as error:  # refused, reset, timed out, not HTTP
                self._drop()
                fault = repr(error)
                if not fresh:
                    continue  # a kept connection that went stale: dial anew at once
            if time.monotonic() + pause > give_up:
                raise Unreachable(f"{method} {route}: {fault}")
            time.sleep(pause)
            pause = min(pause * 2, 2.0)

    def _once(self, method: str, route: str, body: bytes) -> tuple[int, bytes]:
        if self._reader is None:
            self._reader = wire.Reader(wire.dial(self.url, 30.0))
        head = f"{method} /a/{self.attempt}/{route} HTTP/1.1\r\nHost: forge\r\n"
        head += f"Content-Length: {len(body)}\r\n"
        if self.key:
            head += f"Authorization: Bearer {self.key}\r\n"
        if body:
            head += "Content-Type: application/json\r\n"
        self._reader.sock.sendall(head.encode() + b"\r\n" + body)
        got = self._reader.head()
        if got is None:
            raise wire.Broken("closed before the answer")
        start, headers = got
        status = int(start.split(None, 2)[1])
        answer = b"" if status == 204 else wire.read_body(self._reader, headers, BODY_LIMIT)
        if answer is None:
            raise wire.Broken("answer too large")
        if wire.value_of(headers, b"connection").lower() == b"close":
            self._drop()
        return status, answer

    def _drop(self) -> None:
        if self._reader is not None:
            self._reader.sock.close()
            self._reader = None

    close = _drop


class Offline:
    """Stands in for a server in a trial: the plan and the verifier come with the launch order, and what the
    runner has to say goes to stdout as one line.
    """

    key = ""

    def __init__(self, trial: dict[str, Any]) -> None:
        self._trial = trial
        self._said: dict[str, Any] = {}

    def clone(self) -> Offline:
        return self

    def post(self, route: str, body: dict[str, Any], *, patience: float = PATIENCE_S) -> dict[str, Any]:
        if route == "start":
            return {"runner_key": "", "agent_key": "", "plan": self._trial["plan"]}
        if route == "heartbeat":
            return {"action": "continue", "reason": "", "left_s": None}
        if route in ("reward", "finish"):
            self._said[route] = body
        if route == "finish":
            print(f"{TRIAL_MARK}{json.dumps(self._said)}", flush=True)
        return {}

    def get(self, route: str, *, patience: float = PATIENCE_S) -> bytes | None:
        return binascii.a2b_base64(self._trial["verifier"])


def peer_gone(sock: socket.socket) -> bool:
    """Whether the peer of a readable socket has closed it."""
    try:
        return sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
