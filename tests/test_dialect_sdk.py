"""The official SDKs as clients of the whole proxy: streaming and not, tools, images, errors, counting."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from anthropic import APIStatusError as AnthropicError
from anthropic import AsyncAnthropic
from google import genai
from google.genai import errors as genai_errors
from google.genai import types
from openai import AsyncOpenAI
from proxy_rig import PATIENCE, Rig, result, rig

from forge_server.domain.engine import ChatResult

TEXT = "été\u2028done\n"
CALLS = [
    {"id": "call_1", "type": "function", "function": {"name": "shell", "arguments": '{ "cmd": "ls" }'}},
    {"id": "call_2", "type": "function", "function": {"name": "shell", "arguments": '{"cmd": "é"}'}},
]
SCHEMA = {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]}
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
URL = f"data:image/png;base64,{PIXEL}"


@pytest.fixture
async def proxy(tmp_path: Path) -> AsyncIterator[Rig]:
    async with rig(f"sqlite:///{tmp_path / 'forge.db'}") as made:
        yield made


async def calling(body: dict[str, Any]) -> ChatResult:
    """An engine that thinks, talks and calls tools."""
    message = {"role": "assistant", "content": TEXT, "reasoning": "hm", "tool_calls": CALLS}
    return result(body, message=message, finish_reason="tool_calls")


def asked(proxy: Rig) -> list[dict[str, Any]]:
    """The messages of the latest request to the engine."""
    return [msgspec.json.decode(message) for message in proxy.engine.asked[-1]["messages"]]


def openai(proxy: Rig) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=proxy.base, api_key=proxy.key, max_retries=0, timeout=PATIENCE)


def anthropic(proxy: Rig) -> AsyncAnthropic:
    base = f"{proxy.url}/a/{proxy.attempt}"
    return AsyncAnthropic(base_url=base, api_key=proxy.key, max_retries=0, timeout=PATIENCE)


def google(proxy: Rig) -> Any:
    options = types.HttpOptions(base_url=f"{proxy.url}/a/{proxy.attempt}", timeout=int(PATIENCE * 1000))
    return genai.Client(api_key=proxy.key, http_options=options).aio


async def recorded(proxy: Rig, dialect: str, calls: int) -> list[Any]:
    await proxy.seal()
    rows = await proxy.rows()
    assert [(row.dialect, row.end, row.delivered) for row in rows] == [(dialect, "ok", "yes")] * calls
    return rows


# --- OpenAI Responses ---

OPENAI_TOOLS: Any = [
    {"type": "function", "name": "shell", "parameters": SCHEMA, "strict": False},
    {"type": "web_search"},
]


async def test_openai_responses_with_tools_and_an_image(proxy: Rig) -> None:
    proxy.engine.script = calling
    image = {"type": "input_image", "image_url": URL, "detail": "auto"}
    history: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "see"}, image]}]
    async with openai(proxy) as client:
        for streaming in (False, True):
            if streaming:
                async with client.responses.stream(model="m", input=history, tools=OPENAI_TOOLS) as stream:
                    deltas = "".join(
                        [event.delta async for event in stream if event.type == "response.output_text.delta"]
                    )
                    answer: Any = await stream.get_final_response()
                assert deltas == TEXT
            else:
                answer = await client.responses.create(model="m", input=history, tools=OPENAI_TOOLS)
            assert answer.status == "completed"
            assert answer.output_text == TEXT
            calls = [item for item in answer.output if item.type == "function_call"]
            assert [c.arguments for c in calls] == [c["function"]["arguments"] for c in CALLS]  # type: ignore[index]
            assert answer.output[0].content[0].text == "hm"
            assert answer.usage.total_tokens > 0
            history += answer.output
            history += [
                {"type": "function_call_output", "call_id": call.call_id, "output": "ok"} for call in calls
            ]
        await client.responses.create(model="m", input=history, tools=OPENAI_TOOLS)
    messages = asked(proxy)
    assert [m["role"] for m in messages] == ["user", *["assistant", "tool", "tool"] * 2]
    assert messages[0]["content"][1] == {"type": "image_url", "image_url": {"url": URL}}
    assert messages[1]["tool_calls"] == CALLS
    assert messages[1]["reasoning_content"] == "hm"
    rows = await recorded(proxy, "responses", 3)
    assert rows[0].flags == {"dropped": ["tools.web_search"], "images": 1}


async def test_openai_responses_refuses_what_it_cannot_do(proxy: Rig) -> None:
    from openai import BadRequestError

    async with openai(proxy) as client:
        with pytest.raises(BadRequestError) as caught:
            await client.responses.create(model="m", input="hi", previous_response_id="resp_1")
    assert (caught.value.code, caught.value.param) == (
        "previous_response_not_found",
        "previous_response_id",
    )


async def test_openai_responses_waits_through_keepalives(tmp_path: Path) -> None:
    async with rig(f"sqlite:///{tmp_path / 'forge.db'}", keepalive_after_s=0.05) as proxy:
        go = proxy.engine.blocked()
        async with openai(proxy) as client, client.responses.stream(model="m", input="hi") as stream:
            events = aiter(stream)
            assert [(await anext(events)).type for _ in range(2)] == [
                "response.created",
                "response.in_progress",
            ]
            go.set()
            rest = [event async for event in events]
            final = await stream.get_final_response()
        assert rest[-1].type == "response.completed"
        assert final.output_text == "answer 1"


async def test_openai_completions(proxy: Rig) -> None:
    async with openai(proxy) as client:
        whole = await client.completions.create(model="m", prompt="hi")
        text = ""
        stream = await client.completions.create(model="m", prompt=["hi"], stream=True)
        async for chunk in stream:
            text += "".join(choice.text for choice in chunk.choices)
    assert (whole.choices[0].text, text) == ("answer 1", "answer 2")
    assert whole.usage is not None
    assert asked(proxy) == [{"role": "user", "content": "hi"}]
    await recorded(proxy, "completions", 2)


# --- Anthropic Messages ---

CLAUDE_TOOLS: Any = [
    {"name": "shell", "description": "runs", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}},
    {"type": "web_search_20250305", "name": "web_search"},
]


async def test_anthropic_messages_with_tools_and_an_image(proxy: Rig) -> None:
    proxy.engine.script = calling
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}
    history: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "see"}, image]}]
    ask: Any = {
        "model": "m",
        "max_tokens": 100,
        "system": [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
        "tools": CLAUDE_TOOLS,
        "thinking": {"type": "adaptive"},
    }
    async with anthropic(proxy) as client:
        for streaming in (False, True):
            if streaming:
                async with client.messages.stream(messages=history, **ask) as stream:
                    assert "".join([text async for text in stream.text_stream]) == TEXT
                    answer: Any = await stream.get_final_message()
            else:
                answer = await client.messages.create(messages=history, **ask)
            thinking, text, *calls = answer.content
            assert (thinking.thinking, text.text) == ("hm", TEXT)
            assert [call.input for call in calls] == [{"cmd": "ls"}, {"cmd": "é"}]
            assert answer.stop_reason == "tool_use"
            assert answer.usage.output_tokens > 0
            history.append({"role": "assistant", "content": answer.content})
            results = [{"type": "tool_result", "tool_use_id": c.id, "content": "ok"} for c in calls]
            history.append({"role": "user", "content": results})
        await client.beta.messages.create(messages=history, **ask)
        counted = await client.messages.count_tokens(model="m", messages=history, system="be brief")
    messages = asked(proxy)
    assert [m["role"] for m in messages] == ["system", "user", *["assistant", "tool", "tool"] * 2]
    assert messages[0]["content"] == "be brief"
    assert messages[1]["content"][1] == {"type": "image_url", "image_url": {"url": URL}}
    assert messages[2]["reasoning_content"] == "hm"
    assert [c["id"] for c in messages[2]["tool_calls"]] == ["call_1", "call_2"]
    assert counted.input_tokens > 10
    rows = await recorded(proxy, "messages", 3)  # counting is no call
    assert rows[0].flags == {"dropped": ["tools.web_search_20250305"], "images": 1}


async def test_anthropic_errors_and_keepalives(tmp_path: Path) -> None:
    async with rig(f"sqlite:///{tmp_path / 'forge.db'}", keepalive_after_s=0.05, max_calls=1) as proxy:
        go = proxy.engine.blocked()
        ask: Any = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
        async with anthropic(proxy) as client:
            async with client.messages.stream(**ask) as stream:
                asyncio.get_running_loop().call_later(0.2, go.set)
                assert await stream.get_final_text() == "answer 1"
            with pytest.raises(AnthropicError) as caught:
                await client.messages.create(**(ask | {"messages": [{"role": "user", "content": "more"}]}))
    assert caught.value.status_code == 400
    assert "budget of 1 calls" in str(caught.value)


# --- Gemini ---


async def test_google_genai_with_tools_and_an_image(proxy: Rig) -> None:
    proxy.engine.script = calling
    client = google(proxy)
    declaration = types.FunctionDeclaration(
        name="shell",
        description="runs",
        parameters=types.Schema(
            type=types.Type.OBJECT, properties={"cmd": types.Schema(type=types.Type.STRING)}
        ),
    )
    config = types.GenerateContentConfig(
        system_instruction="be brief",
        tools=[
            types.Tool(function_declarations=[declaration]),
            types.Tool(google_search=types.GoogleSearch()),
        ],
        automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True),
        thinking_config=types.ThinkingConfig(include_thoughts=True),
    )
    image = types.Part.from_bytes(data=b"\x89PNG", mime_type="image/png")
    history: list[Any] = [types.Content(role="user", parts=[types.Part(text="see"), image])]
    for streaming in (False, True):
        if streaming:
            stream = await client.models.generate_content_stream(model="m", contents=history, config=config)
            chunks = [chunk async for chunk in stream]
            parts = [part for chunk in chunks for part in chunk.candidates[0].content.parts]
            answer = chunks[-1]
        else:
            answer = await client.models.generate_content(model="m", contents=history, config=config)
            parts = answer.candidates[0].content.parts
        assert [part.text for part in parts[:2]] == ["hm", TEXT]
        assert parts[0].thought
        calls = [part.function_call for part in parts[2:]]
        assert [call.args for call in calls] == [{"cmd": "ls"}, {"cmd": "é"}]
        assert answer.candidates[0].finish_reason == types.FinishReason.STOP
        assert answer.usage_metadata.total_token_count > 0
        history.append(types.Content(role="model", parts=parts))
        results = [
            types.Part(
                function_response=types.FunctionResponse(id=c.id, name=c.name, response={"output": "ok"})
            )
            for c in calls
        ]
        history.append(types.Content(role="user", parts=results))
    await client.models.generate_content(model="m", contents=history, config=config)
    counted = await client.models.count_tokens(model="m", contents=history)
    messages = asked(proxy)
    assert [m["role"] for m in messages] == ["system", "user", *["assistant", "tool", "tool"] * 2]
    assert messages[1]["content"][1]["image_url"]["url"].startswith("data:image/png;base64,iVBORw")
    assert messages[2]["reasoning_content"] == "hm"
    assert [c["id"] for c in messages[2]["tool_calls"]] == ["call_1", "call_2"]
    (tool,) = (msgspec.json.decode(tool) for tool in proxy.engine.asked[-1]["tools"])
    assert tool["function"]["parameters"]["properties"] == {"cmd": {"type": "string"}}
    assert counted.total_tokens > 10
    await client.aclose()
    rows = await recorded(proxy, "gemini", 3)
    assert rows[0].flags == {"dropped": ["tools.googleSearch"], "images": 1}


async def test_google_genai_chat_and_errors(proxy: Rig) -> None:
    client = google(proxy)
    chat = client.chats.create(model="m")
    first = await chat.send_message("one")
    parts = [chunk.text async for chunk in await chat.send_message_stream("two")]
    assert (first.text, "".join(parts)) == ("answer 1", "answer 2")
    assert [m["role"] for m in asked(proxy)] == ["user", "assistant", "user"]
    with pytest.raises(genai_errors.ClientError) as caught:
        await client.models.generate_content(
            model="m", contents="hi", config=types.GenerateContentConfig(candidate_count=1000)
        )
    assert (caught.value.code, caught.value.status) == (400, "INVALID_ARGUMENT")
    await client.aclose()
    await recorded(proxy, "gemini", 2)
