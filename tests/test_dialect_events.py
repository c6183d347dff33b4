"""The answers as they go out: whole event sequences, and the bodies of those who do not stream."""

from typing import Any

import msgspec
import pytest
from dialect_support import GEMINI, GEMINI_STREAM, ID, completion, sse

from forge_server.domain.turn import Completion, Turn
from forge_server.proxy.dialects import completions, gemini
from forge_server.proxy.dialects.base import Dialect, Refusal
from forge_server.proxy.dialects.chat import CHAT
from forge_server.proxy.dialects.completions import COMPLETIONS
from forge_server.proxy.dialects.messages import MESSAGES
from forge_server.proxy.dialects.responses import RESPONSES
from forge_server.proxy.dialects.writing import seal

LOST = Refusal(503, "engine_unavailable", "the model is not available", retry_after=2)
STOP = Refusal(400, "budget_calls", "the rollout has ended")


def ask(dialect: Dialect, **body: Any) -> Turn:
    minimal: dict[str, dict[str, Any]] = {
        "chat": {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
        "responses": {"model": "m", "input": "hi"},
        "messages": {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]},
        "gemini": {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]},
        "completions": {"model": "m", "prompt": "hi"},
    }
    return dialect.read(msgspec.json.encode(minimal[dialect.name] | body))


def types(stream: bytes) -> list[str]:
    events = sse(stream)
    assert all(name == data["type"] for name, data in events)
    return [name for name, _ in events if name is not None]


TOOLS = [
    {"type": "function", "name": "shell", "parameters": {"type": "object"}},
    {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
    {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "spawn"}]},
]


def test_responses_full_sequence() -> None:
    turn = ask(RESPONSES, tools=TOOLS, reasoning={"summary": "auto"}, include=["reasoning.encrypted_content"])
    answer = completion(
        "done",
        ("shell", '{ "cmd": "ls" }'),
        ("patch", '{"input": "a\\nb"}'),
        ("agents__spawn", "{}"),
        ("nobody", "{"),
        reasoning="hm",
    )
    stream = RESPONSES.events(turn, answer)
    call = [
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
    ]
    assert types(stream) == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.reasoning_summary_part.added",
        "response.reasoning_summary_text.delta",
        "response.reasoning_summary_text.done",
        "response.reasoning_summary_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        *call,
        "response.output_item.added",
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
        "response.output_item.done",
        *call,
        *call,
        "response.completed",
    ]
    events = [data for _, data in sse(stream)]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    last = events[-1]["response"]
    assert last == msgspec.json.decode(RESPONSES.write(turn, answer))
    assert [e["item"] for e in events if e["type"] == "response.output_item.done"] == last["output"]
    reasoning, message, shell, patch, spawn, nobody = last["output"]
    assert reasoning["encrypted_content"] == seal("hm")
    assert reasoning["summary"] == [{"type": "summary_text", "text": "hm"}]
    assert message["content"][0]["text"] == "done"
    assert (shell["type"], shell["arguments"]) == ("function_call", '{ "cmd": "ls" }')
    assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "patch", "a\nb")
    assert (spawn["namespace"], spawn["name"]) == ("agents", "spawn")
    assert (nobody["name"], nobody["arguments"]) == ("nobody", "{")
    assert last["usage"] == {
        "input_tokens": 11,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 16,
    }


def test_responses_without_summary_shows_the_reasoning_itself() -> None:
    stream = RESPONSES.events(ask(RESPONSES), completion(None, reasoning="hm"))
    assert types(stream)[2:-1] == [
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
    ]


