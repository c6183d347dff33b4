"""Chat Completions.

Requests: the parameters in ``_Request`` are understood, every other one is dropped by name. Answers:
``usage`` is always sent; in a stream it rides on the last choice chunk, and comes as a chunk of its own too
when ``stream_options.include_usage`` asks for it. The reasoning is called ``reasoning_content``, the name
that harnesses echo. Messages pass as they came, but for their images and the role ``developer``, which is
the system's.
"""

from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

from forge_server.domain.turn import Completion, Turn, as_message
from forge_server.proxy.dialects import images
from forge_server.proxy.dialects.base import Dialect, Refusal
from forge_server.proxy.dialects.conversation import image_part
from forge_server.proxy.dialects.errors import openai_error, openai_error_event
from forge_server.proxy.dialects.reading import (
    NULL,
    bad,
    bounded,
    check_choice,
    check_text,
    choices,
    unsupported,
)
from forge_server.proxy.dialects.writing import sse


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Request(msgspec.Struct):
    messages: list[Raw]
    model: str = ""
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    tools: list[Raw] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    temperature: float | UnsetType | None = UNSET
    top_p: float | UnsetType | None = UNSET
    top_k: int | UnsetType | None = UNSET
    min_p: float | UnsetType | None = UNSET
    presence_penalty: float | UnsetType | None = UNSET
    frequency_penalty: float | UnsetType | None = UNSET
    repetition_penalty: float | UnsetType | None = UNSET
    logit_bias: dict[str, float] | UnsetType | None = UNSET
    seed: int | UnsetType | None = UNSET


class _Part(msgspec.Struct):
    type: str
    text: Any = None
    image_url: Any = None
    uuid: Any = None


class _Function(msgspec.Struct):
    arguments: Any = None


class _Call(msgspec.Struct):
    id: str | None = None
    function: _Function | None = None


class _Message(msgspec.Struct):
    """What is looked at, or at least decoded: text that is no Unicode is found by that."""

    role: str
    content: str | list[_Part] | None = None
    reasoning_content: Any = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None


_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
)
_KNOWN = frozenset(_Request.__struct_fields__)
_TEXTS = frozenset({"text", "input_text", "output_text", "refusal", "thinking"})
_REFUSED = {  # what cannot be left out without changing what the answer is
    "continue_final_message": "end with another message",
    "functions": "use tools",
    "function_call": "use tool_choice",
}
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})

_decode = msgspec.json.Decoder(_Request).decode
_decode_keys = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_message = msgspec.json.Decoder(_Message).decode
_decode_any = msgspec.json.Decoder(dict[str, Any]).decode
_encode = msgspec.json.encode


@bounded
def read(body: bytes) -> Turn:
    """Parse and validate a request body; raises ``Refusal`` 400 that names what is wrong."""
    try:
        keys = _decode_keys(body)
        request = _decode(body)
    except msgspec.ValidationError as error:
        raise Refusal(400, "invalid_request", f"the request body is not valid: {error}") from None
    except msgspec.DecodeError as error:
        raise Refusal(400, "invalid_json", f"the request body is not JSON: {error}") from None
    for name, instead in _REFUSED.items():
        if bytes(keys.get(name, NULL)) not in (b"null", b"false", b"[]"):
            raise unsupported(name, param=name, instead=instead)
    if not request.messages:
        raise Refusal(400, "invalid_request", "messages is empty", param="messages")
    called: set[str | None] = set()
    messages = list(request.messages)
    for index, message in enumerate(request.messages):
        try:
            parsed = _decode_message(message)
        except msgspec.DecodeError as error:
            raise Refusal(400, "invalid_request", f"messages[{index}]: {error}", param="messages") from None
        role = parsed.role
        if role not in _ROLES:
            raise Refusal(
                400, "invalid_request", f"messages[{index}]: unknown role {role!r}", param="messages"
            )
        if parsed.tool_calls:
            for call in parsed.tool_calls:
                called.add(call.id)
        elif role == "tool" and parsed.tool_call_id not in called:
            raise bad(
                f"messages[{index}]: there is no tool call {parsed.tool_call_id!r} that this is the result of",
                param="messages",
            )
        if isinstance(parsed.content, list):
            messages[index] = _content(message, parsed.content, f"messages[{index}].content")
        if role == "developer":  # chat templates leave such a message out in silence, or refuse it
            messages[index] = Raw(_encode(_decode_any(messages[index]) | {"role": "system"}))
    for tool in request.tools or ():
        check_text(tool)
    if request.tool_choice not in (None, "auto", "none"):
        check_choice(request.tool_choice, _names(request.tools or []))
    limits = [x for x in (request.max_tokens, request.max_completion_tokens) if x is not None]
    if limits and min(limits) < 1:
        raise Refusal(
            400, "invalid_request", f"max_tokens must be at least 1, not {min(limits)}", param="max_tokens"
        )
    stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    asked = {
        name: value
        for name in _SAMPLING
        if (value := getattr(request, name)) is not UNSET and value is not None
    }
    return Turn(
        messages=tuple(messages),
        tools=tuple(request.tools or ()),
        tool_choice=request.tool_choice,
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=request.response_format,
        stop=stop,
        max_tokens=min(limits) if limits else None,
        choices=choices(request.n, "n"),
        model=request.model,
        stream=bool(request.stream),
        stream_usage=bool(request.stream_options and request.stream_options.include_usage),
        asked=asked,
        dropped=() if keys.keys() <= _KNOWN else tuple(sorted(keys.keys() - _KNOWN)),
    )


