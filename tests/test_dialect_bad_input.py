"""Whatever is sent, a dialect reads it or refuses it with a 400 that names the fault."""

import copy
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from dialect_support import GEMINI, dialect_of, recorded, request, said
from hypothesis import given, settings
from hypothesis import strategies as st
from proxy_rig import Rig, rig

from forge_server.domain.turn import Turn
from forge_server.proxy.dialects import gemini, messages
from forge_server.proxy.dialects.base import Counter, Dialect, Refusal
from forge_server.proxy.dialects.chat import CHAT
from forge_server.proxy.dialects.completions import COMPLETIONS
from forge_server.proxy.dialects.messages import MESSAGES
from forge_server.proxy.dialects.responses import RESPONSES

Body = dict[str, Any]

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
SCHEMA: Body = {"type": "object", "properties": {"a": {"type": "string"}}}


def chat(*history: Body, **more: Any) -> Body:
    return {"model": "m", "messages": [{"role": "user", "content": "hi"}, *history], **more}


def responses(*items: Any, **more: Any) -> Body:
    return {"model": "m", "input": [{"role": "user", "content": "hi"}, *items], **more}


def claude(*history: Body, **more: Any) -> Body:
    return {
        "model": "m",
        "max_tokens": 9,
        "messages": [{"role": "user", "content": "hi"}, *history],
        **more,
    }


def google(*contents: Body, **more: Any) -> Body:
    return {"contents": [{"role": "user", "parts": [{"text": "hi"}]}, *contents], **more}


def google_tools(**config: Any) -> Body:
    tools = [{"functionDeclarations": [{"name": "f", "parameters": SCHEMA}]}]
    return google(tools=tools, toolConfig={"functionCallingConfig": config})


RESPONSES_TOOL: Body = {"type": "function", "name": "f", "parameters": SCHEMA}
CHAT_TOOL: Body = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
CLAUDE_TOOL: Body = {"name": "f", "input_schema": SCHEMA}

