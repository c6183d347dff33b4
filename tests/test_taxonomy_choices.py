"""Taxonomy, case 15 and class L: n > 1. Every choice is a sampled call of its own, with a seed, a row and a
delivery of its own; they travel in one answer. Chosen or not, each was the policy's act and is trained."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from dialect_support import sse
from proxy_rig import Rig, eventually, follow, hello, rig

from forge_server.domain.engine import ChatResult, EngineUnavailable
from forge_server.domain.states import Delivery, Untrainable


@pytest.fixture
async def proxy(tmp_path: Path) -> AsyncIterator[Rig]:
    async with rig(f"sqlite:///{tmp_path / 'forge.db'}") as made:
        yield made


def texts(answer: httpx.Response) -> list[str]:
    """The text of every choice of a chat answer, by index."""
    choices = answer.json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(choices)))
    return [choice["message"]["content"] for choice in choices]


async def test_case_15_each_choice_is_a_call_of_its_own(proxy: Rig) -> None:
    async with proxy.client() as client:
        answer = await proxy.ask(client, hello(n=4))
        assert sorted(texts(answer)) == [f"answer {k}" for k in (1, 2, 3, 4)]
        assert answer.json()["usage"] == {"prompt_tokens": 8, "completion_tokens": 36, "total_tokens": 44}
        chosen = {"choices": [answer.json()["choices"][2]]}
        assert texts(await proxy.ask(client, follow(hello(), chosen))) == ["answer 5"]
    await proxy.seal()
    *siblings, after = await proxy.rows()
    assert [row.flags["choice"] for row in siblings] == [0, 1, 2, 3]
    assert {row.delivered for row in siblings} == {"yes"}
    assert {row.untrainable for row in siblings} == {None}  # unchosen is not undone: it was the policy's act
    assert after.parent_id == siblings[2].id
    assert len({body["seed"] for body in proxy.engine.asked}) == 5
    assert {body["n"] for body in proxy.engine.asked} == {1}


async def test_choices_in_every_dialect_that_has_them(proxy: Rig) -> None:
    """Whole and as a stream, each choice under its index, usage once and for all of them."""
    google: Any = {"contents": [{"parts": [{"text": "hi"}]}], "generationConfig": {"candidateCount": 2}}
    async with proxy.client() as client:

        async def ask(path: str, body: Any) -> httpx.Response:
            answer = await client.post(f"/a/{proxy.attempt}/{path}", json=body)
            assert answer.status_code == 200, answer.text
            return answer

        chat = "v1/chat/completions"
        told: dict[int, str] = {}
        finished = {}
        chunks = [data for _, data in sse((await ask(chat, hello(n=2, stream=True))).content)]
        assert chunks.pop() == "[DONE]"
        for chunk in chunks:
            for choice in chunk["choices"]:
                at = choice["index"]
                told[at] = told.get(at, "") + choice["delta"].get("content", "")
                finished[at] = choice["finish_reason"]
        assert sorted(told.values()) == ["answer 1", "answer 2"] and finished == {0: "stop", 1: "stop"}
        assert [c["usage"]["completion_tokens"] for c in chunks if "usage" in c] == [18]

        legacy = {"model": "m", "prompt": "hi", "n": 2, "best_of": 2}
        answer = (await ask("v1/completions", legacy)).json()
        assert sorted(choice["text"] for choice in answer["choices"]) == ["answer 3", "answer 4"]
        chunks = [data for _, data in sse((await ask("v1/completions", legacy | {"stream": True})).content)]
        assert {c["choices"][0]["index"] for c in chunks[:-1]} == {0, 1}
        assert [c["usage"]["completion_tokens"] for c in chunks[:-1] if "usage" in c] == [18]

        answer = (await ask("v1beta/models/m:generateContent", google)).json()
        assert [candidate["index"] for candidate in answer["candidates"]] == [0, 1]
        assert {c["finishReason"] for c in answer["candidates"]} == {"STOP"}
        assert answer["usageMetadata"]["candidatesTokenCount"] == 18
        stream = await ask("v1beta/models/m:streamGenerateContent?alt=sse", google)
        candidates = [data["candidates"][0] for _, data in sse(stream.content)]
        assert [candidate["index"] for candidate in candidates] == [0, 1]
        said = {candidate["content"]["parts"][0]["text"] for candidate in candidates}
        assert said == {"answer 9", "answer 10"}
    assert len(await proxy.rows()) == 10


@pytest.mark.parametrize("n", [0, -1, 129, 1 << 40])
async def test_a_number_of_choices_that_no_api_gives_is_refused(proxy: Rig, n: int) -> None:
    bodies: dict[str, Any] = {
        "v1/chat/completions": hello(n=n),
        "v1/completions": {"model": "m", "prompt": "hi", "n": n},
        "v1beta/models/m:generateContent": {
            "contents": [{"parts": [{"text": "hi"}]}],
            "generationConfig": {"candidateCount": n},
        },
    }
    async with proxy.client() as client:
        for path, body in bodies.items():
            answer = await client.post(f"/a/{proxy.attempt}/{path}", json=body)
            assert answer.status_code == 400
            assert f"between 1 and 128, not {n}" in answer.json()["error"]["message"]
    assert await proxy.rows() == []


async def test_the_budget_admits_all_choices_or_none(tmp_path: Path) -> None:
    async with rig(f"sqlite:///{tmp_path / 'forge.db'}", max_calls=3) as proxy, proxy.client() as client:
        assert len(texts(await proxy.ask(client, hello(n=2)))) == 2
        refused = await proxy.ask(client, hello("more", n=2))
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "budget_calls")
        assert len(await proxy.rows()) == 2


async def test_a_retry_of_several_choices_gets_the_same_ones(proxy: Rig) -> None:
    """The client leaves while they are made: none is asked of the engine twice, none is given twice."""
    go = proxy.engine.blocked()
    first, second = proxy.client(), proxy.client()
    marks = {"x-forge-relay-call": "c1"}
    path = f"/a/{proxy.attempt}/v1/chat/completions"
    one = asyncio.create_task(first.post(path, json=hello(n=2), headers=marks))
    for _ in range(2):
        await proxy.engine.arrived()
    two = asyncio.create_task(second.post(path, json=hello(n=2), headers=marks))
    await eventually(lambda: all(f.watchers == 2 for s in proxy.sessions_now() for f in s.flights))
    go.set()
    answers = [await one, await two]
    assert texts(answers[0]) == texts(answers[1])
    rows = await proxy.rows()
    ids = [row.id for row in rows[:2]]
    assert [answer.headers["x-forge-call"] for answer in answers] == [f"{ids[0]} {ids[1]}"] * 2
    assert [row.retry_of for row in rows] == [None, None, *ids]
    assert len(proxy.engine.asked) == 2
    await proxy.sessions.receipts(proxy.attempt, ids, [])  # as the relay tells them, id by id
    await first.aclose()
    await second.aclose()
    await proxy.seal()
    assert [row.delivered for row in await proxy.rows()][:2] == ["yes", "yes"]


async def test_one_choice_that_fails_withholds_the_answer_and_a_retry_makes_only_that_one(proxy: Rig) -> None:
    async def script(body: dict[str, Any]) -> ChatResult:
        if body["seed"] == proxy.engine.asked[0]["seed"]:
            raise EngineUnavailable("away")
        return await proxy.engine.answer(body)

    proxy.engine.script = script
    async with proxy.client() as client:
        answer = await proxy.ask(client, hello(n=3))
        assert answer.status_code == 503
        rows = await proxy.until(lambda rows: [row.delivered for row in rows] == [Delivery.NO] * 3)
        assert sorted(row.end for row in rows) == ["ok", "ok", "upstream_error"]
        proxy.engine.script = proxy.engine.answer
        assert sorted(texts(await proxy.ask(client, hello(n=3)))) == ["answer 1", "answer 2", "answer 3"]
    assert len(proxy.engine.asked) == 4
    await proxy.seal()
    rows = await proxy.rows()
    assert sorted(str(row.untrainable) for row in rows) == sorted(
        ["None"] * 3 + [Untrainable.NOT_OK] + [Untrainable.DUPLICATE] * 2
    )


async def test_a_client_that_leaves_cancels_every_choice(proxy: Rig) -> None:
    proxy.engine.blocked()
    client = proxy.client()
    task = asyncio.create_task(proxy.ask(client, hello(n=3)))
    for _ in range(3):
        await proxy.engine.arrived()
    task.cancel()
    await client.aclose()
    rows = await proxy.until(lambda rows: all(row.end for row in rows))
    assert [row.end for row in rows] == ["client_gone"] * 3
    assert proxy.engine.aborted == 3


async def test_keepalives_and_choices_of_one_stream_have_one_id(tmp_path: Path) -> None:
    async with rig(f"sqlite:///{tmp_path / 'forge.db'}", keepalive_after_s=0.05) as proxy:
        go = proxy.engine.blocked()
        async with (
            proxy.client() as client,
            client.stream(
                "POST", f"/a/{proxy.attempt}/v1/chat/completions", json=hello(n=2, stream=True)
            ) as answer,
        ):
            lines = answer.aiter_lines()
            seen = [await anext(lines)]
            go.set()
            seen += [line async for line in lines]
    chunks = [msgspec.json.decode(line[6:]) for line in seen if line.startswith("data: {")]
    assert chunks[0]["choices"] == [] and len({chunk["id"] for chunk in chunks}) == 1
