"""The scripted engine over HTTP: the interface of vLLM, the real one's answers beside it where they were recorded."""

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from qwen3 import qwen3
from scripted_engine import Asked, Call, Fault, Say, ScriptedEngine, logprob_size

USER = {"role": "user", "content": "hello"}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CHAT = "/v1/chat/completions"
GENERATE = "/inference/v1/generate"


@pytest.fixture(scope="module")
def served() -> Iterator[ScriptedEngine]:
    with ScriptedEngine().serving() as engine:
        yield engine


@pytest.fixture
def engine(served: ScriptedEngine) -> ScriptedEngine:
    served.asked, served.faults, served.generations = [], {}, 0
    served.policy, served.split_tokens, served.sampled = lambda asked: Say("hi"), False, "default"
    return served


@pytest.fixture
def http(engine: ScriptedEngine) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=engine.url, timeout=30) as client:
        yield client


def chat(http: httpx.Client, *messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    body = {"model": "forge", "messages": messages, "return_token_ids": True, "logprobs": True, **more}
    answer = http.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def render(http: httpx.Client, *messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    found: dict[str, Any] = http.post(f"{CHAT}/render", json={"messages": messages, **more}).json()
    return found


def generate(http: httpx.Client, request: dict[str, Any]) -> dict[str, Any]:
    answer = http.post(GENERATE, json={key: value for key, value in request.items() if value is not None})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def derender(
    http: httpx.Client, generated: dict[str, Any], chat_request: dict[str, Any], *, end: bool = False
) -> dict[str, Any]:
    for choice in generated["choices"]:
        if not end and choice["token_ids"][-1] == qwen3().end_id:
            choice["token_ids"] = choice["token_ids"][:-1]
            choice["logprobs"] = None
    body = {"generate_response": generated, "chat_request": chat_request}
    found: dict[str, Any] = http.post(f"{CHAT}/derender", json=body).json()
    return found


def test_a_chat_completion_has_its_ids(engine: ScriptedEngine, http: httpx.Client) -> None:
    engine.policy = lambda asked: Say("well", "why", [Call("f", '{"b":1.0,"a":"\\u00fc"}')])
    found = chat(http, USER, tools=TOOLS)
    choice = found["choices"][0]
    sampled = '<tool_call>\n{"name": "f", "arguments": {"b":1.0,"a":"\\u00fc"}}\n</tool_call>'
    raw = f"<think>\nwhy\n</think>\n\nwell\n{sampled}"
    assert qwen3().decode(choice["token_ids"]) == f"{raw}<|im_end|>"
    assert qwen3().decode(found["prompt_token_ids"]).endswith("hello<|im_end|>\n<|im_start|>assistant\n")
    assert found["usage"]["prompt_tokens"] == len(found["prompt_token_ids"])
    assert found["usage"]["completion_tokens"] == len(choice["token_ids"])
    at = len(found["prompt_token_ids"])
    expected = [-logprob_size(at + k, i) for k, i in enumerate(choice["token_ids"])]
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == expected
    message = choice["message"]
    assert (message["reasoning"], message["content"]) == ("\nwhy\n", "\n\nwell\n")
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"b": 1.0, "a": "ü"}'}
    assert choice["finish_reason"] == "tool_calls"


def test_without_tools_a_call_is_text(engine: ScriptedEngine, http: httpx.Client) -> None:
    engine.policy = lambda asked: Say(calls=[Call("f", {})])
    choice = chat(http, USER)["choices"][0]
    assert choice["message"]["content"].startswith("<tool_call>") and choice["finish_reason"] == "stop"


def test_several_choices_and_odd_tokens(engine: ScriptedEngine, http: httpx.Client) -> None:
    said = iter([Say("one two three"), Say("one two three", split=True)])
    engine.policy = lambda asked: next(said)
    first, second = chat(http, USER, n=2)["choices"]
    assert first["message"]["content"] == second["message"]["content"] == "one two three"
    assert len(second["token_ids"]) == len(first["token_ids"]) + 1
    engine.policy, engine.split_tokens = lambda asked: Say("one two three"), True
    assert chat(http, USER)["choices"][0]["token_ids"] == second["token_ids"]


def test_limits(engine: ScriptedEngine, http: httpx.Client) -> None:
    engine.policy = lambda asked: Say("a b c d e f g", "why")
    choice = chat(http, USER, max_tokens=3)["choices"][0]
    assert choice["finish_reason"] == "length" and len(choice["token_ids"]) == 3
    assert choice["message"]["reasoning"] and choice["message"]["content"] is None
    engine.policy = lambda asked: Say("a b", finish="length")
    choice = chat(http, USER)["choices"][0]
    assert choice["finish_reason"] == "length" and choice["token_ids"][-1] != qwen3().end_id
    body = {"messages": [USER], "max_tokens": engine.window}
    refused = http.post(CHAT, json=body)
    assert refused.status_code == 400 and "maximum context length" in refused.json()["error"]["message"]


def test_rendered_generated_and_derendered_it_is_the_chat(engine: ScriptedEngine, http: httpx.Client) -> None:
    engine.policy = lambda asked: Say("well", "why", [Call("f", '{"a":1}')])
    asked = {"messages": [USER], "tools": TOOLS, "logprobs": True, "return_token_ids": True}
    whole = chat(http, USER, tools=TOOLS)
    rendered = render(http, USER, tools=TOOLS, logprobs=True)
    assert rendered["token_ids"] == whole["prompt_token_ids"]
    generated = generate(http, rendered)
    choice = generated["choices"][0]
    assert choice["token_ids"] == whole["choices"][0]["token_ids"]
    assert [e["token_id"] for e in choice["logprobs"]["content"]] == choice["token_ids"]
    assert choice["weight_versions"] == [{"version": "default", "start": 0, "end": len(choice["token_ids"])}]
    made = derender(http, generated, asked)["choices"][0]["message"]
    for message in (made, whole["choices"][0]["message"]):
        message["tool_calls"][0].pop("id")
    assert made == whole["choices"][0]["message"]
    assert [a.messages for a in engine.asked] == [[USER], [USER]]
    assert [a.tool_names for a in engine.asked] == [["f"], ["f"]]


def test_text_comes_with_the_ids_when_it_is_asked_for(engine: ScriptedEngine, http: httpx.Client) -> None:
    request = {**render(http, USER, logprobs=True), "output_mode": "text"}
    choice = generate(http, request)["choices"][0]
    assert choice["text"] == "hi" and choice["token_ids"][-1] == qwen3().end_id
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == ["hi", "<|im_end|>"]


def test_an_end_of_turn_that_is_derendered_stands_in_the_text(
    engine: ScriptedEngine, http: httpx.Client
) -> None:
    generated = generate(http, render(http, USER))
    request = {"messages": [USER]}
    assert derender(http, generated, request, end=True)["choices"][0]["message"]["content"] == "hi<|im_end|>"
    assert derender(http, generated, request)["choices"][0]["message"]["content"] == "hi"


def test_spliced_ids_are_read_back(engine: ScriptedEngine, http: httpx.Client) -> None:
    """A prompt that no rendering gives: what was sampled stands in it as it was sampled."""

    def policy(asked: Asked) -> Say:
        return Say("done") if asked.turn else Say("well\n\n", "why", [Call("f", '{"a":1.0}')], split=True)

    engine.policy = policy
    first = generate(http, render(http, USER, tools=TOOLS))
    prompt = engine.asked[0].prompt
    ids = qwen3().encode(prompt) + first["choices"][0]["token_ids"]
    bridge = "\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    ids += qwen3().encode(bridge)
    assert ids != qwen3().encode(qwen3().decode(ids))
    second = generate(http, {"token_ids": ids, "sampling_params": {}, "return_token_ids": True})
    assert second["prompt_token_ids"] == ids and second["choices"][0]["logprobs"] is None
    seen = engine.asked[1]
    assert (seen.turn, seen.last, seen.last_user, seen.tool_names) == (1, "42", "hello", ["f"])
    answer = seen.messages[1]
    assert answer["reasoning"] == "\nwhy\n" and answer["tool_calls"][0]["function"]["name"] == "f"
    assert qwen3().decode(second["choices"][0]["token_ids"]) == "done<|im_end|>"


@pytest.mark.parametrize(
    "body",
    [{"token_ids": []}, {"token_ids": [10**6]}, {"token_ids": [-1]}, {}, {"token_ids": "no"}],
)
def test_bad_ids_are_refused(http: httpx.Client, body: dict[str, Any]) -> None:
    answer = http.post(GENERATE, json=body)
    assert answer.status_code == 400 and answer.json()["error"]["code"] == 400


def test_faults_by_number(engine: ScriptedEngine, http: httpx.Client) -> None:
    gate = threading.Event()
    engine.faults = {
        0: Fault(status=429, retry_after=7),
        1: Fault(status=500),
        2: Fault(drop=True),
        3: Fault(hold=gate),
        4: Fault(swap="step-2"),
    }
    body = {"messages": [USER]}
    busy = http.post(CHAT, json=body)
    assert (busy.status_code, busy.headers["retry-after"]) == (429, "7")
    assert http.post(CHAT, json=body).status_code == 500
    with pytest.raises(httpx.TransportError):
        http.post(CHAT, json=body)
    threading.Timer(0.05, gate.set).start()
    assert http.post(CHAT, json=body).status_code == 200
    engine.policy = lambda asked: Say("one two three four")
    choice = generate(http, render(http, USER))["choices"][0]
    count = len(choice["token_ids"])
    assert choice["weight_versions"] == [
        {"version": "default", "start": 0, "end": count // 2},
        {"version": "step-2", "start": count // 2, "end": count},
    ]
    assert http.get("/weight_info").json() == {"weight_version": "default"}
    after = generate(http, render(http, USER))["choices"][0]["weight_versions"]
    assert [span["version"] for span in after] == ["step-2"]
    assert len(engine.asked) == 3  # the policy was not asked for what failed


def test_what_it_offers_is_told(http: httpx.Client) -> None:
    paths = http.get("/openapi.json").json()["paths"]
    assert {GENERATE, f"{CHAT}/render", f"{CHAT}/derender", CHAT, "/tokenize"} <= paths.keys()
    assert http.get("/nothing").status_code == 404
    assert http.get("/version").json() == {"version": "0.32.0"}
    with ScriptedEngine(scale_out=False).serving() as plain:
        assert GENERATE not in httpx.get(f"{plain.url}/openapi.json", timeout=60).json()["paths"]
        assert httpx.post(plain.url + GENERATE, json={}, timeout=60).status_code == 403


def test_tokenize(http: httpx.Client) -> None:
    body = {"messages": [USER], "tools": TOOLS, "add_generation_prompt": True, "return_token_strs": True}
    found = http.post("/tokenize", json=body).json()
    assert found["tokens"] == render(http, USER, tools=TOOLS)["token_ids"]
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    back = http.post("/detokenize", json={"tokens": found["tokens"]}).json()["prompt"]
    assert http.post("/tokenize", json={"prompt": back}).json()["tokens"] == found["tokens"]