REFUSED: list[tuple[Dialect, Body, str]] = [
    # missing and of the wrong type
    (RESPONSES, {"input": "hi"}, "model"),
    (RESPONSES, {"model": "m"}, "input"),
    (RESPONSES, {"model": "m", "input": 3}, "$.input"),
    (RESPONSES, {"model": "m", "input": [3]}, "$.input[0]"),
    (RESPONSES, {"model": "m", "input": ""}, "empty"),
    (RESPONSES, {"model": "m", "input": []}, "empty"),
    (RESPONSES, responses({"role": "user"}), "content is missing"),
    (RESPONSES, responses(stream="yes"), "$.stream"),
    (RESPONSES, responses(max_output_tokens=0), "max_output_tokens"),
    (RESPONSES, responses(tools=[{"type": "function"}]), "name"),
    (RESPONSES, responses(tools=[{"type": "function", "name": "f", "parameters": []}]), "schema"),
    (MESSAGES, {"model": "m", "messages": [{"role": "user", "content": "hi"}]}, "max_tokens"),
    (MESSAGES, {"max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}, "model"),
    (MESSAGES, {"model": "m", "max_tokens": 9}, "messages"),
    (MESSAGES, {"model": "m", "max_tokens": 9, "messages": []}, "at least one message"),
    (MESSAGES, {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": ""}]}, "empty"),
    (MESSAGES, {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": []}]}, "empty"),
    (MESSAGES, claude(max_tokens="many"), "$.max_tokens"),
    (MESSAGES, claude(max_tokens=0), "max_tokens"),
    (MESSAGES, claude(tools=[{"name": "f"}]), "input_schema"),
    (MESSAGES, claude(tools=[{"input_schema": SCHEMA}]), "name"),
    (MESSAGES, claude({"role": "user", "content": [{"type": "image"}]}), "source"),
    (MESSAGES, claude({"role": "user", "content": [{"type": "text"}]}), "text"),
    (GEMINI, {}, "at least one content"),
    (GEMINI, {"contents": []}, "at least one content"),
    (GEMINI, {"contents": "hi"}, "not a list"),
    (GEMINI, {"contents": [3]}, "not an object"),
    (GEMINI, {"contents": [{"role": "user", "parts": []}]}, "must not be empty"),
    (GEMINI, {"contents": [{"role": "user", "parts": [{}]}]}, "a part is empty"),
    (GEMINI, {"contents": [{"role": "user", "parts": [{"text": 3}]}]}, "not a string"),
    (GEMINI, google(generationConfig={"temperature": "hot"}), "temperature"),
    (GEMINI, google(generationConfig={"maxOutputTokens": 1.5}), "maxOutputTokens"),
    (GEMINI, google(tools=[{"functionDeclarations": [{"description": "x"}]}]), "name"),
    (COMPLETIONS, {"model": "m"}, "prompt"),
    (COMPLETIONS, {"model": "m", "prompt": ""}, "empty"),
    (COMPLETIONS, {"model": "m", "prompt": []}, "empty"),
    (COMPLETIONS, {"model": "m", "prompt": {}}, "$.prompt"),
    (CHAT, chat({"role": "user", "content": [{"type": "text"}]}), "without its text"),
    (CHAT, chat({"role": "user", "content": [{"type": "text", "text": 3}]}), "without its text"),
    *(
        (CHAT, chat({"role": "user", "content": [{"type": kind, "text": "x", "uuid": "u", **media}]}), "uuid")
        for kind in ("text", "input_text", "output_text", "refusal", "thinking")
        for media in ({"image_url": "http://x/y.png"}, {"video_url": {"url": "http://x/y.mp4"}}, {})
    ),
    # what would change the answer
    (CHAT, chat(continue_final_message=True), "continue_final_message"),
    (CHAT, chat(functions=[{"name": "f"}]), "use tools"),
    (CHAT, chat(function_call="auto"), "use tool_choice"),
    # roles
    (CHAT, chat({"role": "robot", "content": "x"}), "robot"),
    (RESPONSES, responses({"role": "robot", "content": "x"}), "robot"),
    (MESSAGES, claude({"role": "robot", "content": "x"}), "robot"),
    (GEMINI, google({"role": "robot", "parts": [{"text": "x"}]}), "robot"),
    # a result without its call
    (CHAT, chat({"role": "tool", "tool_call_id": "c", "content": "x"}), "'c'"),
    (CHAT, chat({"role": "tool", "content": "x"}), "no tool call"),
    (RESPONSES, responses({"type": "function_call_output", "call_id": "c", "output": "x"}), "'c'"),
    (RESPONSES, responses({"type": "custom_tool_call_output", "call_id": "c", "output": "x"}), "'c'"),
    (MESSAGES, claude({"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c"}]}), "'c'"),
    (MESSAGES, claude({"role": "user", "content": [{"type": "tool_result"}]}), "tool_use_id"),
    (GEMINI, google({"parts": [{"functionResponse": {"name": "f", "response": {}}}]}), "'f'"),
    (GEMINI, google({"parts": [{"functionResponse": {"name": "f", "id": "c", "response": {}}}]}), "'c'"),
    # contradictory tool choice
    (CHAT, chat(tool_choice="required"), "no tools"),
    (CHAT, chat(tool_choice={"type": "function", "function": {"name": "g"}}, tools=[CHAT_TOOL]), "'g'"),
    (RESPONSES, responses(tool_choice="required"), "no tools"),
    (RESPONSES, responses(tool_choice="sometimes"), "sometimes"),
    (RESPONSES, responses(tool_choice={"type": "function", "name": "g"}, tools=[RESPONSES_TOOL]), "'g'"),
    (RESPONSES, responses(tool_choice={"type": "function", "name": {}}, tools=[RESPONSES_TOOL]), "{}"),
    (RESPONSES, responses(tool_choice={"type": "web_search"}), "web_search"),
    (MESSAGES, claude(tool_choice={"type": "any"}), "no tools"),
    (MESSAGES, claude(tool_choice={"type": "tool", "name": "g"}, tools=[CLAUDE_TOOL]), "'g'"),
    (MESSAGES, claude(tool_choice={"type": "tool"}, tools=[CLAUDE_TOOL]), "None"),
    (MESSAGES, claude(tool_choice={"type": "sometimes"}), "sometimes"),
    (GEMINI, google(toolConfig={"functionCallingConfig": {"mode": "ANY"}}), "no tools"),
    (GEMINI, google_tools(mode="ANY", allowedFunctionNames=["g"]), "'g'"),
    (GEMINI, google_tools(mode="AUTO", allowedFunctionNames=["f"]), "allowedFunctionNames"),
    (GEMINI, google_tools(mode="SOMETIMES"), "SOMETIMES"),
    # not offered
    (RESPONSES, responses(previous_response_id="resp_1"), "not stored"),
    (RESPONSES, responses(conversation="conv_1"), "conversation"),
    (RESPONSES, responses(background=True), "background"),
    (RESPONSES, responses(prompt={"id": "p"}), "prompt"),
    (RESPONSES, responses(include=["message.output_text.logprobs"]), "logprobs"),
    (RESPONSES, responses(tools=[{"type": "computer_use_preview"}]), "computer_use_preview"),
    (RESPONSES, responses(tools=[{"type": "local_shell"}]), "local_shell"),
    (RESPONSES, responses({"type": "item_reference", "id": "x"}), "item_reference"),
    (RESPONSES, responses({"role": "user", "content": [{"type": "input_file"}]}), "input_file"),
    (
        RESPONSES,
        responses({"role": "user", "content": [{"type": "input_image", "file_id": "x"}]}),
        "input_image",
    ),
    (
        RESPONSES,
        responses({"role": "user", "content": [{"type": "input_image", "image_url": "http://x/y.png"}]}),
        "data:image/",
    ),
    (MESSAGES, claude({"role": "assistant", "content": "Sure:"}), "prefilled"),
    (MESSAGES, claude(tools=[{"type": "bash_20250124", "name": "bash"}]), "bash_20250124"),
    (MESSAGES, claude({"role": "user", "content": [{"type": "container_upload"}]}), "container_upload"),
    (
        MESSAGES,
        claude(
            {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://x"}}]}
        ),
        "data:image/",
    ),
    (
        MESSAGES,
        claude({"role": "user", "content": [{"type": "image", "source": {"type": "file", "file_id": "x"}}]}),
        "image",
    ),
    (GEMINI, google({"role": "model", "parts": [{"text": "Sure:"}]}), "prefilled"),
    (GEMINI, google({"parts": [{"fileData": {"fileUri": "gs://x"}}]}), "fileData"),
    (GEMINI, google({"parts": [{"inlineData": {"mimeType": "audio/wav", "data": "x"}}]}), "audio/wav"),
    (GEMINI, google(cachedContent="x"), "cachedContent"),
    (GEMINI, google(generationConfig={"candidateCount": "two"}), "candidateCount"),
    (GEMINI, google(generationConfig={"candidateCount": 0}), "candidateCount"),
    (GEMINI, google(generationConfig={"responseModalities": ["IMAGE"]}), "not text"),
    (GEMINI, google(generationConfig={"responseLogprobs": True}), "responseLogprobs"),
    (GEMINI, google(generationConfig={"responseMimeType": "text/x.enum"}), "text/x.enum"),
    (GEMINI, google(tools=[{"computerUse": {}}]), "computerUse"),
    (COMPLETIONS, {"model": "m", "prompt": [1, 2]}, "token ids"),
    (COMPLETIONS, {"model": "m", "prompt": [[1, 2]]}, "token ids"),
    (COMPLETIONS, {"model": "m", "prompt": ["a", "b"]}, "more than one"),
    (CHAT, chat(n=129), "n must be between 1 and 128"),
    (COMPLETIONS, {"model": "m", "prompt": "a", "n": 0}, "n must be between 1 and 128"),
    (COMPLETIONS, {"model": "m", "prompt": "a", "best_of": 2}, "best_of"),
    (COMPLETIONS, {"model": "m", "prompt": "a", "echo": True}, "echo"),
    (COMPLETIONS, {"model": "m", "prompt": "a", "suffix": "b"}, "suffix"),
    (COMPLETIONS, {"model": "m", "prompt": "a", "logprobs": 1}, "logprobs"),
]


@pytest.mark.parametrize(("dialect", "body", "word"), REFUSED)
def test_faults_are_refused_by_name(dialect: Dialect, body: Body, word: str) -> None:
    with pytest.raises(Refusal) as caught:
        dialect.read(msgspec.json.encode(body))
    assert caught.value.status == 400
    assert word in caught.value.message
    shaped(dialect, caught.value)


def shaped(dialect: Dialect | Counter, refusal: Refusal) -> None:
    """The refusal is worded as the dialect's clients expect."""
    body = msgspec.json.decode(dialect.error(refusal))
    if dialect.name == "gemini":
        assert body["error"]["code"] == refusal.status
        assert body["error"]["status"] == "INVALID_ARGUMENT"
    else:
        assert body["error"]["type"] == "invalid_request_error"
        assert (body.get("type") == "error") is (dialect.name == "messages")


DIALECTS: list[Dialect | Counter] = [
    CHAT,
    RESPONSES,
    MESSAGES,
    messages.COUNT,
    GEMINI,
    gemini.COUNT,
    COMPLETIONS,
]
VALID: dict[str, Callable[..., Body]] = {
    "chat": chat,
    "responses": responses,
    "messages": claude,
    "gemini": google,
    "completions": lambda **more: {"model": "m", "prompt": "hi", **more},
}


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda d: f"{d.name}-{type(d).__name__}")
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"not json",
        b"\xff\xfe",
        b"[1]",
        b"3",
        b"null",
        b'"hi"',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
    ids=lambda b: bytes(b[:12]).decode("latin-1"),
)
def test_what_is_no_request_is_refused(dialect: Dialect | Counter, body: bytes) -> None:
    with pytest.raises(Refusal) as caught:
        dialect.read(body)
    assert caught.value.status == 400
    shaped(dialect, caught.value)


def test_a_null_is_nothing() -> None:
    for dialect, body in (
        (CHAT, chat(functions=None, tools=None, n=None, stop=None, tool_choice=None, stream=None)),
        (RESPONSES, responses(tools=[{"type": "function", "name": "f", "parameters": None}], text=None)),
        (MESSAGES, claude(tools=None, system=None, thinking=None, stop_sequences=None)),
        (GEMINI, google(tools=None, systemInstruction=None, generationConfig=None, toolConfig=None)),
        (COMPLETIONS, {"model": "m", "prompt": "hi", "n": None, "stop": None, "suffix": None}),
    ):
        assert dialect.read(msgspec.json.encode(body)).messages


def nested(depth: int) -> Any:
    value: Any = "x"
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


def deep(name: str, value: Any) -> list[Body]:
    """Requests with a value in every place that takes free JSON."""
    schema = {"type": "object", "properties": {"a": value}}
    if name == "chat":
        function = {"name": "f", "parameters": schema}
        return [chat(tools=[{"type": "function", "function": function}]), chat(metadata=value)]
    if name == "responses":
        return [
            responses(tools=[RESPONSES_TOOL | {"parameters": schema}]),
            responses(metadata=value),
            responses(text={"format": {"type": "json_schema", "name": "x", "schema": schema}}),
        ]
    if name == "messages":
        call = {"type": "tool_use", "id": "c", "name": "f", "input": {"a": value}}
        result = {"type": "tool_result", "tool_use_id": "c", "content": "x"}
        return [
            claude(tools=[CLAUDE_TOOL | {"input_schema": schema}]),
            claude({"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}),
            claude(metadata=value),
        ]
    if name == "gemini":
        declared = [{"functionDeclarations": [{"name": "f", "parameters": schema}]}]
        asked: Body = {"functionCall": {"name": "f", "args": {"a": value}}}
        told: Body = {"functionResponse": {"name": "f", "response": {"a": value}}}
        return [
            google(tools=declared),
            google({"role": "model", "parts": [asked]}, {"role": "user", "parts": [told]}),
            google(labels=value),
        ]
    return [{"model": "m", "prompt": "hi", "metadata": value}]


@pytest.mark.parametrize("dialect", [CHAT, RESPONSES, MESSAGES, GEMINI, COMPLETIONS], ids=lambda d: d.name)
def test_deep_nesting_is_read_or_refused(dialect: Dialect) -> None:
    for body in deep(dialect.name, nested(200)):
        assert dialect.read(msgspec.json.encode(body)).messages
    for body in deep(dialect.name, "MARK"):
        encoded = msgspec.json.encode(body).replace(b'"MARK"', b"[" * 50_000 + b"]" * 50_000)
        with pytest.raises(Refusal) as caught:
            dialect.read(encoded)
        shaped(dialect, caught.value)


@pytest.mark.parametrize("dialect", [CHAT, RESPONSES, MESSAGES, GEMINI, COMPLETIONS], ids=lambda d: d.name)
def test_half_surrogates_are_refused(dialect: Dialect) -> None:
    """No tokenizer takes them; a pair is a character like any other."""
    bodies = [VALID[dialect.name](), *deep(dialect.name, "hi")[:1]]
    if dialect is MESSAGES:
        bodies.append(deep("messages", "hi")[1])
    for body in bodies:
        encoded = msgspec.json.encode(body)
        dialect.read(encoded.replace(b'"hi"', b'"\\ud83d\\ude00"'))
        for half in (b"\\ud83d", b"\\uDE00", b"\\ude00\\ud83d"):
            for at in range(encoded.count(b'"hi"')):
                pieces = encoded.split(b'"hi"')
                left, right = b'"hi"'.join(pieces[: at + 1]), b'"hi"'.join(pieces[at + 1 :])
                with pytest.raises(Refusal) as caught:
                    dialect.read(left + b'"' + half + b'"' + right)
                shaped(dialect, caught.value)


def big(name: str, output: str) -> Body:
    """A request with a tool result."""
    if name == "chat":
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        return chat(
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": output},
        )
    if name == "responses":
        return responses(
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": output},
        )
    if name == "messages":
        return claude(
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": output}]},
        )
    return google(
        {"role": "model", "parts": [{"functionCall": {"name": "f"}}]},
        {"parts": [{"functionResponse": {"name": "f", "response": {"output": output}}}]},
    )


@pytest.mark.parametrize("dialect", [CHAT, RESPONSES, MESSAGES, GEMINI], ids=lambda d: d.name)
def test_large_and_empty_tool_outputs_are_read(dialect: Dialect) -> None:
    for output in ("x\n" * 2_500_000, ""):
        history = said(dialect.read(msgspec.json.encode(big(dialect.name, output))))
        assert history[-1] == {
            "role": "tool",
            "tool_call_id": history[1]["tool_calls"][0]["id"],
            "content": output,
        }


# --- images ---


def test_images_become_parts_of_the_chat() -> None:
    url = f"data:image/png;base64,{PIXEL}"
    image = {"type": "image_url", "image_url": {"url": url}}
    anthropic = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}
    inline = {"inlineData": {"mimeType": "image/png", "data": PIXEL}}
    openai = {"type": "input_image", "detail": "auto", "image_url": url}
    shown: list[tuple[Dialect, Body]] = [
        (RESPONSES, responses({"role": "user", "content": [{"type": "input_text", "text": "see"}, openai]})),
        (MESSAGES, claude({"role": "user", "content": [{"type": "text", "text": "see"}, anthropic]})),
        (GEMINI, google({"parts": [{"text": "see"}, inline]})),
        (
            GEMINI,
            google({"parts": [{"text": "see"}, {"inline_data": {"mime_type": "image/png", "data": PIXEL}}]}),
        ),
    ]
    for dialect, body in shown:
        last = said(dialect.read(msgspec.json.encode(body)))[-1]
        assert last == {"role": "user", "content": [{"type": "text", "text": "see"}, image]}
    results: list[tuple[Dialect, Body]] = [
        (RESPONSES, big("responses", "")),
        (MESSAGES, big("messages", "")),
        (GEMINI, big("gemini", "")),
    ]
    results[0][1]["input"][-1]["output"] = [openai]
    results[1][1]["messages"][-1]["content"][0]["content"] = [anthropic]
    results[2][1]["contents"][-1]["parts"][0]["functionResponse"]["parts"] = [inline]
    for dialect, body in results:
        last = said(dialect.read(msgspec.json.encode(body)))[-1]
        assert last["role"] == "tool"
        assert last["content"][-1] == image


# --- chance ---

JUNK: st.SearchStrategy[Any] = st.sampled_from(
    [
        *(None, True, -1, 0, 1.5, 2**70, "", "x", "user", "auto", "\x00"),
        *([], [None], [[]], [{"role": "user"}], [{"type": "function_call"}]),
        *({}, {"a": 1}, {"": ""}, {"\x00": 1}, {"type": 3}, {"type": "text"}, {"name": []}),
    ]
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to everything within a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, entry in inner for found in places(entry, (*path, key)))]


def starts() -> list[tuple[Dialect | Counter, Body]]:
    """Requests to break: the recorded ones, and some that use what those do not."""
    made: list[tuple[Dialect | Counter, Body]] = []
    for name in recorded():
        found = request(name)
        made.append((dialect_of(found["dialect"], found["path"]), found["body"]))
    for dialect in DIALECTS:
        if dialect is not COMPLETIONS:
            made.append((dialect, big(dialect.name, "x")))
            made += [(dialect, body) for body in deep(dialect.name, "x")]
    made.append((COMPLETIONS, {"model": "m", "prompt": "hi", "stop": ["x"], "seed": 3}))
    made += [(dialect, body) for dialect, body, _ in REFUSED]
    return made


STARTS = starts()


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(STARTS), st.data())
def test_a_broken_request_is_read_or_refused(
    start: tuple[Dialect | Counter, Body], data: st.DataObject
) -> None:
    dialect, body = start
    body = copy.deepcopy(body)
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(places(body)[1:] or [()]))
        if not path:
            break
        holder: Any = body
        for key in path[:-1]:
            holder = holder[key]
        if data.draw(st.booleans()):
            holder[path[-1]] = copy.deepcopy(data.draw(JUNK))
        else:
            del holder[path[-1]]
    try:
        turn = dialect.read(json.dumps(body).encode())
    except Refusal as refusal:
        assert refusal.status == 400
        shaped(dialect, refusal)
    else:
        assert isinstance(turn, Turn)
        assert turn.messages
        msgspec.json.encode((turn.messages, turn.tools, turn.stop, turn.model))
        noted = msgspec.json.encode((turn.dropped, turn.asked, turn.tool_choice, turn.response_format))
        assert b"\\u0000" not in noted


# --- over HTTP ---


@pytest.fixture
async def proxy(tmp_path: Path) -> AsyncIterator[Rig]:
    async with rig(f"sqlite:///{tmp_path / 'forge.db'}") as made:
        yield made


PATHS = {
    "chat": "v1/chat/completions",
    "responses": "v1/responses",
    "messages": "v1/messages?beta=true",
    "gemini": "v1beta/models/m:generateContent",
    "completions": "v1/completions",
}


async def test_refusals_leave_no_call_behind(proxy: Rig) -> None:
    async with proxy.client() as client:
        for dialect, body, word in REFUSED:
            answer = await client.post(f"/a/{proxy.attempt}/{PATHS[dialect.name]}", json=body)
            assert answer.status_code == 400
            assert word in answer.json()["error"]["message"]
        answer = await client.post(f"/a/{proxy.attempt}/v1beta/models/m:embedContent", json={})
        assert (answer.status_code, answer.json()["error"]["status"]) == (404, "NOT_FOUND")
        answer = await client.get(f"/a/{proxy.attempt}/v1/messages")
        assert (answer.status_code, answer.json()["type"]) == (405, "error")
    assert await proxy.rows() == []
    assert proxy.engine.asked == []


async def test_large_deep_and_odd_requests_pass_through_the_proxy(proxy: Rig) -> None:
    async with proxy.client() as client:
        for name, path in PATHS.items():
            bodies = deep(name, nested(200))
            if name != "completions":
                bodies.append(big(name, "x" * 5_000_000))
            for body in bodies:
                answer = await client.post(f"/a/{proxy.attempt}/{path}", json=body)
                assert answer.status_code == 200, answer.text[:300]
    assert {row.end for row in await proxy.rows()} == {"ok"}