def test_responses_that_ran_out_of_tokens_are_incomplete() -> None:
    name, data = sse(RESPONSES.events(ask(RESPONSES), completion("do", finish="length")))[-1]
    assert name == "response.incomplete"
    assert data["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert data["response"]["output"][0]["status"] == "incomplete"


def test_a_custom_tool_called_in_another_form_keeps_the_sampled_text() -> None:
    turn = ask(RESPONSES, tools=TOOLS)
    for text in ('{"input": 3}', '{"input": "a", "more": 1}', "bare", "[" * 3000):
        (item,) = msgspec.json.decode(RESPONSES.write(turn, completion(None, ("patch", text))))["output"]
        assert item["input"] == text


def test_messages_full_sequence() -> None:
    turn = ask(MESSAGES, thinking={"type": "adaptive"})
    answer = completion("done", ("shell", '{ "cmd": "ls" }'), ("shell", "{"), reasoning="hm")
    stream = MESSAGES.events(turn, answer)
    assert types(stream) == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        *["content_block_start", "content_block_delta", "content_block_stop"] * 3,
        "message_delta",
        "message_stop",
    ]
    events = [data for _, data in sse(stream)]
    deltas = [e["delta"] for e in events if e["type"] == "content_block_delta"]
    assert [delta["type"] for delta in deltas] == [
        "thinking_delta",
        "signature_delta",
        "text_delta",
        "input_json_delta",
        "input_json_delta",
    ]
    assert deltas[1]["signature"]
    assert deltas[3]["partial_json"] == '{ "cmd": "ls" }'  # as it was sampled
    assert deltas[4]["partial_json"] == '{"INVALID_JSON":"{"}'
    assert [e["index"] for e in events if "index" in e] == [0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2]["usage"] == {"input_tokens": 11, "output_tokens": 5}
    whole = msgspec.json.decode(MESSAGES.write(turn, answer))
    assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert whole["content"][2]["input"] == {"cmd": "ls"}
    assert whole["usage"]["input_tokens"] == 11


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (completion(), "end_turn"),
        (completion(finish="length"), "max_tokens"),
        (completion(None, ("f", "{}"), finish="stop"), "tool_use"),
        (completion(None, ("f", "{}"), finish="length"), "max_tokens"),
    ],
)
def test_messages_stop_reasons(answer: Completion, reason: str) -> None:
    assert msgspec.json.decode(MESSAGES.write(ask(MESSAGES), answer))["stop_reason"] == reason


def test_thinking_is_shown_to_those_who_ask() -> None:
    answer = completion(reasoning="hm")
    for thinking, shown in (
        (None, 1),
        ({"type": "disabled"}, 1),
        ({"type": "enabled", "budget_tokens": 2}, 2),
    ):
        whole = msgspec.json.decode(MESSAGES.write(ask(MESSAGES, thinking=thinking), answer))
        assert len(whole["content"]) == shown


def test_gemini_sends_one_event_per_part() -> None:
    turn = GEMINI_STREAM.read(
        msgspec.json.encode(
            {
                "contents": [{"parts": [{"text": "hi"}]}],
                "generationConfig": {"thinkingConfig": {"includeThoughts": True}},
            }
        )
    )
    answer = completion("done", ("f", '{\n "a": 1}'), ("f", "no"), reasoning="hm")
    stream = GEMINI_STREAM.events(turn, answer)
    assert stream.count(b"\r\n\r\n") == stream.count(b"data: ") == stream.count(b"\n") / 2 == 4
    chunks = [data for _, data in sse(stream)]
    parts = [chunk["candidates"][0]["content"]["parts"][0] for chunk in chunks]
    assert parts == [
        {"text": "hm", "thought": True},
        {"text": "done"},
        {
            "functionCall": {"id": "call_0", "name": "f", "args": {"a": 1}},
            "thoughtSignature": seal("hm"),
        },
        {"functionCall": {"id": "call_1", "name": "f", "args": {"INVALID_JSON": "no"}}},
    ]
    assert ["finishReason" in chunk["candidates"][0] for chunk in chunks] == [False, False, False, True]
    assert chunks[-1]["usageMetadata"] == {
        "promptTokenCount": 11,
        "candidatesTokenCount": 5,
        "totalTokenCount": 16,
    }
    whole = msgspec.json.decode(GEMINI.write(turn, answer))
    assert whole["candidates"][0]["content"]["parts"] == parts


def test_gemini_without_sse_answers_one_list() -> None:
    found = gemini.method("m:streamGenerateContent", b"")
    assert isinstance(found, Dialect)
    turn = ask(found)
    assert not turn.stream
    (whole,) = msgspec.json.decode(found.write(turn, completion(finish="length")))
    assert whole["candidates"][0]["finishReason"] == "MAX_TOKENS"


def test_gemini_method_names_and_models() -> None:
    found = gemini.method("tuned/m%3A1:generateContent", b"")
    assert isinstance(found, Dialect)
    assert ask(found).model == "tuned/m:1"
    assert gemini.method("m:embedContent", b"") is None
    assert gemini.method("m", b"") is None


