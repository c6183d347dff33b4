"""Recording (I1, I2): what is in the database when, and what is stored of a call."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec
import numpy as np
import pytest
import sqlalchemy as sa
from proxy_rig import PATIENCE, Rig, follow, hello, result, rig

from forge_server.domain.engine import ChatResult, EngineRefused, EngineUnavailable
from forge_server.domain.states import Delivery, Untrainable
from forge_server.store import messages
from forge_server.store import tables as t
from forge_server.trajectory import codec


@pytest.fixture
async def proxy(database_url: str) -> AsyncIterator[Rig]:
    async with rig(database_url) as made:
        yield made


async def calls_of(proxy: Rig) -> Any:
    query = (
        sa.select(t.calls, t.call_tokens)
        .outerjoin(t.call_tokens, t.call_tokens.c.call_id == t.calls.c.id)
        .where(t.calls.c.attempt_id == proxy.attempt)
    )
    names = codec.CallRow.__struct_fields__

    def read(connection: sa.Connection) -> Any:
        rows = connection.execute(query).all()
        return codec.decode_attempt(codec.CallRow(**{n: getattr(r, n) for n in names}) for r in rows)

    return await proxy.store.read(read)


async def test_i1_the_intent_is_durable_before_the_call_is_forwarded(proxy: Rig) -> None:
    seen: list[Any] = []

    async def script(body: dict[str, Any]) -> ChatResult:
        seen.extend(await proxy.rows())
        return result(body)

    proxy.engine.script = script
    async with proxy.client() as client:
        assert (await proxy.ask(client)).status_code == 200
    assert [(row.seq, row.end) for row in seen] == [(0, None)]
    request = await proxy.store.read(lambda c: messages.request_of(c, seen[0].id))
    assert request == ([], hello()["messages"])


async def test_i1_the_end_is_durable_before_a_byte_of_the_answer_leaves(proxy: Rig) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(proxy.url.rsplit(":", 1)[1]))
    body = msgspec.json.encode(hello(stream=True))
    head = (
        f"POST /a/{proxy.attempt}/v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
        f"authorization: Bearer {proxy.key}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    async with asyncio.timeout(PATIENCE):
        assert await reader.readexactly(1) == b"H"
    (row,) = await proxy.rows()
    assert (row.end, row.status, row.finish_reason) == ("ok", 200, "stop")
    writer.close()


async def test_a_session_is_stored_as_deltas_and_read_back_whole(proxy: Rig) -> None:
    body, asked = hello(), []
    async with proxy.client() as client:
        for turn in range(4):
            asked.append(body)
            body = follow(body, (await proxy.ask(client, body)).json(), f"turn {turn}")
    stored = await calls_of(proxy)
    assert [call.seq for call in stored] == [0, 1, 2, 3]
    for call, body in zip(stored, proxy.engine.asked, strict=True):
        expected = result(body)
        assert call.prompt.tolist() == expected.prompt_ids.tolist()  # type: ignore[union-attr]
        assert call.logprobs.size == call.completion.size
    rows = await proxy.rows()
    assert [row.storage_parent_id for row in rows] == [None, *(row.id for row in rows[:-1])]
    assert [row.prefix_len for row in rows[1:]] == [c.prompt.size + c.completion.size for c in stored[:-1]]
    for row, given in zip(rows, asked, strict=True):
        assert await proxy.store.read(lambda c, id=row.id: messages.request_of(c, id)) == (
            [],
            given["messages"],
        )
        response = await proxy.store.read(lambda c, id=row.id: messages.response_of(c, id))
        assert response == {"role": "assistant", "content": f"answer {row.seq + 1}"}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"usage_completion": 7}, Untrainable.COUNT_MISMATCH),
        ({"usage_prompt": 7}, Untrainable.COUNT_MISMATCH),
        ({"prompt_ids": None}, Untrainable.COUNT_MISMATCH),
        ({"completion_ids": None}, Untrainable.COUNT_MISMATCH),
        ({"logprobs": None}, Untrainable.NO_LOGPROBS),
        ({"logprobs": np.full(3, np.nan, np.float32)}, Untrainable.BAD_LOGPROBS),
        ({"logprobs": np.full(3, -9999, np.float32)}, Untrainable.BAD_LOGPROBS),
        (
            {
                "completion_ids": np.empty(0, np.int32),
                "logprobs": np.empty(0, np.float32),
                "usage_completion": 0,
            },
            Untrainable.EMPTY,
        ),
    ],
)
async def test_i2_what_does_not_add_up_is_not_trainable_and_says_why(
    proxy: Rig, changes: dict[str, Any], reason: Untrainable | None
) -> None:
    async def script(body: dict[str, Any]) -> ChatResult:
        return result(body, **changes)

    proxy.engine.script = script
    async with proxy.client() as client:
        assert (await proxy.ask(client)).status_code == 200
    (row,) = await proxy.rows()
    assert (row.end, row.untrainable) == ("ok", reason)


async def test_ids_and_logprobs_are_stripped_from_what_the_harness_sees(proxy: Rig) -> None:
    async with proxy.client() as client:
        answer = (await proxy.ask(client, hello(logprobs=True, return_token_ids=True))).json()
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "answer 1"},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert answer["model"] == "gpt-x"
    assert answer["usage"] == {"prompt_tokens": 8, "completion_tokens": 9, "total_tokens": 17}
    (row,) = await proxy.rows()
    assert row.flags == {"dropped": ["logprobs", "return_token_ids"]}


@pytest.mark.parametrize(
    ("error", "status", "code", "end"),
    [
        (
            EngineRefused(400, "maximum context length", "context_length_exceeded"),
            400,
            "context_length_exceeded",
            "rejected",
        ),
        (EngineRefused(400, "bad tools", "invalid_request"), 400, "invalid_request", "rejected"),
        (EngineUnavailable("the engine is away"), 503, "engine_unavailable", "upstream_error"),
    ],
)
async def test_i1_engine_errors_end_the_call_and_keep_their_status(
    proxy: Rig, error: Exception, status: int, code: str, end: str
) -> None:
    async def script(body: dict[str, Any]) -> ChatResult:
        raise error

    proxy.engine.script = script
    async with proxy.client() as client:
        answer = await proxy.ask(client, hello(stream=True))
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert ("retry-after" in answer.headers) == (status == 503)
    (row,) = await proxy.rows()
    assert (row.end, row.status, row.untrainable, row.delivered) == (end, status, "not_ok", "no")
    assert row.error.startswith(code)


async def test_i1_what_a_harness_makes_the_engine_say_does_not_keep_the_end_from_being_written(
    proxy: Rig,
) -> None:
    """Else it could leave a call in flight for ever, and so keep a bad attempt from being trained."""

    async def script(body: dict[str, Any]) -> ChatResult:
        raise EngineRefused(400, "no role \0 here", "invalid_request")

    proxy.engine.script = script
    async with proxy.client() as client:
        await proxy.ask(client)
    (row,) = await proxy.rows()
    assert row.end == "rejected" and row.error.startswith("invalid_request: no role \ufffd")


async def test_a_row_keeps_little_of_what_a_harness_asks(proxy: Rig) -> None:
    bias = {str(n): 1.0 for n in range(10_000)}
    async with proxy.client() as client:
        more = {"x" * 10_000 + str(n): 1 for n in range(500)}
        assert (await proxy.ask(client, hello(logit_bias=bias, temperature=0.3, **more))).status_code == 200
    (row,) = await proxy.rows()
    assert len(msgspec.json.encode(row.flags)) < 12_000 and row.flags["overridden"]["temperature"] == 0.3


async def test_a_message_that_cannot_be_read_is_an_engine_error(proxy: Rig) -> None:
    async def script(body: dict[str, Any]) -> ChatResult:
        return result(body, message={"role": "assistant", "tool_calls": [{"function": 3}]})

    proxy.engine.script = script
    async with proxy.client() as client:
        assert (await proxy.ask(client)).status_code == 503
    assert [row.end for row in await proxy.rows()] == ["upstream_error"]


async def test_i1_a_client_that_leaves_cancels_the_engine_call(proxy: Rig) -> None:
    proxy.engine.blocked()
    async with proxy.client() as client:
        asking = asyncio.create_task(proxy.ask(client))
        await proxy.engine.arrived()
        asking.cancel()
        async with asyncio.timeout(PATIENCE):
            await proxy.engine.gone.wait()
        (row,) = await proxy.until(lambda rows: rows[0].end is not None)
    assert (row.end, row.status, row.delivered, row.untrainable) == ("client_gone", 499, "no", "not_ok")
    assert proxy.gate.running == 0


async def test_i1_sealing_cancels_calls_in_flight_and_refuses_new_ones(proxy: Rig) -> None:
    proxy.engine.blocked()
    async with proxy.client() as client:
        asking = asyncio.create_task(proxy.ask(client))
        await proxy.engine.arrived()
        await proxy.seal()
        assert (await asking).status_code == 409
        assert proxy.engine.aborted == 1
        (row,) = await proxy.rows()
        assert (row.end, row.status) == ("rejected", 409)
        late = await proxy.ask(client)
    assert (late.status_code, late.json()["error"]["code"]) == (409, "attempt_sealed")
    assert len(await proxy.rows()) == 1


async def test_the_seed_and_the_plain_distribution_are_pinned(proxy: Rig) -> None:
    proxy.policy["temperature"] = 0.7
    body = hello(temperature=0.1, top_p=0.5, frequency_penalty=0.3, max_tokens=100_000, logit_bias={"5": 2})
    async with proxy.client() as client:
        await proxy.ask(client, body)
        await proxy.ask(client, body)
    first, second = proxy.engine.asked
    wanted = {
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "max_tokens": 4096,
        "model": "forge",
    }
    assert {name: first[name] for name in wanted} == wanted
    assert first["seed"] != second["seed"]
    assert first.keys() == {*wanted, "messages", "seed", "n", "stream"}
    row = (await proxy.rows())[0]
    assert row.temperature == 0.7
    assert row.flags == {
        "clamped": {"max_tokens": 100_000},
        "overridden": {"temperature": 0.1, "top_p": 0.5, "frequency_penalty": 0.3, "logit_bias": {"5": 2.0}},
    }


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}, "strict": True}}
FREE_TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


@pytest.mark.parametrize(
    "constraint",
    [
        {"response_format": {"type": "json_object"}},
        {"tools": [TOOL], "tool_choice": "required"},
        {"tools": [TOOL]},
        {"tools": [FREE_TOOL], "parallel_tool_calls": False},
    ],
)
@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        ({"grammar": "lift"}, None),
        ({"grammar": "enforce"}, Untrainable.CONSTRAINED),
        ({"mode": "eval"}, Untrainable.CONSTRAINED),
    ],
)
async def test_grammars_are_lifted_in_training_or_flagged(
    database_url: str, policy: dict[str, Any], reason: Untrainable | None, constraint: dict[str, Any]
) -> None:
    async with rig(database_url, **policy) as proxy:
        async with proxy.client() as client:
            assert (await proxy.ask(client, hello(**constraint))).status_code == 200
        (body,) = proxy.engine.asked
        (row,) = await proxy.rows()
        assert row.untrainable == reason
        lifted = reason is None
        assert ("lifted" in (row.flags or {})) == lifted
        assert ("response_format" in body) == ("response_format" in constraint and not lifted)
        if "tool_choice" in constraint:
            assert body["tool_choice"] == ("auto" if lifted else "required")
        if "tools" in constraint:
            strict = constraint["tools"] == [TOOL]
            assert (b"strict" in msgspec.json.encode(body["tools"])) == (strict and not lifted)
        assert ("parallel_tool_calls" in body) == ("parallel_tool_calls" in constraint and not lifted)


@pytest.mark.parametrize(
    "free",
    [
        {"parallel_tool_calls": False},
        {"tools": [FREE_TOOL], "parallel_tool_calls": True},
        {"tools": [FREE_TOOL], "parallel_tool_calls": False, "tool_choice": "none"},
    ],
)
async def test_what_makes_no_grammar_passes(database_url: str, free: dict[str, Any]) -> None:
    async with rig(database_url) as proxy:
        async with proxy.client() as client:
            assert (await proxy.ask(client, hello(**free))).status_code == 200
        (row,) = await proxy.rows()
        assert (row.untrainable, row.flags) == (None, None)


async def test_evaluation_calls_are_not_trainable(database_url: str) -> None:
    async with rig(database_url, mode="eval", temperature=0.0) as proxy:
        async with proxy.client() as client:
            await proxy.ask(client)
        (row,) = await proxy.rows()
        assert (row.untrainable, row.temperature) == (Untrainable.EVALUATION, 0.0)


async def test_i9_a_call_across_a_weight_update_says_so(proxy: Rig) -> None:
    proxy.versions.current = 4

    async def script(body: dict[str, Any]) -> ChatResult:
        proxy.versions.current = 5
        return result(body)

    proxy.engine.script = script
    async with proxy.client() as client:
        await proxy.ask(client)
    (row,) = await proxy.rows()
    assert (row.policy_version, row.untrainable) == (4, Untrainable.MIXED_VERSIONS)


async def test_i9_a_call_that_a_weight_update_did_not_wait_for_is_not_trained(proxy: Rig) -> None:
    """The new weights may have answered it before anybody says that they are live."""

    async def script(body: dict[str, Any]) -> ChatResult:
        if body["messages"][0] != first:
            return result(body)
        await proxy.gate.hold("weight_update")
        assert not await proxy.gate.drained(0.001)
        await proxy.gate.release()
        return result(body)

    first = msgspec.Raw(msgspec.json.encode(hello()["messages"][0]))
    proxy.engine.script = script
    async with proxy.client() as client:
        await proxy.ask(client)
        await proxy.ask(client, hello("after it"))
    rows = await proxy.rows()
    assert [row.untrainable for row in rows] == [Untrainable.MIXED_VERSIONS, None]


async def test_an_answer_that_a_weight_update_aborted_is_sampled_again(proxy: Rig) -> None:
    proxy.versions.current = 1
    await proxy.gate.hold("weight_update")

    async def script(body: dict[str, Any]) -> ChatResult:
        if len(proxy.engine.asked) == 1:
            await proxy.gate.hold("weight_update")
            proxy.versions.current = 2
            return result(body, "half", finish_reason="abort")
        return result(body, "whole")

    proxy.engine.script = script
    async with proxy.client() as client:
        asking = asyncio.create_task(proxy.ask(client))
        await proxy.gate.release()
        await proxy.engine.arrived()
        assert await proxy.gate.drained(PATIENCE)
        await proxy.gate.release()
        answer = (await asking).json()
    assert answer["choices"][0]["message"]["content"] == "whole"
    (row,) = await proxy.rows()
    assert (row.policy_version, row.untrainable, row.flags) == (2, None, {"resampled": 1})


async def test_side_calls_are_labelled_and_not_trained(database_url: str) -> None:
    class Rules:
        looks_inside = True

        def normalise(self, given: list[dict[str, Any]]) -> list[dict[str, Any]]:
            return [{**m, "content": m["content"].replace("<volatile>", "")} for m in given]

        def label(self, given: Any, tools: Any) -> str:
            return "title" if "title" in given[0]["content"] else ""

        def agent(self, headers: Mapping[bytes, bytes]) -> dict[str, str]:
            return {"agent": "worker"} if b"x-agent" in headers else {}

    async with rig(database_url, rules=Rules()) as proxy:
        async with proxy.client() as client:
            await proxy.ask(client, hello("a title<volatile>"))
            await proxy.ask(client, hello("work"), headers={"X-Agent": "worker"})
        side, work = await proxy.rows()
        assert (side.label, side.untrainable) == ("title", Untrainable.SIDE_CALL)
        assert (work.label, work.untrainable) == ("", None)
        assert (side.flags, work.flags) == (None, {"agent": "worker"})
        request = await proxy.store.read(lambda c: messages.request_of(c, side.id))
        assert request == ([], [{"role": "user", "content": "a title"}])


async def test_i1_concurrent_calls_have_rows_and_numbers_of_their_own(proxy: Rig) -> None:
    async with proxy.client() as client:
        answers = await asyncio.gather(*(proxy.ask(client, hello(f"q{i}")) for i in range(24)))
    assert {answer.status_code for answer in answers} == {200}
    rows = await proxy.rows()
    assert [row.seq for row in rows] == list(range(24))
    assert len(await calls_of(proxy)) == 24
    await proxy.seal()
    assert {row.delivered for row in await proxy.rows()} == {Delivery.YES}
