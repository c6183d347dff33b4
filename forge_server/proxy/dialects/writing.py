"""What the dialects share when they write: events, parsed tool arguments, and state that clients carry for us."""

import base64
import binascii
from typing import Any

import msgspec
from msgspec import Raw

_decode_object = msgspec.json.Decoder(dict[str, Raw]).decode
_MARK = b"forge1:"


def sse(data: object, event: str | None = None, end: bytes = b"\n\n") -> bytes:
    """One server-sent event. Characters at which some clients break lines are escaped."""
    head = b"data: " if event is None else b"event: " + event.encode() + b"\ndata: "
    body = msgspec.json.encode(data)
    for character, escaped in (
        (b"\xe2\x80\xa8", b"\\u2028"),
        (b"\xe2\x80\xa9", b"\\u2029"),
        (b"\xc2\x85", b"\\u0085"),
    ):
        body = body.replace(character, escaped)
    return head + body + end


def arguments_object(arguments: str) -> Raw:
    """Sampled arguments for a dialect that carries them parsed. Where they are no JSON object they become
    the text under ``INVALID_JSON``, which the harness shows the policy again.
    """
    try:
        raw = arguments.encode()
        if not raw.strip():
            return Raw(b"{}")
        _decode_object(raw)
        msgspec.json.decode(raw)
        return Raw(msgspec.json.format(raw, indent=-1) if b"\n" in raw or b"\r" in raw else raw)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        text = arguments.encode("utf-8", "replace").decode()
        return Raw(msgspec.json.encode({"INVALID_JSON": text}))


def seal(text: str) -> str:
    """Text as an opaque token that a client carries in its history and sends back."""
    return base64.b64encode(_MARK + text.encode("utf-8", "replace")).decode()


def unseal(token: Any) -> str | None:
    """The text of a token that ``seal`` made, else None."""
    try:
        raw = base64.b64decode(token, validate=True)
        return raw.removeprefix(_MARK).decode() if raw.startswith(_MARK) else None
    except (binascii.Error, ValueError, TypeError):
        return None


def bare(id: str) -> str:
    """The id of a completion without the prefix of its first dialect."""
    return id.removeprefix("chatcmpl-")
