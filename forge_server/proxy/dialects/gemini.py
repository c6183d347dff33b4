"""Gemini ``generateContent``, ``streamGenerateContent`` and ``countTokens``.

Model and method stand in the path. The API has no ids for tool calls of its own, but carries ours; where a
client sends none, calls and results are paired by name and order. Clients drop thoughts and keep the
``thoughtSignature``, so the signature carries them. Fields are known by both spellings of protobuf's JSON.
Nothing may be sent while a stream waits: Gemini CLI takes a comment for a broken answer.
"""

from collections.abc import Callable
from functools import partial
from typing import Any
from urllib.parse import unquote

import msgspec
from msgspec import Raw

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
from forge_server.proxy.dialects.errors import gemini_error
from forge_server.proxy.dialects.reading import (
    bad,
    bounded,
    check_choice,
    check_limit,
    choices,
    parse,
    unsupported,
)
from forge_server.proxy.dialects.writing import arguments_object, bare, seal, sse, unseal

Json = dict[str, Any]

_KNOWN = frozenset({"contents", "systemInstruction", "tools", "toolConfig", "generationConfig", "model"})
_ASKED = {
    "temperature": "temperature",
    "topP": "top_p",
    "topK": "top_k",
    "seed": "seed",
    "presencePenalty": "presence_penalty",
    "frequencyPenalty": "frequency_penalty",
}
_CONFIG = frozenset(
    {"maxOutputTokens", "stopSequences", "candidateCount", "thinkingConfig", "responseMimeType"}
    | {"responseSchema", "responseJsonSchema", *_ASKED}
)
_SERVER_TOOLS = frozenset(
    {
        "googleSearch",
        "googleSearchRetrieval",
        "codeExecution",
        "urlContext",
        "googleMaps",
        "fileSearch",
        "enterpriseWebSearch",
        "retrieval",
        "mcpServers",
    }
)
_TYPES = frozenset({"STRING", "NUMBER", "INTEGER", "BOOLEAN", "ARRAY", "OBJECT", "NULL"})
_RESULT_KEYS = ("output", "result")

_decode = msgspec.json.Decoder(dict[str, Any]).decode
_encode = msgspec.json.encode


class _Memo(msgspec.Struct, frozen=True):
    """``thoughts``: whether the client asked to see them; ``array``: the answers of the stream as one list."""

    thoughts: bool = False
    array: bool = False


def _camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(word[:1].upper() + word[1:] for word in rest)


def _object(value: Any, where: str) -> Json:
    """A message of the API, its fields in camel case. What is null is not there."""
    if not isinstance(value, dict):
        raise bad(f"{where}: not an object", param=where)
    return {_camel(name): field for name, field in value.items() if field is not None}


def _list(value: Any, where: str) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise bad(f"{where}: not a list", param=where)
    return value


