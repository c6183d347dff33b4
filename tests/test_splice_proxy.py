"""Token-exact forwarding in the whole proxy: what is sent, what is stored, and what happens when something fails."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
import sqlalchemy as sa
from proxy_rig import PATIENCE, Rig
from qwen3 import qwen3
from splice_world import TOOLS, Engine, call, think

from forge_server.domain.call import VersionSpan
from forge_server.domain.engine import EngineRefused, EngineUnavailable
from forge_server.domain.states import Delivery
from forge_server.store import tables as t
from forge_server.store.database import Store
from forge_server.store.recordings import call_rows
from forge_server.trajectory.attempt import cut
from forge_server.trajectory.codec import decode_attempt

FLIGHT = call('{"city":"Zürich"}')


@asynccontextmanager
async def rig(url: str, **policy: Any) -> AsyncIterator[Rig]:
    """A proxy whose engine renders and tokenises like Qwen3."""
    store = Store.open(url, create=True)
    try:
        made = Rig(store)
        made.engine = Engine()  # type: ignore[assignment]
        made.policy |= {"forwarding": "auto", "window": 100_000, **policy}
        made.attempt = await made.new_attempt()
        async with made.serving():
            yield made
    finally:
        store.close()


@pytest.fixture
async def proxy(tmp_path: Any) -> AsyncIterator[Rig]:
    async with rig(f"sqlite:///{tmp_path}/forge.db") as made:
        yield made


class Talk:
    """A harness that extends its conversation, and writes arguments its own way."""

    def __init__(self, proxy: Rig, client: httpx.AsyncClient) -> None:
        self.proxy, self.client = proxy, client
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": "How is Zürich?"}]

    async def ask(self, *says: str | list[int], **more: Any) -> httpx.Response:
        self.proxy.engine.says = list(says)  # type: ignore[attr-defined]
        body = {"model": "x", "messages": self.messages, "tools": TOOLS, **more}
        response = await self.client.post(f"/a/{self.proxy.attempt}/v1/chat/completions", json=body)
        if response.status_code == 200:
            message = response.json()["choices"][0]["message"]
            for entry in message.get("tool_calls", ()):
                arguments = json.loads(entry["function"]["arguments"])
                entry["function"]["arguments"] = json.dumps(arguments, separators=(",", ":"))
            self.messages = [*self.messages, message]
        return response

    def tool(self, text: str = "21 degrees") -> None:
        self.messages.append({"role": "tool", "tool_call_id": self._ids()[-1], "content": text})

    def user(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def _ids(self) -> list[str]:
        return [c["id"] for m in self.messages for c in m.get("tool_calls") or ()]


async def stored(proxy: Rig) -> list[Any]:
    return decode_attempt(await proxy.store.read(lambda c: call_rows(c, proxy.attempt)))


async def samples(proxy: Rig) -> int:
    await proxy.seal()
    rows = await proxy.store.read(lambda c: call_rows(c, proxy.attempt))
    found = cut(rows, 1_000_000)
    assert found.fault is None and not found.untrained
    return len(found.samples)


def engine(proxy: Rig) -> Engine:
    return proxy.engine  # type: ignore[return-value]


async def test_a_tool_loop_is_one_sample_and_stored_as_it_was_sent(proxy: Rig) -> None:
    async with proxy.client() as client:
        talk = Talk(proxy, client)
        sent = []
        for turn in range(5):
            answer = (await talk.ask(qwen3().split_one(qwen3().encode(think(f"hm {turn}") + FLIGHT)))).json()
            sent.append(engine(proxy).sent)
            assert answer["choices"][0]["finish_reason"] == "tool_calls"
            assert answer["usage"]["prompt_tokens"] == len(sent[-1])
            talk.tool()
        await talk.ask("It is warm.")
        sent.append(engine(proxy).sent)
    assert engine(proxy).log.count("chat") == 0
    rows = await proxy.until(
        lambda rows: len(rows) == 6 and all(row.delivered == Delivery.YES for row in rows)
    )
    assert [row.mode for row in rows] == ["splice"] * 6 and not any(row.flags for row in rows)
    assert [row.parent_id for row in rows] == [None, *(row.id for row in rows[:-1])]
    calls = await stored(proxy)
    assert [call.prompt.tolist() for call in calls] == sent
    for before, after in pairwise(calls):
        whole = np.concatenate((before.prompt, before.completion))
        assert np.array_equal(after.prompt[: whole.size], whole)
    assert await samples(proxy) == 1


async def test_the_run_can_ask_for_record(tmp_path: Any) -> None:
    async with rig(f"sqlite:///{tmp_path}/forge.db", forwarding="record") as proxy:
        async with proxy.client() as client:
            talk = Talk(proxy, client)
            await talk.ask(FLIGHT)
            talk.tool()
            await talk.ask("It is warm.")
        assert engine(proxy).log == ["chat", "chat"]
        assert [row.mode for row in await proxy.rows()] == ["record", "record"]
        assert await samples(proxy) == 2


async def test_a_grammar_that_only_the_engine_knows_of_is_told_by_render(proxy: Rig) -> None:
    """Some tool parsers sample every call with tools under one."""
    engine(proxy).sampling = {"structured_outputs": {"structural_tag": "{}"}}
    async with proxy.client() as client:
        assert (await Talk(proxy, client).ask(FLIGHT)).status_code == 200
    [row] = await proxy.rows()
    assert (row.mode, row.untrainable, row.flags) == ("record", "constrained", {"fallback": "constrained"})


@pytest.mark.parametrize("forwarding", ["record", "auto"])
async def test_no_call_of_an_engine_that_guides_tools_is_trained(tmp_path: Any, forwarding: str) -> None:
    async with rig(f"sqlite:///{tmp_path}/forge.db", forwarding=forwarding) as proxy:
        template = engine(proxy).template
        assert template is not None
        engine(proxy).template = msgspec.structs.replace(template, guides_tools=True)
        async with proxy.client() as client:
            await Talk(proxy, client).ask(FLIGHT)
        [row] = await proxy.rows()
        assert (row.mode, row.untrainable) == ("record", "constrained")


@pytest.mark.parametrize("how", ["compacted", "the end is spelled out"])
async def test_such_a_grammar_is_seen_of_a_call_that_cannot_be_spliced(proxy: Rig, how: str) -> None:
    engine(proxy).sampling = {"structured_outputs": {"structural_tag": "{}"}}
    async with proxy.client() as client:
        talk = Talk(proxy, client)
        if how == "compacted":
            await talk.ask(FLIGHT)
            talk.tool()
            await talk.ask(FLIGHT)
            talk.messages = [{"role": "user", "content": "Summary: it was warm."}, *talk.messages[1:3]]
        else:
            await talk.ask([id for letter in "<|im_end|>" for id in qwen3().encode(letter)])
            talk.user("And?")
        await talk.ask(FLIGHT)
    assert {row.untrainable for row in await proxy.rows()} == {"constrained"}


@pytest.mark.parametrize(("forwarding", "flags"), [("auto", None), ("splice", {"fallback": "not_offered"})])
async def test_an_engine_that_takes_no_tokens(tmp_path: Any, forwarding: str, flags: Any) -> None:
    async with rig(f"sqlite:///{tmp_path}/forge.db", forwarding=forwarding) as proxy:
        engine(proxy).template = None
        async with proxy.client() as client:
            assert (await Talk(proxy, client).ask("Hello.")).status_code == 200
        [row] = await proxy.rows()
        assert (row.mode, row.flags) == ("record", flags)


REFUSED = EngineRefused(400, "no", "invalid_request")
BROKEN = EngineUnavailable("it answered 500", sent=True, http_status=500)
MISSING = EngineUnavailable("it answered 404", sent=True, http_status=404)


@pytest.mark.parametrize(
    ("where", "error", "reason"),
    [
        ("render", REFUSED, "render_failed"),
        ("render", BROKEN, "render_failed"),
        ("generate", REFUSED, "generate_refused"),
        ("generate", MISSING, "generate_refused"),
        ("message", REFUSED, "derender_failed"),
        ("message", BROKEN, "derender_failed"),
        ("detokenize", BROKEN, "render_failed"),
    ],
)
async def test_a_failing_route_is_a_fallback_and_the_conversation_goes_on(
    proxy: Rig, where: str, error: Exception, reason: str
) -> None:
    async with proxy.client() as client:
        talk = Talk(proxy, client)
        await talk.ask(think("hm") + FLIGHT)
        talk.tool()
        engine(proxy).fails = {where: error}
        assert (await talk.ask(FLIGHT, FLIGHT)).status_code == 200
        talk.tool()
        engine(proxy).fails = {}
        assert (await talk.ask("Done.")).status_code == 200
    rows = await proxy.rows()
    assert [row.mode for row in rows] == ["splice", "record", "splice"]
    assert rows[1].flags == {"fallback": reason} and rows[2].flags is None
    assert await samples(proxy) == 2


async def test_an_engine_in_trouble_ends_the_call_as_in_record_mode(proxy: Rig) -> None:
    async with proxy.client() as client:
        talk = Talk(proxy, client)
        for where in ("render", "generate", "message"):
            engine(proxy).fails = {where: EngineUnavailable("it is away", sent=True)}
            assert (await talk.ask("Hello.")).status_code == 503
        engine(proxy).fails = {"generate": BROKEN}
        assert (await talk.ask("Hello.")).status_code == 503
        assert (await talk.ask("Hello.")).status_code == 400  # one time too many
    rows = await proxy.rows()
    assert {row.end for row in rows} == {"upstream_error"} and {row.mode for row in rows} == {"record"}
    assert "chat" not in engine(proxy).log


async def test_a_prompt_that_is_too_long_is_refused_as_in_record_mode(proxy: Rig) -> None:
    engine(proxy).window = 300
    async with proxy.client() as client:
        talk = Talk(proxy, client)
        talk.messages[0]["content"] = "long " * 400
        response = await talk.ask("Hello.")
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    [row] = await proxy.rows()
    assert (row.end, row.mode) == ("rejected", "record")


async def test_a_spliced_prompt_that_does_not_fit_gives_way_to_a_rendered_one_that_does(
    tmp_path: Any,
) -> None:
    said = [i for c in "Paris is warm, and this is one token per letter." for i in qwen3().encode(c)]
    async with rig(f"sqlite:///{tmp_path}/forge.db", window=240, max_completion_tokens=50) as proxy:
        engine(proxy).window = 240
        async with proxy.client() as client:
            talk = Talk(proxy, client)
            await talk.ask(said)
            talk.user("And?")
            await talk.ask("Yes.")
        rows = await proxy.rows()
        assert [row.mode for row in rows] == ["splice", "record"]
        assert rows[1].flags["fallback"] == "window"


async def test_an_aborted_answer_is_sampled_again(proxy: Rig) -> None:
    engine(proxy).aborts = 2
    async with proxy.client() as client:
        assert (await Talk(proxy, client).ask("Hello.")).status_code == 200
    [row] = await proxy.rows()
    assert row.mode == "splice" and row.flags == {"resampled": 2}


async def test_the_engines_word_on_versions_is_kept_per_token(proxy: Rig) -> None:
    """I9: a call that two versions answered says which token is whose; weights of no version are not trained."""

    proxy.versions.current = 3
    plain = engine(proxy).generate

    async def generate(*args: Any, **kwargs: Any) -> Any:
        found = await plain(*args, **kwargs)
        proxy.versions.current = 4
        return found

    engine(proxy).generate = generate  # type: ignore[method-assign]
    async with proxy.client() as client:
        talk = Talk(proxy, client)
        size = len(qwen3().encode("It is warm.")) + 1
        engine(proxy).versions = (VersionSpan(3, 0, 2), VersionSpan(4, 2, size))
        await talk.ask("It is warm.")
        talk.user("And?")
        engine(proxy).versions = (VersionSpan(-1, 0, size),)
        await talk.ask("It is warm.")
        talk.user("And now?")
        engine(proxy).versions = (VersionSpan(2, 0, size),)
        await talk.ask("It is warm.")
    rows = await proxy.rows()
    assert [row.untrainable for row in rows] == [None, "unknown_version", "unknown_version"]
    assert rows[0].policy_version == 3
    calls = await stored(proxy)
    assert calls[0].versions == (VersionSpan(3, 0, 2), VersionSpan(4, 2, size))


async def test_answers_are_known_again_after_a_restart(tmp_path: Any) -> None:
    """I12: the conversation goes on from the recorded tokens; those of a spliced prompt stay recorded ones."""
    url = f"sqlite:///{tmp_path}/forge.db"
    async with rig(url) as proxy:
        attempt = proxy.attempt
        async with proxy.client() as client:
            talk = Talk(proxy, client)
            for _ in range(3):
                await talk.ask(qwen3().split_one(qwen3().encode(think("hm") + FLIGHT)))
                talk.tool()
            messages = talk.messages
    async with rig(url) as proxy:
        proxy.attempt = attempt
        async with proxy.client() as client:
            talk = Talk(proxy, client)
            talk.messages = messages
            for _ in range(2):
                await talk.ask(call('{"city" : "Zürich"}'))
                talk.tool()
            tip = proxy.sessions_now()[0].answers.begins(
                proxy.sessions_now()[0].answers.asked("forge", _turn(talk.messages), _digests(talk.messages)),
                lambda tip: True,
            )
            assert tip is not None and len(tip.line()) == 5
        rows = await proxy.rows()
        assert [row.mode for row in rows] == ["splice"] * 5 and not any(row.flags for row in rows)
        assert await samples(proxy) == 1


async def test_what_cannot_be_read_back_after_a_restart_is_a_reason(tmp_path: Any) -> None:
    url = f"sqlite:///{tmp_path}/forge.db"
    async with rig(url) as proxy:
        attempt = proxy.attempt
        async with proxy.client() as client:
            talk = Talk(proxy, client)
            await talk.ask(FLIGHT)
            talk.tool()
            messages = talk.messages
        await proxy.store.write(lambda c: c.execute(sa.update(t.call_tokens).values(data=b"\x01damaged")))
    async with rig(url) as proxy:
        proxy.attempt = attempt
        async with proxy.client() as client:
            talk = Talk(proxy, client)
            talk.messages = messages
            assert (await talk.ask(FLIGHT)).status_code == 200
        row = (await proxy.rows())[-1]
        assert (row.mode, row.flags["fallback"]) == ("record", "unknown_after_restart")


async def test_parallel_conversations_each_go_on_from_their_own_answers(proxy: Rig) -> None:
    async with proxy.client() as client:
        talks = [Talk(proxy, client) for _ in range(4)]
        for number, talk in enumerate(talks):
            talk.messages[0]["content"] = f"Task {number}"
        for turn in range(3):
            for number, talk in enumerate(talks):
                await talk.ask(call(f'{{"city":"{number}/{turn}"}}'))
                talk.tool()
        for talk in talks:
            await talk.ask("Done.")
    assert {row.mode for row in await proxy.rows()} == {"splice"}
    assert await samples(proxy) == 4


async def test_equal_answers_to_one_question_are_told_apart_by_their_call_ids(proxy: Rig) -> None:
    """Best of three: the harness goes on from the second, whose tokens are not those of the others."""
    async with proxy.client() as client:
        talks = [Talk(proxy, client) for _ in range(3)]
        for talk, raw in zip(
            talks, ('{"city":"Rome"}', '{"city": "Rome"}', '{ "city": "Rome" }'), strict=True
        ):
            await talk.ask(call(raw))
        talk = talks[1]
        talk.tool()
        await talk.ask("Done.")
    assert call('{"city": "Rome"}') in qwen3().decode(engine(proxy).sent)


async def test_a_closing_server_waits_for_no_render(proxy: Rig) -> None:
    """A harness that leaves while the prompt is rendered ends the call; nothing is generated."""
    waiting = asyncio.Event()

    async def render(*args: Any, **kwargs: Any) -> Any:
        waiting.set()
        await asyncio.Event().wait()

    engine(proxy).render = render  # type: ignore[method-assign]
    async with proxy.client() as client:
        task = asyncio.create_task(Talk(proxy, client).ask("Hello."))
        async with asyncio.timeout(PATIENCE):
            await waiting.wait()
        await proxy.seal()
        assert (await task).status_code == 409
    [row] = await proxy.rows()
    assert row.end == "rejected" and "generate" not in engine(proxy).log


def _turn(messages: list[dict[str, Any]]) -> Any:
    from msgspec import Raw

    from forge_server.domain.turn import Turn

    return Turn(
        messages=tuple(Raw(json.dumps(m).encode()) for m in messages),
        tools=tuple(Raw(json.dumps(tool).encode()) for tool in TOOLS),
    )


def _digests(messages: list[dict[str, Any]]) -> list[bytes]:
    return [json.dumps(entry).encode() for entry in (*TOOLS, *messages)]
