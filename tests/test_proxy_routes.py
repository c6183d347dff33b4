"""The listener: who may call, what is refused and how it is worded."""

import asyncio
import gc
import json
import weakref
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
from litestar import Litestar, asgi
from litestar.types import Receive, Scope, Send
from openai import APIStatusError, AsyncOpenAI
from proxy_rig import PATIENCE, SECRET, Rig, eventually, hello, listening, result, rig

from forge_server.domain.engine import ChatResult
from forge_server.store.keys import attempt_key


@pytest.fixture
async def proxy(database_url: str) -> AsyncIterator[Rig]:
    async with rig(database_url) as made:
        yield made


def error_of(answer: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = answer.json()["error"]
    return error


# --- identity (I10) ---


async def test_i10_the_key_is_taken_from_wherever_a_dialect_puts_it(proxy: Rig) -> None:
    carriers: list[dict[str, str]] = [
        {"Authorization": f"Bearer {proxy.key}"},
        {"authorization": f"bearer {proxy.key}"},
        {"x-api-key": proxy.key},
        {"x-goog-api-key": proxy.key},
    ]
    async with httpx.AsyncClient(base_url=proxy.url, timeout=PATIENCE) as client:
        for headers in carriers:
            answer = await client.post("/v1/chat/completions", json=hello(), headers=headers)
            assert answer.status_code == 200
    assert len(await proxy.rows()) == len(carriers)


async def test_i10_wrong_keys_are_refused(proxy: Rig) -> None:
    other = await proxy.new_attempt()
    good = proxy.key
    keys = {
        "": "missing",
        "sk-anything": "foreign",
        good[:-1] + ("0" if good[-1] != "0" else "1"): "forged",
        attempt_key(SECRET, proxy.attempt, "runner"): "runner's",
        attempt_key(SECRET, other, "agent"): "another attempt's",
        attempt_key(SECRET, "at-nobody", "agent"): "of no attempt",
    }
    async with httpx.AsyncClient(base_url=proxy.url, timeout=PATIENCE) as client:
        for key in keys:
            headers = {"x-api-key": key} if key else {}
            for path in (f"/a/{proxy.attempt}/v1/chat/completions", f"/a/{proxy.attempt}/v1/models"):
                answer = await client.post(path, json=hello(), headers=headers)
                if path.endswith("models"):
                    answer = await client.get(path, headers=headers)
                assert answer.status_code == 401, keys[key]
        unknown = {"x-api-key": attempt_key(SECRET, "at-nobody", "agent")}
        answer = await client.post("/v1/chat/completions", json=hello(), headers=unknown)
        assert (answer.status_code, error_of(answer)["code"]) == (401, "unknown_attempt")
    assert await proxy.rows() == []


async def test_an_attempt_that_has_not_started_is_asked_to_wait(proxy: Rig) -> None:
    proxy.attempt = await proxy.new_attempt(running=False)
    async with proxy.client() as client:
        answer = await proxy.ask(client)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


async def test_a_sealed_attempt_is_refused_also_after_a_restart(proxy: Rig) -> None:
    async with proxy.client() as client:
        await proxy.ask(client)
        await proxy.seal()
        assert (await proxy.ask(client)).status_code == 409
    async with proxy.serving(), proxy.client() as client:
        answer = await proxy.ask(client)
        assert (answer.status_code, error_of(answer)["code"]) == (409, "attempt_sealed")


# --- bad input ---

HELLO: dict[str, Any] = {"role": "user", "content": "hello"}


@pytest.mark.parametrize(
    ("body", "code", "word"),
    [
        (b"", "invalid_json", "JSON"),
        (b"{", "invalid_json", "JSON"),
        (b"not json", "invalid_json", "JSON"),
        (b"\xff\xfe", "invalid_json", "JSON"),
        (b"[1]", "invalid_request", "object"),
        (b"{}", "invalid_request", "messages"),
        (b'{"messages": []}', "invalid_request", "messages"),
        (b'{"messages": "hi"}', "invalid_request", "messages"),
        (b'{"messages": [3]}', "invalid_request", "messages[0]"),
        (b'{"messages": [{"content": "x"}]}', "invalid_request", "role"),
        (b'{"messages": [{"role": "robot", "content": "x"}]}', "invalid_request", "robot"),
        (b'{"messages": [{"role": "user", "content": [1]}]}', "invalid_request", "content"),
        ({"n": 0}, "invalid_request", "n must be between 1 and 128"),
        ({"max_tokens": 0}, "invalid_request", "max_tokens"),
        ({"max_tokens": "many"}, "invalid_request", "max_tokens"),
        ({"temperature": "hot"}, "invalid_request", "temperature"),
        ({"tools": {}}, "invalid_request", "tools"),
        ({"stream": "yes"}, "invalid_request", "stream"),
    ],
)
async def test_bad_bodies_are_named(proxy: Rig, body: bytes | dict[str, Any], code: str, word: str) -> None:
    data = body if isinstance(body, bytes) else msgspec.json.encode({"messages": [HELLO], **body})
    async with proxy.client() as client:
        answer = await client.post(f"/a/{proxy.attempt}/v1/chat/completions", content=data)
    assert answer.status_code == 400
    error = error_of(answer)
    assert (error["type"], error["code"]) == ("invalid_request_error", code)
    assert word in error["message"]
    assert await proxy.rows() == []


async def test_unknown_parameters_and_models_are_taken_and_noted(proxy: Rig) -> None:
    async with proxy.client() as client:
        answer = await proxy.ask(client, hello(model="no-such-model", store=False, prompt_cache_key="x", n=1))
    assert (answer.status_code, answer.json()["model"]) == (200, "no-such-model")
    (body,) = proxy.engine.asked
    assert body["model"] == "forge"
    assert not {"store", "prompt_cache_key"} & body.keys()
    (row,) = await proxy.rows()
    assert row.flags == {"dropped": ["prompt_cache_key", "store"]}


async def test_a_20_mb_body_works_and_one_over_the_limit_is_413(proxy: Rig) -> None:
    async with proxy.client() as client:
        assert (await proxy.ask(client, hello("x" * 20_000_000))).status_code == 200
    async with proxy.client() as client:
        body = msgspec.json.encode(hello("x" * (65 * 1024 * 1024)))
        for content in (body, _parts(body)):
            answer = await client.post(f"/a/{proxy.attempt}/v1/chat/completions", content=content)
            assert (answer.status_code, error_of(answer)["code"]) == (413, "body_too_large")
    assert len(await proxy.rows()) == 1


async def _parts(body: bytes) -> AsyncIterator[bytes]:
    """Chunked: no content-length tells the size beforehand."""
    for start in range(0, len(body), 1 << 20):
        yield body[start : start + (1 << 20)]


async def test_compressed_bodies_are_refused_by_name(proxy: Rig) -> None:
    async with proxy.client(**{"content-encoding": "gzip"}) as client:
        answer = await proxy.ask(client)
    assert (answer.status_code, error_of(answer)["code"]) == (415, "unsupported_encoding")


# --- other routes ---


async def test_models_lists_the_one_model(proxy: Rig) -> None:
    async with proxy.client() as client:
        for path in ("/v1/models", f"/a/{proxy.attempt}/v1/models"):
            answer = await client.get(path)
            assert [model["id"] for model in answer.json()["data"]] == ["forge"]
        entry = (await client.get("/v1/models/org%2Fmodel-7")).json()
        assert (entry["id"], entry["object"], entry["type"]) == ("org/model-7", "model", "model")
        google = (await client.get("/v1beta/models", headers={"x-goog-api-key": proxy.key})).json()
        assert [model["name"] for model in google["models"]] == ["models/forge"]
        assert (await client.get("/v1beta/models/gemini-9")).json()["name"] == "models/gemini-9"
        assert (await client.post("/v1/models")).status_code == 405
        assert (await client.get("/v1/chat/completions")).status_code == 405
        assert (await client.get("/v1/nothing")).status_code == 404


async def test_a_websocket_upgrade_gets_426(proxy: Rig) -> None:
    headers = {
        "connection": "Upgrade",
        "upgrade": "websocket",
        "sec-websocket-version": "13",
        "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==",
    }
    async with proxy.client(**headers) as client:
        answer = await client.get(f"/a/{proxy.attempt}/v1/responses")
    assert answer.status_code == 426


@pytest.mark.parametrize(
    ("path", "shape"),
    [
        ("v1/completions", "openai"),
        ("v1/responses", "openai"),
        ("v1/messages?beta=true", "anthropic"),
        ("v1/messages/count_tokens", "anthropic"),
        ("v1beta/models/m:generateContent", "gemini"),
        ("v1beta/models/m:streamGenerateContent?alt=sse", "gemini"),
        ("v1beta/models/m:countTokens", "gemini"),
    ],
)
async def test_faults_are_told_in_the_dialect_of_the_route(proxy: Rig, path: str, shape: str) -> None:
    async with proxy.client() as client:
        answer = await client.post(f"/a/{proxy.attempt}/{path}", json={})
        refused = await client.post(f"/{path}", json={}, headers={"Authorization": "Bearer sk-x"})
    assert (answer.status_code, refused.status_code) == (400, 401)
    body = answer.json()
    if shape == "openai":
        assert (body["error"]["type"], body["error"]["code"]) == ("invalid_request_error", "invalid_request")
    elif shape == "anthropic":
        assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    else:
        assert (body["error"]["code"], body["error"]["status"]) == (400, "INVALID_ARGUMENT")


async def test_the_routes_work_mounted_in_litestar(proxy: Rig) -> None:
    routes = proxy.routes

    @asgi(["/a", "/v1", "/v1beta"], is_mount=True, copy_scope=False)
    async def inference(scope: Scope, receive: Receive, send: Send) -> None:
        await routes(scope, receive, send)

    app = Litestar([inference], openapi_config=None, logging_config=None)
    async with listening(app) as proxy.url, proxy.client() as client:
        assert (await proxy.ask(client)).status_code == 200
        assert (await client.post("/v1/chat/completions", json=hello("b"))).status_code == 200
        assert (await client.get("/v1/models")).status_code == 200
    await proxy.seal()
    assert [row.delivered for row in await proxy.rows()] == ["yes", "yes"]


# --- budgets and the window ---


async def test_the_budget_of_calls_ends_the_attempt_with_400(database_url: str) -> None:
    async with rig(database_url, max_calls=2) as proxy:
        async with proxy.client() as client:
            answers = [await proxy.ask(client, hello(f"q{i}")) for i in range(5)]
        assert [answer.status_code for answer in answers] == [200, 200, 400, 400, 400]
        assert error_of(answers[2])["code"] == "budget_calls"
        assert len(await proxy.rows()) == 2  # a flood leaves no rows
        assert (await proxy.lifecycle.heartbeat(proxy.attempt)).reason == "budget_calls"
        await proxy.seal()
        async with proxy.client() as client:
            assert (await proxy.ask(client, hello("late"))).status_code == 400


async def test_the_budget_of_tokens_clamps_the_last_call_and_then_ends(database_url: str) -> None:
    async with rig(database_url, max_tokens=12) as proxy:  # an answer has 9 tokens
        async with proxy.client() as client:
            answers = [await proxy.ask(client, hello(f"q{i}")) for i in range(3)]
        assert [answer.status_code for answer in answers] == [200, 200, 400]
        assert error_of(answers[2])["code"] == "budget_tokens"
        assert [body["max_tokens"] for body in proxy.engine.asked] == [12, 3]


async def test_what_is_refused_again_and_again_keeps_no_session_in_memory(database_url: str) -> None:
    async with rig(database_url, max_calls=1) as proxy:
        count = f"/a/{proxy.attempt}/v1/messages/count_tokens"
        async with proxy.client() as client:
            assert (await proxy.ask(client)).status_code == 200
            for n in range(3):
                assert (await proxy.ask(client, hello(f"q{n}"))).status_code == 400
                assert (await client.post(count, json=hello(max_tokens=1))).status_code == 400
            session = weakref.ref(proxy.sessions_now()[0])
            await proxy.seal()
            assert (await proxy.ask(client)).status_code == 400

        def gone() -> bool:
            gc.collect()
            return session() is None

        await eventually(gone)
        assert proxy.sessions._sealed[proxy.attempt].__traceback__ is None


async def test_the_harness_may_ask_for_less_than_the_limit(proxy: Rig) -> None:
    async with proxy.client() as client:
        await proxy.ask(client, hello(max_completion_tokens=7))
    assert proxy.engine.asked[0]["max_tokens"] == 7
    assert [row.flags for row in await proxy.rows()] == [None]


# --- the official SDK ---


def sdk(proxy: Rig, **more: Any) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=proxy.base, api_key=proxy.key, max_retries=0, timeout=PATIENCE, **more)