def test_an_answer_of_nothing_is_well_formed() -> None:
    nothing = completion(None)
    assert msgspec.json.decode(RESPONSES.write(ask(RESPONSES), nothing))["output"] == []
    assert msgspec.json.decode(MESSAGES.write(ask(MESSAGES), nothing))["content"] == []
    whole = msgspec.json.decode(GEMINI.write(ask(GEMINI), nothing))
    assert whole["candidates"][0]["content"]["parts"] == [{"text": ""}]
    assert types(RESPONSES.events(ask(RESPONSES), nothing))[-1] == "response.completed"
    assert types(MESSAGES.events(ask(MESSAGES), nothing)) == [
        "message_start",
        "message_delta",
        "message_stop",
    ]
    assert len(sse(GEMINI_STREAM.events(ask(GEMINI_STREAM), nothing))) == 1


def test_completions() -> None:
    answer = completion("done", finish="length")
    for usage in (False, True):
        turn = ask(COMPLETIONS, stream=True, stream_options={"include_usage": usage})
        data = [data for _, data in sse(completions.events(turn, answer))]
        assert data[-1] == "[DONE]"
        assert "".join(c["text"] for chunk in data[:-1] for c in chunk["choices"]) == "done"
        assert data[1]["choices"][0]["finish_reason"] == "length"
        assert data[-2]["usage"]["total_tokens"] == 16
        assert (data[-2]["choices"] == []) is usage
    whole = msgspec.json.decode(COMPLETIONS.write(turn, answer))
    assert (whole["id"], whole["choices"][0]["text"]) == ("cmpl-2a", "done")
    assert turn.dropped == ("prompt",)


def _strings(data: Any) -> list[str]:
    if isinstance(data, str):
        return [data]
    inner = data.values() if isinstance(data, dict) else data if isinstance(data, list) else ()
    return [found for entry in inner for found in _strings(entry)]


def test_line_breaks_of_unicode_do_not_cut_an_event() -> None:
    text = "a\u2028b\u2029c\u0085d\r\ne"
    for dialect in (CHAT, RESPONSES, MESSAGES, GEMINI_STREAM, COMPLETIONS):
        stream = dialect.events(ask(dialect), completion(text))
        lines = stream.decode().splitlines()
        assert all(line.startswith(("data: ", "event: ")) for line in lines if line)
        assert text in [found for _, data in sse(stream) for found in _strings(data)]


def test_keepalives() -> None:
    turn = ask(RESPONSES, stream=True)
    assert types(RESPONSES.keepalive(turn, ID, 7, True) or b"") == [
        "response.created",
        "response.in_progress",
    ]
    again = RESPONSES.keepalive(turn, ID, 7, False) or b""
    assert types(again) == ["response.in_progress"]
    last = sse(RESPONSES.events(turn, completion()))[-1][1]["response"]
    assert sse(again)[0][1]["response"]["id"] == last["id"]
    assert MESSAGES.keepalive(turn, ID, 7, True) == b'event: ping\ndata: {"type":"ping"}\n\n'
    assert GEMINI_STREAM.keepalive(turn, ID, 7, True) is None
    assert sse(COMPLETIONS.keepalive(turn, ID, 7, True) or b"")[0][1]["choices"] == []


def test_errors_within_a_stream() -> None:
    for refusal, code in ((LOST, "server_error"), (STOP, "invalid_prompt")):
        ((name, data),) = sse(RESPONSES.error_event(refusal))
        assert (name, data["response"]["error"]["code"]) == ("response.failed", code)
        assert data["response"]["status"] == "failed"
    ((name, data),) = sse(MESSAGES.error_event(LOST))
    assert (name, data["type"], data["error"]["type"]) == ("error", "error", "api_error")
    ((_, data),) = sse(GEMINI_STREAM.error_event(LOST))
    assert data["error"]["status"] == "UNAVAILABLE"
    for refusal, code in (
        (LOST, 503),
        (STOP, STOP.code),
    ):  # the status is told here, since the stream's is 200
        ((_, data),) = sse(COMPLETIONS.error_event(refusal))
        assert data["error"]["code"] == code
    assert CHAT.error_event is COMPLETIONS.error_event


def test_a_full_window_is_told_in_the_words_that_clients_know() -> None:
    full = Refusal(400, "context_length_exceeded", "40000 tokens")
    assert msgspec.json.decode(RESPONSES.error(full))["error"]["code"] == "context_length_exceeded"
    assert sse(RESPONSES.error_event(full))[0][1]["response"]["error"]["code"] == "context_length_exceeded"
    assert msgspec.json.decode(MESSAGES.error(full))["error"]["message"].startswith("prompt is too long")
    assert "token count exceeds" in msgspec.json.decode(GEMINI.error(full))["error"]["message"]
    assert CHAT.error is RESPONSES.error
