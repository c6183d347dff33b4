"""What the relay can say of an answer's delivery (I3), told by the harness's own kernel."""

import os
import socket
import struct
import time

import pytest
from test_runner_relay import Upstream, post, read

from forge_server.runner.relay import Relay


def answer(call):
    return b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nx-forge-call: %d\r\n\r\nok" % call


@pytest.fixture
def upstream():
    it = Upstream()
    yield it
    it.listener.close()


@pytest.fixture
def relay(upstream):
    made = Relay(socket.create_server(("127.0.0.1", 0)), f"http://127.0.0.1:{upstream.port}", "at-1")
    made.start()
    yield made
    made.close()


def connect(relay):
    sock = socket.create_connection(relay.listener.getsockname())
    sock.settimeout(120)
    return sock


def ask(sock, extra=b""):
    """Read one answer byte by byte, so that nothing is left behind and nothing is taken too much."""
    from forge_server.runner.wire import Reader

    sock.sendall(post(extra=extra))
    return read(Reader(sock))


def until(holds):
    give_up = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < give_up
        time.sleep(0.005)


def harness(act):
    """A process that does ``act`` and then waits to be killed; returns once it has done it."""
    ready, done = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            act()
            os.write(done, b"!")
            time.sleep(600)
        finally:
            os._exit(1)
    os.close(done)
    assert os.read(ready, 1) == b"!"
    os.close(ready)
    return pid


def kill(pid):
    os.kill(pid, 9)
    os.waitpid(pid, 0)


def test_the_proxys_id_of_a_call_is_kept_from_the_harness(relay, upstream):
    upstream.serve(upstream.answer(answer(7)))
    sock = connect(relay)
    status, headers, body = ask(sock)
    assert (status, body) == (b"200", b"ok") and b"x-forge-call" not in dict(headers)


def test_i3_who_asks_again_or_closes_in_order_has_read(relay, upstream):
    upstream.serve(
        upstream.answer(answer(1), times=1), upstream.answer(answer(2)), upstream.answer(answer(3))
    )
    sock = connect(relay)
    ask(sock)
    ask(sock)
    sock.close()
    until(lambda: relay.receipts.final(0.0) == ([1, 2], []))
    other = connect(relay)
    ask(other, extra=b"X-Forge-Relay-Read: 99\r\n")
    heads = [head for _, head, _ in upstream.requests]
    told = [head.get(b"x-forge-relay-read", b"") for head in heads]
    assert told == [b"", b"1", b"2"]  # and nothing that the harness claims itself
    assert relay.receipts.final(0.0) == ([1, 2], [])  # of an open connection nothing is said


def test_what_the_proxy_did_not_hear_is_told_again(relay, upstream):
    """A request that made no call (it listed models, or was refused) may not have been listened to."""
    deaf = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
    upstream.serve(upstream.answer(answer(1)), *(upstream.answer(a) for a in (deaf, answer(2), answer(3))))
    first = connect(relay)
    ask(first)
    first.close()
    for _ in range(3):
        sock = connect(relay)
        ask(sock)
        keep(sock)
    told = [head.get(b"x-forge-relay-read", b"") for _, head, _ in upstream.requests]
    assert told == [b"", b"1", b"1", b""]


def test_i3_a_harness_that_is_killed_with_the_answer_unread_did_not_get_it(relay, upstream):
    upstream.serve(upstream.answer(answer(1)))
    pid = harness(lambda: connect_and_send(relay))
    until(lambda: relay.receipts._open)
    kill(pid)
    assert relay.receipts.final(120.0) == ([], [1])


def test_i3_a_harness_that_is_killed_after_reading_got_it(relay, upstream):
    upstream.serve(upstream.answer(answer(1)))
    pid = harness(lambda: keep(connect_and_ask(relay)))
    until(lambda: relay.receipts._open)
    kill(pid)
    assert relay.receipts.final(120.0) == ([1], [])


_kept = []


def keep(thing):
    _kept.append(thing)


def connect_and_send(relay):
    sock = connect(relay)
    sock.sendall(post())
    keep(sock)


def connect_and_ask(relay):
    sock = connect(relay)
    ask(sock)
    return sock


def test_i3_a_reset_while_the_answer_is_passed_on_is_a_loss(relay, upstream):
    """The harness goes while the answer comes in: it was taken by the relay and by nobody else."""
    sock = connect(relay)

    def behave(connection, reader):
        upstream.take(reader)
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nx-forge-call: 5\r\n\r\n")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()
        connection.sendall(b"ok")

    upstream.serve(behave)
    sock.sendall(post())
    until(lambda: relay.receipts.final(0.0) == ([], [5]))


def test_i3_an_answer_given_again_and_read_counts_as_read(relay, upstream):
    upstream.serve(upstream.answer(answer(1)), upstream.answer(answer(1)))
    first = connect(relay)
    first.sendall(post())
    until(lambda: relay.receipts._open)
    first.close()  # unread
    until(lambda: relay.receipts.final(0.0) == ([], [1]))
    second = connect(relay)
    ask(second)
    second.close()
    until(lambda: relay.receipts.final(0.0) == ([1], []))


def test_a_connection_that_is_not_kept_is_told_as_well(relay, upstream):
    upstream.serve(upstream.answer(answer(1)))
    sock = connect(relay)
    ask(sock, extra=b"Connection: close\r\n")
    sock.close()
    until(lambda: relay.receipts.final(0.0) == ([1], []))


def test_an_answer_cut_off_by_the_proxys_death_is_asked_for_again(relay, upstream):
    """Half an answer is no answer: the harness sees the whole one of the next life."""

    def half(connection, reader):
        upstream.take(reader)
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\no")

    upstream.serve(half, upstream.answer(answer(1)))
    assert ask(connect(relay))[2] == b"ok"
    ids = {head[b"x-forge-relay-call"] for _, head, _ in upstream.requests}
    assert len(upstream.requests) == 2 and len(ids) == 1


# --- what a harness can do to the relay's memory (I5: the runner's death would be an infra failure) ---


def test_a_chunk_beyond_all_measure_is_not_read(relay, upstream):
    sock = connect(relay)
    sock.sendall(
        b"POST /v1/messages HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffff\r\n" + b"x" * 5000
    )
    assert sock.recv(20).startswith(b"HTTP/1.1 413")


def test_bodies_share_a_bounded_room(relay, monkeypatch):
    from forge_server.runner.wire import Room

    relay._room = Room(1000)
    held = connect(relay)
    held.sendall(post(body=b"x" * 900)[:-1])
    until(lambda: relay._room._left == 100)
    chunked = connect(relay)
    chunked.sendall(b"POST /v1/messages HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nc8\r\n" + b"x" * 200)
    assert chunked.recv(20).startswith(b"HTTP/1.1 413")
    held.close()
    until(lambda: relay._room._left == 1000)