CALLS = [
    {"id": "call_1", "type": "function", "function": {"name": "shell", "arguments": '{ "cmd": "ls" }'}},
    {"id": "call_2", "type": "function", "function": {"name": "finish", "arguments": "{}"}},
]


async def test_the_openai_sdk_reads_both_forms_of_an_answer(proxy: Rig) -> None:
    async def script(body: dict[str, Any]) -> ChatResult:
        message = {"role": "assistant", "content": "été\n", "reasoning": "hm", "tool_calls": CALLS}
        return result(body, message=message, finish_reason="tool_calls")

    proxy.engine.script = script
    async with sdk(proxy) as client:
        whole = await client.chat.completions.create(model="m", messages=[HELLO])  # type: ignore[list-item]
        message = whole.choices[0].message
        seen = []
        for usage in (True, False):
            text, calls, finish, used, reasoning = "", {}, None, None, ""
            stream = await client.chat.completions.create(
                model="m",
                messages=[HELLO],  # type: ignore[list-item]
                stream=True,
                stream_options={"include_usage": usage},
            )
            async for chunk in stream:
                used = chunk.usage or used
                for choice in chunk.choices:
                    finish = choice.finish_reason or finish
                    text += choice.delta.content or ""
                    reasoning += getattr(choice.delta, "reasoning_content", None) or ""
                    for part in choice.delta.tool_calls or []:
                        assert part.function is not None
                        calls[part.index] = (part.id, part.function.name, part.function.arguments)
            seen.append((text, reasoning, list(calls.values()), finish, used))
    assert message.content == "été\n"
    assert message.tool_calls is not None
    asked = [(c.id, c.function.name, c.function.arguments) for c in message.tool_calls]  # type: ignore[union-attr]
    assert asked == [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in CALLS]  # type: ignore[index]
    for text, reasoning, calls, finish, used in seen:
        assert (text, reasoning, calls, finish) == ("été\n", "hm", asked, "tool_calls")
        assert used == whole.usage


