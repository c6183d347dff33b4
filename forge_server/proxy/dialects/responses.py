"""OpenAI Responses, as Codex and the OpenAI SDKs speak it.

Nothing is kept between requests: what refers to an earlier response is refused, and ``store`` is answered
with false. Namespaces are flattened to ``namespace__name`` for the chat template and come back as they went;
a custom (freeform) tool becomes a function with one string, ``input``. Tools that the server would have to
run are dropped by name. Item ids are made up on the way out and ignored on the way in.
"""

from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

from forge_server.domain.turn import Completion, ToolCall, Turn
from forge_server.proxy.dialects import images
from forge_server.proxy.dialects.base import Dialect, Refusal
from forge_server.proxy.dialects.conversation import (
    Conversation,
    Part,
    content_of,
    image_part,
    text_part,
    tool,
)
from forge_server.proxy.dialects.errors import openai_error
from forge_server.proxy.dialects.reading import (
    NOTHING,
    bad,
    bounded,
    check_choice,
    check_limit,
    parse,
    schema_of,
    unsupported,
)
from forge_server.proxy.dialects.writing import bare, seal, sse, unseal


class _Part(msgspec.Struct):
    type: str
    text: str | None = None
    image_url: str | None = None
    refusal: str | None = None


class _Item(msgspec.Struct):
    type: str = "message"
    role: str | None = None
    content: str | list[_Part] | None = None
    summary: list[_Part] | None = None
    encrypted_content: str | None = None
    call_id: str | None = None
    namespace: str | None = None
    name: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | list[_Part] | None = None


class _Tool(msgspec.Struct):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: Raw = NOTHING
    strict: bool | None = None
    format: dict[str, Any] | None = None
    tools: list["_Tool"] | None = None


class _Format(msgspec.Struct):
    type: str = "text"
    name: str = "answer"
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class _Text(msgspec.Struct):
    format: _Format | None = None


class _Reasoning(msgspec.Struct):
    summary: str | None = None
    generate_summary: str | None = None


