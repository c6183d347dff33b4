"""The oracle of the least number of samples, and the table of each harness's tools: by hand and on recorded runs."""

import json
from pathlib import Path
from typing import Any

import pytest
from harness_policies import HANDS, TEXT, done, rough, shell, standard, write
from sample_oracle import Asking, history_of, is_generation, minimum
from scripted_engine import Asked, Say

RUNS = Path(__file__).parent / "wire" / "runs"
CHAT = "/v1/chat/completions"


def recorded(name: str) -> list[Asking]:
    return [Asking(entry["path"], entry["body"]) for entry in json.loads((RUNS / f"{name}.json").read_text())]


@pytest.mark.parametrize(
    ("name", "parents", "words"),
    [
        ("pi", [None, 0, 1], {}),
        ("gemini", [None, 0, 1], {}),
        ("claude_sub", [None, 0, None, None, 1], {2: "other tools", 3: "other tools"}),
        ("qwen_sub", [None, 0, None, 1, None], {2: "other tools", 4: "other tools"}),
        ("opencode", [None, None, 1, 2], {1: "other tools"}),
        ("openclaw", [None, None, None], {1: "item 2 (user) differs", 2: "item 4 (user) differs"}),
    ],
)
def test_recorded_runs(name: str, parents: list[int | None], words: dict[int, str]) -> None:
    found = minimum(recorded(name))
    assert list(found.parents.values()) == parents
    assert found.samples == sum(at not in parents for at in range(len(parents)))
    assert found.breaks.keys() == words.keys()
    assert all(word in found.breaks[at] for at, word in words.items())


def test_what_is_taken_out_of_every_request_does_not_count() -> None:
    found = minimum(recorded("openclaw"), [r"<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>.*"])
    assert found.samples == 1 and not found.breaks


# --- by hand ----------------------------------------------------------------------------------------------------

SYSTEM = {"role": "system", "content": "be brief"}
USER = {"role": "user", "content": "go"}


def call(arguments: Any = '{"a": 1, "b": 2}', text: Any = None, **more: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    calls = [{"id": "c", "type": "function", "function": function}]
    return {"role": "assistant", "content": text, "tool_calls": calls, **more}


def result(text: Any = "ok") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "c", "content": text}


def chat(*messages: dict[str, Any], **more: Any) -> Asking:
    known = {key: more.pop(key) for key in ("answer", "side", "dead") if key in more}
    return Asking(CHAT, {"messages": list(messages), **more}, **known)


@pytest.mark.parametrize(
    "again",
    [
        call('{"b":2,"a":1}'),
        call(text=""),
        call(text=[{"type": "text", "text": " "}]),
        call(reasoning_content="because"),
    ],
)
def test_the_same_written_differently(again: dict[str, Any]) -> None:
    first = chat(SYSTEM, USER, answer=call())
    user = {"role": "user", "content": [{"type": "text", "text": "go \n", "cache_control": {"type": "e"}}]}
    assert minimum([first, chat(SYSTEM, user, again, result())]).samples == 1


@pytest.mark.parametrize(
    ("second", "word"),
    [
        (chat(SYSTEM, USER, call('{"a": 2}'), result()), "came back"),
        (chat(SYSTEM, USER, call(text="more"), result()), "came back"),
        (chat(SYSTEM, USER, result()), "no answer follows"),
        (chat(SYSTEM, USER), "asked again"),
        (chat(SYSTEM), "shorter"),
        (chat(SYSTEM, {"role": "user", "content": "went"}, call(), result()), "item 1 (user) differs"),
        (chat({"role": "system", "content": "be long"}, USER, call(), result()), "item 0 (system) differs"),
        (chat(SYSTEM, USER, call(), result(), tools=[{"type": "function"}]), "other tools"),
    ],
)
def test_what_is_not_the_same(second: Asking, word: str) -> None:
    found = minimum([chat(SYSTEM, USER, answer=call()), second])
    assert found.samples == 2 and word in found.breaks[1]


def test_branches_retries_and_side_calls() -> None:
    root = chat(SYSTEM, USER)
    left = chat(SYSTEM, USER, call(), result("left"))
    right = chat(SYSTEM, USER, call(), result("right"))
    found = minimum([root, left, right, chat(*left.body["messages"], call(), result())])
    assert found.samples == 2 and found.parents == {0: None, 1: 0, 2: 0, 3: 1}
    assert "already" in found.breaks[2]
    # asked twice and gone on from twice: each went on from one of them
    assert minimum([root, root, left, right]).samples == 2
    assert minimum([root, root, left]).samples == 2
    assert minimum([chat(SYSTEM, USER, dead=True), root, left]).samples == 1
    title = chat({"role": "user", "content": "title"}, side=True)
    assert minimum([root, title, left]).samples == 1


