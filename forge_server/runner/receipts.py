"""Which answers the harness has read: what the proxy cannot see, whose own socket ends at the relay (I3).

The kernel knows it of the harness's side. Who asks again on a connection has read the answer before; a
connection that is closed in order after everything on it was acknowledged was read to its end, since a
process that closes, or is killed, with bytes unread leaves a reset. Of a connection that is still open nothing
is said.
"""

from __future__ import annotations

import contextlib
import fcntl
import select
import socket
import struct
import termios
import threading
import time

_CLOSED, _CLOSED_BY_PEER = 7, 8  # TCP_CLOSE, TCP_CLOSE_WAIT
_MENTIONED = 64  # fit into one header


class Receipts:
    """Of one relay. A call counts as read once any of its answers was. An answer with several choices is that
    of several calls: their ids with spaces between them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[socket.socket, bytes] = {}  # the last answer on each connection, undecided
        self._known: dict[bytes, bool] = {}
        self._news: list[bytes] = []

    def sent(self, call: bytes, client: socket.socket) -> None:
        """The answer of ``call`` was passed on whole."""
        with self._lock:
            self._open[client] = call

    def lost(self, call: bytes) -> None:
        """The answer of ``call`` could not be passed on."""
        with self._lock:
            self._decide(call, False)

    def asked_again(self, client: socket.socket) -> None:
        """Another request came on the connection."""
        with self._lock:
            call = self._open.pop(client, None)
            if call is not None:
                self._decide(call, True)

    def ended(self, client: socket.socket) -> None:
        """The connection is about to be closed on this side: say now what can be said."""
        with self._lock:
            if client in self._open:
                self._look(client)
                self._open.pop(client, None)

    def news(self) -> list[bytes]:
        """Calls that were found read and that the proxy does not know of, for a header of the next request."""
        with self._lock:
            for client in tuple(self._open):
                self._look(client)
            return self._news[:_MENTIONED]

    def told(self, news: list[bytes]) -> None:
        """The request with this news was answered as a call: the proxy knows."""
        with self._lock:
            self._news = [call for call in self._news if call not in news]

    def final(self, patience_s: float) -> tuple[list[int], list[int]]:
        """Every call whose answer was read, and every one whose answer was not. The harness is dead, so its
        connections tell now, at the latest after ``patience_s``.
        """
        give_up = time.monotonic() + patience_s
        while True:
            with self._lock:
                for client in tuple(self._open):
                    self._look(client)
                waiting = list(self._open)
                known = [(int(call), read) for calls, read in self._known.items() for call in calls.split()]
            left = give_up - time.monotonic()
            if not waiting or left <= 0:
                return [call for call, read in known if read], [call for call, read in known if not read]
            poll = select.poll()
            for client in waiting:
                with contextlib.suppress(OSError, ValueError):  # closed meanwhile by its own thread
                    poll.register(client, select.POLLRDHUP)
            poll.poll(min(left, 0.05) * 1000)

    def _look(self, client: socket.socket) -> None:
        state = _state(client)
        if state in (_CLOSED, _CLOSED_BY_PEER):
            read = state == _CLOSED_BY_PEER and _acknowledged(client)
            self._decide(self._open.pop(client), read)

    def _decide(self, call: bytes, read: bool) -> None:
        if read and not self._known.get(call):
            self._news.append(call)
        self._known[call] = read or self._known.get(call, False)


def _state(sock: socket.socket) -> int:
    try:
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    except OSError:
        return 0


def _acknowledged(sock: socket.socket) -> bool:
    try:
        (left,) = struct.unpack("i", fcntl.ioctl(sock, termios.TIOCOUTQ, b"\0\0\0\0"))
    except OSError:
        return False
    return bool(left == 0)
