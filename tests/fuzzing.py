"""Requests that nobody should send, and what may become of them: an answer of the dialect, or a refusal of its shape.

Two sources. *Broken*: requests that real harnesses sent, and others that are right, with something in them replaced,
removed, doubled, swapped or added, or with their bytes damaged. *Made*: requests of each dialect's shape whose every
field is now and then something else. The judge lets nothing pass that is no answer: no status of the 5xx, no answer
that cannot be read, no refusal in another dialect's words.
"""

import copy
import json
from collections.abc import Callable
from typing import Any

import msgspec
from dialect_support import WIRE, sse
from hypothesis import strategies as st

Json = Any
Case = tuple[str, str, bytes]
"""Dialect, path behind ``/a/ATTEMPT/``, body."""

PATHS: dict[str, tuple[str, ...]] = {
    "chat": ("v1/chat/completions",),
    "completions": ("v1/completions",),
    "responses": ("v1/responses",),
    "messages": ("v1/messages", "v1/messages?beta=true", "v1/messages/count_tokens"),
    "gemini": (
        "v1beta/models/m:generateContent",
        "v1beta/models/m:streamGenerateContent?alt=sse",
        "v1beta/models/m:streamGenerateContent",
        "v1beta/models/m:countTokens",
    ),
}


def corpus() -> list[tuple[str, Json]]:
    """Dialect and body of the recorded requests."""
    found = []
    for path in sorted((*WIRE.glob("*.json"), *WIRE.glob("chat/*.json"))):
        recorded = msgspec.json.decode(path.read_bytes())
        found.append((recorded["dialect"], recorded["body"]))
    found.append(("completions", {"model": "m", "prompt": "hi", "stop": ["x"], "seed": 3, "stream": True}))
    return found


# --- odd values ---

TEXTS = st.sampled_from(
    [
        *(
            "",
            " ",
            "hi",
            "user",
            "assistant",
            "tool",
            "system",
            "developer",
            "model",
            "function",
            "auto",
            "none",
        ),
        *(
            "required",
            "any",
            "text",
            "image_url",
            "input_text",
            "tool_use",
            "tool_result",
            "function_call",
            "\x00",
        ),
        *(
            "data:image/png;base64,AAAA",
            "http://127.0.0.1:9/x.png",
            "a" * 5000,
            "{}",
            "{",
            "null",
            "<|im_end|>",
        ),
        *(
            "{{ 7 * 7 }}",
            "../../etc/passwd",
            "\u202e\u2028\u0085",
            "é" * 300,
            "\U0001f600",
            "call_1",
            "-1",
            "1e999",
        ),
    ]
)
HALVES = st.sampled_from(["\ud83d", "\ude00", "x\udfff"])
NUMBERS = st.sampled_from([0, -1, 1, 2, 1.5, -0.0, 1e308, 2**31, 2**63, 2**64, -(2**70), 10**30])


def deep(depth: int) -> Json:
    value: Json = 1
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


ODD: st.SearchStrategy[Json] = st.one_of(
    st.none(),
    st.booleans(),
    NUMBERS,
    TEXTS,
    HALVES,
    st.sampled_from(
        [[], {}, [[]], [None], {"": None}, [{}], {"type": "text"}, {"role": "user", "content": None}]
    ),
    st.sampled_from([30, 200, 900]).map(deep),
    st.recursive(
        st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3), st.dictionaries(TEXTS.map(lambda t: t[:20]), inner, max_size=3)
        ),
        max_leaves=6,
    ),
)


# --- broken requests ---


def places(value: Json, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to everything within a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, entry in inner for found in places(entry, (*path, key)))]


def at(body: Json, path: tuple[Any, ...]) -> Json:
    for key in path:
        body = body[key]
    return body


