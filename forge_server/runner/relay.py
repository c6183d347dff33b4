"""The only door out of the harness's network: model traffic from its loopback to the proxy.

Requests go through unchanged, with the agent's own key; only ``X-Forge-Relay-Call`` is added. When the
proxy is away (refused, reset, closed before any byte of the answer) the same request is sent again with the
same call id for up to ``REDIAL_S``, so that a restart of the proxy is a short wait for the harness. An answer is
passed on once it is there whole. Only inference routes pass, and only what the proxy reads as one request with a
body: after a CONNECT, or an upgrade of the connection, it could take the body for requests of their own. So the
runner's own lifecycle routes cannot be reached from the sandbox.

To the proxy an answer that the relay took is not yet delivered: what the harness has read (``receipts``) is
told with the next request, and in full when the harness is dead (I3).
"""

import contextlib
import os
import select
import socket
import threading
import time

from . import wire
from .control import peer_gone
from .receipts import Receipts

REDIAL_S = 120.0
BODY_LIMIT = 64 << 20
BODIES_LIMIT = 4 * BODY_LIMIT  # of all requests under way
CLOSING_S = 2.0  # given to the harness to close a connection that will not be used again
CONNECTIONS = 256  # at a time; more wait in the backlog
MARK = b"x-forge-relay-call"  # on requests: the same for every re-dial
READ = b"x-forge-relay-read"  # on requests: calls whose answers the harness has read since
CALL = b"x-forge-call"  # on answers: the call that was answered, or the calls
_METHODS = (b"GET", b"HEAD", b"POST")
_VERSIONS = (b"HTTP/1.0", b"HTTP/1.1")
_NOT_PASSED = (
    MARK,
    READ,
    b"expect",
    b"transfer-encoding",
    b"content-length",
    b"connection",
    b"proxy-connection",  # which parsers take for the former
    b"keep-alive",
)


class _ClientGone(Exception):
    pass


class Relay:
    """Accepts on ``listener`` (made inside the harness's network namespace) and forwards to ``url``."""

    def __init__(self, listener: socket.socket, url: str, attempt: str) -> None:
        self.listener, self.url = listener, url
        self.prefixes = (f"/a/{attempt}/v1/".encode(), f"/a/{attempt}/v1beta/".encode(), b"/v1/", b"/v1beta/")
        self.closed = False
        self.receipts = Receipts()
        self._room = wire.Room(BODIES_LIMIT)
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
            self.receipts.ended(client)
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
        self.receipts.asked_again(reader.sock)
        start, headers = got
        client = reader.sock
        parts = start.split(b" ")
        if len(parts) != 3 or not self._is_inference(parts[1]):
            _answer(client, b"404 Not Found", "not_found_error", "only model requests pass here")
            return False
        if parts[0] not in _METHODS:
            _answer(client, b"405 Method Not Allowed", "invalid_request_error", "use GET, HEAD or POST")
            return False
        if parts[2] not in _VERSIONS:
            _answer(client, b"505 HTTP Version Not Supported", "invalid_request_error", "use HTTP/1.1")
            return False
        if wire.value_of(headers, b"expect"):
            client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        share = wire.Share(self._room)
        try:
            body = wire.read_body(reader, headers, BODY_LIMIT, share)
            if body is None:
                _answer(client, b"413 Content Too Large", "invalid_request_error", "the body is too large")
                return False
            return self._pass(client, line, parts, headers, body)
        except wire.Full:
            _answer(
                client, b"413 Content Too Large", "invalid_request_error", "too much is being sent at once"
            )
            return False
        finally:
            share.close()

    def _pass(
        self, client: socket.socket, line: "_Upstream", parts: list[bytes], headers: wire.Headers, body: bytes
    ) -> bool:
        """Pass one request on, and its answer back; whether the connection may be used again."""
        lines = [b" ".join(parts)] + [n + b": " + v for n, v in headers if n not in _NOT_PASSED]
        lines += [MARK + b": " + os.urandom(8).hex().encode(), b"content-length: %d" % len(body)]
        if news := self.receipts.news():
            lines.append(READ + b": " + b" ".join(news))
        answer = line.exchange(client, b"\r\n".join(lines) + b"\r\n\r\n" + body, parts[0] == b"HEAD")
        if answer is None:
            _answer(client, b"503 Service Unavailable", "server_error", "the model is away", retry=True)
            return True
        call = wire.value_of(answer.headers, CALL)
        if call:
            self.receipts.told(news)
        try:
            answer.write_to(client)
        except BaseException:
            if call:
                self.receipts.lost(call)
            raise
        if call:
            self.receipts.sent(call, client)
        if not answer.keep:
            line.drop()
        if answer.keep and wire.value_of(headers, b"connection").lower() != b"close":
            return True
        _readable([client], CLOSING_S)  # let the harness close first: how it does tells whether it has read
        return False

    def _is_inference(self, path: bytes) -> bool:
        return path.startswith(self.prefixes) and b".." not in path.lower().replace(b"%2e", b".")


class _Reply:
    """An answer of the proxy: its head, and its body if that came with its length; else the body follows."""

    def __init__(self, reader: wire.Reader, to_head: bool) -> None:
        """Raises ``Broken`` when the proxy goes before all of it was there."""
        got = reader.head()
        if got is None:
            raise wire.Broken("closed before the answer")
        start, self.headers = got
        self.reader = reader
        kept = (n + b": " + v for n, v in self.headers if n != CALL)
        self.head = b"\r\n".join((start, *kept)) + b"\r\n\r\n"
        empty = to_head or start.split(b" ", 2)[1] in (b"204", b"304")
        length = 0 if empty else wire.body_length(self.headers)
        self.chunked = length is None
        # without any framing the end of the connection ends the body
        self.unframed = not empty and length == 0 and not wire.value_of(self.headers, b"content-length")
        self.body = reader.exactly(length) if length else b""
        self.keep = not self.unframed and wire.value_of(self.headers, b"connection").lower() != b"close"

    def write_to(self, client: socket.socket) -> None:
        """Pass it on; a body without a length as it comes."""
        client.sendall(self.head + self.body)
        while self.chunked:
            raw, payload = self.reader.chunk()
            client.sendall(raw)
            if not payload:
                return
        while self.unframed and (self.reader.buffer or self.reader.fill()):
            client.sendall(self.reader.buffer)
            self.reader.buffer = b""


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

    def exchange(self, client: socket.socket, request: bytes, to_head: bool) -> _Reply | None:
        """Send until an answer is there; None when the proxy stayed away too long."""
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
                    return _Reply(self.reader, to_head)
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