async def test_the_openai_sdk_reads_errors(proxy: Rig) -> None:
    async with sdk(proxy) as client:
        with pytest.raises(APIStatusError) as caught:
            await client.chat.completions.create(model="m", messages=[HELLO], n=0)  # type: ignore[list-item]
    assert (caught.value.status_code, caught.value.code) == (400, "invalid_request")


async def test_the_openai_sdk_retries_until_the_engine_is_back(proxy: Rig) -> None:
    from forge_server.domain.engine import EngineUnavailable

    async def script(body: dict[str, Any]) -> ChatResult:
        if len(proxy.engine.asked) == 1:
            raise EngineUnavailable("the engine restarts")
        return result(body, "back")

    proxy.engine.script = script
    async with AsyncOpenAI(base_url=proxy.base, api_key=proxy.key, max_retries=1, timeout=PATIENCE) as client:
        answer = await client.chat.completions.create(model="m", messages=[HELLO])  # type: ignore[list-item]
    assert answer.choices[0].message.content == "back"
    assert [row.end for row in await proxy.rows()] == ["upstream_error", "ok"]


async def test_I5_a_request_that_kills_the_engine_again_and_again_ends_its_attempt(proxy: Rig) -> None:
    """Such calls are charged to no budget; after a few in a row the attempt ends, and not by the policy's fault."""
    from forge_server.domain.engine import EngineUnavailable

    async def script(body: dict[str, Any]) -> ChatResult:
        raise EngineUnavailable("the engine died", sent=True)

    proxy.engine.script = script
    async with proxy.client() as client:
        path = f"/a/{proxy.attempt}/v1/chat/completions"
        answers = [(await client.post(path, json=hello())).status_code for _ in range(6)]
    assert answers == [503, 503, 503, 503, 400, 400]
    assert [row.end for row in await proxy.rows()] == ["upstream_error"] * 4
    told = await proxy.lifecycle.heartbeat(proxy.attempt)
    assert (told.stop, told.reason) == (True, "engine_error")