@st.composite
def broken(draw: st.DrawFn, starts: list[tuple[str, Json]]) -> Case:
    dialect, start = draw(st.sampled_from(starts))
    body = copy.deepcopy(start)
    for _ in range(draw(st.integers(0, 4))):
        path = draw(st.sampled_from(places(body)))
        if not path:
            continue
        holder, key = at(body, path[:-1]), path[-1]
        how = draw(st.sampled_from(["replace", "replace", "delete", "double", "swap", "add", "rename"]))
        if how == "replace":
            holder[key] = copy.deepcopy(draw(ODD))
        elif how == "delete":
            del holder[key]
        elif how == "add":
            if isinstance(holder, list):
                holder.insert(draw(st.integers(0, len(holder))), copy.deepcopy(draw(ODD)))
            else:
                holder[draw(TEXTS)[:20]] = copy.deepcopy(draw(ODD))
        elif how == "rename" and isinstance(holder, dict):
            holder[draw(TEXTS)[:20]] = holder.pop(key)
        elif how == "double" and isinstance(holder, list):
            holder.insert(key, copy.deepcopy(holder[key]))
        elif how == "swap":
            other = draw(st.sampled_from(places(body)))
            if other and other[: len(path)] != path and path[: len(other)] != other:
                there = at(body, other[:-1])
                there[other[-1]], holder[key] = holder[key], there[other[-1]]
    encoded = json.dumps(body).encode()
    if draw(st.integers(0, 9)) == 0:
        encoded = draw(damaged(encoded))
    return dialect, draw(st.sampled_from(PATHS[dialect])), encoded


@st.composite
def damaged(draw: st.DrawFn, body: bytes) -> bytes:
    """Bytes that are no longer what was meant: cut, with something put in, with a byte changed."""
    where = draw(st.integers(0, len(body)))
    how = draw(st.sampled_from(["cut", "put", "change", "wrap"]))
    if how == "cut":
        return body[:where]
    if how == "wrap":
        return draw(st.sampled_from([b"[%s]", b'"%s"', b"%s%s", b"\xef\xbb\xbf%s", b" %s\n\n"])).replace(
            b"%s", body
        )
    put = draw(
        st.sampled_from([b"\xff", b"\x00", b'"', b"}", b"\\ud800", b"\xed\xa0\x80", b"1e400", b"//", b","])
    )
    return body[:where] + put + body[where + (how == "change") :]


# --- made requests ---


def mostly(usual: st.SearchStrategy[Json]) -> st.SearchStrategy[Json]:
    """Something else in one of thirty."""
    return st.integers(0, 29).flatmap(lambda dice: ODD if dice == 29 else usual)


def shape(required: dict[str, Any], optional: dict[str, Any] | None = None) -> st.SearchStrategy[Json]:
    """An object with odd fields, a missing one, an unknown one now and then."""
    usual = st.fixed_dictionaries(
        {name: mostly(value) for name, value in required.items()},
        optional={name: mostly(value) for name, value in (optional or {}).items()},
    )
    lacking = usual.map(lambda made: dict(list(made.items())[1:]))
    return st.integers(0, 29).flatmap(lambda dice: lacking if dice == 29 else usual)


SAID = st.one_of(TEXTS, st.text(max_size=20))
IDS = st.sampled_from(["call_1", "call_2", ""])
NAMES = st.sampled_from(["f", "g", "shell", "a.b", "name with spaces", ""])
SCHEMAS = st.sampled_from(
    [
        {"type": "object", "properties": {"a": {"type": "string"}}},
        {"type": "object", "properties": {}, "additionalProperties": False, "required": ["a"]},
        {"type": "array"},
        {"$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#/$defs/x"}}},
        True,
    ]
)
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
IMAGES = st.sampled_from([PIXEL, PIXEL, "AAAA", "?"])
URLS = st.one_of(IMAGES.map("data:image/png;base64,".__add__), st.sampled_from(["http://127.0.0.1:9/x", "x"]))
FLAGS = st.booleans()
SAMPLING = {
    "temperature": st.sampled_from([0, 1, 0.7, -1, 3]),
    "top_p": st.sampled_from([0, 0.5, 1, 2]),
    "seed": NUMBERS,
}

