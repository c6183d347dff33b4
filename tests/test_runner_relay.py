"""The relay: unchanged passage, one call id through every re-dial, cancellation when a side hangs up."""

import json
import socket
import threading
import tracemalloc

import httptools
import pytest

from forge_server.runner import relay as relay_module
from forge_server.runner.relay import Relay
from forge_server.runner.wire import Reader, read_body, value_of

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nx-own: 1\r\n\r\nok"


class Upstream:
    """A proxy whose behaviour is a list of functions, one per connection accepted."""

    def __init__(self, port=0):
        self.listener = socket.create_server(("127.0.0.1", port), reuse_port=True)
        self.port = self.listener.getsockname()[1]
        self.requests = []
        self.gone = threading.Event()

    def serve(self, *behaviours):
        def run():
            for behaviour in behaviours:
                connection, _ = self.listener.accept()
                with connection:
                    connection.settimeout(120)
                    behaviour(connection, Reader(connection))

        threading.Thread(target=run, daemon=True).start()
        return self

    def take(self, reader):
        start, headers = reader.head()
        self.requests.append((start, dict(headers), read_body(reader, headers, 1 << 20)))

    def answer(self, raw=ANSWER, times=1):
        def behave(connection, reader):
            for _ in range(times):
                self.take(reader)
                connection.sendall(raw)

        return behave

    def hang_up(self, connection, reader):
        """Take the request and close without a byte, as a proxy that is killed does."""
        self.take(reader)

    def wait_for_hang_up(self, connection, reader):
        self.take(reader)
        if connection.recv(1) == b"":
            self.gone.set()


@pytest.fixture
def upstream():
    it = Upstream()
    yield it
    it.listener.close()


@pytest.fixture
def door(upstream):
    """A relay to ``upstream``; gives a function that connects to it."""
    listener = socket.create_server(("127.0.0.1", 0))
    relay = Relay(listener, f"http://127.0.0.1:{upstream.port}", "at-1")
    relay.start()
    sockets = []

    def connect():
        sock = socket.create_connection(listener.getsockname())
        sock.settimeout(120)
        sockets.append(sock)
        return sock, Reader(sock)

    connect.relay = relay
    yield connect
    relay.close()
    for sock in sockets:
        sock.close()


def post(path="/a/at-1/v1/chat/completions", body=b"{}", extra=b""):
    head = b"POST %s HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer k\r\n%sContent-Length: %d\r\n\r\n"
    return head % (path.encode(), extra, len(body)) + body


def read(reader):
    start, headers = reader.head()
    return start.split(b" ", 2)[1], headers, read_body(reader, headers, 1 << 20)


def test_a_request_passes_unchanged_and_gets_a_call_id(door, upstream):
    upstream.serve(upstream.answer(times=2))
    sock, reader = door()
    for _ in range(2):  # both connections are kept
        sock.sendall(post(body=b'{"a": 1}', extra=b"X-Forge-Relay-Call: forged\r\nUser-Agent: h\r\n"))
        status, headers, body = read(reader)
        assert (status, value_of(headers, b"x-own"), body) == (b"200", b"1", b"ok")
    (start, first, body), (_, second, _) = upstream.requests
    assert start == b"POST /a/at-1/v1/chat/completions HTTP/1.1" and body == b'{"a": 1}'
    assert first[b"authorization"] == b"Bearer k" and first[b"user-agent"] == b"h"
    ids = {first[b"x-forge-relay-call"], second[b"x-forge-relay-call"]}
    assert len(ids) == 2 and b"forged" not in ids


def test_redials_carry_the_same_call_id(door, upstream):
    """Two proxies die with the request in hand, the third answers: one call for the harness."""
    upstream.serve(upstream.hang_up, upstream.hang_up, upstream.answer())
    sock, reader = door()
    sock.sendall(post())
    assert read(reader)[0] == b"200"
    ids = [headers[b"x-forge-relay-call"] for _, headers, _ in upstream.requests]
    assert len(ids) == 3 and len(set(ids)) == 1


