"""Anthropic Messages, as Claude Code and the Anthropic SDKs speak it.

``system`` becomes the first message; system messages within the conversation stay where they are. Thinking is
shown only to those who ask for it (``thinking``: enabled or adaptive). ``cache_control`` says nothing about
the prompt and is ignored. Tools that the server would have to run are dropped by name; the client tools that
Anthropic's models know without a schema are refused. Tool arguments travel as parsed objects: the sampled
text is kept where it is a JSON object, spacing included.
"""

from collections.abc import Callable
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Raw, UnsetType

from forge_server.domain.turn import Completion, Turn
from forge_server.proxy.dialects import images
from forge_server.proxy.dialects.base import Counter, Dialect, Refusal
from forge_server.proxy.dialects.conversation import (
    Conversation,
    Part,
    content_of,
    image_part,
    text_part,
    tool,
)
from forge_server.proxy.dialects.errors import anthropic_error
from forge_server.proxy.dialects.reading import (
    NOTHING,
    bad,
    bounded,
    check_choice,
    check_limit,
    check_text,
    parse,
    schema_of,
    unsupported,
)
from forge_server.proxy.dialects.writing import arguments_object, bare, seal, sse


class _Source(msgspec.Struct):
    type: str
    media_type: str = ""
    data: str = ""
    url: str = ""


class _Block(msgspec.Struct):
    type: str
    text: str | None = None
    thinking: str | None = None
    source: _Source | None = None
    id: str | None = None
    name: str | None = None
    input: Raw = NOTHING
    tool_use_id: str | None = None
    content: "str | list[_Block] | None" = None
    is_error: bool | None = None
    tool_name: str | None = None


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Block]


class _Tool(msgspec.Struct):
    name: str | None = None
    type: str | None = None
    description: str | None = None
    input_schema: Raw = NOTHING
    strict: bool | None = None
    defer_loading: bool | None = None


class _Choice(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class _Thinking(msgspec.Struct):
    type: str


class _Format(msgspec.Struct):
    type: str
    schema: dict[str, Any] | None = None


class _OutputConfig(msgspec.Struct):
    format: _Format | None = None
    effort: str | None = None


class _Counted(msgspec.Struct, kw_only=True):
    model: str
    messages: list[_Message]
    system: str | list[_Block] | None = None
    tools: list[_Tool] | None = None
    tool_choice: _Choice | None = None
    thinking: _Thinking | None = None
    output_config: _OutputConfig | None = None


class _Request(_Counted, kw_only=True):
    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | UnsetType | None = UNSET
    top_p: float | UnsetType | None = UNSET
    top_k: int | UnsetType | None = UNSET


class _Memo(msgspec.Struct, frozen=True):
    """``thinking``: whether the client asked to see it."""

    thinking: bool


_SERVER_TOOLS = (
    "web_search_",
    "web_fetch_",
    "code_execution_",
    "tool_search_tool_",
    "mcp_toolset",
    "advisor_",
)
_KNOWN = frozenset(_Request.__struct_fields__) - {"output_config"}
_STOPS = {"tool_calls": "tool_use", "length": "max_tokens"}
_ASKED = ("temperature", "top_p", "top_k")

_decode = msgspec.json.Decoder(_Request).decode
_decode_counted = msgspec.json.Decoder(_Counted).decode
_encode = msgspec.json.encode


@bounded
def read(body: bytes) -> Turn:
    """Parse and validate a request body; raises ``Refusal`` 400 that names what is wrong."""
    request, keys = parse(body, _decode)
    check_limit(request.max_tokens, "max_tokens")
    turn = _turn(request, keys - _KNOWN)
    asked = {name: getattr(request, name) for name in _ASKED}
    return msgspec.structs.replace(
        turn,
        stop=tuple(request.stop_sequences or ()),
        max_tokens=request.max_tokens,
        stream=bool(request.stream),
        asked={name: value for name, value in asked.items() if value is not UNSET and value is not None},
    )


@bounded
def read_counted(body: bytes) -> Turn:
    """The turn of a request whose tokens are to be counted."""
    request, _ = parse(body, _decode_counted)
    return _turn(request, frozenset())


def _turn(request: _Counted, unknown: frozenset[str]) -> Turn:
    if not request.messages:
        raise bad("messages: at least one message is required", param="messages")
    dropped = set(unknown - {"output_config"})
    tools, names = _tools(request.tools or [], dropped)
    choice, parallel = _choice(request.tool_choice)
    check_choice(choice, names)
    conversation = Conversation()
    if request.system:
        conversation.add("system", _system(request.system, "system"))
    for index, message in enumerate(request.messages):
        where = f"messages.{index}"
        if not message.content:
            raise bad(f"{where}: content is empty", param="messages")
        if message.role == "system":
            conversation.add("system", _system(message.content, where))
        elif message.role == "user":
            _user(conversation, message.content, where, dropped)
        elif message.role == "assistant":
            _assistant(conversation, message.content, where, dropped)
        else:
            raise bad(f"{where}: unknown role {message.role!r}", param="messages")
    if request.messages[-1].role == "assistant":
        raise unsupported(
            "a prefilled answer", param="messages", instead="end the conversation with a user message"
        )
    if request.output_config is not None and request.output_config.effort is not None:
        dropped.add("output_config.effort")
    return Turn(
        messages=conversation.messages(),
        tools=tuple(tools),
        tool_choice=choice,
        parallel_tool_calls=parallel,
        response_format=_response_format(request.output_config),
        model=request.model,
        stream_usage=True,
        dropped=tuple(sorted(dropped)),
        memo=_Memo(request.thinking is not None and request.thinking.type in ("enabled", "adaptive")),
    )


def _tools(given: list[_Tool], dropped: set[str]) -> tuple[list[Raw], set[str]]:
    """Tools in chat shape, and their names."""
    tools: list[Raw] = []
    names: set[str] = set()
    for index, entry in enumerate(given):
        where = f"tools.{index}"
        if entry.type not in (None, "custom"):
            if entry.type.startswith(_SERVER_TOOLS):
                dropped.add(f"tools.{entry.type}")
                continue
            raise unsupported(
                f"{where}: a tool of type {entry.type!r}", param="tools", instead="give it an input_schema"
            )
        if not entry.name:
            raise bad(f"{where}.name: field required", param="tools")
        schema = schema_of(entry.input_schema, where)
        if schema is None:
            raise bad(f"{where}.input_schema: field required", param="tools")
        if entry.defer_loading:
            dropped.add("tools.defer_loading")
        names.add(entry.name)
        tools.append(tool(entry.name, entry.description, schema, strict=bool(entry.strict)))
    return tools, names


def _choice(choice: _Choice | None) -> tuple[Any, bool | None]:
    """Tool choice in chat shape, and whether calls may be parallel."""
    if choice is None:
        return None, None
    parallel = None if choice.disable_parallel_tool_use is None else not choice.disable_parallel_tool_use
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}, parallel
    return ("required" if choice.type == "any" else choice.type), parallel


