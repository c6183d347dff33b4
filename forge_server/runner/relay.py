"""The only door out of the harness's network: model traffic from its loopback to the proxy.

Requests go through unchanged, with the agent's own key; only ``X-Forge-Relay-Call`` is added. When the
proxy is away (refused, reset, closed before any byte of the answer) the same request is sent again with the
same call id for up to ``REDIAL_S``, so that a restart of the proxy is a short wait for the harness. Only
inference routes pass: the runner's own lifecycle routes cannot be reached from the sandbox.
"""

import contextlib
import os
import select
import socket
import threading
import time

from . import wire
from .control import peer_gone

REDIAL_S = 120.0
BODY_LIMIT = 64 << 20
CONNECTIONS = 256  # at a time; more wait in the backlog
MARK = b"x-forge-relay-call"


class _ClientGone(Exception):
    pass


class Relay:
    """Accepts on ``listener`` (made inside the harness's network namespace) and forwards to ``url``."""

    def __init__(self, listener: socket.socket, url: str, attempt: str) -> None:
        self.listener, self.url = listener, url
        self.prefixes = (f"/a/{attempt}/v1/".encode(), f"/a/{attempt}/v1beta/".encode(), b"/v1/", b"/v1beta/")
        self.closed = False
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._slots = threading.Semaphore(CONNECTIONS)

    def start(self) -> None:
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Stop accepting and cut every connection, so that calls in flight are cancelled at the proxy."""
        self.closed = True
        with self._lock:
            sockets = [self.listener, *self._open]
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self.listener.close()

    def _accept(self) -> None:
        while not self.closed:
            self._slots.acquire()
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        line = _Upstream(self)
        with self._lock:
            self._open.add(client)
        try:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            reader = wire.Reader(client)
            while not self.closed and self._one(reader, line):
                pass
        except (OSError, ValueError, _ClientGone):
            pass
        finally:
            line.drop()
            with self._lock:
                self._open.discard(client)
            client.close()
            self._slots.release()

    def _one(self, reader: wire.Reader, line: "_Upstream") -> bool:
        """Serve one request; whether the connection may be used again."""
        got = reader.head()
        if got is None:
            return False
        start, headers = got
        client = reader.sock
        parts = start.split(b" ")
        if len(parts) != 3 or not self._is_inference(parts[1]):
            _answer(client, b"404 Not Found", "not_found_error", "only model requests pass here")
            return False
        if wire.value_of(headers, b"expect"):
            client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = wire.read_body(reader, headers, BODY_LIMIT)
        if body is None:
            _answer(client, b"413 Content Too Large", "invalid_request_error", "the body is too large")
            return False
        skip = (MARK, b"expect", b"transfer-encoding", b"content-length", b"connection", b"keep-alive")
        lines = [start] + [name + b": " + value for name, value in headers if name not in skip]
        lines += [MARK + b": " + os.urandom(8).hex().encode(), b"content-length: %d" % len(body)]
        answer = line.exchange(client, b"\r\n".join(lines) + b"\r\n\r\n" + body)
        if answer is None:
            _answer(client, b"503 Service Unavailable", "server_error", "the model is away", retry=True)
            return True
        keep = self._forward(client, answer, parts[0] == b"HEAD")
        if not keep:
            line.drop()
        return keep and wire.value_of(headers, b"connection").lower() != b"close"

    def _is_inference(self, path: bytes) -> bool:
        return path.startswith(self.prefixes) and b".." not in path.lower().replace(b"%2e", b".")

    def _forward(self, client: socket.socket, answer: wire.Reader, no_body: bool) -> bool:
        """Pass the answer on as it comes; whether both connections may be used again."""
        got = answer.head()
        if got is None:
            return False
        start, headers = got
        client.sendall(start + b"\r\n" + b"".join(n + b": " + v + b"\r\n" for n, v in headers) + b"\r\n")
        status = start.split(b" ", 2)[1]
        if no_body or status in (b"204", b"304"):
            return True
        length = wire.body_length(headers)
        if length is None:
            while True:
                raw, payload = answer.chunk()
                client.sendall(raw)
                if not payload:
                    break
        elif length or wire.value_of(headers, b"content-length"):
            client.sendall(answer.exactly(length))
        else:  # no framing: the end of the connection ends the body
            while answer.buffer or answer.fill():
                client.sendall(answer.buffer)
                answer.buffer = b""
            return False
        return wire.value_of(headers, b"connection").lower() != b"close"


class _Upstream:
    """The connection to the proxy that belongs to one connection of the harness."""

    def __init__(self, relay: Relay) -> None:
        self.relay = relay
        self.reader: wire.Reader | None = None

    def drop(self) -> None:
        if self.reader is not None:
            with self.relay._lock:
                self.relay._open.discard(self.reader.sock)
            self.reader.sock.close()
            self.reader = None

    def exchange(self, client: socket.socket, request: bytes) -> wire.Reader | None:
        """Send until a first byte of an answer is there; None when the proxy stayed away too long."""
        away_since, pause = None, 0.1
        while not self.relay.closed:
            reused = self.reader is not None
            dialled = time.monotonic()
            try:
                if self.reader is None:
                    self.reader = wire.Reader(wire.dial(self.relay.url, 10.0))
                    with self.relay._lock:
                        self.relay._open.add(self.reader.sock)
                    self.reader.sock.settimeout(None)
                self.reader.sock.sendall(request)
                if self._first_byte(client):
                    return self.reader
            except OSError:
                pass
            self.drop()
            if reused:
                continue  # a kept connection that the proxy had closed: not a sign that it is away
            now = time.monotonic()
            if away_since is None or now - dialled > 5.0:
                away_since, pause = now, 0.1
            if now - away_since > REDIAL_S:
                return None
            if _readable([client], pause) and peer_gone(client):
                raise _ClientGone
            pause = min(pause * 2, 1.0)
        raise _ClientGone

    def _first_byte(self, client: socket.socket) -> bool:
        """Wait for the answer to begin, watching the harness: if it hangs up, so do we (the call is
        cancelled).
        """
        assert self.reader is not None
        upstream, watched = self.reader.sock, [client]
        while True:
            if upstream.fileno() in _readable([upstream, *watched], None):
                return self.reader.fill()
            if peer_gone(client):
                raise _ClientGone
            watched = []  # it has sent the next request already; do not spin on it


def _readable(sockets: list[socket.socket], timeout: float | None) -> set[int]:
    """Descriptors that have something to read or have ended (poll: descriptors may exceed 1024)."""
    poll = select.poll()
    for sock in sockets:
        poll.register(sock, select.POLLIN)
    return {fd for fd, _ in poll.poll(None if timeout is None else int(timeout * 1000))}


def _answer(client: socket.socket, status: bytes, kind: str, message: str, *, retry: bool = False) -> None:
    body = b'{"error": {"type": "%s", "message": "%s"}}' % (kind.encode(), message.encode())
    extra = b"retry-after: 1\r\n" if retry else b"connection: close\r\n"
    head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\n%scontent-length: %d\r\n\r\n"
    client.sendall(head % (status, extra, len(body)) + body)
