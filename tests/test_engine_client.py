"""The engine's client: what it sends, what it makes of answers, and of every way an engine can fail."""

import asyncio
import copy
import json
from collections.abc import AsyncIterator

import numpy as np
import pytest
from engine_fake import CHAT, FakeEngine
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from forge_server.domain.call import count_fault
from forge_server.domain.engine import EngineRefused, EngineUnavailable
from forge_server.domain.states import Untrainable
from forge_server.engine import answers
from forge_server.engine.client import EngineClient

BODY = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "stream": True, "model": "gpt"}


@pytest.fixture
async def fake() -> AsyncIterator[FakeEngine]:
    async with FakeEngine().serving() as engine:
        yield engine


@pytest.fixture
async def client(fake: FakeEngine) -> AsyncIterator[EngineClient]:
    client = EngineClient(fake.url, "forge", api_key="secret", timeout_s=5)
    yield client
    await client.close()


async def test_chat_gives_ids_and_logprobs_and_forces_what_recording_needs(
    fake: FakeEngine, client: EngineClient
) -> None:
    result = await client.chat(BODY, request_id="at-1.7")
    assert result.prompt_ids is not None and result.prompt_ids.tolist() == [1, 2, 3]
    assert result.completion_ids is not None and result.completion_ids.tolist() == [7, 8]
    assert result.completion_ids.dtype == np.int32
    assert result.logprobs is not None and result.logprobs.tolist() == [-0.5, -0.25]
    assert result.message == {"role": "assistant", "content": "hi"}
    assert (result.finish_reason, result.usage_prompt, result.usage_completion) == ("stop", 3, 2)
    sent = fake.last_body
    assert sent["model"] == "forge" and sent["stream"] is False
    assert sent["return_token_ids"] is True and sent["logprobs"] is True
    assert fake.last_headers["X-Request-Id"] == "at-1.7"
    assert fake.last_headers["Authorization"] == "Bearer secret"


async def test_tool_calls_and_reasoning_pass_through(fake: FakeEngine, client: EngineClient) -> None:
    answer = copy.deepcopy(CHAT)
    calls = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    answer["choices"][0]["message"] = {
        "role": "assistant", "content": None, "reasoning": "hm", "tool_calls": calls,
    }  # fmt: skip
    fake.chat_answer = answer
    result = await client.chat(BODY, request_id="r")
    assert result.message == {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": calls}


async def test_missing_ids_and_logprobs_are_none_not_guessed(fake: FakeEngine, client: EngineClient) -> None:
    answer = copy.deepcopy(CHAT)
    del answer["prompt_token_ids"], answer["choices"][0]["token_ids"], answer["choices"][0]["logprobs"]
    fake.chat_answer = answer
    result = await client.chat(BODY, request_id="r")
    assert (result.prompt_ids, result.completion_ids, result.logprobs) == (None, None, None)


async def test_prompt_ids_that_disagree_with_usage_are_left_out(
    fake: FakeEngine, client: EngineClient
) -> None:
    fake.chat_answer = {**CHAT, "prompt_token_ids": [1, 2]}
    assert (await client.chat(BODY, request_id="r")).prompt_ids is None


async def test_tokens_are_counted_by_the_engine(fake: FakeEngine, client: EngineClient) -> None:
    message, tool = (
        Raw(b'{"role":"user","content":"hi"}'),
        Raw(b'{"type":"function","function":{"name":"f"}}'),
    )
    assert await client.count_tokens([message], []) == 1
    assert await client.count_tokens([message, message], [tool]) == 3


async def test_null_logprob_becomes_nan_and_is_a_count_fault(fake: FakeEngine, client: EngineClient) -> None:
    answer = copy.deepcopy(CHAT)
    answer["choices"][0]["logprobs"]["content"][1]["logprob"] = None
    fake.chat_answer = answer
    result = await client.chat(BODY, request_id="r")
    assert result.completion_ids is not None
    assert count_fault(result.completion_ids, result.logprobs, 2) is Untrainable.BAD_LOGPROBS


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("This model's maximum context length is 2048 tokens. However, ...", "context_length_exceeded"),
        ("max_tokens=9 cannot be greater than max_model_len=4.", "context_length_exceeded"),
        ("temperature must be non-negative", "invalid_request"),
    ],
)
async def test_400_blames_the_request_and_names_the_window(
    fake: FakeEngine, client: EngineClient, message: str, code: str
) -> None:
    fake.chat_status = 400
    fake.chat_answer = {"error": {"message": message, "type": "BadRequestError", "param": None, "code": 400}}
    with pytest.raises(EngineRefused) as caught:
        await client.chat(BODY, request_id="r")
    assert (caught.value.http_status, caught.value.code, caught.value.message) == (400, code, message)


@pytest.mark.parametrize("status", [401, 404, 429, 500, 503])
async def test_other_statuses_blame_the_engine(fake: FakeEngine, client: EngineClient, status: int) -> None:
    fake.chat_status = status
    fake.chat_answer = {"error": {"message": "no", "type": "x", "param": None, "code": status}}
    with pytest.raises(EngineUnavailable) as caught:
        await client.chat(BODY, request_id="r")
    assert caught.value.http_status == status and caught.value.sent