def _response_format(config: _OutputConfig | None) -> dict[str, Any] | None:
    if config is None or config.format is None:
        return None
    if config.format.type != "json_schema" or config.format.schema is None:
        raise unsupported(f"an output format of type {config.format.type!r}", param="output_config.format")
    schema = {"name": "answer", "schema": config.format.schema, "strict": True}
    return {"type": "json_schema", "json_schema": schema}


def _system(content: str | list[_Block], where: str) -> str:
    if isinstance(content, str):
        return content
    for block in content:
        if block.type != "text" or block.text is None:
            raise bad(f"{where}: a system prompt is made of text blocks", param="system")
    return "\n".join(block.text or "" for block in content)


def _user(conversation: Conversation, content: str | list[_Block], where: str, dropped: set[str]) -> None:
    """One user message: tool results are messages of their own, in the order in which they stand."""
    if isinstance(content, str):
        conversation.add("user", content)
        return
    parts: list[Part] = []
    for index, block in enumerate(content):
        at = f"{where}.content.{index}"
        if block.type != "tool_result":
            parts.append(_part(block, at))
            continue
        if parts:
            conversation.add("user", content_of(parts))
            parts = []
        if not block.tool_use_id:
            raise bad(f"{at}.tool_use_id: field required", param="messages")
        if block.is_error:
            dropped.add("tool_result.is_error")
        inner = block.content or ""
        result = inner if isinstance(inner, str) else content_of([_part(b, at) for b in inner])
        conversation.result(block.tool_use_id, result, "messages")
    if parts:
        conversation.add("user", content_of(parts))


def _part(block: _Block, where: str) -> Part:
    """Text or an image."""
    if block.type == "text":
        if block.text is None:
            raise bad(f"{where}.text: field required", param="messages")
        return text_part(block.text)
    if block.type == "tool_reference" and block.tool_name is not None:
        return text_part(f"The tool {block.tool_name} is available.")
    source = block.source
    if block.type == "image" and source is None:
        raise bad(f"{where}.source: field required", param="messages")
    if block.type == "image" and source is not None and source.type == "base64":
        return image_part(images.of_base64(source.media_type, source.data, f"{where}.source"))
    if block.type == "image" and source is not None and source.type == "url":
        return image_part(images.of_url(source.url, f"{where}.source.url"))
    if block.type == "document" and source is not None and source.type == "text":
        return text_part(source.data)
    raise unsupported(f"{where}: a block of type {block.type!r}", param="messages")


