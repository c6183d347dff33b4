"""An answer that a client puts into its history is read as the message that was recorded."""

import json
from typing import Any

import msgspec
from dialect_support import GEMINI, GEMINI_STREAM, completion, said, sse
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_server.domain.turn import Completion, as_message
from forge_server.proxy.dialects.base import Dialect
from forge_server.proxy.dialects.messages import MESSAGES
from forge_server.proxy.dialects.responses import RESPONSES

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40)
NAMES = ["shell", "patch", "ns__spawn"]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
ARGUMENTS = st.dictionaries(TEXT, VALUES, max_size=3)


@st.composite
def answers(draw: st.DrawFn) -> Completion:
    """Answers as an engine gives them; the arguments with the spacing that a model likes."""
    calls = []
    for name in draw(st.lists(st.sampled_from(NAMES), max_size=3)):
        if name == "patch":
            text = json.dumps({"input": draw(TEXT)})
        else:
            text = json.dumps(draw(ARGUMENTS), indent=draw(st.sampled_from([None, 1])))
        calls.append((name, text))
    spoken = draw(TEXT if not calls else st.none() | TEXT)
    return completion(spoken, *calls, reasoning=draw(st.none() | TEXT))


def like(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its arguments parsed: what dialects that carry objects can keep."""
    message = json.loads(json.dumps(message))
    for call in message.get("tool_calls", ()):
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return message


def read(dialect: Dialect, body: dict[str, Any]) -> list[dict[str, Any]]:
    return said(dialect.read(msgspec.json.encode(body)))


RESPONSES_ASK: dict[str, Any] = {
    "model": "m",
    "input": [{"role": "user", "content": "hi"}],
    "tools": [
        {"type": "function", "name": "shell", "parameters": {}},
        {"type": "custom", "name": "patch"},
        {"type": "namespace", "name": "ns", "tools": [{"type": "function", "name": "spawn"}]},
    ],
    "reasoning": {"summary": "auto"},
    "include": ["reasoning.encrypted_content"],
}


@settings(max_examples=60, deadline=None)
@given(answers(), st.sampled_from(["all", "summary", "sealed"]))
def test_responses(answer: Completion, kept: str) -> None:
    turn = RESPONSES.read(msgspec.json.encode(RESPONSES_ASK))
    whole = msgspec.json.decode(RESPONSES.write(turn, answer))
    done = [d["item"] for _, d in sse(RESPONSES.events(turn, answer)) if d["type"].endswith("item.done")]
    assert done == whole["output"]
    items = [dict(item) for item in done]
    for item in items:
        if item["type"] == "reasoning" and kept != "all":
            del item["content"]
            item["summary"] = item["summary"] if kept == "summary" else []
            if kept == "summary":
                del item["encrypted_content"]
    results = [
        {"type": item["type"] + "_output", "call_id": item["call_id"], "output": "ok"}
        for item in items
        if "call_id" in item
    ]
    more = [*RESPONSES_ASK["input"], *items, *results, {"role": "user", "content": "go on"}]
    history = read(RESPONSES, RESPONSES_ASK | {"input": more})
    assert like(history[1]) == like(as_message(answer))
    exact = [c for c in answer.tool_calls if c.name != "patch"]
    back = {c["id"]: c["function"]["arguments"] for c in history[1].get("tool_calls", ())}
    assert [back[call.id] for call in exact] == [call.arguments for call in exact]
    assert [m["role"] for m in history[2:]] == ["tool"] * len(results) + ["user"]


MESSAGES_ASK: dict[str, Any] = {
    "model": "m",
    "max_tokens": 9,
    "thinking": {"type": "adaptive"},
    "messages": [{"role": "user", "content": "hi"}],
}


@settings(max_examples=60, deadline=None)
@given(answers())
def test_messages(answer: Completion) -> None:
    turn = MESSAGES.read(msgspec.json.encode(MESSAGES_ASK))
    whole = msgspec.json.decode(MESSAGES.write(turn, answer))
    blocks = _blocks(MESSAGES.events(turn, answer))
    assert blocks == whole["content"]
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": [{"type": "text", "text": "ok"}]}
        for block in blocks
        if block["type"] == "tool_use"
    ]
    user = [*results, {"type": "text", "text": "go on"}]
    more = [
        *MESSAGES_ASK["messages"],
        {"role": "assistant", "content": blocks},
        {"role": "user", "content": user},
    ]
    history = read(MESSAGES, MESSAGES_ASK | {"messages": more})
    assert like(history[1]) == like(as_message(answer))
    assert [m["role"] for m in history[2:]] == ["tool"] * len(results) + ["user"]


def _blocks(stream: bytes) -> list[dict[str, Any]]:
    """What a client puts together from the events."""
    blocks: list[dict[str, Any]] = []
    for _, data in sse(stream):
        if data["type"] == "content_block_start":
            blocks.append(data["content_block"])
        elif data["type"] == "content_block_delta":
            delta, block = data["delta"], blocks[-1]
            kind = delta["type"].removesuffix("_delta")
            if kind == "input_json":
                block["input"] = json.loads(delta["partial_json"])
            else:
                block[kind] += delta[kind]
    return blocks


GEMINI_ASK: dict[str, Any] = {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}


@settings(max_examples=60, deadline=None)
@given(answers(), st.booleans(), st.booleans(), st.booleans())
def test_gemini(answer: Completion, shown: bool, ids: bool, merged: bool) -> None:
    config = {"generationConfig": {"thinkingConfig": {"includeThoughts": shown}}}
    turn = GEMINI_STREAM.read(msgspec.json.encode(GEMINI_ASK | config))
    whole = msgspec.json.decode(GEMINI.write(turn, answer))["candidates"][0]["content"]["parts"]
    streamed = [d["candidates"][0]["content"] for _, d in sse(GEMINI_STREAM.events(turn, answer))]
    assert [part for content in streamed for part in content["parts"]] == whole
    for part in whole:
        if not ids and "functionCall" in part:
            del part["functionCall"]["id"]
    if merged:  # as Gemini CLI does, without the thoughts; the Python SDK keeps every chunk as it came
        contents = [{"role": "model", "parts": [p for p in whole if not p.get("thought")]}]
    else:
        contents = [{"role": "model", "parts": [part]} for part in whole]
    results = [
        {
            "functionResponse": {
                "name": part["functionCall"]["name"],
                "response": {"output": "ok"},
                **({"id": part["functionCall"]["id"]} if ids else {}),
            }
        }
        for part in whole
        if "functionCall" in part
    ]
    user = {"role": "user", "parts": [*results, {"text": "go on"}]}
    history = read(GEMINI, {"contents": [*GEMINI_ASK["contents"], *contents, user]})
    expected = like(as_message(answer))
    back = like(history[1])
    if not ids:
        for number, call in enumerate(back.get("tool_calls", ()), 1):
            assert call["id"] == f"call_{number}"
            call["id"] = expected["tool_calls"][number - 1]["id"]
    assert back == expected
    assert [m["role"] for m in history[2:]] == ["tool"] * len(results) + ["user"]
    calls = [call["id"] for call in history[1].get("tool_calls", ())]
    assert sorted(calls) == sorted(m["tool_call_id"] for m in history[2:-1])