@pytest.mark.parametrize("answer", ["<html>proxy error</html>", "", "{}", '{"choices": [], "usage": {}}'])
async def test_an_answer_that_is_no_completion_is_named(
    fake: FakeEngine, client: EngineClient, answer: str
) -> None:
    fake.chat_answer = answer
    with pytest.raises(EngineUnavailable, match="no chat completion"):
        await client.chat(BODY, request_id="r")


async def test_a_hanging_engine_times_out(fake: FakeEngine) -> None:
    client = EngineClient(fake.url, "forge", timeout_s=0.2)
    fake.chat_hang.clear()
    with pytest.raises(EngineUnavailable, match="no answer within"):
        await client.chat(BODY, request_id="r")
    await client.close()


async def test_nothing_listening_was_never_sent() -> None:
    async with FakeEngine().serving() as engine:
        url = engine.url
    client = EngineClient(url, "forge")
    with pytest.raises(EngineUnavailable) as caught:
        await client.chat(BODY, request_id="r")
    assert not caught.value.sent
    await client.close()


async def test_cancelling_a_call_closes_its_connection(fake: FakeEngine, client: EngineClient) -> None:
    fake.chat_hang.clear()
    call = asyncio.create_task(client.chat(BODY, request_id="r"))
    await asyncio.wait_for(fake.arrived.wait(), 60)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await asyncio.wait_for(fake.cancelled.wait(), 60)


class Dropping:
    """Answers the first ``good`` requests of each connection, then closes it on the next one unanswered."""

    def __init__(self, good: int) -> None:
        self.good = good
        self.requests = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for number in range(self.good + 1):
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(
                int(line.split(b":")[1])
                for line in head.split(b"\r\n")
                if line.lower().startswith(b"content-length")
            )
            await reader.readexactly(length)
            self.requests += 1
            if number < self.good:
                body = json.dumps(CHAT).encode()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
                await writer.drain()
        writer.close()


@pytest.mark.parametrize(("good", "requests_seen"), [(1, 3), (0, 1)])
async def test_a_dead_pooled_connection_costs_one_retry_and_a_fresh_one_none(
    good: int, requests_seen: int
) -> None:
    dropping = Dropping(good)
    server = await asyncio.start_server(dropping.serve, "127.0.0.1", 0)
    client = EngineClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "forge", timeout_s=60)
    if good:
        await client.chat(BODY, request_id="1")
        await client.chat(BODY, request_id="2")  # on the pooled connection, dropped, retried on a fresh one
    else:
        with pytest.raises(EngineUnavailable) as caught:
            await client.chat(BODY, request_id="1")
        assert caught.value.sent
    assert dropping.requests == requests_seen
    await client.close()
    server.close()


async def test_an_engine_that_dies_of_a_request_on_a_kept_connection_had_it() -> None:
    """Its successor does not listen yet when the request is sent again."""
    dropping, served = Dropping(1), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await dropping.serve(reader, Dying(writer))

    class Dying:
        def __init__(self, writer: asyncio.StreamWriter) -> None:
            self.write, self.drain, self._writer = writer.write, writer.drain, writer

        def close(self) -> None:
            server.close()
            self._writer.transport.abort()
            served.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    client = EngineClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "forge", timeout_s=60)
    await client.chat(BODY, request_id="1")
    with pytest.raises(EngineUnavailable) as caught:
        await client.chat(BODY, request_id="2")
    assert served.is_set() and dropping.requests == 2
    assert caught.value.sent
    await client.close()


@given(
    st.lists(st.integers(0, 200_000), max_size=40),
    st.lists(st.integers(0, 200_000), max_size=10),
    st.integers(0, 40),
)
def test_a_known_prefix_never_changes_the_ids(first: list[int], more: list[int], keep: int) -> None:
    """Whatever the earlier prompt was, prefix or not, the ids are those of the new answer."""

    def answer(ids: list[int]) -> bytes:
        body = {**CHAT, "prompt_token_ids": ids, "usage": {"prompt_tokens": len(ids), "completion_tokens": 2}}
        return json.dumps(body, separators=(",", ":")).encode()

    known = answers.chat_result(answer(first))
    second = first[:keep] + more
    result = answers.chat_result(answer(second), known)
    assert result.prompt_ids is not None and result.prompt_ids.tolist() == second


def test_a_known_prefix_that_ends_inside_a_number_is_not_taken() -> None:
    def answer(ids: list[int]) -> bytes:
        body = {**CHAT, "prompt_token_ids": ids, "usage": {"prompt_tokens": len(ids), "completion_tokens": 2}}
        return json.dumps(body, separators=(",", ":")).encode()

    result = answers.chat_result(answer([1, 23, 4]), answers.chat_result(answer([1, 2])))
    assert result.prompt_ids is not None and result.prompt_ids.tolist() == [1, 23, 4]


@pytest.mark.parametrize("field", ["content", "reasoning"])
def test_text_that_looks_like_ids_is_never_taken_for_them(field: str) -> None:
    answer = copy.deepcopy(CHAT)
    fake = 'x,"prompt_token_ids":[9,9,9],"y'
    answer["choices"][0]["message"][field] = fake
    answer["model"] = fake
    for ids in ({"prompt_token_ids": [1, 2, 3]}, {"prompt_token_ids": None}):
        body = json.dumps({**answer, **ids}, separators=(",", ":")).encode()
        result = answers.chat_result(body)
        assert result.message[field] == fake and result.model == fake
        expected = ids["prompt_token_ids"]
        assert (None if result.prompt_ids is None else result.prompt_ids.tolist()) == expected
