"""What a dialect is, and the refusal that every part of the proxy raises and a dialect words."""

from collections.abc import Callable

import msgspec

from forge_server.domain.turn import Completion, Turn


class Refusal(Exception):
    """A request is answered with ``status`` instead of a completion.

    ``code`` is the machine-readable reason, ``retry_after`` seconds go with a 503, ``param`` names the field
    at fault.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        self.status, self.code, self.message = status, code, message
        self.param, self.retry_after = param, retry_after
        super().__init__(f"{status} {code}: {message}")

    def again(self) -> "Refusal":
        """An equal one to raise: one that is kept and raised would hold on to every frame it went through."""
        return Refusal(self.status, self.code, self.message, param=self.param, retry_after=self.retry_after)


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """``read``: body -> turn, raises ``Refusal``. ``write``: the whole response body. ``events``: the whole
    event stream. ``keepalive`` (turn, id, created, whether it is the first): an event that clients ignore, or
    None where every event hurts. ``error``: error body. ``error_event``: the same inside a stream whose
    headers have left.
    """

    name: str
    read: Callable[[bytes], Turn]
    write: Callable[[Turn, Completion], bytes]
    events: Callable[[Turn, Completion], bytes]
    keepalive: Callable[[Turn, str, int, bool], bytes | None]
    error: Callable[[Refusal], bytes]
    error_event: Callable[[Refusal], bytes]


class Counter(msgspec.Struct, frozen=True, kw_only=True):
    """Counts the tokens of a request instead of answering it. ``write``: count -> response body."""

    name: str
    read: Callable[[bytes], Turn]
    write: Callable[[int], bytes]
    error: Callable[[Refusal], bytes]
