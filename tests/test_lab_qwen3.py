"""The lab's Qwen3 against the originals: transformers' rendering and token ids, vLLM's request reading and parsers."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from qwen3 import (
    Message,
    assets,
    parse_answer,
    parse_calls,
    parse_prompt,
    qwen3,
    template_messages,
    template_tools,
)
from scripted_engine import Call, Say, _readable

TOOLS: list[Message] = [
    {
        "type": "function",
        "function": {
            "name": "shell",
            "description": "Run <b> & 'it' — ünï \u2028",
            "parameters": {
                "type": "object",
                "properties": {"b": {"type": "number", "default": 1.0}, "a": {}},
            },
        },
    },
    {"type": "function", "function": {"name": "bare"}},
    {"type": "function", "function": {"name": "strict", "strict": True, "parameters": {}, "more": 1}, "x": 2},
]


def call(arguments: Any, name: str = "shell", text: str | None = None, **more: Any) -> Message:
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": text,
        "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        **more,
    }


SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "héllo <|x|> 世界 🙂"}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "line\n  two\n"}
CONVERSATIONS: list[list[Message]] = [
    [USER],
    [SYSTEM, USER],
    [SYSTEM, USER, {"role": "assistant", "content": "plain"}, USER],
    [SYSTEM, USER, {"role": "assistant", "content": "plain", "reasoning": "why\n\nnot"}, USER],
    [USER, call('{"b":1.0,"a":"Z\\u00fcrich"}'), RESULT],
    [USER, call('{"b": 1.0}', text="Let me see.\n\n", reasoning="hm"), RESULT, RESULT],
    [USER, call({"a": [1, {"b": None}]}), RESULT, call("{}", "bare"), RESULT, USER],
    [USER, call("not json"), RESULT, call("[1]"), RESULT, call(""), RESULT],
    [
        {"role": "system", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "c"}]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "d"}]},
    ],
    [
        {"role": "system", "content": "x-anthropic-billing-header: cch=1\nrest"},
        {"role": "system", "content": "second"},
        {"role": "developer", "content": "unknown to the template"},
        USER,
    ],
    [
        {"role": "user", "content": ""},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": "<think>\nx\n</think>\n\ny"},
    ],
]

SAYINGS = [
    Say("hello"),
    Say("hello", reasoning="why"),
    Say("  hello \n\n", reasoning="why\n\nso"),
    Say(calls=[Call("f", {"a": "ü"})]),
    Say("first", reasoning="why", calls=[Call("f", '{"a":1.0,"b":"\\u00fc"}'), Call("g", "{ }")]),
    Say(reasoning="why", calls=[Call("f", {"a": "</think> <tool_call>"})]),
    Say(reasoning="why", calls=[Call("f", '{"broken": ')]),
    Say(raw="<think>\ncut off"),
    Say(raw='<think>\nno end, but a call <tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'),
    Say(raw='<think>\na\n</think>\n\n</think>text<tool_call>{"name": "f", "arguments": {"x": 1}}'),
    Say(raw='<think>\n\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\ntail'),
    Say(raw='<think>a</think><tool_call>\n{"name": "f"}\n</tool_call>'),
    Say(
        raw='<think>a</think><tool_call>\n{"name": "f", "arguments": {}}\n</tool_call> between\n'
        '<tool_call>\n{"name": "f", "arguments": 7}\n</tool_call>'
    ),
]


@pytest.fixture(scope="module")
def originals(engine_env: Path) -> dict[str, Any]:
    cases = []
    for messages in CONVERSATIONS:
        for tools in (None, TOOLS):
            for opened in (True, False):
                more = [{}, {"enable_thinking": False}, {"enable_thinking": True}] if opened else [{}]
                cases += [
                    {
                        "messages": template_messages(messages),
                        "tools": template_tools(tools),
                        "open": opened,
                        "more": m,
                    }
                    for m in more
                ]
    given = {
        "folder": str(assets()),
        "conversations": cases,
        "requests": [{"messages": messages, "tools": TOOLS} for messages in CONVERSATIONS],
        "outputs": [say.output for say in SAYINGS],
    }
    done = subprocess.run(
        [engine_env / "bin" / "python", "-W", "ignore", Path(__file__).with_name("qwen3_peer.py")],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answer: dict[str, Any] = json.loads(done.stdout[done.stdout.index('{"rendered"') :])
    return {"given": given, **answer}


@pytest.mark.vllm
def test_rendering_and_ids_are_those_of_transformers(originals: dict[str, Any]) -> None:
    for case, theirs in zip(originals["given"]["conversations"], originals["rendered"], strict=True):
        text = qwen3().render(case["messages"], case["tools"], case["open"], **case["more"])
        assert text == theirs["text"]
        assert qwen3().encode(text) == theirs["ids"]
        assert qwen3().decode(theirs["ids"]) == text


@pytest.mark.vllm
def test_requests_are_read_as_vllm_reads_them(originals: dict[str, Any]) -> None:
    for messages, theirs in zip(CONVERSATIONS, originals["as_vllm"], strict=True):
        assert template_tools(TOOLS) == theirs["tools"]
        for ours, other in zip(template_messages(messages), theirs["messages"], strict=True):
            assert ours == {key: value for key, value in other.items() if value is not None}


@pytest.mark.vllm
def test_outputs_are_parsed_as_vllm_parses_them(originals: dict[str, Any]) -> None:
    for say, theirs in zip(SAYINGS, originals["parsed"], strict=True):
        message = parse_answer(say.output, tools=True)
        calls = [[c["function"]["name"], c["function"]["arguments"]] for c in message.get("tool_calls", ())]
        ours = {"reasoning": message.get("reasoning"), "content": message["content"], "calls": calls}
        if "<think>" not in say.output and "</think>" not in say.output:
            # the one difference, see parse_answer: all that was not a call is reasoning to vLLM
            ours["reasoning"], ours["content"] = ours["content"], None
        assert ours == theirs, say


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_a_prompt_reads_back(messages: list[Message], tools: list[Message] | None) -> None:
    """What splice mode sees is the conversation, as far as the template shows it; rendered again it is the same."""
    text = qwen3().render(template_messages(messages), template_tools(tools))
    seen, seen_tools = parse_prompt(qwen3().decode(qwen3().encode(text)))
    assert seen_tools == (template_tools(tools) or [])
    shown = [m for m in _readable(template_messages(messages)) if m["role"] != "developer"]
    merged = shown[0]["role"] == "system" or not tools
    assert [m["role"] for m in seen] == [m["role"] for m in shown], merged
    for found, sent in zip(seen, shown, strict=True):
        names = [c["function"] for c in found.get("tool_calls", ())]
        assert names == [c["function"] for c in sent.get("tool_calls", ())]
        assert (found["content"] or "").strip() == sent["content"].split("</think>")[-1].strip()


def test_a_split_token_is_the_same_text() -> None:
    ids = qwen3().encode('<think>\nhm\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>')
    split = qwen3().split_one(ids)
    assert len(split) == len(ids) + 1
    assert qwen3().decode(split) == qwen3().decode(ids) and qwen3().encode(qwen3().decode(split)) == ids


def test_arguments_are_written_anew() -> None:
    raw = '<tool_call>\n{"name": "f", "arguments": {"a":1.0,"b":"\\u00fc"}}\n</tool_call>'
    assert parse_calls(raw) == [("f", '{"a": 1.0, "b": "ü"}')]