def test_a_refused_connection_is_waited_for(door, upstream):
    upstream.listener.close()
    sock, reader = door()
    sock.sendall(post())
    again = Upstream(upstream.port)
    again.serve(again.answer())
    assert read(reader)[0] == b"200"
    again.listener.close()


def test_a_proxy_that_stays_away_becomes_503(door, upstream, monkeypatch):
    monkeypatch.setattr(relay_module, "REDIAL_S", 0.2)
    upstream.listener.close()
    sock, reader = door()
    sock.sendall(post())
    status, headers, body = read(reader)
    assert status == b"503" and value_of(headers, b"retry-after") == b"1"
    assert json.loads(body)["error"]["type"] == "server_error"


def test_a_kept_connection_that_went_stale_is_replaced(door, upstream):
    upstream.serve(upstream.answer(), upstream.answer())
    sock, reader = door()
    for _ in range(2):
        sock.sendall(post())
        assert read(reader)[0] == b"200"


def test_the_call_is_cancelled_when_the_harness_hangs_up(door, upstream):
    upstream.serve(upstream.wait_for_hang_up)
    sock, _ = door()
    sock.sendall(post())
    while not upstream.requests:
        threading.Event().wait(0.005)
    sock.close()
    assert upstream.gone.wait(120)


def test_closing_the_relay_cancels_what_is_in_flight(door, upstream):
    upstream.serve(upstream.wait_for_hang_up)
    sock, _ = door()
    sock.sendall(post())
    while not upstream.requests:
        threading.Event().wait(0.005)
    door.relay.close()
    assert upstream.gone.wait(120)
    assert sock.recv(1) == b""


