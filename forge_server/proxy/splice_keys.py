"""What a message says, whatever way it is written: the key by which an answer is known again in a request.

Harnesses write the same message differently from call to call: tool arguments are parsed and serialised again,
text is trimmed or cut into parts, ids are renamed, ``cache_control`` wanders, reasoning is kept, trimmed or
dropped. None of this changes a key. Anything that a model would read as something else does.
"""

import hashlib
from typing import Any

import msgspec
from msgspec import Raw

_encoder = msgspec.json.Encoder(order="deterministic")


class Key(msgspec.Struct, frozen=True):
    """``digest``: of role, text and tool calls. ``thought``: of the reasoning, empty without any; it is no part
    of the digest. ``call_ids``: as the message has them; a hint to tell equal answers apart."""

    digest: bytes
    assistant: bool = False
    thought: bytes = b""
    call_ids: tuple[str, ...] = ()


class _Message(msgspec.Struct):
    role: str = ""
    content: Any = None
    reasoning: Any = None
    reasoning_content: Any = None
    tool_calls: Any = None
    function_call: Any = None


_decode = msgspec.json.Decoder(_Message).decode


def key_of(body: bytes | Raw) -> Key:
    """The key of a message (JSON, chat shape). What is no message is known by its bytes."""
    try:
        message = _decode(body)
        calls = _calls(message)
        said = [message.role, _text(message.content), calls]
        digest = _digest(_encoder.encode(said))
    except (msgspec.MsgspecError, RecursionError):
        return Key(_digest(bytes(body)))
    if message.role != "assistant":
        return Key(digest)
    thought = _text(message.reasoning or message.reasoning_content)
    return Key(
        digest=digest,
        assistant=True,
        thought=_digest(_encoder.encode(thought)) if thought else b"",
        call_ids=tuple(
            str(call.get("id") or "") for call in message.tool_calls or () if isinstance(call, dict)
        ),
    )


def key_of_tool(body: bytes | Raw) -> bytes:
    """16 bytes that say what a tool is, whatever the order of its keys."""
    try:
        return _digest(_encoder.encode(_without_hints(msgspec.json.decode(body))))
    except (msgspec.MsgspecError, RecursionError):
        return _digest(bytes(body))


def chain(start: bytes, keys: tuple[Key, ...] | list[Key]) -> bytes:
    """16 bytes for a conversation of these messages that begins with ``start`` (model and tools)."""
    return _digest(start + b"".join(key.digest for key in keys))


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _text(content: Any) -> Any:
    """One string without space around it; parts other than text stay what they are."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content.strip()
    if not isinstance(content, list):
        return content
    texts = [_part(part) for part in content]
    if all(isinstance(text, str) for text in texts):
        return "\n".join(texts).strip()
    return texts


def _part(part: Any) -> Any:
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return part["text"]
    return _without_hints(part)


def _calls(message: _Message) -> list[Any]:
    given = message.tool_calls or []
    if message.function_call:
        given = [*given, {"function": message.function_call}]
    calls = []
    for call in given:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            calls.append(call)
            continue
        calls.append([function.get("name"), _arguments(function.get("arguments"))])
    return calls


def _arguments(given: Any) -> Any:
    """The value of a call's arguments; text that is no JSON is compared as text."""
    if not isinstance(given, str):
        return _plain(given or {})
    try:
        return _plain(msgspec.json.decode(given))
    except msgspec.MsgspecError:
        return given.strip() or {}


def _plain(value: Any) -> Any:
    """The value as any JSON library would hand it on: 1.0 and 1 are one number."""
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < 2**53 else value
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    return value


def _without_hints(value: Any) -> Any:
    """Without ``cache_control``, which tells the provider something and the model nothing."""
    if isinstance(value, dict):
        return {name: _without_hints(entry) for name, entry in value.items() if name != "cache_control"}
    if isinstance(value, list):
        return [_without_hints(entry) for entry in value]
    return value
