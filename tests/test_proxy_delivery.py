"""Delivery (I3) and retries: what a harness is known to have got, and which request gets which answer."""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from proxy_rig import PATIENCE, Rig, eventually, follow, hello, result, rig

from forge_server.domain.classify import RECORD_ERROR
from forge_server.domain.engine import ChatResult, EngineUnavailable
from forge_server.domain.errors import StoreError
from forge_server.domain.states import Delivery, Untrainable
from forge_server.proxy import record
from forge_server.proxy.connection import Connection


@pytest.fixture
async def proxy(database_url: str) -> AsyncIterator[Rig]:
    async with rig(database_url) as made:
        yield made


class Wire:
    """A client whose every step on the socket is under the test's hand."""

    def __init__(self, proxy: Rig) -> None:
        self.proxy = proxy
        self.sock = socket.socket()
        self.sock.setblocking(False)

    async def send(self, body: dict[str, Any], **headers: str) -> None:
        loop = asyncio.get_running_loop()
        if self.sock.getsockname()[1] == 0:
            await loop.sock_connect(self.sock, ("127.0.0.1", int(self.proxy.url.rsplit(":", 1)[1])))
        data = msgspec.json.encode(body)
        lines = [
            f"POST /a/{self.proxy.attempt}/v1/chat/completions HTTP/1.1",
            "host: x",
            f"authorization: Bearer {self.proxy.key}",
            f"content-length: {len(data)}",
            *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items()),
        ]
        await loop.sock_sendall(self.sock, "\r\n".join(lines).encode() + b"\r\n\r\n" + data)

    async def read(self) -> dict[str, Any]:
        loop, data = asyncio.get_running_loop(), b""
        async with asyncio.timeout(PATIENCE):
            while b"\r\n\r\n" not in data:
                data += await self._more(loop)
            head, _, body = data.partition(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            while len(body) < length:
                body += await self._more(loop)
        answer: dict[str, Any] = msgspec.json.decode(body)
        return answer

    async def _more(self, loop: asyncio.AbstractEventLoop) -> bytes:
        part = await loop.sock_recv(self.sock, 65536)
        assert part, "the connection was closed"
        return part

    def close(self) -> None:
        self.sock.close()

    def reset(self) -> None:
        """Close with a reset, as a process that dies with unread data does."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()


def content(answer: dict[str, Any]) -> str:
    text: str = answer["choices"][0]["message"]["content"]
    return text


async def test_i3_the_next_request_on_a_connection_shows_that_the_answer_was_read(proxy: Rig) -> None:
    wire = Wire(proxy)
    await wire.send(hello("a"))
    await wire.read()
    await wire.send(hello("something else"))
    await wire.read()
    rows = await proxy.until(lambda rows: rows[0].delivered == Delivery.YES)
    assert [row.delivered for row in rows] == ["yes", "unknown"]
    wire.close()


async def test_i3_a_last_answer_that_was_taken_is_delivered(proxy: Rig) -> None:
    """No later prompt can show it: the connection does, open or closed in order."""
    kept, closed = Wire(proxy), Wire(proxy)
    for wire, text in ((kept, "a"), (closed, "b")):
        await wire.send(hello(text))
        await wire.read()
    closed.close()
    await proxy.seal()
    assert [(row.delivered, row.untrainable) for row in await proxy.rows()] == [("yes", None), ("yes", None)]
    kept.close()


async def test_i3_an_answer_to_a_closing_connection_is_delivered(proxy: Rig) -> None:
    wire = Wire(proxy)
    await wire.send(hello(), connection="close")
    await wire.read()
    await proxy.until(lambda rows: rows[0].delivered == Delivery.YES)
    wire.close()


async def test_i3_a_connection_that_dies_during_recording_took_nothing(proxy: Rig) -> None:
    wire = Wire(proxy)
    answered = asyncio.Event()

    async def script(body: dict[str, Any]) -> ChatResult:
        answered.set()
        return result(body)

    write_rows = proxy.store.write_rows
    held = asyncio.Event()

    async def slow(rows: Any) -> None:
        rows = list(rows)
        if answered.is_set():
            await held.wait()
        await write_rows(rows)

    proxy.engine.script = script
    proxy.store.write_rows = slow  # type: ignore[method-assign]
    await wire.send(hello())
    await proxy.engine.arrived()
    wire.reset()
    await eventually(
        lambda: (
            not any(
                session.flights and f.watchers for session in proxy.sessions_now() for f in session.flights
            )
        )
    )
    held.set()
    (row,) = await proxy.until(lambda rows: rows[0].delivered == Delivery.NO)
    assert row.end == "ok"
    await proxy.seal()
    assert [row.untrainable for row in await proxy.rows()] == [Untrainable.NOT_DELIVERED]


async def test_i3_what_is_not_known_to_be_delivered_is_not_trained(proxy: Rig) -> None:
    """The peer's kernel took the answer, then the peer reset the connection: nobody knows."""
    wire = Wire(proxy)
    await wire.send(hello())
    await proxy.until(lambda rows: bool(rows) and rows[0].end == "ok")
    wire.reset()
    await proxy.seal()
    (row,) = await proxy.rows()
    assert row.delivered != Delivery.YES
    assert row.untrainable in (Untrainable.DELIVERY_UNKNOWN, Untrainable.NOT_DELIVERED)


async def test_i3_a_later_prompt_that_contains_an_answer_shows_its_delivery(proxy: Rig) -> None:
    first = Wire(proxy)
    await first.send(hello())
    answer = await first.read()
    first.reset()
    (row,) = await proxy.until(lambda rows: rows[0].end == "ok")
    second = Wire(proxy)
    await second.send(follow(hello(), answer))
    await second.read()
    rows = await proxy.until(lambda rows: rows[0].delivered == Delivery.YES)
    assert rows[1].parent_id == row.id
    second.close()


async def test_i3_an_answer_after_the_end_of_its_connection_went_nowhere() -> None:
    """A pipelining client leaves while its second answer is being written: the first one's last bytes are
    waited for, and say nothing about the second."""
    ours, theirs = socket.socketpair()
    ours.sendall(b"the first answer")

    class Transport:
        def get_extra_info(self, name: str) -> socket.socket:
            return ours

        def get_write_buffer_size(self) -> int:
            return 0

    told: list[tuple[int, Delivery]] = []
    connection = Connection(Transport())  # type: ignore[arg-type]
    connection.answered(lambda delivery: told.append((1, delivery)))
    connection.lost(None)
    connection.answered(lambda delivery: told.append((2, delivery)))
    assert told == [(2, Delivery.UNKNOWN)]
    theirs.recv(100)
    await eventually(lambda: len(told) == 2)
    assert told[1] == (1, Delivery.YES)
    ours.close()
    theirs.close()


async def test_i3_a_delivery_that_is_told_after_the_database_failed_is_written(proxy: Rig) -> None:
    write_rows, failed, works = proxy.store.write_rows, asyncio.Event(), asyncio.Event()

    async def failing(rows: Any) -> None:
        rows = list(rows)
        if rows[0][0] is record.DELIVERED and not works.is_set():
            failed.set()
            raise StoreError("the disk that holds the database is full")
        await write_rows(rows)

    proxy.store.write_rows = failing  # type: ignore[method-assign]
    wire = Wire(proxy)
    for text in ("a", "b"):
        await wire.send(hello(text))
        await wire.read()
    async with asyncio.timeout(PATIENCE):
        await failed.wait()
    works.set()
    await wire.send(hello("c"))
    await wire.read()
    await proxy.until(lambda rows: [row.delivered for row in rows] == ["yes", "yes", "unknown"])
    wire.close()


async def test_i3_a_delivery_that_is_being_written_at_the_sealing_counts(proxy: Rig) -> None:
    write_rows, writing, go = proxy.store.write_rows, asyncio.Event(), asyncio.Event()

    async def slow(rows: Any) -> None:
        rows = list(rows)
        if rows[0][0] is record.DELIVERED and not writing.is_set():
            writing.set()
            await go.wait()
        await write_rows(rows)

    proxy.store.write_rows = slow  # type: ignore[method-assign]
    wire = Wire(proxy)
    await wire.send(hello())
    await wire.read()
    wire.close()
    async with asyncio.timeout(PATIENCE):
        await writing.wait()
    sealing = asyncio.create_task(proxy.seal())
    await asyncio.wait({sealing}, timeout=0.3)
    assert not sealing.done()
    go.set()
    await sealing
    assert [(row.delivered, row.untrainable) for row in await proxy.rows()] == [("yes", None)]


# --- retries ---


async def _lose(proxy: Rig, wire: Wire, body: dict[str, Any], **headers: str) -> None:
    """Ask, and lose the answer after it was recorded."""
    await wire.send(body, **headers)
    await proxy.until(lambda rows: bool(rows) and rows[-1].end == "ok")
    wire.reset()

    def lost() -> bool:
        """It can be read a moment before the proxy itself knows that it is written."""
        answers = [answer for session in proxy.sessions_now() for answer in session._open.values()]
        return bool(answers) and all(answer.lost for answer in answers)

    await eventually(lost)


async def test_a_lost_answer_is_replayed_to_the_same_body(proxy: Rig) -> None:
    await _lose(proxy, Wire(proxy), hello())
    again = Wire(proxy)
    await again.send(hello())
    assert content(await again.read()) == "answer 1"
    await again.send(hello("other"))
    await again.read()
    rows = await proxy.until(lambda rows: rows[0].delivered == Delivery.YES)
    assert len(proxy.engine.asked) == 2
    assert [row.retry_of for row in rows] == [None, rows[0].id, None]
    assert [row.untrainable for row in rows] == [None, Untrainable.DUPLICATE, None]
    assert rows[1].delivered == Delivery.YES
    again.close()


async def test_i5_a_replay_that_cannot_be_recorded_is_a_failure_of_ours(proxy: Rig) -> None:
    await _lose(proxy, Wire(proxy), hello())
    works = proxy.refuse_writes()
    async with proxy.client() as client:
        assert (await proxy.ask(client)).status_code == 503
    works.set()
    again = (await proxy.until(lambda rows: len(rows) == 2 and rows[1].status != 200))[1]
    assert (again.end, again.status, again.delivered, again.untrainable) == ("ok", 503, "no", "duplicate")
    assert again.error.startswith(RECORD_ERROR)


async def test_i3_a_commit_that_was_taken_and_told_as_lost_delivers_nothing(database_url: str) -> None:
    """The harness got an error; the relay, whose stream had been announced, tells that it was read."""
    async with rig(database_url, keepalive_after_s=0.02) as proxy:
        write_rows, go = proxy.store.write_rows, proxy.engine.blocked()

        async def ambiguous(rows: Any) -> None:
            rows = list(rows)
            await write_rows(rows)
            if any(what is record.ANSWERED for what, _ in rows):
                raise StoreError("the connection to the database was lost")

        proxy.store.write_rows = ambiguous  # type: ignore[method-assign]
        async with proxy.client(**{"x-forge-relay-call": "r1"}) as client:
            path = f"/a/{proxy.attempt}/v1/chat/completions"
            async with client.stream("POST", path, json=hello(stream=True)) as told:
                read = [int(told.headers["x-forge-call"])]
                go.set()
                text = (await told.aread()).decode()
        assert "server_error" in text and "answer" not in text
        withheld = ("ok", 503, "no", "not_delivered")
        await proxy.until(lambda rows: rows[0].status == 503)
        for _ in range(2):
            await proxy.sessions.receipts(proxy.attempt, read, [])
            (row,) = await proxy.rows()
            assert (row.end, row.status, row.delivered, row.untrainable) == withheld
            assert row.error.startswith(RECORD_ERROR)
            await proxy.seal()


async def test_a_lost_answer_is_not_given_to_another_body(proxy: Rig) -> None:
    await _lose(proxy, Wire(proxy), hello())
    again = Wire(proxy)
    await again.send(hello(max_tokens=5))
    assert content(await again.read()) == "answer 2"
    again.close()


async def test_a_lost_answer_is_not_given_to_another_attempt(proxy: Rig) -> None:
    await _lose(proxy, Wire(proxy), hello())
    proxy.attempt = await proxy.new_attempt()
    again = Wire(proxy)
    await again.send(hello())
    assert content(await again.read()) == "answer 2"
    again.close()


async def test_an_answer_that_was_taken_and_asked_for_again_is_a_new_call(proxy: Rig) -> None:
    async with proxy.client() as client:
        first, second = (await proxy.ask(client)).json(), (await proxy.ask(client)).json()
    assert [content(first), content(second)] == ["answer 1", "answer 2"]
    await proxy.seal()
    rows = await proxy.rows()
    assert [(row.delivered, row.untrainable, row.retry_of) for row in rows] == [("yes", None, None)] * 2


RELAY = {"x_forge_relay_call": "c1"}
KEY = {"idempotency_key": "k1"}
RETRIED = {"x_stainless_retry_count": "1"}


@pytest.mark.parametrize(
    ("first", "second", "calls"),
    [
        ({}, {}, 2),  # two live connections with equal bodies are two calls
        ({}, RETRIED, 1),
        (RETRIED, {}, 2),
        ({}, {"x_stainless_retry_count": "0"}, 2),
        (RELAY, RELAY, 1),
        (RELAY, {"x_forge_relay_call": "c2"}, 2),
        (RELAY, {}, 2),
        (KEY, KEY, 1),
        (KEY, {"idempotency_key": "k2"}, 2),
    ],
)
async def test_twins_in_flight(proxy: Rig, first: dict[str, str], second: dict[str, str], calls: int) -> None:
    go = proxy.engine.blocked()
    wires = [Wire(proxy), Wire(proxy)]
    await wires[0].send(hello(), **first)
    await proxy.engine.arrived()
    await wires[1].send(hello(), **second)
    if calls == 2:
        await proxy.engine.arrived()
    else:
        await _watched(proxy, 2)
    go.set()
    answers = [content(await wire.read()) for wire in wires]
    assert len(set(answers)) == calls == len(proxy.engine.asked)
    rows = await proxy.rows()
    assert [row.seq for row in rows] == [0, 1]
    assert [row.retry_of for row in rows] == [None, None if calls == 2 else rows[0].id]
    for wire in wires:
        wire.close()


async def _watched(proxy: Rig, watchers: int) -> None:
    await eventually(
        lambda: any(f.watchers == watchers for session in proxy.sessions_now() for f in session.flights)
    )


@pytest.mark.parametrize("marks", [RELAY, KEY])
async def test_a_marked_retry_gets_the_same_answer_whatever_became_of_it(
    proxy: Rig, marks: dict[str, str]
) -> None:
    """The relay says that it never got it; the kernel's word does not count against it."""
    wire, again = Wire(proxy), Wire(proxy)
    await wire.send(hello(), **marks)
    await wire.read()
    await again.send(hello(), **marks)
    assert content(await again.read()) == "answer 1"
    assert len(proxy.engine.asked) == 1
    wire.close()
    again.close()


async def test_a_mark_on_another_body_is_another_call(proxy: Rig) -> None:
    wire = Wire(proxy)
    await wire.send(hello(), **KEY)
    await wire.read()
    await wire.send(hello("other"), **KEY)
    assert content(await wire.read()) == "answer 2"
    wire.close()


async def test_a_joined_call_goes_on_when_the_first_connection_leaves(proxy: Rig) -> None:
    go = proxy.engine.blocked()
    first, second = Wire(proxy), Wire(proxy)
    await first.send(hello())
    await proxy.engine.arrived()
    await second.send(hello(), **RETRIED)
    await _watched(proxy, 2)
    first.close()
    await _watched(proxy, 1)
    go.set()
    assert content(await second.read()) == "answer 1"
    assert proxy.engine.aborted == 0
    await second.send(hello("other"))
    await second.read()
    rows = await proxy.until(lambda rows: rows[0].delivered == Delivery.YES)
    assert [row.end for row in rows] == ["ok", "ok", "ok"]
    second.close()


async def test_a_cancelled_call_is_not_joined(proxy: Rig) -> None:
    proxy.engine.blocked()
    first, second = Wire(proxy), Wire(proxy)
    await first.send(hello())
    await proxy.engine.arrived()
    first.close()
    async with asyncio.timeout(PATIENCE):
        await proxy.engine.gone.wait()
    proxy.engine.script = proxy.engine.answer
    await second.send(hello(), **RETRIED)
    assert content(await second.read()) == "answer 1"
    rows = await proxy.until(lambda rows: all(row.end for row in rows))
    assert [(row.end, row.retry_of) for row in rows] == [("client_gone", None), ("ok", None)]
    second.close()


@pytest.mark.parametrize("marks", [RELAY, KEY, RETRIED])
async def test_a_call_that_is_being_cancelled_is_not_joined(proxy: Rig, marks: dict[str, str]) -> None:
    """A connection that is cut cancels its call; what is asked again because of the cut is made anew."""
    stopping, stopped = asyncio.Event(), asyncio.Event()

    async def script(body: dict[str, Any]) -> ChatResult:
        try:
            await asyncio.Event().wait()
        finally:
            stopping.set()
            await stopped.wait()  # the engine takes its time
        raise AssertionError

    proxy.engine.script = script
    first, second = Wire(proxy), Wire(proxy)
    await first.send(hello(), **marks)
    await proxy.engine.arrived()
    first.reset()
    async with asyncio.timeout(PATIENCE):
        await stopping.wait()
    proxy.engine.script = proxy.engine.answer
    await second.send(hello(), **marks)
    asyncio.get_running_loop().call_later(0.3, stopped.set)
    assert content(await second.read()) == "answer 1"
    rows = await proxy.until(lambda rows: all(row.end for row in rows))
    assert [(row.end, row.retry_of) for row in rows] == [("client_gone", None), ("ok", None)]
    third = Wire(proxy)
    await third.send(hello(), **marks)
    assert content(await third.read()) == ("answer 2" if marks is RETRIED else "answer 1")
    second.close()
    third.close()


async def test_replays_do_not_use_up_the_budget(database_url: str) -> None:
    async with rig(database_url, max_calls=1) as proxy:
        await _lose(proxy, Wire(proxy), hello())
        again = Wire(proxy)
        await again.send(hello())
        assert content(await again.read()) == "answer 1"
        again.close()


# --- answers that go through a runner's relay ---


def _relay(number: int, **more: str) -> dict[str, str]:
    return {"x_forge_relay_call": f"r{number}", **more}


async def test_i3_what_a_relay_took_is_not_yet_delivered(proxy: Rig) -> None:
    """Closed in order with every byte acknowledged, or open when the attempt is sealed: neither says a thing
    about the harness behind the relay."""
    closed, kept = Wire(proxy), Wire(proxy)
    await closed.send(hello("a"), **_relay(1))
    await closed.read()
    closed.close()
    await kept.send(hello("b"), **_relay(2))
    await kept.read()
    await proxy.seal()
    rows = await proxy.rows()
    assert [(row.delivered, row.untrainable) for row in rows] == [("unknown", "delivery_unknown")] * 2
    kept.close()


async def test_i3_the_relay_tells_what_its_harness_read(proxy: Rig) -> None:
    first, second = Wire(proxy), Wire(proxy)
    await first.send(hello("a"), **_relay(1))
    await first.read()
    (row,) = await proxy.rows()
    first.close()
    await second.send(hello("b"), **_relay(2, x_forge_relay_read=f"{row.id} 12 nonsense"))
    await second.read()
    rows = await proxy.until(lambda rows: rows[0].delivered == Delivery.YES)
    assert [row.delivered for row in rows] == ["yes", "unknown"]
    await second.send(hello("c"), **_relay(3))  # on the same connection: the relay has passed it on
    await second.read()
    await proxy.until(lambda rows: rows[1].delivered == Delivery.YES)
    second.close()


async def test_an_answer_that_the_harness_read_is_not_given_again(proxy: Rig) -> None:
    """The relay's connection is gone, its word comes with the very request that asks the same again."""
    first, second = Wire(proxy), Wire(proxy)
    await first.send(hello("a"), **_relay(1))
    assert content(await first.read()) == "answer 1"
    (row,) = await proxy.rows()
    first.close()
    await eventually(lambda: all(a.line is None for s in proxy.sessions_now() for a in s._open.values()))
    await second.send(hello("a"), **_relay(2, x_forge_relay_read=str(row.id)))
    assert content(await second.read()) == "answer 2"
    second.close()


@pytest.mark.parametrize("sealed_first", [False, True])
async def test_i3_the_relays_last_word_is_written_before_and_after_the_sealing(
    proxy: Rig, sealed_first: bool
) -> None:
    wires = [Wire(proxy) for _ in range(3)]
    for number, wire in enumerate(wires):
        await wire.send(hello(str(number)), **_relay(number))
        await wire.read()
    ids = [row.id for row in await proxy.rows()]
    if sealed_first:
        await proxy.seal()
    for _ in range(2):
        await proxy.sessions.receipts(proxy.attempt, ids[:1], ids[1:2])
    if not sealed_first:
        await proxy.seal()
    assert [(row.delivered, row.untrainable) for row in await proxy.rows()] == [
        ("yes", None),
        ("no", Untrainable.NOT_DELIVERED),
        ("unknown", Untrainable.DELIVERY_UNKNOWN),
    ]
    other = await proxy.new_attempt()
    await proxy.sessions.receipts(other, ids[2:], [])  # another attempt's runner has no say
    assert (await proxy.rows())[2].delivered == Delivery.UNKNOWN
    for wire in wires:
        wire.close()


def _first_fails(proxy: Rig) -> asyncio.Event:
    """The engine fails the first call that it is asked once the event is set; others go as before."""
    fail, others = asyncio.Event(), proxy.engine.script

    async def script(body: dict[str, Any]) -> ChatResult:
        if body is proxy.engine.asked[0]:
            await fail.wait()
            raise EngineUnavailable("away", sent=True)
        return await others(body)

    proxy.engine.script = script
    return fail


async def test_i3_an_error_in_the_place_of_an_announced_answer_delivers_nothing(database_url: str) -> None:
    """A stream that got keep-alives has named its calls. When one of them fails the relay passes the error on and
    tells that all were read."""
    async with rig(database_url, keepalive_after_s=0.02, max_calls=2) as proxy:
        fail = _first_fails(proxy)
        async with proxy.client() as client:
            path = f"/a/{proxy.attempt}/v1/chat/completions"
            headers = {"x-forge-relay-call": "r1"}
            async with client.stream("POST", path, json=hello(n=2, stream=True), headers=headers) as told:
                read = told.headers["x-forge-call"]
                await proxy.until(lambda rows: any(row.end == "ok" for row in rows))
                fail.set()
                text = (await told.aread()).decode()
            assert "server_error" in text and "answer" not in text
            rows = await proxy.rows()  # before the harness can have read it
            withheld = [("ok", 503, "no", "not_delivered"), ("upstream_error", 503, "no", "not_ok")]
            assert sorted((row.end, row.status, row.delivered, row.untrainable) for row in rows) == withheld
            headers = {"x-forge-relay-call": "r2", "x-forge-relay-read": read}
            again = (await proxy.ask(client, hello(n=2, stream=True), headers=headers)).text
        # what was withheld is given to nobody, and charged to no budget
        assert [f"answer {n}" in again for n in (1, 2, 3)] == [False, True, True]
        ids = [row.id for row in await proxy.rows()]
        await proxy.sessions.receipts(proxy.attempt, ids, [])
        await proxy.seal()
        await proxy.sessions.receipts(proxy.attempt, ids, [])
        rows = await proxy.rows()
        assert sorted((row.end, row.status, row.delivered, row.untrainable) for row in rows[:2]) == withheld
        assert [(row.status, row.delivered, row.untrainable) for row in rows[2:]] == [(200, "yes", None)] * 2


async def test_i3_a_withheld_answer_that_another_request_waits_for_is_delivered_to_that(
    database_url: str,
) -> None:
    async with rig(database_url, keepalive_after_s=0.02) as proxy:
        go = proxy.engine.blocked()
        fail = _first_fails(proxy)
        async with proxy.client() as client, proxy.client(**{"x-stainless-retry-count": "1"}) as other:
            path = f"/a/{proxy.attempt}/v1/chat/completions"
            headers = {"x-forge-relay-call": "r1"}
            async with client.stream("POST", path, json=hello(n=2, stream=True), headers=headers) as told:
                fail.set()
                await proxy.until(lambda rows: any(row.end == "upstream_error" for row in rows))
                joined = asyncio.create_task(proxy.ask(other, hello(n=2, stream=True)))
                await _watched(proxy, 2)
                go.set()
                assert "server_error" in (await told.aread()).decode()
            assert (await joined).text.count("answer") == 2
        await proxy.seal()
        rows = [row for row in await proxy.rows() if row.retry_of is None]
        assert sorted((row.end, row.status, row.delivered) for row in rows) == [
            ("ok", 200, "yes"),
            ("ok", 200, "yes"),
            ("upstream_error", 503, "no"),
        ]


@pytest.mark.parametrize("n", [1, 2])
async def test_i3_an_announced_answer_that_the_sealing_withheld_is_not_delivered(
    database_url: str, n: int
) -> None:
    """The attempt is sealed while the answer is being written; the relay's last word comes after that."""
    async with rig(database_url, keepalive_after_s=0.02) as proxy:
        write_rows, go = proxy.store.write_rows, proxy.engine.blocked()
        writing, written, works = asyncio.Semaphore(0), asyncio.Event(), asyncio.Event()

        async def shaky(rows: Any) -> None:
            rows = list(rows)
            if any(what is record.ANSWERED for what, _ in rows):
                writing.release()
                await written.wait()
            elif rows[0][0] is record.WITHHELD and not works.is_set():
                asyncio.get_running_loop().call_later(0.3, works.set)
                raise StoreError("the disk that holds the database is full")
            await write_rows(rows)

        proxy.store.write_rows = shaky  # type: ignore[method-assign]
        async with proxy.client(**{"x-forge-relay-call": "r1"}) as client:
            path = f"/a/{proxy.attempt}/v1/chat/completions"
            async with client.stream("POST", path, json=hello(n=n, stream=True)) as told:
                go.set()
                async with asyncio.timeout(PATIENCE):
                    for _ in range(n):
                        await writing.acquire()
                sealing = asyncio.create_task(proxy.seal())
                await eventually(lambda: not proxy.sessions_now())
                written.set()
                assert "attempt_sealed" in (await told.aread()).decode()
        await sealing
        for _ in range(2):
            rows = await proxy.rows()
            withheld = [("ok", 409, "no", "not_delivered")] * n
            assert [(row.end, row.status, row.delivered, row.untrainable) for row in rows] == withheld
            await proxy.sessions.receipts(proxy.attempt, [row.id for row in rows], [])