@pytest.mark.parametrize("sent", [True, False])
async def test_one_outage_of_the_engine_does_not_end_an_attempt(proxy: Rig, sent: bool) -> None:
    """However many of its calls were in flight, and however often it asks an engine that is not there."""
    from forge_server.domain.engine import EngineUnavailable

    died = asyncio.Event()

    async def script(body: dict[str, Any]) -> ChatResult:
        await died.wait()
        raise EngineUnavailable("the engine is away", sent=sent)

    proxy.engine.script = script
    async with proxy.client() as client:
        asking = [asyncio.create_task(proxy.ask(client, hello(f"agent {i}"))) for i in range(6)]
        for _ in asking:
            await proxy.engine.arrived()
        died.set()
        assert [(await one).status_code for one in asking] == [503] * 6
        if not sent:
            assert [(await proxy.ask(client)).status_code for _ in range(6)] == [503] * 6
        proxy.engine.script = proxy.engine.answer
        assert (await proxy.ask(client)).status_code == 200
    assert not (await proxy.lifecycle.heartbeat(proxy.attempt)).stop


# --- time ---


async def test_a_stream_that_takes_long_gets_keepalives_and_then_the_answer(database_url: str) -> None:
    async with rig(database_url, keepalive_after_s=0.05) as proxy:
        go = proxy.engine.blocked()
        async with sdk(proxy) as client:
            stream = await client.chat.completions.create(  # headers come with the first keep-alive
                model="m",
                messages=[HELLO],  # type: ignore[list-item]
                stream=True,
            )
            chunks = aiter(stream)
            assert (await anext(chunks)).choices == []
            (row,) = await proxy.rows()
            assert row.end is None
            go.set()
            text = "".join([c.choices[0].delta.content or "" async for c in chunks if c.choices])
        assert text == "answer 1"