def test_streams_pass_as_they_come(door, upstream):
    """The first event reaches the harness before the second is sent."""
    seen = threading.Event()

    def behave(connection, reader):
        upstream.take(reader)
        connection.sendall(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n7\r\ndata: 1\r\n")
        assert seen.wait(120)
        connection.sendall(b"7\r\ndata: 2\r\n0\r\n\r\n")

    upstream.serve(behave)
    sock, reader = door()
    sock.sendall(post())
    assert reader.head() is not None
    assert reader.chunk()[1] == b"data: 1"
    seen.set()
    assert reader.chunk()[1] == b"data: 2" and reader.chunk()[1] == b""


def test_a_chunked_request_and_an_expectation(door, upstream):
    upstream.serve(upstream.answer())
    sock, reader = door()
    head = b"POST /a/at-1/v1/messages HTTP/1.1\r\nExpect: 100-continue\r\nTransfer-Encoding: chunked\r\n\r\n"
    sock.sendall(head)
    assert reader.until(b"\r\n\r\n", 100) == b"HTTP/1.1 100 Continue\r\n\r\n"
    sock.sendall(b"2\r\n{}\r\n0\r\n\r\n")
    assert read(reader)[0] == b"200"
    assert upstream.requests[0][2] == b"{}" and upstream.requests[0][1][b"content-length"] == b"2"


@pytest.mark.parametrize(
    "path",
    [
        "/a/at-1/finish",
        "/a/at-1/reward",
        "/a/at-2/v1/chat/completions",
        "/a/at-1/v1/../finish",
        "/a/at-1/v1/%2e%2e/finish",
        "/api/v1/runs",
        "/",
    ],
)
def test_only_inference_passes(door, upstream, path):
    sock, reader = door()
    sock.sendall(post(path))
    assert read(reader)[0] == b"404"
    assert upstream.requests == []


@pytest.mark.parametrize(
    "path", ["/v1/models", "/a/at-1/v1beta/models/m:generateContent", "/a/at-1/v1/messages?beta=true"]
)
def test_every_inference_route_passes(door, upstream, path):
    upstream.serve(upstream.answer())
    sock, reader = door()
    sock.sendall(post(path))
    assert read(reader)[0] == b"200"


@pytest.mark.parametrize(
    ("start", "status"),
    [
        (b"CONNECT /v1/x HTTP/1.1", b"405"),
        (b"PUT /v1/x HTTP/1.1", b"405"),
        (b"get /v1/x HTTP/1.1", b"405"),
        (b"PRI /v1/x HTTP/2.0", b"405"),
        (b"POST /v1/x HTTP/2.0", b"505"),
        (b"POST /v1/x HTTP/0.9", b"505"),
    ],
)
def test_what_a_proxy_may_read_otherwise_does_not_pass(door, upstream, start, status):
    sock, reader = door()
    sock.sendall(start + b"\r\nContent-Length: 2\r\n\r\n{}")
    assert read(reader)[0] == status
    assert upstream.requests == []


@pytest.mark.parametrize(
    "extra",
    [
        b"Upgrade: websocket\r\nConnection: upgrade\r\n",
        b"Upgrade: h2c\r\nConnection: keep-alive, Upgrade, HTTP2-Settings\r\nHTTP2-Settings: x\r\n",
        b"Upgrade: h2c\r\nProxy-Connection: upgrade\r\n",
        b"Content-Length: 0\r\n",
        b"Keep-Alive: 1\r\nTE: chunked\r\nTrailer: content-length\r\n",
    ],
)
def test_the_body_stays_a_body_to_the_proxys_parser(door, upstream, extra):
    """Nothing makes the proxy take what follows a head for something else than this request's body."""
    body = b"GET /v1/models HTTP/1.1\r\n\r\n"
    seen = []

    def behave(connection, reader):
        upstream.take(reader)
        connection.sendall(ANSWER)

    upstream.serve(behave)
    sock, reader = door()
    # our own length first: which of two counts is the relay's affair, the proxy sees one
    sock.sendall(b"POST /v1/responses HTTP/1.1\r\nContent-Length: %d\r\n%s\r\n%s" % (len(body), extra, body))
    assert read(reader)[0] == b"200"
    ((start, headers, got),) = upstream.requests

    class Parsed:
        def on_body(self, data):
            seen.append(data)

        def on_message_complete(self):
            seen.append(None)

    parser = httptools.HttpRequestParser(Parsed())
    lines = [start, *(name + b": " + value for name, value in headers.items())]
    parser.feed_data(b"\r\n".join(lines) + b"\r\n\r\n" + got)
    assert seen == [body, None] and not parser.should_upgrade()
    assert (b"upgrade" in headers) == (b"Upgrade" in extra)  # the proxy answers it with 426


def test_a_body_beyond_all_measure_is_refused(door, upstream, monkeypatch):
    monkeypatch.setattr(relay_module, "BODY_LIMIT", 1000)
    sock, reader = door()
    sock.sendall(post(body=b"x" * 2000))
    assert read(reader)[0] == b"413"
    assert upstream.requests == []


def test_trailers_without_end_are_refused(door, upstream):
    sock, reader = door()
    head = b"POST /v1/messages HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"
    sock.sendall(head + (b"a: " + b"x" * 1000 + b"\r\n") * 66)
    assert read(reader)[0] == b"413"
    assert upstream.requests == []


def test_small_chunks_take_no_more_room_than_they_hold():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        body = b"2\r\nab\r\n" * 100_000 + b"0\r\n\r\n"
        sender = threading.Thread(target=theirs.sendall, args=(body,))
        tracemalloc.start()
        try:
            sender.start()
            got = read_body(Reader(ours), [(b"transfer-encoding", b"chunked")], 1 << 20)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
            sender.join()
    assert got == b"ab" * 100_000
    assert peak < 2_000_000


@pytest.mark.parametrize(
    "raw",
    [
        b"\x00\x01garbage\r\n\r\n",
        b"POST\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nA: b\nX-Forge-Relay-Read: 1\r\n\r\n",
        b"GET /v1/models\rX-Forge-Relay-Read: 1 HTTP/1.1\r\n\r\n",
    ],
)
def test_what_is_not_http_ends_the_connection(door, raw):
    sock, _ = door()
    sock.sendall(raw)
    answer = sock.recv(1000)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 404")
