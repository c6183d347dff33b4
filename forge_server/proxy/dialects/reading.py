"""How the dialects take a request body apart: decoding that turns every fault into a 400, and shared checks."""

from collections.abc import Callable, Collection
from functools import wraps
from typing import Any, TypeVar

import msgspec
from msgspec import Raw

from forge_server.domain.turn import Turn
from forge_server.proxy.dialects.base import Refusal

T = TypeVar("T")

NOTHING = Raw()
"""Stands in a field of type Raw for one that was not sent."""
NULL = Raw(b"null")

_decode_keys = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_any = msgspec.json.Decoder().decode
_encode = msgspec.json.encode


def bad(message: str, *, param: str | None = None, code: str = "invalid_request") -> Refusal:
    """The request is at fault."""
    return Refusal(400, code, message, param=param)


def unsupported(what: str, *, param: str | None = None, instead: str = "") -> Refusal:
    """The request is right in its dialect, but asks for something that is not offered here."""
    advice = f": {instead}" if instead else ""
    return Refusal(400, "unsupported", f"{what} is not supported{advice}", param=param)


def parse(body: bytes, decode: Callable[[bytes], T]) -> tuple[T, frozenset[str]]:
    """The decoded body and the names of its top-level fields."""
    try:
        keys = _decode_keys(body)
        parsed = decode(body)
    except msgspec.ValidationError as error:
        raise bad(f"the request body is not valid: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad(f"the request body is not JSON: {error}", code="invalid_json") from None
    return parsed, frozenset(keys)


def check_text(raw: Raw) -> None:
    """Refuse half surrogate pairs in what is passed on without being decoded: no tokenizer takes them."""
    try:
        _decode_any(raw)  # quicker than to search for an escape
    except msgspec.DecodeError:
        raise bad("a string holds half a surrogate pair", code="invalid_json") from None


def schema_of(given: Raw, param: str) -> Raw | None:
    """The JSON schema of a tool's arguments, or None where there is none."""
    if given in (NOTHING, NULL):
        return None
    if not bytes(given).startswith(b"{"):
        raise bad("the schema of a tool's arguments is not an object", param=param)
    check_text(given)
    return given


def _printable(name: str) -> str:
    """The name of a field as it can be shown and stored, whatever a client has called it."""
    return name[:80] if name.isprintable() else repr(name[:80])


def bounded(read: Callable[..., Turn]) -> Callable[..., Turn]:
    """Makes a reader refuse what could not be written again: what is nested deeper than the interpreter can
    follow, numbers that no JSON library agrees on, and names that cannot be stored.
    """

    @wraps(read)
    def guarded(*args: Any, **more: Any) -> Turn:
        try:
            turn = read(*args, **more)
            written = _encode((turn.tool_choice, turn.response_format, turn.asked, turn.max_tokens))
        except RecursionError:
            raise bad("the request body is nested too deeply") from None
        except OverflowError:
            raise bad("a number in the request body is too large") from None
        if b"\\u0000" in written:
            raise bad("a parameter holds a NUL character")
        if turn.dropped:
            turn = msgspec.structs.replace(turn, dropped=tuple(map(_printable, turn.dropped)))
        return turn

    return guarded


def check_choice(choice: object, names: Collection[str], *, param: str = "tool_choice") -> None:
    """A choice (in chat shape) has to be among the tools that are sent."""
    if choice == "required" and not names:
        raise bad("a tool call is required, but there are no tools", param=param)
    if isinstance(choice, dict):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or name not in names:
            raise bad(f"the tool {name!r} is to be called, but is not among the tools", param=param)


def check_limit(limit: int | None, param: str) -> None:
    """A limit of the answer's tokens is at least one."""
    if limit is not None and limit < 1:
        raise bad(f"{param} must be at least 1, not {limit}", param=param)


MOST_CHOICES = 128
"""More answers than this to one request no API gives."""


def choices(count: int | None, param: str) -> int:
    """How many answers are wanted at once."""
    if count is None:
        return 1
    if not 1 <= count <= MOST_CHOICES:
        raise bad(f"{param} must be between 1 and {MOST_CHOICES}, not {count}", param=param)
    return count
