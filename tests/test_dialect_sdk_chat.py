"""The official Python SDKs: chat with tools, images and several choices; models; errors of each family."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic as anthropic_sdk
import openai as openai_sdk
import pytest
from google.genai import errors as genai_errors
from google.genai import types
from proxy_rig import Rig, rig
from test_dialect_sdk import CALLS, SCHEMA, TEXT, URL, anthropic, asked, calling, google, openai, recorded


@pytest.fixture
async def proxy(tmp_path: Path) -> AsyncIterator[Rig]:
    async with rig(f"sqlite:///{tmp_path / 'forge.db'}") as made:
        yield made


async def test_openai_chat_with_tools_an_image_and_choices(proxy: Rig) -> None:
    proxy.engine.script = calling
    image = {"type": "image_url", "image_url": {"url": URL}}
    history: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "see"}, image]}]
    tools: Any = [{"type": "function", "function": {"name": "shell", "parameters": SCHEMA}}]
    async with openai(proxy) as client:
        for streaming in (False, True):
            if streaming:
                async with client.chat.completions.stream(
                    model="m", messages=history, tools=tools, n=2, stream_options={"include_usage": True}
                ) as stream:
                    deltas = [event.delta async for event in stream if event.type == "content.delta"]
                    answer: Any = await stream.get_final_completion()
                assert "".join(deltas) == TEXT * 2
            else:
                answer = await client.chat.completions.create(model="m", messages=history, tools=tools, n=2)
            assert [choice.index for choice in answer.choices] == [0, 1]
            for choice in answer.choices:
                assert (choice.message.content, choice.finish_reason) == (TEXT, "tool_calls")
                assert [c.function.arguments for c in choice.message.tool_calls] == [
                    call["function"]["arguments"]  # type: ignore[index]
                    for call in CALLS
                ]
            assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
            message = answer.choices[1].message
            history.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
            history += [{"role": "tool", "tool_call_id": c.id, "content": "ok"} for c in message.tool_calls]
        await client.chat.completions.create(model="m", messages=history, tools=tools)
    messages = asked(proxy)
    assert [m["role"] for m in messages] == ["user", *["assistant", "tool", "tool"] * 2]
    assert messages[0]["content"][1] == {"type": "image_url", "image_url": {"url": URL}}
    assert [call["id"] for call in messages[1]["tool_calls"]] == ["call_1", "call_2"]
    await recorded(proxy, "chat", 5)


async def test_every_sdk_lists_the_one_model(proxy: Rig) -> None:
    """And finds it under whatever name it asks for: by that name a call would be answered."""
    async with openai(proxy) as client:
        assert [model.id async for model in client.models.list()] == ["forge"]
        assert (await client.models.retrieve("gpt-x")).id == "gpt-x"
    async with anthropic(proxy) as claude:
        assert [model.id async for model in claude.models.list()] == ["forge"]
        assert (await claude.models.retrieve("claude-x")).display_name == "claude-x"
    client = google(proxy)
    assert [model.name async for model in await client.models.list()] == ["models/forge"]
    assert (await client.models.get(model="gemini-x")).name == "models/gemini-x"
    await client.aclose()
    assert await proxy.rows() == []


async def test_every_sdk_reads_errors(proxy: Rig) -> None:
    robot: Any = [{"role": "robot", "content": "x"}]
    async with openai(proxy) as client:
        with pytest.raises(openai_sdk.BadRequestError, match="robot"):
            await client.chat.completions.create(model="m", messages=robot)
        with pytest.raises(openai_sdk.BadRequestError, match="robot"):
            async with client.chat.completions.stream(model="m", messages=robot) as stream:
                await stream.get_final_completion()
        with pytest.raises(openai_sdk.BadRequestError, match="empty"):
            await client.completions.create(model="m", prompt="")
    async with anthropic(proxy) as claude:
        with pytest.raises(anthropic_sdk.BadRequestError, match="robot") as caught:
            await claude.messages.create(model="m", max_tokens=9, messages=robot)
        assert caught.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
        with pytest.raises(anthropic_sdk.BadRequestError, match="robot"):
            await claude.messages.count_tokens(model="m", messages=robot)
        with pytest.raises(anthropic_sdk.AuthenticationError):
            await claude.with_options(api_key="no").messages.create(model="m", max_tokens=9, messages=robot)
    gemini = google(proxy)
    contents: Any = [types.Content(role="robot", parts=[types.Part(text="x")])]
    for call in (gemini.models.generate_content, gemini.models.count_tokens):
        with pytest.raises(genai_errors.ClientError, match="robot") as failed:
            await call(model="m", contents=contents)
        assert (failed.value.code, failed.value.status) == (400, "INVALID_ARGUMENT")
    with pytest.raises(genai_errors.ClientError, match="robot"):
        async for _ in await gemini.models.generate_content_stream(model="m", contents=contents):
            pass
    await gemini.aclose()
    assert await proxy.rows() == []


async def test_google_genai_reads_several_candidates(proxy: Rig) -> None:
    client = google(proxy)
    config = types.GenerateContentConfig(candidate_count=2)
    answer = await client.models.generate_content(model="m", contents="hi", config=config)
    texts = [candidate.content.parts[0].text for candidate in answer.candidates]
    assert sorted(texts) == ["answer 1", "answer 2"]
    told: dict[int, str] = {}
    async for chunk in await client.models.generate_content_stream(model="m", contents="hi", config=config):
        for candidate in chunk.candidates:
            at = candidate.index or 0
            told[at] = told.get(at, "") + "".join(part.text or "" for part in candidate.content.parts)
    assert sorted(told.values()) == ["answer 3", "answer 4"]
    await client.aclose()