async def test_an_error_after_keepalives_is_an_event_of_the_stream(database_url: str) -> None:
    async with rig(database_url, keepalive_after_s=0.05) as proxy:
        go = asyncio.Event()

        async def script(body: dict[str, Any]) -> ChatResult:
            from forge_server.domain.engine import EngineUnavailable

            await go.wait()
            raise EngineUnavailable("the engine is away")

        proxy.engine.script = script
        async with proxy.client() as client:
            path = f"/a/{proxy.attempt}/v1/chat/completions"
            async with client.stream("POST", path, json=hello(stream=True)) as answer:
                assert answer.status_code == 200
                lines = answer.aiter_lines()
                assert (await anext(lines)).startswith("data: {")
                go.set()
                rest = [line async for line in lines if line]
        error = json.loads(rest[-1].removeprefix("data: "))["error"]
        assert (error["type"], error["code"]) == ("server_error", 503)


async def test_a_json_answer_that_takes_long_keeps_its_status(database_url: str) -> None:
    async with rig(database_url, keepalive_after_s=0.01) as proxy:
        go = proxy.engine.blocked()
        async with proxy.client() as client:
            asking = asyncio.create_task(proxy.ask(client))
            await proxy.engine.arrived()
            await asyncio.wait({asking}, timeout=0.1)
            assert not asking.done()
            go.set()
            assert (await asking).status_code == 200


