"""HTTP/1.1 connections to one engine: a whole request out, a whole answer back.

A general client costs five times as much CPU per call as everything else that this side does with a
connection, hence our own: kept-alive connections, no streaming, no redirects, no cookies, no decompression.
Cancelling a request closes its connection.
"""

import asyncio
import ssl
from urllib.parse import urlsplit

import httptools

CONNECT_S = 10.0


class Lost(Exception):
    """No answer came. ``sent``: the request may have reached the engine. ``stale``: a kept connection turned
    out to be closed before any byte of an answer, which says nothing about the engine.
    """

    def __init__(self, why: str, *, sent: bool, stale: bool = False) -> None:
        self.sent, self.stale = sent, stale
        super().__init__(why)


class Wire:
    """The connections to ``url`` (scheme, host and port). Idle ones are used for ``idle_s`` seconds at
    most."""

    def __init__(self, url: str, headers: dict[str, str], *, idle_s: float) -> None:
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._fixed = _lines({"Host": parts.netloc.rpartition("@")[2], **headers})
        self._idle_s = idle_s
        self._idle: list[_Connection] = []
        self._all: set[_Connection] = set()

    async def exchange(
        self, method: str, target: str, body: bytes, timeout_s: float, headers: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        """Status and body of the answer. Raises ``Lost``, or TimeoutError when none is there in time."""
        connection = self._kept() or await self._dial()
        lines = self._fixed + _lines({**(headers or {}), "Content-Length": str(len(body))})
        head = f"{method} {target} HTTP/1.1\r\n{lines}\r\n"
        try:
            async with asyncio.timeout(timeout_s):
                answer = await connection.exchange(head.encode("latin-1") + body)
        except BaseException:
            connection.close()
            raise
        if connection.reusable:
            connection.idle_since = asyncio.get_running_loop().time()
            self._idle.append(connection)
        else:
            connection.close()
        return answer

    def close(self) -> None:
        """Close every connection; requests in flight fail."""
        self._idle.clear()
        for connection in list(self._all):
            connection.close()

    def _kept(self) -> "_Connection | None":
        """The connection that was used last, unless it has been idle for too long."""
        oldest = asyncio.get_running_loop().time() - self._idle_s
        while self._idle:
            connection = self._idle.pop()
            if connection.open and connection.idle_since >= oldest:
                connection.kept = True
                return connection
            connection.close()
        return None

    async def _dial(self) -> "_Connection":
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_S):
                _, connection = await loop.create_connection(
                    lambda: _Connection(self._all), self._host, self._port, ssl=self._tls
                )
        except TimeoutError:
            raise Lost(f"no connection within {CONNECT_S:g} s", sent=False) from None
        except OSError as error:
            raise Lost(error.strerror or str(error), sent=False) from None
        return connection


class _Connection(asyncio.Protocol):
    """One connection, one request at a time. ``reusable`` once an answer has come and the engine keeps it
    open."""

    def __init__(self, register: set["_Connection"]) -> None:
        self._register = register
        self._transport: asyncio.Transport
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self.open = self.kept = self.reusable = False
        self.idle_since = 0.0

    def exchange(self, request: bytes) -> asyncio.Future[tuple[int, bytes]]:
        self._answer = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._body: list[bytes] = []
        self._begun = self.reusable = False
        if self.open:
            self._transport.write(request)
        else:
            self._fail("it closed the connection")
        return self._answer

    def close(self) -> None:
        if self.open:
            self._transport.abort()

    # asyncio

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self.open = True
        self._register.add(self)

    def data_received(self, data: bytes) -> None:
        if self._answer is None or self._answer.done():
            self.reusable = False
            self.close()  # bytes that nobody asked for
            return
        self._begun = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"its answer is no HTTP ({error})")

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = self.reusable = False
        self._register.discard(self)
        self._fail(str(exc) if exc else "it closed the connection")

    # httptools

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200 or self._answer is None or self._answer.done():
            return
        self.reusable = self._parser.should_keep_alive()
        self._answer.set_result((status, b"".join(self._body)))

    def _fail(self, why: str) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(Lost(why, sent=True, stale=self.kept and not self._begun))


def _lines(headers: dict[str, str]) -> str:
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items())