def _assistant(
    conversation: Conversation, content: str | list[_Block], where: str, dropped: set[str]
) -> None:
    if isinstance(content, str):
        conversation.say(content)
        return
    for index, block in enumerate(content):
        at = f"{where}.content.{index}"
        match block.type:
            case "text" if block.text is not None:
                conversation.say(block.text)
            case "thinking" if block.thinking is not None:
                conversation.think(block.thinking)
            case "redacted_thinking":
                dropped.add("redacted_thinking")
            case "tool_use" if block.id and block.name:
                if block.input != NOTHING:
                    check_text(block.input)
                arguments = bytes(block.input).decode() or "{}"
                if not arguments.startswith("{"):
                    raise bad(f"{at}.input: not an object", param="messages")
                conversation.call(block.id, block.name, arguments)
            case "text" | "thinking" | "tool_use":
                raise bad(f"{at}: a field is missing", param="messages")
            case other:
                raise unsupported(f"{at}: a block of type {other!r}", param="messages")


def _blocks(turn: Turn, completion: Completion) -> list[dict[str, Any]]:
    """The answer's blocks; the arguments of a tool call still as text."""
    blocks: list[dict[str, Any]] = []
    if completion.reasoning and isinstance(turn.memo, _Memo) and turn.memo.thinking:
        signature = seal(bare(completion.id))
        blocks.append({"type": "thinking", "thinking": completion.reasoning, "signature": signature})
    if completion.text:
        blocks.append({"type": "text", "text": completion.text})
    for call in completion.tool_calls:
        blocks.append(
            {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments_object(call.arguments)}
        )
    return blocks


def _stop_reason(completion: Completion) -> str:
    if completion.tool_calls and completion.finish_reason == "stop":
        return "tool_use"  # a forced call ends like that
    return _STOPS.get(completion.finish_reason, "end_turn")


def _message(
    turn: Turn, completion: Completion, content: list[Any], stop: str | None, out: int
) -> dict[str, Any]:
    usage = {
        "input_tokens": completion.prompt_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": out,
    }
    return {
        "id": f"msg_{bare(completion.id)}",
        "type": "message",
        "role": "assistant",
        "model": turn.model,
        "content": content,
        "stop_reason": stop,
        "stop_sequence": None,
        "usage": usage,
    }


def write(turn: Turn, completion: Completion) -> bytes:
    """The response body of a request that does not stream."""
    blocks, stop = _blocks(turn, completion), _stop_reason(completion)
    return _encode(_message(turn, completion, blocks, stop, completion.completion_tokens))


def _event(type: str, **fields: Any) -> bytes:
    return sse({"type": type, **fields}, type)


def events(turn: Turn, completion: Completion) -> bytes:
    """The event stream of a finished completion: few, large deltas."""
    out = [_event("message_start", message=_message(turn, completion, [], None, 1))]
    for index, block in enumerate(_blocks(turn, completion)):
        opened, deltas = _OPEN[block["type"]](block)
        out.append(_event("content_block_start", index=index, content_block=opened))
        out += [_event("content_block_delta", index=index, delta=delta) for delta in deltas]
        out.append(_event("content_block_stop", index=index))
    delta = {"stop_reason": _stop_reason(completion), "stop_sequence": None}
    usage = {"input_tokens": completion.prompt_tokens, "output_tokens": completion.completion_tokens}
    out.append(_event("message_delta", delta=delta, usage=usage))
    out.append(_event("message_stop"))
    return b"".join(out)


def _open_thinking(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    return block | {"thinking": "", "signature": ""}, [
        {"type": "thinking_delta", "thinking": block["thinking"]},
        {"type": "signature_delta", "signature": block["signature"]},
    ]


def _open_text(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    return block | {"text": ""}, [{"type": "text_delta", "text": block["text"]}]


def _open_tool(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    arguments = bytes(block["input"]).decode()
    return block | {"input": {}}, [{"type": "input_json_delta", "partial_json": arguments}]


_OPEN: dict[str, Callable[[dict[str, Any]], tuple[dict[str, Any], list[dict[str, Any]]]]] = {
    "thinking": _open_thinking,
    "text": _open_text,
    "tool_use": _open_tool,
}


def keepalive(turn: Turn, id: str, created: int, first: bool) -> bytes:
    """A ping, also before the message has started."""
    return _event("ping")


def error_event(refusal: Refusal) -> bytes:
    """An error after the headers of a stream have left."""
    return b"event: error\ndata: " + anthropic_error(refusal) + b"\n\n"


def write_count(count: int) -> bytes:
    """How many tokens a request has."""
    return _encode({"input_tokens": count})


MESSAGES = Dialect(
    name="messages",
    read=read,
    write=write,
    events=events,
    keepalive=keepalive,
    error=anthropic_error,
    error_event=error_event,
)
COUNT = Counter(name="messages", read=read_counted, write=write_count, error=anthropic_error)