# --- the hold ---


async def test_calls_are_held_during_a_weight_update_and_then_pass(proxy: Rig) -> None:
    go = proxy.engine.blocked()
    async with proxy.client() as client:
        before = asyncio.create_task(proxy.ask(client, hello("before")))
        await proxy.engine.arrived()
        await proxy.gate.hold("weight_update")
        assert proxy.gate.running == 1
        during = [asyncio.create_task(proxy.ask(client, hello(f"during {i}"))) for i in range(3)]
        await eventually(lambda: proxy.gate.waiting == 3)
        assert len(proxy.engine.asked) == 1
        go.set()
        assert await proxy.gate.drained(PATIENCE)
        assert (await before).status_code == 200
        proxy.versions.current = 1
        await proxy.gate.release()
        assert {answer.status_code for answer in await asyncio.gather(*during)} == {200}
    rows = await proxy.rows()
    assert [(row.policy_version, row.untrainable) for row in rows] == [(0, None), *[(1, None)] * 3]
    assert rows[0].held_ms == 0
    assert all(row.held_ms > 0 for row in rows[1:])


async def test_a_hold_that_lasts_too_long_is_a_503_with_retry_after(database_url: str) -> None:
    async with rig(database_url, max_hold_s=0.05) as proxy:
        await proxy.gate.hold("weight_update")
        async with proxy.client() as client:
            answer = await proxy.ask(client, hello(stream=True))
        assert (answer.status_code, error_of(answer)["code"]) == (503, "held")
        assert int(answer.headers["retry-after"]) > 0
        assert proxy.engine.asked == []
        (row,) = await proxy.rows()
        assert (row.end, row.status, row.untrainable) == ("rejected", 503, "not_ok")
        assert (proxy.gate.waiting, proxy.gate.running) == (0, 0)


async def test_a_client_that_leaves_while_held_reaches_no_engine(proxy: Rig) -> None:
    await proxy.gate.hold("weight_update")
    async with proxy.client() as client:
        asking = asyncio.create_task(proxy.ask(client))
        await eventually(lambda: proxy.gate.waiting == 1)
        asking.cancel()
        (row,) = await proxy.until(lambda rows: rows[0].end is not None)
    await proxy.gate.release()
    assert (row.end, proxy.engine.asked) == ("client_gone", [])


# --- a database that fails ---


async def test_i1_without_a_durable_intent_nothing_is_forwarded(proxy: Rig) -> None:
    async with proxy.client() as client:
        works = proxy.refuse_writes()
        answer = await proxy.ask(client)
        assert (answer.status_code, error_of(answer)["code"]) == (503, "store_unavailable")
        assert "retry-after" in answer.headers
        assert proxy.engine.asked == []
        works.set()
        rows = await proxy.until(lambda rows: bool(rows))  # the numbering of the calls gets no hole
        assert [(row.seq, row.end, row.status) for row in rows] == [(0, "rejected", 503)]
        assert (await proxy.ask(client)).status_code == 200
    assert [row.seq for row in await proxy.rows()] == [0, 1]


async def test_i1_an_answer_that_cannot_be_recorded_does_not_leave(proxy: Rig) -> None:
    async with proxy.client() as client:
        works = proxy.refuse_writes(lambda rows: bool(proxy.engine.asked))
        answer = await proxy.ask(client)
        assert (answer.status_code, error_of(answer)["code"]) == (503, "store_unavailable")
        assert "answer 1" not in answer.text
        works.set()
        (row,) = await proxy.until(lambda rows: rows[0].end is not None)
    assert (row.end, row.status, row.delivered, row.untrainable) == ("ok", 503, "no", "not_delivered")
    assert row.error.startswith("store")