class _Request(msgspec.Struct):
    model: str
    input: str | list[_Item]
    instructions: str | None = None
    stream: bool | None = None
    tools: list[_Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = None
    text: _Text | None = None
    reasoning: _Reasoning | None = None
    include: list[str] | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    temperature: float | UnsetType | None = UNSET
    top_p: float | UnsetType | None = UNSET


class _Memo(msgspec.Struct, frozen=True):
    """What the answer has to know: flat tool name -> (type, namespace, name), and what was asked to see."""

    tools: dict[str, tuple[str, str | None, str]]
    encrypted: bool
    summary: bool


_ROLES = frozenset({"user", "system", "developer"})
_SERVER_TOOLS = (
    "web_search",
    "file_search",
    "code_interpreter",
    "image_generation",
    "mcp",
    "tool_search",
    "programmatic_tool_calling",
)
_SERVER_INCLUDES = (
    "web_search_call.",
    "file_search_call.",
    "code_interpreter_call.",
    "computer_call_output.",
)
_ENCRYPTED = "reasoning.encrypted_content"
_KNOWN = frozenset(_Request.__struct_fields__) - {"store"}
_CUSTOM: dict[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}

_decode = msgspec.json.Decoder(_Request).decode
_encode = msgspec.json.encode


@bounded
def read(body: bytes) -> Turn:
    """Parse and validate a request body; raises ``Refusal`` 400 that names what is wrong."""
    request, keys = parse(body, _decode)
    _refuse_state(request)
    tools, names, dropped = _tools(request.tools or [])
    include = request.include or []
    for wanted in include:
        if wanted != _ENCRYPTED and not wanted.startswith(_SERVER_INCLUDES):
            raise unsupported(f"include {wanted!r}", param="include")
    choice = _choice(request.tool_choice, names, dropped)
    check_choice(choice, names)
    check_limit(request.max_output_tokens, "max_output_tokens")
    conversation = Conversation()
    if request.instructions:
        conversation.add("system", request.instructions)
    if not request.input:
        raise bad("input is empty", param="input")
    if isinstance(request.input, str):
        conversation.add("user", request.input)
    else:
        for index, item in enumerate(request.input):
            _take(conversation, item, f"input[{index}]")
    dropped += keys - _KNOWN
    asked = {"temperature": request.temperature, "top_p": request.top_p}
    return Turn(
        messages=conversation.messages(),
        tools=tuple(tools),
        tool_choice=choice,
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=_response_format(request.text),
        max_tokens=request.max_output_tokens,
        model=request.model,
        stream=bool(request.stream),
        stream_usage=True,
        asked={name: value for name, value in asked.items() if value is not UNSET and value is not None},
        dropped=tuple(sorted(set(dropped))),
        memo=_Memo(
            tools=names,
            encrypted=_ENCRYPTED in include,
            summary=request.reasoning is not None
            and bool(request.reasoning.summary or request.reasoning.generate_summary),
        ),
    )


def _refuse_state(request: _Request) -> None:
    """What needs a server that remembers, or works in the background."""
    if request.previous_response_id is not None:
        raise Refusal(
            400,
            "previous_response_not_found",
            "responses are not stored here: send the whole conversation as input",
            param="previous_response_id",
        )
    for name in ("conversation", "prompt"):
        if getattr(request, name) is not None:
            raise unsupported(name, param=name, instead="send the whole conversation as input")
    if request.background:
        raise unsupported("background", param="background")


def _tools(given: list[_Tool]) -> tuple[list[Raw], dict[str, tuple[str, str | None, str]], list[str]]:
    """Tools in chat shape, what their flat names stand for, and the names of what was dropped."""
    tools: list[Raw] = []
    names: dict[str, tuple[str, str | None, str]] = {}
    dropped: list[str] = []

    def take(entry: _Tool, where: str, namespace: str | None) -> None:
        if entry.type.startswith(_SERVER_TOOLS):
            dropped.append(f"tools.{entry.type}")
            return
        if entry.type not in ("function", "custom", "namespace"):
            raise unsupported(f"a tool of type {entry.type!r}", param=where)
        if not entry.name:
            raise bad("a tool needs a name", param=where)
        if entry.type == "namespace":
            if namespace is not None:
                raise bad("a namespace within a namespace", param=where)
            for index, inner in enumerate(entry.tools or []):
                take(inner, f"{where}.tools[{index}]", entry.name)
            return
        flat = _flat(namespace, entry.name)
        names[flat] = (entry.type, namespace, entry.name)
        if entry.type == "function":
            tools.append(
                tool(flat, entry.description, schema_of(entry.parameters, where), strict=bool(entry.strict))
            )
            return
        description = entry.description or ""
        if entry.format is not None and entry.format.get("type") == "grammar":
            syntax, grammar = entry.format.get("syntax"), entry.format.get("definition")
            description += f"\n\nThe input has to follow this {syntax} grammar:\n{grammar}"
            dropped.append(f"tools.{flat}.format")
        tools.append(tool(flat, description, _CUSTOM))

    for index, entry in enumerate(given):
        take(entry, f"tools[{index}]", None)
    return tools, names, dropped


def _flat(namespace: str | None, name: str) -> str:
    return f"{namespace}__{name}" if namespace else name


def _choice(
    choice: str | dict[str, Any] | None, names: dict[str, tuple[str, str | None, str]], dropped: list[str]
) -> Any:
    if choice is None or choice in ("auto", "none", "required"):
        return choice
    if isinstance(choice, str):
        raise bad(f"tool_choice {choice!r} is unknown", param="tool_choice")
    kind = choice.get("type")
    if kind in ("function", "custom"):
        return {
            "type": "function",
            "function": {"name": _flat(choice.get("namespace"), choice.get("name", ""))},
        }
    if kind == "allowed_tools" and choice.get("mode") in ("auto", "required"):
        dropped.append("tool_choice.tools")
        return choice["mode"]
    raise unsupported(f"tool_choice of type {kind!r}", param="tool_choice")


def _response_format(text: _Text | None) -> dict[str, Any] | None:
    if text is None or text.format is None or text.format.type == "text":
        return None
    format = text.format
    if format.type == "json_object":
        return {"type": "json_object"}
    if format.type != "json_schema":
        raise unsupported(f"a text format of type {format.type!r}", param="text.format")
    if format.schema is None:
        raise bad("a text format of type 'json_schema' needs a schema", param="text.format.schema")
    schema = {"name": format.name, "schema": format.schema, "strict": bool(format.strict)}
    return {"type": "json_schema", "json_schema": schema}


def _take(conversation: Conversation, item: _Item, where: str) -> None:
    """Add one input item to the conversation."""
    match item.type:
        case "message" if item.role == "assistant":  # no answer has two of them: the next one is another turn
            conversation.say(_text(item.content, where), own=True)
        case "message":
            if item.role not in _ROLES:
                raise bad(f"unknown role {item.role!r}", param=f"{where}.role")
            role = "user" if item.role == "user" else "system"
            conversation.add(role, _content(item.content, f"{where}.content"))
        case "reasoning":
            # as it was shown, or as it was sealed for clients that get no more than that
            shown = item.content if item.content else item.summary
            sealed = unseal(item.encrypted_content) if item.encrypted_content else None
            conversation.think(sealed if sealed is not None else _text(shown, where))
        case "function_call" | "custom_tool_call":
            if not item.call_id or not item.name:
                raise bad("a tool call needs call_id and name", param=where)
            if item.type == "function_call":
                if item.arguments is None:
                    raise bad("a function call needs arguments", param=where)
                arguments = item.arguments
            else:
                if item.input is None:
                    raise bad("a custom tool call needs an input", param=where)
                arguments = _encode({"input": item.input}).decode()
            conversation.call(item.call_id, _flat(item.namespace, item.name), arguments)
        case "function_call_output" | "custom_tool_call_output":
            if not item.call_id or item.output is None:
                raise bad("a tool result needs call_id and output", param=where)
            conversation.result(item.call_id, _content(item.output, f"{where}.output"), where)
        case other:
            raise unsupported(f"an input item of type {other!r}", param=where)


def _text(content: str | list[_Part] | None, where: str) -> str:
    """What the assistant said or thought: text alone."""
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.text is None and part.refusal is None:
            raise unsupported(f"a part of type {part.type!r} of the assistant", param=where)
    return "\n".join(part.text if part.text is not None else part.refusal or "" for part in content)


def _content(content: str | list[_Part] | None, where: str) -> str | list[Part]:
    if content is None:
        raise bad("content is missing", param=where)
    if isinstance(content, str):
        return content
    parts: list[Part] = []
    for part in content:
        if part.type in ("input_text", "output_text", "text") and part.text is not None:
            parts.append(text_part(part.text))
        elif part.type == "input_image" and part.image_url is not None:
            parts.append(image_part(images.of_url(part.image_url, where)))
        else:
            raise unsupported(f"a part of type {part.type!r}", param=where, instead="text and images are")
    return content_of(parts)


def _response(
    turn: Turn, id: str, created: int, status: str, output: list[Any], usage: Any
) -> dict[str, Any]:
    return {
        "id": f"resp_{bare(id)}",
        "object": "response",
        "created_at": created,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": None,
        "max_output_tokens": turn.max_tokens,
        "metadata": {},
        "model": turn.model,
        "output": output,
        "parallel_tool_calls": turn.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "temperature": 1.0,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_p": 1.0,
        "truncation": "disabled",
        "usage": usage,
        "user": None,
    }


def _usage(completion: Completion) -> dict[str, Any]:
    return {
        "input_tokens": completion.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": completion.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": completion.prompt_tokens + completion.completion_tokens,
    }


def _memo(turn: Turn) -> _Memo:
    return turn.memo if isinstance(turn.memo, _Memo) else _Memo({}, False, False)


def _items(turn: Turn, completion: Completion) -> list[dict[str, Any]]:
    memo, id = _memo(turn), bare(completion.id)
    items: list[dict[str, Any]] = []
    if completion.reasoning:
        item: dict[str, Any] = {
            "id": f"rs_{id}",
            "type": "reasoning",
            "summary": [{"type": "summary_text", "text": completion.reasoning}] if memo.summary else [],
            "content": [{"type": "reasoning_text", "text": completion.reasoning}],
        }
        if memo.encrypted:
            item["encrypted_content"] = seal(completion.reasoning)
        items.append(item)
    if completion.text:
        part = {"type": "output_text", "text": completion.text, "annotations": [], "logprobs": []}
        status = "incomplete" if completion.finish_reason == "length" else "completed"
        items.append(
            {"id": f"msg_{id}", "type": "message", "status": status, "role": "assistant", "content": [part]}
        )
    items += [_call(call, f"{id}_{index}", memo) for index, call in enumerate(completion.tool_calls)]
    return items


def _call(call: ToolCall, id: str, memo: _Memo) -> dict[str, Any]:
    kind, namespace, name = memo.tools.get(call.name, ("function", None, call.name))
    item: dict[str, Any] = {"id": f"fc_{id}", "type": "function_call", "status": "completed"}
    if kind == "custom":
        item |= {"id": f"ctc_{id}", "type": "custom_tool_call"}
        item |= {"call_id": call.id, "name": name, "input": _freeform(call.arguments)}
    else:
        item |= {"call_id": call.id, "name": name, "arguments": call.arguments}
    if namespace is not None:
        item["namespace"] = namespace
    return item


def _freeform(arguments: str) -> str:
    """The input of a custom tool, or the sampled text itself where the policy did not put it as it should."""
    try:
        parsed = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return arguments
    if isinstance(parsed, dict) and parsed.keys() == {"input"} and isinstance(parsed["input"], str):
        return parsed["input"]
    return arguments


def _finished(turn: Turn, completion: Completion, items: list[Any]) -> dict[str, Any]:
    status = "incomplete" if completion.finish_reason == "length" else "completed"
    return _response(turn, completion.id, completion.created, status, items, _usage(completion))


def write(turn: Turn, completion: Completion) -> bytes:
    """The response body of a request that does not stream."""
    return _encode(_finished(turn, completion, _items(turn, completion)))


class _Events:
    """Numbers the events of one stream."""

    def __init__(self) -> None:
        self.out: list[bytes] = []

    def add(self, type: str, **fields: Any) -> None:
        number = len(self.out)
        self.out.append(sse({"type": type, "sequence_number": number, **fields}, type))


def events(turn: Turn, completion: Completion) -> bytes:
    """The event stream of a finished completion: few, large deltas."""
    stream = _Events()
    begun = _response(turn, completion.id, completion.created, "in_progress", [], None)
    stream.add("response.created", response=begun)
    stream.add("response.in_progress", response=begun)
    items = _items(turn, completion)
    for index, item in enumerate(items):
        _item_events(stream, item, index)
    last = _finished(turn, completion, items)
    stream.add(f"response.{last['status']}", response=last)
    return b"".join(stream.out)


def _item_events(stream: _Events, item: dict[str, Any], index: int) -> None:
    at = {"item_id": item["id"], "output_index": index}
    match item["type"]:
        case "reasoning":
            text = item["content"][0]["text"]
            opened = item | {"summary": [], "content": []}
            stream.add("response.output_item.added", output_index=index, item=opened)
            if item["summary"]:
                at["summary_index"] = 0
                kind, part = "reasoning_summary", item["summary"][0]
                stream.add("response.reasoning_summary_part.added", **at, part=part | {"text": ""})
            else:
                at["content_index"] = 0
                kind, part = "reasoning", item["content"][0]
                stream.add("response.content_part.added", **at, part=part | {"text": ""})
            stream.add(f"response.{kind}_text.delta", **at, delta=text)
            stream.add(f"response.{kind}_text.done", **at, text=text)
            done = "reasoning_summary_part" if item["summary"] else "content_part"
            stream.add(f"response.{done}.done", **at, part=part)
        case "message":
            part = item["content"][0]
            opened = item | {"status": "in_progress", "content": []}
            stream.add("response.output_item.added", output_index=index, item=opened)
            at["content_index"] = 0
            stream.add("response.content_part.added", **at, part=part | {"text": ""})
            stream.add("response.output_text.delta", **at, delta=part["text"], logprobs=[])
            stream.add("response.output_text.done", **at, text=part["text"], logprobs=[])
            stream.add("response.content_part.done", **at, part=part)
        case "function_call":
            opened = item | {"status": "in_progress", "arguments": ""}
            stream.add("response.output_item.added", output_index=index, item=opened)
            stream.add("response.function_call_arguments.delta", **at, delta=item["arguments"])
            stream.add(
                "response.function_call_arguments.done", **at, arguments=item["arguments"], name=item["name"]
            )
        case _:
            opened = item | {"status": "in_progress", "input": ""}
            stream.add("response.output_item.added", output_index=index, item=opened)
            stream.add("response.custom_tool_call_input.delta", **at, delta=item["input"])
            stream.add("response.custom_tool_call_input.done", **at, input=item["input"])
    stream.add("response.output_item.done", output_index=index, item=item)


def keepalive(turn: Turn, id: str, created: int, first: bool) -> bytes:
    """The stream opens, and then says again and again that it is in progress: Codex counts events, not
    comments.
    """
    begun = _response(turn, id, created, "in_progress", [], None)
    stream = _Events()
    if first:
        stream.add("response.created", response=begun)
    stream.add("response.in_progress", response=begun)
    return b"".join(stream.out)


def error_event(refusal: Refusal) -> bytes:
    """An error after the headers of a stream have left. Codex tries again unless the code says that asking
    again is useless.
    """
    code = refusal.code
    if code != "context_length_exceeded":
        code = "invalid_prompt" if refusal.status < 500 else "server_error"
    failed = _response(Turn(messages=()), "failed", 0, "failed", [], None)
    failed["error"] = {"code": code, "message": refusal.message}
    return sse({"type": "response.failed", "sequence_number": 0, "response": failed}, "response.failed")


RESPONSES = Dialect(
    name="responses",
    read=read,
    write=write,
    events=events,
    keepalive=keepalive,
    error=openai_error,
    error_event=error_event,
)
