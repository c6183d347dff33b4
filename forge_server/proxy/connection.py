"""What the socket knows about the delivery of an answer (I3).

A server that has written an answer does not know that it arrived. The kernel does: it counts the bytes that
the peer's kernel has not acknowledged (TCP) or the peer has not read (unix). An answer counts as taken when
that count is zero and the connection then carries another request, is closed in order, or is still open when
the attempt is sealed. A connection reset with bytes outstanding means that it was not. Everything else stays
unknown.
"""

import asyncio
import contextlib
import fcntl
import os
import socket
import struct
import termios
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from forge_server.domain.states import Delivery

EXTENSION = "forge.connection"
"""Where the connection is found in ``scope["extensions"]``."""

_LINGER_S = (0.05, 0.25, 1.0)  # when to ask again whether a closing connection's last bytes were acknowledged

Settle = Callable[[Delivery], None]


class Connection:
    """One client connection and the answers on it whose delivery is open. ``gone`` is done once it is
    lost."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._fd: int = transport.get_extra_info("socket").fileno()
        self._open = True
        self._waiting: list[Settle] = []
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def answered(self, settle: Settle) -> None:
        """An answer was written whole; ``settle`` is called once, when its delivery is decided."""
        if not self._open:  # it was lost meanwhile: what was written last went nowhere
            settle(Delivery.UNKNOWN)
        else:
            self._waiting.append(settle)

    def taken(self) -> bool:
        """Whether the peer has taken every byte that was written."""
        if self._fd < 0 or (self._open and self._transport.get_write_buffer_size()):
            return False
        try:
            (left,) = struct.unpack("i", fcntl.ioctl(self._fd, termios.TIOCOUTQ, b"\0\0\0\0"))
        except OSError:
            return False
        return bool(left == 0)

    def next_request(self) -> None:
        """The client asks again on this connection: it has read the answers before."""
        if self._waiting:
            self._settle(Delivery.YES)

    def lost(self, error: Exception | None) -> None:
        """The connection is about to be closed (its descriptor is still valid)."""
        self._open = False
        self.gone.set_result(None)
        if not self._waiting:
            self._fd = -1
        elif error is not None:
            # reset: with everything acknowledged the peer may or may not have read it
            self._finish(Delivery.UNKNOWN if self.taken() else Delivery.NO)
        elif self.taken():
            self._finish(Delivery.YES)
        else:
            self._linger()

    def _linger(self) -> None:
        """Closed in order with the last acknowledgements outstanding: keep the socket a moment to see
        them."""
        self._fd = os.dup(self._fd)
        sock = socket.socket(fileno=self._fd)
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_WR)
        loop = asyncio.get_running_loop()
        delays = iter(_LINGER_S)

        def look() -> None:
            taken = self.taken()
            delay = None if taken else next(delays, None)
            if delay is not None:
                loop.call_later(delay, look)
                return
            self._finish(Delivery.YES if taken else Delivery.UNKNOWN)
            sock.close()

        loop.call_later(next(delays), look)

    def _finish(self, delivery: Delivery) -> None:
        self._fd = -1
        self._settle(delivery)

    def _settle(self, delivery: Delivery) -> None:
        waiting, self._waiting = self._waiting, []
        for settle in waiting:
            settle(delivery)


class ConnectionProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol with the ``Connection`` put into every request's scope.

    Serve with ``uvicorn.Config(app, http=ConnectionProtocol)``; under another server deliveries stay unknown
    until a later prompt shows them.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.connection = Connection(transport)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.connection.next_request()
        scope: dict[str, Any] = self.scope  # type: ignore[assignment]
        scope["extensions"] = {EXTENSION: self.connection}

    def connection_lost(self, exc: Exception | None) -> None:
        self.connection.lost(exc)
        super().connection_lost(exc)
