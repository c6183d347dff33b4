"""Requests that real harnesses sent, as the proxy reads them."""

from typing import Any

import msgspec
import pytest
from dialect_support import dialect_of, recorded, request, said, tools

from forge_server.domain.turn import Turn
from forge_server.proxy.dialects.chat import CHAT
from forge_server.proxy.dialects.responses import RESPONSES


def turn_of(name: str) -> Turn:
    found = request(name)
    return dialect_of(found["dialect"], found["path"]).read(msgspec.json.encode(found["body"]))


@pytest.mark.parametrize("name", recorded())
def test_every_recorded_request_is_read(name: str) -> None:
    found = request(name)
    turn = turn_of(name)
    history = said(turn)
    assert turn.stream
    assert turn.model == "mock-model"
    roles = {message["role"] for message in history}
    assert roles <= {"system", "user", "assistant", "tool"}
    called: set[str] = set()
    for message in history:
        if message["role"] == "assistant":
            called |= {call["id"] for call in message.get("tool_calls", ())}
        elif message["role"] == "tool":
            assert message["tool_call_id"] in called
            assert isinstance(message["content"], str)
        else:
            assert message["content"]
    declared = sum(_size(tool) for tool in found["body"].get("tools", ()))
    assert len(turn.tools) == declared
    # nothing but what the harness sent: every text of the request is somewhere in the turn
    whole = b"".join(bytes(message) for message in turn.messages)
    for text in _texts(found["body"]):
        assert msgspec.json.encode(text)[1:-1] in whole


def _size(tool: dict[str, Any]) -> int:
    if "functionDeclarations" in tool:
        return len(tool["functionDeclarations"])
    return len(tool["tools"]) if "tools" in tool else 0 if tool.get("type") == "web_search" else 1


def _texts(body: Any) -> list[str]:
    """Every string that is called ``text`` or ``thinking``, wherever it stands in the messages."""
    if isinstance(body, list):
        return [text for entry in body for text in _texts(entry)]
    if not isinstance(body, dict):
        return []
    own = [v for k, v in body.items() if k in ("text", "thinking") and isinstance(v, str)]
    return own + [t for k, v in body.items() if k not in ("tools", "toolConfig") for t in _texts(v)]


def test_codex_keeps_its_turn_and_gets_it_back() -> None:
    turn = turn_of("codex_sub_002")
    history = said(turn)
    assert [m["role"] for m in history] == ["system", "user", "user", "assistant", "tool"]
    assert history[0]["content"].count("\n\n<") >= 1
    assert history[3] == {
        "role": "assistant",
        "content": "Running step 1.",
        "reasoning_content": "I should run step 1.",
        "tool_calls": [
            {
                "id": "call_5a45dd4533694a368ca9b4b5",
                "type": "function",
                "function": {
                    "name": "multi_agent_v1__spawn_agent",
                    "arguments": '{"message": "Run the shell command `echo sub >> sub.txt` and report."}',
                },
            }
        ],
    }
    assert history[4]["tool_call_id"] == "call_5a45dd4533694a368ca9b4b5"
    assert {"exec_command", "multi_agent_v1__close_agent"} <= tools(turn).keys()
    assert turn.dropped == ("prompt_cache_key", "store")


def test_codex_server_side_search_is_dropped_by_name() -> None:
    turn = turn_of("codex_sub_003")
    assert "tools.web_search" in turn.dropped
    assert "web_search" not in tools(turn)


def test_codex_after_a_cut_stream_ends_with_reasoning() -> None:
    history = said(turn_of("codex_dropx1_002"))
    assert history[-1] == {
        "role": "assistant",
        "content": None,
        "reasoning_content": "I should run step 1.",
    }


def test_claude_code_puts_system_messages_into_the_conversation() -> None:
    turn = turn_of("claude_partool_002")
    history = said(turn)
    assert [m["role"] for m in history] == ["system", "user", "system", "assistant", "tool", "tool"]
    calls = history[3]["tool_calls"]
    assert [call["function"]["name"] for call in calls] == ["Bash", "Bash"]
    assert [m["tool_call_id"] for m in history[4:]] == [call["id"] for call in calls]
    assert history[3]["reasoning_content"] == "I should run step 1."
    assert turn.max_tokens in (8192, 32000)
    assert "output_config.effort" in turn.dropped


def test_claude_code_compacts_with_its_instruction_behind_a_tool_result() -> None:
    assert [m["role"] for m in said(turn_of("claude_compact_003"))][-2:] == ["tool", "user"]


def test_gemini_cli_pairs_parallel_calls_by_its_own_ids() -> None:
    turn = turn_of("gemini_partool_002")
    history = said(turn)
    assert [m["role"] for m in history] == ["system", "user", "assistant", "tool", "tool"]
    assert [m["tool_call_id"] for m in history[3:]] == [call["id"] for call in history[2]["tool_calls"]]
    assert history[3]["content"].startswith("<untrusted_context>\nOutput: step-1")
    assert turn.asked == {"temperature": 1.0, "top_p": 0.95, "top_k": 64}


def test_instructions_are_one_system_message() -> None:
    """Whoever they come from, as long as nobody else has spoken."""
    said_by = [("developer", "a"), ("system", "b"), ("user", "c"), ("developer", "d"), ("system", "e")]
    items = [{"type": "message", "role": role, "content": text} for role, text in said_by]
    turn = RESPONSES.read(msgspec.json.encode({"model": "m", "instructions": "0", "input": items}))
    told = [(message["role"], message["content"]) for message in said(turn)]
    assert told == [("system", "0\n\na\n\nb"), ("user", "c"), ("system", "d"), ("system", "e")]


def test_a_chats_developer_is_the_system() -> None:
    """Chat templates do not know the role. Everything else keeps its bytes."""
    user = b'{"role": "user",  "content": "hi"}'
    body = (
        b'{"model": "m", "messages": [{"role": "developer", "content": [{"type": "text", "text": "a"}]}, %s]}'
        % user
    )
    first, second = CHAT.read(body).messages
    assert msgspec.json.decode(first) == {"role": "system", "content": [{"type": "text", "text": "a"}]}
    assert bytes(second) == user