_chat_part = st.one_of(
    shape({"type": st.just("text"), "text": SAID}),
    shape({"type": st.just("image_url"), "image_url": shape({"url": URLS})}),
)
_chat_call = shape(
    {
        "id": IDS,
        "type": st.just("function"),
        "function": shape({"name": NAMES, "arguments": st.one_of(st.just('{"a": 1}'), SAID)}),
    }
)
_chat_message = st.one_of(
    shape(
        {
            "role": st.sampled_from(["user", "system", "developer"]),
            "content": st.one_of(SAID, st.lists(_chat_part, max_size=3)),
        }
    ),
    shape(
        {"role": st.just("assistant"), "content": st.one_of(SAID, st.none())},
        {"tool_calls": st.lists(_chat_call, max_size=2), "reasoning_content": SAID},
    ),
    shape({"role": st.just("tool"), "tool_call_id": IDS, "content": SAID}),
)
_chat_tool = shape({"type": st.just("function"), "function": shape({"name": NAMES}, {"parameters": SCHEMAS})})
CHAT = shape(
    {"model": st.just("m"), "messages": st.lists(_chat_message, min_size=1, max_size=5)},
    {
        "tools": st.lists(_chat_tool, max_size=3),
        "tool_choice": st.sampled_from(
            ["auto", "none", "required", {"type": "function", "function": {"name": "f"}}]
        ),
        "response_format": st.sampled_from(
            [
                {"type": "text"},
                {"type": "json_object"},
                {"type": "json_schema", "json_schema": {"schema": {}}},
            ]
        ),
        "stop": st.one_of(SAID, st.lists(SAID, max_size=5)),
        "n": st.integers(-1, 3),
        "stream": FLAGS,
        "stream_options": st.just({"include_usage": True}),
        "max_tokens": NUMBERS,
        "parallel_tool_calls": FLAGS,
        "logit_bias": st.just({"1": -100}),
        **SAMPLING,
    },
)

COMPLETIONS = shape(
    {"model": st.just("m"), "prompt": st.one_of(SAID, st.lists(SAID, max_size=2))},
    {
        "n": st.integers(-1, 3),
        "best_of": st.integers(0, 3),
        "stream": FLAGS,
        "stop": SAID,
        "echo": FLAGS,
        **SAMPLING,
    },
)

_item = st.one_of(
    shape({"role": st.sampled_from(["user", "system", "developer", "assistant"]), "content": SAID}),
    shape(
        {
            "type": st.just("message"),
            "role": st.just("user"),
            "content": st.lists(
                st.one_of(
                    shape({"type": st.just("input_text"), "text": SAID}),
                    shape({"type": st.just("input_image"), "image_url": URLS}),
                ),
                max_size=3,
            ),
        }
    ),
    shape({"type": st.just("function_call"), "call_id": IDS, "name": NAMES, "arguments": SAID}),
    shape({"type": st.just("function_call_output"), "call_id": IDS, "output": SAID}),
    shape({"type": st.just("custom_tool_call"), "call_id": IDS, "name": NAMES, "input": SAID}),
    shape({"type": st.just("custom_tool_call_output"), "call_id": IDS, "output": SAID}),
    shape({"type": st.just("reasoning"), "summary": st.just([])}, {"encrypted_content": SAID}),
)
_response_tool = st.one_of(
    shape({"type": st.just("function"), "name": NAMES, "parameters": SCHEMAS}, {"strict": FLAGS}),
    shape(
        {"type": st.just("custom"), "name": NAMES},
        {"format": st.just({"type": "grammar", "definition": "x"})},
    ),
    shape({"type": st.just("namespace"), "name": NAMES, "tools": st.just([])}),
    shape({"type": st.sampled_from(["web_search", "local_shell", "mcp"])}),
)
RESPONSES = shape(
    {"model": st.just("m"), "input": st.one_of(SAID, st.lists(_item, min_size=1, max_size=5))},
    {
        "instructions": SAID,
        "tools": st.lists(_response_tool, max_size=3),
        "tool_choice": st.sampled_from(["auto", "none", "required", {"type": "function", "name": "f"}]),
        "text": st.sampled_from([{"format": {"type": "text"}}, {"format": {"type": "json_object"}}]),
        "reasoning": st.sampled_from([{"effort": "low"}, {"summary": "auto"}]),
        "include": st.just(["reasoning.encrypted_content"]),
        "max_output_tokens": NUMBERS,
        "stream": FLAGS,
        "store": FLAGS,
        **SAMPLING,
    },
)