def _content(message: Raw, parts: list[_Part], where: str) -> Raw:
    """The message with its images in one form; without any it keeps its bytes. The engine knows further kinds of
    parts, and would fetch them from anywhere."""
    urls: dict[int, str] = {}
    for index, part in enumerate(parts):
        at = f"{where}[{index}]"
        if part.type == "image_url":
            given = part.image_url
            urls[index] = images.of_url(given.get("url") if isinstance(given, dict) else given, at)
        elif part.type not in _TEXTS:
            raise unsupported(f"{at}: a part of type {part.type[:100]!r}", param="messages")
        elif part.uuid is not None:  # vLLM then looks for an image, audio or video in it, whatever its type
            raise unsupported(f"{at}: a part of type {part.type!r} with a uuid", param="messages")
        elif part.type.endswith("text") and not isinstance(part.text, str):
            raise bad(f"{at}: a part of type {part.type!r} without its text", param="messages")
    if not urls:
        return message
    value = _decode_any(message)
    for index, url in urls.items():
        value["content"][index] = image_part(url)
    return Raw(_encode(value))


def _names(tools: list[Raw]) -> set[str]:
    """Names of the tools that have one; what is no tool is left for the engine to refuse."""
    found = set()
    for tool in tools:
        parsed = msgspec.json.decode(tool)
        function = parsed.get("function") if isinstance(parsed, dict) else None
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            found.add(function["name"])
    return found


def _usage(completion: Completion) -> dict[str, int]:
    return {
        "prompt_tokens": completion.prompt_tokens,
        "completion_tokens": completion.sampled_tokens,
        "total_tokens": completion.prompt_tokens + completion.sampled_tokens,
    }


def write(turn: Turn, completion: Completion) -> bytes:
    """The response body of a request that does not stream."""
    return _encode(
        {
            "id": completion.id,
            "object": "chat.completion",
            "created": completion.created,
            "model": turn.model,
            "choices": [
                {
                    "index": index,
                    "message": as_message(choice),
                    "logprobs": None,
                    "finish_reason": choice.finish_reason,
                }
                for index, choice in enumerate(completion.choices)
            ],
            "usage": _usage(completion),
        }
    )


def _chunk(
    turn: Turn, id: str, created: int, choices: list[Any], usage: dict[str, int] | None = None
) -> bytes:
    body = {
        "id": id,
        "object": "chat.completion.chunk",
        "created": created,
        "model": turn.model,
        "choices": choices,
    }
    if usage is not None:
        body["usage"] = usage
    return sse(body)


def events(turn: Turn, completion: Completion) -> bytes:
    """The event stream of a finished completion: few, large deltas, one choice after the other."""
    usage = _usage(completion)
    out = []
    for index, choice in enumerate(completion.choices):
        for delta in _deltas(choice):
            told = [{"index": index, "delta": delta, "finish_reason": None}]
            out.append(_chunk(turn, completion.id, completion.created, told))
        last = [{"index": index, "delta": {}, "finish_reason": choice.finish_reason}]
        ends = index == len(completion.others)
        rides = usage if ends and not turn.stream_usage else None
        out.append(_chunk(turn, completion.id, completion.created, last, rides))
    if turn.stream_usage:
        out.append(_chunk(turn, completion.id, completion.created, [], usage))
    out.append(b"data: [DONE]\n\n")
    return b"".join(out)


def _deltas(choice: Completion) -> list[dict[str, Any]]:
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    if choice.reasoning:
        deltas.append({"reasoning_content": choice.reasoning})
    if choice.text:
        deltas.append({"content": choice.text})
    for index, call in enumerate(choice.tool_calls):
        function = {"name": call.name, "arguments": call.arguments}
        deltas.append(
            {"tool_calls": [{"index": index, "id": call.id, "type": "function", "function": function}]}
        )
    return deltas


def keepalive(turn: Turn, id: str, created: int, first: bool) -> bytes:
    """A chunk without choices: resets read timers and is ignored by every client that was tried."""
    return _chunk(turn, id, created, [])


CHAT = Dialect(
    name="chat",
    read=read,
    write=write,
    events=events,
    keepalive=keepalive,
    error=openai_error,
    error_event=openai_error_event,
)
