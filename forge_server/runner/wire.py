"""As much HTTP/1.1 as the runner needs, over TCP or a unix socket, on blocking sockets."""

import socket
import threading

HEAD_LIMIT = 64 * 1024
Headers = list[tuple[bytes, bytes]]


class Broken(ConnectionError):
    """The peer closed the connection, or sent what is not HTTP."""


class TooLong(Broken):
    """A chunk, or what follows the last one, is longer than what may be taken in."""


def dial(url: str, timeout: float | None) -> socket.socket:
    """Connect to ``http://HOST:PORT`` or ``unix:/PATH``."""
    if url.startswith("unix:"):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(timeout)
        try:
            sock.connect(url[len("unix:") :])
        except OSError:
            sock.close()
            raise
        return sock
    host, _, port = url.removeprefix("http://").rstrip("/").rpartition(":")
    sock = socket.create_connection((host.strip("[]"), int(port)), timeout)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


class Reader:
    """Buffered reads from one socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.buffer = b""

    def fill(self) -> bool:
        """One more ``recv``; False at the end of the stream."""
        data = self.sock.recv(65536)
        self.buffer += data
        return bool(data)

    def until(self, mark: bytes, limit: int) -> bytes:
        """Bytes up to and including ``mark``; ``b""`` when the stream ends before its first byte."""
        while (at := self.buffer.find(mark)) < 0:
            if len(self.buffer) > limit:
                raise Broken("head or line too long")
            if not self.fill():
                if self.buffer:
                    raise Broken("closed inside a message")
                return b""
        taken, self.buffer = self.buffer[: at + len(mark)], self.buffer[at + len(mark) :]
        return taken

    def head(self) -> tuple[bytes, Headers] | None:
        """Start line and headers (names in lower case); None when the stream ended cleanly before."""
        raw = self.until(b"\r\n\r\n", HEAD_LIMIT)
        if not raw:
            return None
        start, *lines = raw[:-4].split(b"\r\n")
        if b"\n" in start or b"\r" in start:
            raise Broken("malformed request line")
        headers = []
        for line in lines:
            name, colon, value = line.partition(b":")
            if not colon or b"\n" in line or b"\r" in line:  # a lenient parser would see two headers
                raise Broken("malformed header")
            headers.append((name.strip().lower(), value.strip()))
        return start, headers

    def exactly(self, count: int) -> bytes:
        if len(self.buffer) >= count:
            taken, self.buffer = self.buffer[:count], self.buffer[count:]
            return taken
        parts, missing = [self.buffer], count - len(self.buffer)
        self.buffer = b""
        while missing:
            data = self.sock.recv(min(missing, 1 << 20))
            if not data:
                raise Broken("closed inside a body")
            parts.append(data)
            missing -= len(data)
        return b"".join(parts)

    def chunk(self, limit: int = 1 << 30, share: "Share | None" = None) -> tuple[bytes, bytes]:
        """The next chunk of a chunked body: (raw bytes as sent, payload). The last has an empty payload.

        Before any of it is read: raises ``TooLong`` beyond ``limit`` bytes, and takes room from ``share``.
        """
        line = self.until(b"\r\n", 4096)
        try:
            size = int(line.split(b";")[0], 16)
        except ValueError:
            raise Broken("malformed chunk") from None
        if not 0 <= size <= limit:
            raise TooLong("chunk too long")
        if share is not None:
            share.take(size)
        if size:
            payload = self.exactly(size)
            return line + payload + self.exactly(2), payload
        raw = line
        while True:  # trailers, then an empty line
            part = self.until(b"\r\n", HEAD_LIMIT)
            raw += part
            if len(raw) > HEAD_LIMIT:
                raise TooLong("trailers too long")
            if part in (b"\r\n", b""):
                return raw, b""


def value_of(headers: Headers, name: bytes) -> bytes:
    """The first header of this (lower case) name, or ``b""``."""
    for key, value in headers:
        if key == name:
            return value
    return b""


def body_length(headers: Headers) -> int | None:
    """Bytes of the body by its ``content-length`` (0 when absent); None for a chunked body."""
    if b"chunked" in value_of(headers, b"transfer-encoding").lower():
        return None
    text = value_of(headers, b"content-length") or b"0"
    if not text.isdigit():
        raise Broken("malformed content-length")
    return int(text)


class Full(Exception):
    """There is no room for a body at the moment."""


class Room:
    """Memory for bodies, shared by all connections: a harness that sends without end must not bring down
    who forwards for it. One ``Share`` per connection."""

    def __init__(self, size: int) -> None:
        self._left, self._lock = size, threading.Lock()

    def add(self, count: int) -> None:
        """Give ``count`` bytes back, or take them when negative. Raises ``Full``."""
        with self._lock:
            if self._left + count < 0:
                raise Full
            self._left += count


class Share:
    """What one request has taken of the room."""

    def __init__(self, room: Room) -> None:
        self._room, self._taken = room, 0

    def take(self, count: int) -> None:
        self._room.add(-count)
        self._taken += count

    def close(self) -> None:
        self._room.add(self._taken)
        self._taken = 0


def read_body(reader: Reader, headers: Headers, limit: int, share: Share | None = None) -> bytes | None:
    """The whole body; None when it is longer than ``limit`` bytes (what is left is not read).

    With ``share`` room is taken for them first, which the caller gives back. Raises ``Full``.
    """
    length = body_length(headers)
    if length is not None:
        if length > limit:
            return None
        if share is not None:
            share.take(length)
        return reader.exactly(length)
    body = bytearray()  # a list of small chunks would take many times their room
    while True:
        try:
            _, payload = reader.chunk(limit - len(body), share)
        except TooLong:
            return None
        if not payload:
            return bytes(body)
        body += payload