_block = st.one_of(
    shape({"type": st.just("text"), "text": SAID}, {"cache_control": st.just({"type": "ephemeral"})}),
    shape({"type": st.just("tool_use"), "id": IDS, "name": NAMES, "input": st.just({"a": 1})}),
    shape({"type": st.just("tool_result"), "tool_use_id": IDS, "content": SAID}, {"is_error": FLAGS}),
    shape({"type": st.just("thinking"), "thinking": SAID, "signature": SAID}),
    shape({"type": st.just("redacted_thinking"), "data": SAID}),
    shape(
        {
            "type": st.just("image"),
            "source": shape({"type": st.just("base64"), "media_type": st.just("image/png"), "data": IMAGES}),
        }
    ),
)
MESSAGES = shape(
    {
        "model": st.just("m"),
        "max_tokens": st.integers(-1, 99),
        "messages": st.lists(
            shape(
                {
                    "role": st.sampled_from(["user", "user", "assistant", "system"]),
                    "content": st.one_of(SAID, st.lists(_block, max_size=3)),
                }
            ),
            min_size=1,
            max_size=5,
        ),
    },
    {
        "system": st.one_of(SAID, st.lists(_block, max_size=2)),
        "tools": st.lists(shape({"name": NAMES, "input_schema": SCHEMAS}), max_size=3),
        "tool_choice": st.sampled_from([{"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "f"}]),
        "thinking": st.sampled_from([{"type": "enabled", "budget_tokens": 9}, {"type": "disabled"}]),
        "stop_sequences": st.lists(SAID, max_size=3),
        "stream": FLAGS,
        "top_k": NUMBERS,
        **SAMPLING,
    },
)

_gemini_part = st.one_of(
    shape({"text": SAID}, {"thought": FLAGS, "thoughtSignature": SAID}),
    shape({"functionCall": shape({"name": NAMES}, {"id": IDS, "args": st.just({"a": 1})})}),
    shape({"functionResponse": shape({"name": NAMES, "response": st.just({"output": "x"})}, {"id": IDS})}),
    shape({"inlineData": shape({"mimeType": st.just("image/png"), "data": IMAGES})}),
)
GEMINI = shape(
    {
        "contents": st.lists(
            shape({"role": st.sampled_from(["user", "model"]), "parts": st.lists(_gemini_part, max_size=3)}),
            min_size=1,
            max_size=5,
        )
    },
    {
        "systemInstruction": st.one_of(SAID, shape({"parts": st.lists(_gemini_part, max_size=2)})),
        "tools": st.lists(
            shape(
                {
                    "functionDeclarations": st.lists(
                        shape({"name": NAMES}, {"parameters": SCHEMAS}), max_size=2
                    )
                }
            ),
            max_size=2,
        ),
        "toolConfig": shape(
            {"functionCallingConfig": shape({"mode": st.sampled_from(["AUTO", "ANY", "NONE", "VALIDATED"])})}
        ),
        "generationConfig": shape(
            {"temperature": NUMBERS},
            {
                "candidateCount": st.integers(-1, 3),
                "maxOutputTokens": NUMBERS,
                "stopSequences": st.lists(SAID, max_size=2),
                "responseMimeType": st.sampled_from(["text/plain", "application/json", "x"]),
                "responseSchema": SCHEMAS,
                "thinkingConfig": st.just({"includeThoughts": True}),
            },
        ),
    },
)
SHAPES = {
    "chat": CHAT,
    "completions": COMPLETIONS,
    "responses": RESPONSES,
    "messages": MESSAGES,
    "gemini": GEMINI,
}


def made() -> st.SearchStrategy[Case]:
    """A request of some dialect's shape."""
    return st.sampled_from(sorted(SHAPES)).flatmap(
        lambda dialect: st.tuples(
            st.just(dialect),
            st.sampled_from(PATHS[dialect]),
            SHAPES[dialect].map(lambda body: json.dumps(body).encode()),
        )
    )


def cases(starts: list[tuple[str, Json]] | None = None) -> st.SearchStrategy[Case]:
    """Everything."""
    return st.one_of(broken(starts or corpus()), made())


# --- the judge ---


def judge(dialect: str, path: str, status: int, kind: str, body: bytes) -> str:
    """What came of a request, in a word: ``answered``, ``streamed`` or ``refused``. Fails on anything else."""
    assert status == 200 or 400 <= status < 500, (status, body[:500])
    if status != 200:
        assert status == 400, (status, body[:500])
        refused(dialect, msgspec.json.decode(body))
        return "refused"
    if kind.startswith("text/event-stream"):
        _streamed[dialect](sse(body))
        return "streamed"
    answer = msgspec.json.decode(body)
    if "ount" in path:
        (count,) = answer.values()
        assert count > 0
    else:
        _answered[dialect](answer[0] if isinstance(answer, list) else answer)
    return "answered"


def refused(dialect: str, body: Json) -> None:
    """A refusal as the dialect's clients read it."""
    error = body["error"]
    assert isinstance(error["message"], str) and error["message"]
    if dialect == "gemini":
        assert (error["code"], error["status"]) == (400, "INVALID_ARGUMENT")
    elif dialect == "messages":
        assert (body["type"], error["type"]) == ("error", "invalid_request_error")
    else:
        assert error["type"] == "invalid_request_error" and error["code"]
        assert error.keys() == {"message", "type", "param", "code"}


def _chat_answer(answer: Json) -> None:
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(answer["choices"])))
    assert all(choice["message"]["role"] == "assistant" for choice in answer["choices"])


def _chat_stream(events: list[tuple[str | None, Json]]) -> None:
    assert events[-1][1] == "[DONE]"
    finished = [c["finish_reason"] for _, e in events[:-1] for c in e["choices"] if c["finish_reason"]]
    assert finished


def _responses_stream(events: list[tuple[str | None, Json]]) -> None:
    assert events[0][0] == "response.created"
    assert events[-1][0] in ("response.completed", "response.incomplete")
    assert [event["sequence_number"] for _, event in events] == list(range(len(events)))


def _messages_stream(events: list[tuple[str | None, Json]]) -> None:
    assert (events[0][0], events[-1][0]) == ("message_start", "message_stop")


def _gemini_stream(events: list[tuple[str | None, Json]]) -> None:
    assert events[-1][1]["usageMetadata"] and events[-1][1]["candidates"][0]["finishReason"]


def _has(*keys: str) -> Callable[[Json], None]:
    def check(answer: Json) -> None:
        assert answer.keys() >= set(keys), answer

    return check


_answered: dict[str, Callable[[Json], None]] = {
    "chat": _chat_answer,
    "completions": _has("choices", "usage"),
    "responses": _has("output", "status", "usage"),
    "messages": _has("content", "stop_reason", "usage"),
    "gemini": _has("candidates", "usageMetadata"),
}
_streamed: dict[str, Callable[[list[tuple[str | None, Json]]], None]] = {
    "chat": _chat_stream,
    "completions": _chat_stream,
    "responses": _responses_stream,
    "messages": _messages_stream,
    "gemini": _gemini_stream,
}
