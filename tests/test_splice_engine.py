"""Tokens in, tokens out on a real vLLM: the same ids, logprobs and message as its chat endpoint, and conversations
that go on from the very tokens that were sampled."""

import msgspec
import numpy as np
import pytest

from forge_server.domain.engine import ChatResult, Generated, Rendered
from forge_server.engine.pool import EnginePool

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "shell",
            "description": "Run a command.",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
        },
    }
]
PLAIN = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "max_tokens": 48}


def body(seed: int, messages: list[dict[str, object]] | None = None, **more: object) -> dict[str, object]:
    asked = messages or [{"role": "user", "content": f"run ls -la, please ({seed})"}]
    return {"messages": asked, "seed": seed, **PLAIN, **more}


async def exact(
    pool: EnginePool, asked: dict[str, object], prompt: bytes | None = None
) -> tuple[Rendered, Generated, dict[str, object]]:
    """Render, generate after ``prompt`` (or what was rendered), and read the message."""
    rendered = await pool.render(asked, request_id="r", affinity="at")
    found = await pool.generate(prompt or rendered.text, rendered, 48, request_id="g", affinity="at")
    message = await pool.message(found, rendered, asked, rendered.ids, request_id="m", affinity="at")
    return rendered, found, message


def without_ids(message: dict[str, object]) -> dict[str, object]:
    """Ids of tool calls are made up at random."""
    plain = msgspec.json.decode(msgspec.json.encode(message))
    for call in plain.get("tool_calls", ()):
        assert call.pop("id").startswith("chatcmpl-tool-")
    return plain


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("stop", [None, ["a", "e "]])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_a_first_turn_is_the_same_both_ways(
    vllm_pool: EnginePool, tools: list[object] | None, stop: list[str] | None, temperature: float
) -> None:
    """Whatever random weights babble: plain text, special tokens, bytes that are no characters, stop strings."""
    assert vllm_pool.template is not None and vllm_pool.template.marker == "<|im_end|>"
    more = {key: value for key, value in (("tools", tools), ("stop", stop)) if value}
    for seed in range(6):
        asked = body(seed, **more) | {"temperature": temperature}
        chat: ChatResult = await vllm_pool.chat(asked, request_id="c")
        rendered, found, message = await exact(vllm_pool, asked)
        assert chat.completion_ids is not None and found.completion_ids is not None
        assert np.array_equal(rendered.ids, chat.prompt_ids)
        assert np.array_equal(found.completion_ids, chat.completion_ids)
        assert found.logprobs is not None and chat.logprobs is not None
        assert np.abs(found.logprobs - chat.logprobs).max() < 1e-5
        assert (found.stop_reason, found.usage_completion) == (chat.stop_reason, chat.usage_completion)
        assert without_ids(message) == without_ids(chat.message)
        assert [(span.version, span.start, span.end) for span in found.versions] == [
            (0, 0, found.completion_ids.size)
        ]


async def test_tool_calls_are_read_as_the_chat_endpoint_reads_them(vllm_pool: EnginePool) -> None:
    """The random model never calls a tool: the parser is given ids of one."""
    asked = body(1, tools=TOOLS)
    rendered = await vllm_pool.render(asked, request_id="r", affinity="at")
    text = 'I look.\n<tool_call>\n{"name": "shell", "arguments": {"command":"ls"}}\n</tool_call>'
    client = vllm_pool._first()
    told = await client.call(
        "POST", "/tokenize", {"model": "forge", "prompt": text, "add_special_tokens": False}
    )
    ids = np.array([*told["tokens"], vllm_pool.template.closing], np.int32)  # type: ignore[union-attr]
    found = Generated(
        completion_ids=ids,
        completion_text=b"",
        logprobs=None,
        text=text,
        finish_reason="stop",
        stop_reason=None,
        usage_prompt=0,
        usage_completion=ids.size,
        model="forge",
        versions=(),
    )
    message = await vllm_pool.message(found, rendered, asked, rendered.ids, request_id="m", affinity="at")
    assert without_ids(message) == {
        "role": "assistant",
        "content": "I look.\n",
        "tool_calls": [{"type": "function", "function": {"name": "shell", "arguments": '{"command": "ls"}'}}],
    }


@pytest.mark.parametrize(
    ("more", "grammar"),
    [
        ({}, False),
        ({"tools": TOOLS}, False),
        ({"tools": TOOLS, "parallel_tool_calls": False, "tool_choice": "none"}, False),
        ({"tools": TOOLS, "parallel_tool_calls": False}, True),
        ({"tools": TOOLS, "tool_choice": "required"}, True),
        ({"response_format": {"type": "json_object"}}, True),
    ],
)
async def test_render_tells_of_a_grammar(
    vllm_pool: EnginePool, more: dict[str, object], grammar: bool
) -> None:
    rendered = await vllm_pool.render(body(1, **more), request_id="r", affinity="at")
    assert bool(rendered.sampling.get("structured_outputs")) == grammar


async def test_this_engine_guides_no_tools(vllm_pool: EnginePool) -> None:
    """Its parser is hermes."""
    assert vllm_pool.template is not None and not vllm_pool.template.guides_tools


async def test_a_given_prompt_is_what_the_engine_conditions_on(vllm_pool: EnginePool) -> None:
    """Logprobs after exact ids are those of the same ids as one prompt, whatever the template would make of it."""
    asked = body(3)
    rendered, first, _ = await exact(vllm_pool, asked)
    assert first.completion_ids is not None
    whole = [*rendered.ids.tolist(), *first.completion_ids.tolist(), 5, 6, 7]
    later = await vllm_pool.generate(
        ",".join(map(str, whole)).encode(), rendered, 8, request_id="g", affinity="at"
    )
    assert later.completion_ids is not None and later.logprobs is not None
    assert later.usage_prompt == len(whole)
    client = vllm_pool._first()
    scored = await client.call(
        "POST",
        "/v1/completions",
        {
            "model": "forge",
            "prompt": [*whole, *later.completion_ids.tolist()],
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": 0,
        },
    )
    entries = scored["choices"][0]["prompt_logprobs"][len(whole) :]
    again = [
        entry[str(id)]["logprob"] for entry, id in zip(entries, later.completion_ids.tolist(), strict=True)
    ]
    assert np.abs(np.array(again) - later.logprobs).max() < 1e-3
