"""The pod-facing inference routes: a raw ASGI application.

``/a/{attempt}/v1/...`` and bare ``/v1/...``; the key says who calls, and path and key must agree (I10). The
headers of an answer are held until the answer is there, so that an error keeps its status; only a stream that
takes longer than ``keepalive_after_s`` gets its headers and keep-alives first. A client that leaves cancels
its call.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import unquote

import msgspec
import structlog

from forge_server.domain.errors import StoreError
from forge_server.domain.states import CallEnd, Delivery
from forge_server.domain.turn import Completion, Turn
from forge_server.proxy.calls import Calls
from forge_server.proxy.connection import EXTENSION, Connection
from forge_server.proxy.dialects import gemini, messages, models
from forge_server.proxy.dialects.base import Counter, Dialect, Refusal
from forge_server.proxy.dialects.chat import CHAT
from forge_server.proxy.dialects.completions import COMPLETIONS
from forge_server.proxy.dialects.errors import openai_error
from forge_server.proxy.dialects.gemini import GEMINI
from forge_server.proxy.dialects.messages import MESSAGES
from forge_server.proxy.dialects.responses import RESPONSES
from forge_server.proxy.flights import Answer, Flight
from forge_server.proxy.identity import Headers, headers_of, key_of
from forge_server.proxy.ports import AgentKeys
from forge_server.proxy.recall import completion_id
from forge_server.proxy.sessions import Session, Sessions

log = structlog.get_logger(__name__)

Scope = Any
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

KEEPALIVE_EVERY_S = 15.0
_DRAINED = 16  # of a body that is too large, this many times the limit is read and dropped

_JSON = (b"content-type", b"application/json")
_SSE = (b"content-type", b"text/event-stream; charset=utf-8")
_NO_CACHE = (b"cache-control", b"no-cache")

_RELAY_CALL = b"x-forge-relay-call"  # a runner's relay asks: deliveries are its to tell
_RELAY_READ = b"x-forge-relay-read"  # ids of calls whose answers its harness has read
_CALL = b"x-forge-call"  # the ids that it calls them by, one for each choice

_POST: dict[str, Dialect | Counter] = {
    "v1/chat/completions": CHAT,
    "v1/completions": COMPLETIONS,
    "v1/responses": RESPONSES,
    "v1/messages": MESSAGES,
    "v1/messages/count_tokens": messages.COUNT,
}
_GEMINI = re.compile(r"v1(?:beta|alpha)?/models/.+(?::|%3[Aa])\w+")  # MODEL:METHOD
_MODELS = re.compile(r"v1(beta|alpha)?/models(?:/(.+))?")


class _Gone(Exception):
    """The client has left: there is nobody to answer."""


class Route(msgspec.Struct, frozen=True):
    """``attempt`` is None on the bare routes; ``rest`` is what follows, without the leading slash."""

    attempt: str | None
    rest: str


def route_of(path: str) -> Route | None:
    """The inference route of a path, or None when it is none."""
    rest, attempt = path.lstrip("/"), None
    if rest.startswith("a/"):
        _, attempt, rest = (*rest.split("/", 2), "", "")[:3]
    if rest in _POST or _MODELS.fullmatch(rest):
        return Route(attempt, rest)
    return None


class InferenceRoutes:
    """``model`` is the name listed by ``v1/models``; what is no inference route goes to ``otherwise``."""

    def __init__(
        self,
        *,
        sessions: Sessions,
        calls: Calls,
        keys: AgentKeys,
        model: str,
        max_body: int = 64 * 1024 * 1024,
        keepalive_after_s: float = 60.0,
        otherwise: Application | None = None,
    ) -> None:
        self._sessions, self._calls, self._keys, self._model = sessions, calls, keys, model
        self._max_body, self._keepalive_after_s = max_body, keepalive_after_s
        self._otherwise = otherwise

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry. ``raw_path`` is used, since a mount may have cut ``path``."""
        path = (scope.get("raw_path") or scope["path"].encode()).decode("latin-1")
        route = route_of(path)
        if scope["type"] == "websocket":
            await _refuse_websocket(send)
        elif route is not None:
            await self._inference(route, scope, receive, send)
        elif self._otherwise is not None:
            await self._otherwise(scope, receive, send)
        else:
            await _respond(send, 404, openai_error(Refusal(404, "not_found", f"there is no route {path}")))

    async def _inference(self, route: Route, scope: Scope, receive: Receive, send: Send) -> None:
        listing = None if _GEMINI.fullmatch(route.rest) else _MODELS.fullmatch(route.rest)
        dialect = _POST.get(route.rest) or (CHAT if listing is not None and not listing[1] else GEMINI)
        try:
            if dialect is GEMINI and listing is None:
                dialect = _gemini(route.rest, scope["query_string"])
            headers = headers_of(scope["headers"])
            attempt_id = self._identify(route, headers)
            method = scope["method"]
            if listing is not None:
                _check_method(method, "GET")
                google = bool(listing[1]) or b"x-goog-api-key" in headers
                await _respond(send, 200, self._models(google, listing[2]))
            elif route.rest == "v1/responses" and b"upgrade" in headers:
                raise Refusal(426, "websocket_unsupported", "no websockets here: use POST")
            else:
                _check_method(method, "POST")
                turn = dialect.read(await self._body(headers, receive))
                if isinstance(dialect, Counter):
                    count = await self._calls.count(await self._sessions.open(attempt_id), turn)
                    await _respond(send, 200, dialect.write(count))
                else:
                    await self._serve(attempt_id, dialect, turn, headers, scope, receive, send)
        except Refusal as refusal:
            await _refuse(send, dialect, refusal)
        except _Gone:
            pass
        except StoreError as error:
            log.error("request failed", path=scope["path"], error=str(error))
            away = Refusal(503, "store_unavailable", "the database does not answer", retry_after=2)
            await _refuse(send, dialect, away)
        except Exception:
            log.exception("request failed", path=scope["path"])
            await _refuse(send, dialect, Refusal(500, "internal_error", "internal error"))

    def _identify(self, route: Route, headers: Headers) -> str:
        attempt_id = self._keys(key_of(headers))
        if attempt_id is None:
            raise Refusal(401, "invalid_api_key", "the key is not valid")
        if route.attempt is not None and route.attempt != attempt_id:
            raise Refusal(401, "invalid_api_key", "the key belongs to another attempt")
        return attempt_id

    def _models(self, google: bool, name: str | None) -> bytes:
        if name is None:
            return models.gemini_listed(self._model) if google else models.listed(self._model)
        return models.gemini_shown(unquote(name)) if google else models.shown(unquote(name))

    async def _body(self, headers: Headers, receive: Receive) -> bytes:
        if headers.get(b"content-encoding", b"identity") != b"identity":
            raise Refusal(415, "unsupported_encoding", "send the body without content-encoding")
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _Gone
            part = message.get("body", b"")
            size += len(part)
            if part and size <= self._max_body:
                parts.append(part)
            if not message.get("more_body", False) or size > _DRAINED * self._max_body:
                break
        if size > self._max_body:
            # read to its end all the same: a client that is still sending would see a reset, not the answer
            raise Refusal(413, "body_too_large", f"the request body is larger than {self._max_body} bytes")
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def _serve(
        self,
        attempt_id: str,
        dialect: Dialect,
        turn: Turn,
        headers: Headers,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        """Answer one turn; for each choice its own call, one that it joins, or an answer that is given again."""
        session = await self._sessions.open(attempt_id)
        relayed = _RELAY_CALL in headers
        if relayed and _RELAY_READ in headers:
            session.receipts([int(call) for call in headers[_RELAY_READ].split() if call.isdigit()], ())
        served = await self._calls.begin(session, dialect.name, turn, headers)
        ids = [one.id if isinstance(one, Flight) else one.call_id for one, _ in served]
        stream = _Stream(send, dialect, turn, ids, relayed=relayed)
        connection: Connection | None = scope.get("extensions", {}).get(EXTENSION)
        try:
            await self._give(session, served, dialect, turn, stream, connection, receive, relayed=relayed)
        except Refusal as refusal:
            if not stream.started:
                raise
            if relayed:  # the ids have left with the head: the relay will take the error for their answers
                landed = [one.answer if isinstance(one, Flight) else one for one, _ in served]
                lost = [answer for answer in landed if answer is not None and answer.lost]
                await self._sessions.withdraw(session, lost, refusal)
            await stream.finish(dialect.error_event(refusal))

    async def _give(
        self,
        session: Session,
        served: list[tuple[Flight | Answer, bool]],
        dialect: Dialect,
        turn: Turn,
        stream: "_Stream",
        connection: Connection | None,
        receive: Receive,
        *,
        relayed: bool,
    ) -> None:
        """Wait for the answers and send them. Raises ``Refusal`` when one of them failed."""
        flights = [one for one, _ in served if isinstance(one, Flight)]
        leaving = connection.gone if connection is not None else asyncio.ensure_future(receive())
        given: list[tuple[Answer, int | None]] = []
        try:
            gone = await self._wait(flights, stream, leaving) if flights else False
            answers = [one.task.result() if isinstance(one, Flight) else one for one, _ in served]
            if session.closed:
                for answer in answers:
                    session.settle(answer, Delivery.NO)
                assert session.refusal is not None
                raise session.refusal.again()
            given = [
                (answer, None if own else await self._calls.repeat(session, dialect.name, turn, answer))
                for answer, (_, own) in zip(answers, served, strict=True)
            ]
            await self._deliver(session, given, stream, connection, gone=gone, relayed=relayed)
        finally:
            if connection is None:
                leaving.cancel()
            for one, _ in served:
                one.watchers -= 1
                landed = one.answer if isinstance(one, Flight) else None
                if landed is not None:
                    landed.watchers -= 1
                    if (
                        not given and landed.lost
                    ):  # another choice failed, or the client left before it was due
                        session.settle(landed, Delivery.NO)

    async def _wait(self, flights: list[Flight], stream: "_Stream", leaving: asyncio.Future[Any]) -> bool:
        """Wait until every flight has landed; whether the client has left meanwhile. Leaving before that
        cancels the calls that nobody else waits for.
        """
        timeout: float | None = self._keepalive_after_s
        landed: asyncio.Future[Any] = flights[0].task
        if len(flights) > 1:
            landed = asyncio.gather(*(flight.task for flight in flights), return_exceptions=True)
        while not landed.done():
            await asyncio.wait((landed, leaving), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if landed.done():
                break
            if leaving.done():
                for flight in flights:
                    if flight.watchers == 1:
                        flight.stop(CallEnd.CLIENT_GONE, Refusal(499, "client_gone", "the client has left"))
                raise _Gone
            timeout = KEEPALIVE_EVERY_S if await stream.keep_alive(int(flights[0].began_at)) else None
        return leaving.done()

    async def _deliver(
        self,
        session: Session,
        given: list[tuple[Answer, int | None]],
        stream: "_Stream",
        connection: Connection | None,
        *,
        gone: bool,
        relayed: bool,
    ) -> None:
        """Send the answer to each choice, and let the connection tell what becomes of them. With each goes
        the id of its row if it is given again.
        """

        def told(delivery: Delivery) -> None:
            # The end of a relay's connection says nothing about the harness behind it: the relay does.
            if relayed and delivery is Delivery.YES and connection is not None and connection.gone.done():
                delivery = Delivery.UNKNOWN
            for answer, row_id in given:
                session.settle(answer, delivery, row_id)

        if gone:
            told(Delivery.NO)
            return
        for answer, _ in given:
            answer.line, answer.relayed = connection, relayed
        try:
            await stream.answer([answer.completion for answer, _ in given])
        except OSError:
            told(Delivery.NO)
            return
        if connection is None:
            told(Delivery.UNKNOWN)
        else:
            connection.answered(told)


class _Stream:
    """The response to one request: JSON or events, with the headers held back as long as possible."""

    def __init__(self, send: Send, dialect: Dialect, turn: Turn, ids: list[int], *, relayed: bool) -> None:
        self._send, self._dialect, self._turn = send, dialect, turn
        self._id = completion_id(ids[0])
        self._extra = [(_CALL, b" ".join(b"%d" % id for id in ids))] if relayed else []
        self.started = False

    async def keep_alive(self, created: int) -> bool:
        """Show a streaming client that we are alive; False when its dialect has no harmless way."""
        if not self._turn.stream:
            return False
        event = self._dialect.keepalive(self._turn, self._id, created, not self.started)
        if event is None:
            return False
        if not self.started:
            self.started = True
            await self._send(
                {"type": "http.response.start", "status": 200, "headers": [_SSE, _NO_CACHE, *self._extra]}
            )
        await self._send({"type": "http.response.body", "body": event, "more_body": True})
        return True

    async def answer(self, choices: list[Completion]) -> None:
        completion = choices[0]
        if len(choices) > 1:
            completion = msgspec.structs.replace(completion, others=tuple(choices[1:]))
        if self._turn.stream:
            await self.finish(self._dialect.events(self._turn, completion))
        else:
            await _respond(self._send, 200, self._dialect.write(self._turn, completion), self._extra)

    async def finish(self, events: bytes) -> None:
        """All events at once; with their length, unless the headers have left already."""
        if not self.started:
            self.started = True
            await _start(self._send, 200, [_SSE, _NO_CACHE, *self._extra], len(events))
        await self._send({"type": "http.response.body", "body": events})


def _gemini(rest: str, query: bytes) -> Dialect | Counter:
    found = gemini.method(rest.partition("/models/")[2], query)
    if found is None:
        raise Refusal(404, "not_found", f"there is no method {rest}")
    return found


def _check_method(method: str, wanted: str) -> None:
    if method != wanted:
        raise Refusal(405, "method_not_allowed", f"use {wanted}")


async def _refuse(send: Send, dialect: Dialect | Counter, refusal: Refusal) -> None:
    extra = []
    if refusal.retry_after is not None:
        extra.append((b"retry-after", str(refusal.retry_after).encode()))
    if refusal.status == 426:
        extra.append((b"upgrade", b"HTTP/1.1"))
    if refusal.status == 413:
        extra.append((b"connection", b"close"))
    await _respond(send, refusal.status, dialect.error(refusal), extra)


async def _respond(
    send: Send, status: int, body: bytes, extra: list[tuple[bytes, bytes]] | None = None
) -> None:
    await _start(send, status, [_JSON, *(extra or ())], len(body))
    await send({"type": "http.response.body", "body": body})


async def _start(send: Send, status: int, headers: list[tuple[bytes, bytes]], length: int) -> None:
    headers.append((b"content-length", str(length).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def _refuse_websocket(send: Send) -> None:
    """A server with websocket support hands the upgrade over as a websocket scope."""
    refusal = Refusal(426, "websocket_unsupported", "no websockets here: use POST")
    body = openai_error(refusal)
    headers = [_JSON, (b"upgrade", b"HTTP/1.1"), (b"content-length", str(len(body)).encode())]
    await send({"type": "websocket.http.response.start", "status": 426, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": body})