def test_pieces_of_an_answer_are_one() -> None:
    first = {"instructions": "be brief", "input": "go"}
    answer = call('{"x": 1}', "hm")
    pieces = [
        {"role": "user", "content": [{"type": "input_text", "text": "go"}]},
        {"type": "reasoning", "summary": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "hm"}]},
        {"type": "function_call", "name": "f", "arguments": '{"x":1}', "call_id": "c"},
        {"type": "function_call_output", "call_id": "c", "output": "ok"},
    ]
    second = {"instructions": "be brief", "input": pieces}
    path = "/v1/responses"
    assert minimum([Asking(path, first, answer), Asking(path, second)]).samples == 1
    freeform = [
        pieces[0],
        pieces[2],
        {"type": "custom_tool_call", "name": "f", "input": "raw", "call_id": "c"},
    ]
    said = call('{"input": "raw"}', "hm")
    assert minimum([Asking(path, first, said), Asking(path, {**second, "input": freeform})]).samples == 1


def test_the_four_apis_say_the_same() -> None:
    messages = {
        "system": [{"type": "text", "text": "be brief"}],
        "messages": [
            {"role": "user", "content": "go"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "text", "text": "well"},
                    {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "t", "content": "ok"}],
            },
        ],
    }
    gemini = {
        "systemInstruction": {"parts": [{"text": "be brief"}]},
        "contents": [
            {"role": "user", "parts": [{"text": "go"}]},
            {
                "role": "model",
                "parts": [
                    {"text": "hm", "thought": True},
                    {"text": "well"},
                    {"functionCall": {"name": "f", "args": {"a": 1}}, "thoughtSignature": "s"},
                ],
            },
        ],
    }
    responses = {
        "instructions": "be brief",
        "input": [
            {"role": "user", "content": "go"},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "well"}]},
            {"type": "function_call", "name": "f", "arguments": '{"a":1}', "call_id": "c"},
            {"type": "function_call_output", "call_id": "c", "output": "ok"},
        ],
    }
    plain = history_of(CHAT, {"messages": [SYSTEM, USER, call('{"a": 1}', "well"), result()]})
    assert history_of("/v1/messages?beta=true", messages) == plain
    assert history_of("/v1/responses", responses) == plain
    assert history_of("/v1beta/models/m:streamGenerateContent?alt=sse", gemini) == plain[:3]


def test_an_image_counts() -> None:
    def picture(data: str) -> dict[str, Any]:
        url = f"data:image/png;base64,{data}"
        return {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}

    first = chat(SYSTEM, picture("AAAA"))
    assert minimum([first, chat(SYSTEM, picture("AAAA"), call(), result())]).samples == 1
    assert minimum([first, chat(SYSTEM, picture("BBBB"), call(), result())]).samples == 2


def test_what_asks_for_a_completion() -> None:
    yes = (
        "/v1/chat/completions",
        "/v1/messages?beta=true",
        "/v1/responses",
        "/v1beta/models/m:generateContent",
    )
    no = ("/v1/messages/count_tokens", "/v1/models", "/v1beta/models/m:countTokens", "/v1/responses/x")
    assert all(map(is_generation, yes)) and not any(map(is_generation, no))


# --- the harnesses' hands ---------------------------------------------------------------------------------------

TOOLS: dict[str, dict[str, list[str]]] = json.loads((RUNS / "tools.json").read_text())


def asked(harness: str, turn: int = 0) -> Asked:
    tools = [{"type": "function", "function": {"name": name}} for name in TOOLS.get(harness, ())]
    messages = [USER] + [{"role": "assistant", "content": ""}] * turn
    return Asked(messages, tools, "", "chat")


@pytest.mark.parametrize("harness", sorted(TOOLS))
def test_hands_fit_the_recorded_tools(harness: str) -> None:
    hand, tools = HANDS[harness], TOOLS[harness]
    said = shell(harness, asked(harness), "ls")
    assert set(said.calls[0].arguments) <= set(tools[said.calls[0].name])
    for tool in (hand.write, hand.edit, hand.done):
        if tool is not None:
            assert set(tool[1:]) <= set(tools[tool[0]])


@pytest.mark.parametrize("harness", sorted({*HANDS, *TEXT}))
def test_every_harness_can_be_told_the_standard_task(harness: str) -> None:
    hand = HANDS.get(harness)
    names = [tool[0] for tool in (hand.shell, hand.write, hand.done) if tool] if hand else []
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    policy = rough(standard(harness, reasoning=True))
    outputs = [
        policy(Asked([USER] + [{"role": "assistant", "content": ""}] * turn, tools, "", "chat")).output
        for turn in range(6)
    ]
    assert all(output.startswith("<think>\n") for output in outputs)
    assert "notes.txt" in outputs[0] and outputs[4] == outputs[5]


def test_a_name_behind_a_namespace_is_found() -> None:
    tools = [{"type": "function", "function": {"name": "shell__exec_command"}}]
    found = shell("codex", Asked([USER], tools, "", "chat"), "ls")
    assert found.calls[0].name == "shell__exec_command"
    with pytest.raises(AssertionError, match="no tool"):
        write("codex", Asked([USER], [], "", "chat"), "a", "b")
    assert done("codex", Asked([USER], [], "", "chat"), "bye") == Say("bye")