def _string(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise bad(f"{where}: not a string", param=where)
    return value


def _number(value: Any, where: str, kind: type[int] | type[float]) -> Any:
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not isinstance(value, (int, float)) or (kind is int and not whole):
        raise bad(f"{where}: not a number", param=where)
    return kind(value)


@bounded
def read(body: bytes, *, model: str, stream: bool, array: bool = False) -> Turn:
    """Parse and validate a request body; raises ``Refusal`` 400 that names what is wrong."""
    given, _ = parse(body, _decode)
    request = _object(given, "the request")
    if request.get("cachedContent"):
        raise unsupported("cachedContent", param="cachedContent", instead="send the whole conversation")
    dropped = set(request.keys() - _KNOWN)
    tools, names = _tools(request.get("tools"), dropped)
    choice = _choice(request.get("toolConfig"), names, dropped)
    check_choice(choice, names, param="toolConfig")
    config = _object(request.get("generationConfig", {}), "generationConfig")
    thoughts = _config(config, dropped)
    candidates = _number(config.get("candidateCount", 1), "generationConfig.candidateCount", int)
    limit = config.get("maxOutputTokens")
    limit = None if limit is None else _number(limit, "generationConfig.maxOutputTokens", int)
    check_limit(limit, "generationConfig.maxOutputTokens")
    return Turn(
        messages=_messages(request),
        tools=tuple(tools),
        tool_choice=choice,
        response_format=_response_format(config),
        stop=tuple(
            _string(stop, "stopSequences") for stop in _list(config.get("stopSequences"), "stopSequences")
        ),
        max_tokens=limit,
        choices=choices(candidates, "generationConfig.candidateCount"),
        model=model,
        stream=stream and not array,
        stream_usage=True,
        asked={
            ours: _number(
                config[theirs], f"generationConfig.{theirs}", int if ours in ("top_k", "seed") else float
            )
            for theirs, ours in _ASKED.items()
            if theirs in config
        },
        dropped=tuple(sorted(dropped)),
        memo=_Memo(thoughts, array),
    )


@bounded
def read_counted(body: bytes, *, model: str) -> Turn:
    """The turn of a request whose tokens are to be counted: contents, or a whole generateContentRequest."""
    given, _ = parse(body, _decode)
    request = _object(given, "the request")
    if "generateContentRequest" in request:
        request = _object(request["generateContentRequest"], "generateContentRequest")
    tools, _ = _tools(request.get("tools"), set())
    return Turn(messages=_messages(request), tools=tuple(tools), model=model)


# --- what is asked ---


def _messages(request: Json) -> tuple[Raw, ...]:
    conversation = Conversation()
    system = request.get("systemInstruction")
    if system is not None:
        text = system if isinstance(system, str) else _system(_object(system, "systemInstruction"))
        if text:
            conversation.add("system", text)
    contents = request.get("contents")
    if isinstance(contents, dict):
        contents = [contents]
    contents = _list(contents, "contents")
    if not contents:
        raise bad("contents: at least one content is required", param="contents")
    pairing = _Pairing()
    role = ""
    for index, entry in enumerate(contents):
        where = f"contents[{index}]"
        content = _object(entry, where)
        role = content.get("role", "user")
        parts = [_object(part, where) for part in _list(content.get("parts"), f"{where}.parts")]
        if not parts:
            raise bad(f"{where}.parts: must not be empty", param=where)
        if role == "model":
            _model(conversation, parts, where, pairing)
        elif role in ("user", "function"):
            _user(conversation, parts, where, pairing)
        else:
            raise bad(f"{where}.role: {role!r} is no valid role, use user or model", param=where)
    if role == "model":
        raise unsupported("a prefilled answer", param="contents", instead="end with a user's content")
    return conversation.messages()


def _system(content: Json) -> str:
    where = "systemInstruction"
    parts = [_object(part, where) for part in _list(content.get("parts"), where)]
    return "\n".join(_string(part.get("text"), f"{where}.parts.text") for part in parts)


class _Pairing:
    """Gives calls their ids, and results the ids of their calls."""

    def __init__(self) -> None:
        self._count = 0
        self._open: list[tuple[str, str]] = []

    def call(self, id: str | None, name: str) -> str:
        self._count += 1
        id = id or f"call_{self._count}"
        self._open.append((id, name))
        return id

    def result(self, id: str | None, name: str) -> str:
        """An id that belongs to no call is left for the conversation to refuse."""
        for call in self._open:
            if call[0] == id or (not id and call[1] == name):
                self._open.remove(call)
                return call[0]
        return id or name


def _model(conversation: Conversation, parts: list[Json], where: str, pairing: _Pairing) -> None:
    """What the policy said. Its thoughts come back in a signature when the client has dropped them; a
    signature stands on the last part of an answer that has no calls, and else on the first call.
    """
    sealed = next((s for part in parts if (s := unseal(part.get("thoughtSignature"))) is not None), None)
    thoughts = [_string(p.get("text"), f"{where}.text") for p in parts if p.get("thought") is True]
    if thoughts:
        conversation.think("".join(thoughts))
    elif sealed is not None and not conversation.thought:
        conversation.recall(sealed)
    for part in parts:
        if part.get("thought") is True:
            continue
        if "functionCall" in part:
            call = _object(part["functionCall"], f"{where}.functionCall")
            name = _string(call.get("name"), f"{where}.functionCall.name")
            arguments = call.get("args", {})
            if not isinstance(arguments, dict):
                raise bad(f"{where}.functionCall.args: not an object", param=where)
            id = call.get("id")
            id = pairing.call(None if id is None else _string(id, f"{where}.functionCall.id"), name)
            conversation.call(id, name, _encode(arguments).decode())
        elif "text" in part:
            text = _string(part["text"], f"{where}.text")
            if text:
                conversation.say(text)
        else:
            raise _unknown_part(part, where)


def _user(conversation: Conversation, parts: list[Json], where: str, pairing: _Pairing) -> None:
    """One content of the user: tool results are messages of their own, in the order in which they stand."""
    said: list[Part] = []
    for part in parts:
        if "functionResponse" not in part:
            said.append(_part(part, where))
            continue
        if said:
            conversation.add("user", content_of(said))
            said = []
        result = _object(part["functionResponse"], f"{where}.functionResponse")
        name = _string(result.get("name"), f"{where}.functionResponse.name")
        id = result.get("id")
        id = pairing.result(None if id is None else _string(id, f"{where}.functionResponse.id"), name)
        conversation.result(id, _result(result, where), where)
    if said:
        conversation.add("user", content_of(said))


def _result(result: Json, where: str) -> str | list[Part]:
    """A lone string under ``output`` or ``result`` is the output itself; anything else is told as JSON."""
    response = result.get("response", {})
    if not isinstance(response, dict):
        raise bad(f"{where}.functionResponse.response: not an object", param=where)
    text = _encode(response).decode()
    if len(response) == 1:
        ((key, value),) = response.items()
        if key in _RESULT_KEYS and isinstance(value, str):
            text = value
    more = [_part(_object(part, where), where) for part in _list(result.get("parts"), where)]
    return content_of([text_part(text), *more])


def _part(part: Json, where: str) -> Part:
    """Text or an image."""
    if "text" in part:
        return text_part(_string(part["text"], f"{where}.text"))
    if "inlineData" in part:
        blob = _object(part["inlineData"], f"{where}.inlineData")
        mime = _string(blob.get("mimeType"), f"{where}.inlineData.mimeType")
        data = _string(blob.get("data"), f"{where}.inlineData.data")
        data = data.replace("-", "+").replace("_", "/")
        return image_part(images.of_base64(mime, data, f"{where}.inlineData"))
    raise _unknown_part(part, where)


def _unknown_part(part: Json, where: str) -> Refusal:
    if not part:
        return bad(f"{where}: a part is empty", param=where)
    return unsupported(f"{where}: a part with {', '.join(sorted(part))}", param=where)


def _tools(given: Any, dropped: set[str]) -> tuple[list[Raw], set[str]]:
    """Tools in chat shape, and their names."""
    tools: list[Raw] = []
    names: set[str] = set()
    for index, entry in enumerate(_list(given, "tools")):
        where = f"tools[{index}]"
        for kind, value in _object(entry, where).items():
            if kind in _SERVER_TOOLS:
                dropped.add(f"tools.{kind}")
                continue
            if kind != "functionDeclarations":
                raise unsupported(f"{where}.{kind}", param=where)
            for declaration in _list(value, f"{where}.functionDeclarations"):
                function = _object(declaration, where)
                name = _string(function.get("name"), f"{where}.name")
                description = function.get("description")
                if description is not None:
                    _string(description, f"{where}.description")
                schema = function.get("parametersJsonSchema")
                if schema is None and "parameters" in function:
                    schema = _json_schema(function["parameters"])
                if schema is not None and not isinstance(schema, dict):
                    raise bad(f"{where}: the parameters of {name} are no schema", param=where)
                names.add(name)
                tools.append(tool(name, description, schema))
    return tools, names


def _json_schema(schema: Any) -> Any:
    """The API's subset of OpenAPI as JSON schema: types in lower case, ``nullable`` as a type."""
    if isinstance(schema, list):
        return [_json_schema(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    out: Json = {}
    for key, value in schema.items():
        if key == "properties" and isinstance(value, dict):
            out[key] = {name: _json_schema(entry) for name, entry in value.items()}
        elif key == "type" and isinstance(value, str) and value in _TYPES:
            out[key] = value.lower()
        elif key in ("enum", "default", "example", "required", "nullable"):
            out[key] = value
        else:
            out[key] = _json_schema(value)
    if out.pop("nullable", None) is True and isinstance(out.get("type"), str):
        out["type"] = [out["type"], "null"]
    return out


def _choice(given: Any, names: set[str], dropped: set[str]) -> Any:
    """The function calling mode as tool choice in chat shape."""
    if given is None:
        return None
    config = _object(_object(given, "toolConfig").get("functionCallingConfig", {}), "functionCallingConfig")
    allowed = [
        _string(n, "allowedFunctionNames") for n in _list(config.get("allowedFunctionNames"), "toolConfig")
    ]
    mode = config.get("mode", "AUTO")
    if mode in ("AUTO", "MODE_UNSPECIFIED", "NONE") and allowed:
        raise bad("allowedFunctionNames goes with mode ANY or VALIDATED only", param="toolConfig")
    for name in allowed:
        if name not in names:
            raise bad(f"allowedFunctionNames: there is no function {name!r}", param="toolConfig")
    if mode in ("AUTO", "MODE_UNSPECIFIED", "NONE"):
        return "none" if mode == "NONE" else "auto"
    if mode == "VALIDATED":
        dropped.add("toolConfig.VALIDATED")
        return "auto"
    if mode != "ANY":
        raise bad(f"functionCallingConfig.mode: {mode!r} is unknown", param="toolConfig")
    if len(allowed) == 1:
        return {"type": "function", "function": {"name": allowed[0]}}
    if allowed:
        dropped.add("toolConfig.allowedFunctionNames")
    return "required"


def _config(config: Json, dropped: set[str]) -> bool:
    """Check what else the configuration asks for; whether thoughts are to be shown."""
    modalities = _list(config.pop("responseModalities", None), "responseModalities")
    if any(modality not in ("TEXT", "text") for modality in modalities):
        raise unsupported("an answer that is not text", param="responseModalities")
    if config.get("responseLogprobs"):
        raise unsupported("responseLogprobs", param="responseLogprobs")
    dropped |= {f"generationConfig.{name}" for name in config.keys() - _CONFIG}
    thinking = _object(config.get("thinkingConfig", {}), "thinkingConfig")
    return thinking.get("includeThoughts") is True


def _response_format(config: Json) -> Json | None:
    mime = config.get("responseMimeType", "text/plain")
    schema = config.get("responseJsonSchema")
    if schema is None and "responseSchema" in config:
        schema = _json_schema(config["responseSchema"])
    if mime == "text/plain":
        if schema is not None:
            raise bad("a response schema needs responseMimeType application/json", param="generationConfig")
        return None
    if mime != "application/json":
        raise unsupported(f"responseMimeType {mime!r}", param="generationConfig")
    if schema is None:
        return {"type": "json_object"}
    if not isinstance(schema, dict):
        raise bad("the response schema is not an object", param="generationConfig")
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


# --- what is answered ---


def _parts(turn: Turn, completion: Completion) -> list[Json]:
    memo = turn.memo if isinstance(turn.memo, _Memo) else _Memo()
    parts: list[Json] = []
    if completion.text:
        parts.append({"text": completion.text})
    for call in completion.tool_calls:
        function = {"id": call.id, "name": call.name, "args": arguments_object(call.arguments)}
        parts.append({"functionCall": function})
    if not parts:
        parts.append({"text": ""})
    if completion.reasoning:
        signed = next((part for part in parts if "functionCall" in part), parts[-1])
        signed["thoughtSignature"] = seal(completion.reasoning)
        if memo.thoughts:
            parts.insert(0, {"text": completion.reasoning, "thought": True})
    return parts


def _candidate(index: int, parts: list[Json], finish: str | None) -> Json:
    candidate: Json = {"content": {"role": "model", "parts": parts}, "index": index}
    if finish is not None:
        candidate["finishReason"] = "MAX_TOKENS" if finish == "length" else "STOP"
    return candidate


def _chunk(turn: Turn, completion: Completion, candidates: list[Json], last: bool) -> Json:
    chunk: Json = {"candidates": candidates}
    if last:
        chunk["usageMetadata"] = {
            "promptTokenCount": completion.prompt_tokens,
            "candidatesTokenCount": completion.sampled_tokens,
            "totalTokenCount": completion.prompt_tokens + completion.sampled_tokens,
        }
    return chunk | {"modelVersion": turn.model, "responseId": bare(completion.id)}


def write(turn: Turn, completion: Completion) -> bytes:
    """The response body of a request that does not stream, or the whole stream as one JSON list."""
    candidates = [
        _candidate(index, _parts(turn, choice), choice.finish_reason)
        for index, choice in enumerate(completion.choices)
    ]
    body = _encode(_chunk(turn, completion, candidates, True))
    return b"[" + body + b"]" if isinstance(turn.memo, _Memo) and turn.memo.array else body


def events(turn: Turn, completion: Completion) -> bytes:
    """The event stream of a finished completion: one event per part, one candidate after the other."""
    out = []
    for index, choice in enumerate(completion.choices):
        parts = _parts(turn, choice)
        for at, part in enumerate(parts, 1):
            ends = at == len(parts)
            candidate = _candidate(index, [part], choice.finish_reason if ends else None)
            last = ends and index == len(completion.others)
            out.append(sse(_chunk(turn, completion, [candidate], last), end=b"\r\n\r\n"))
    return b"".join(out)


def keepalive(turn: Turn, id: str, created: int, first: bool) -> None:
    """Every event that is no answer breaks Gemini CLI."""


def error_event(refusal: Refusal) -> bytes:
    """An error after the headers of a stream have left."""
    return b"data: " + gemini_error(refusal) + b"\r\n\r\n"


def write_count(count: int) -> bytes:
    """How many tokens a request has."""
    return _encode({"totalTokens": count})


GEMINI = Dialect(
    name="gemini",
    read=partial(read, model="", stream=False),
    write=write,
    events=events,
    keepalive=keepalive,
    error=gemini_error,
    error_event=error_event,
)
COUNT = Counter(name="gemini", read=partial(read_counted, model=""), write=write_count, error=gemini_error)


def method(target: str, query: bytes) -> Dialect | Counter | None:
    """The dialect of ``MODEL:METHOD`` with its query string, or None when there is no such method."""
    name, _, verb = unquote(target).rpartition(":")
    made: Callable[[bytes], Turn]
    if verb == "countTokens":
        return msgspec.structs.replace(COUNT, read=partial(read_counted, model=name))
    if verb == "generateContent":
        made = partial(read, model=name, stream=False)
    elif verb == "streamGenerateContent":
        made = partial(read, model=name, stream=True, array=b"alt=sse" not in query.split(b"&"))
    else:
        return None
    return msgspec.structs.replace(GEMINI, read=made)
