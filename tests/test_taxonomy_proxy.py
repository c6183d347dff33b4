"""Taxonomy at the proxy: what a harness does on the wire, and what is trained of it. The numbers are those of the
list of cases (``test_taxonomy_index.py``); the same cases on tokens alone are in ``test_taxonomy_tokens.py``.

The whole way is taken: requests over sockets, rows in a database, the attempt's rows cut into samples, and the
data checker over all of it.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import sqlalchemy as sa
from proxy_rig import PATIENCE, Rig, eventually, follow, hello, result, rig
from test_proxy_delivery import Wire, content

from forge_server.domain.engine import ChatResult
from forge_server.domain.sample import BreakReason, Sample
from forge_server.domain.states import Delivery, Untrainable
from forge_server.harness.load import parse
from forge_server.harness.rules import Rules
from forge_server.store.database import Store
from forge_server.store.recordings import call_rows
from forge_server.store.tables import calls
from forge_server.trajectory.attempt import Cut, Fault, cut
from forge_server.trajectory.check import CheckedAttempt, CheckedCall, DataReport
from forge_server.trajectory.drift import DriftReport

NO_LIMIT = 1 << 30
Body = dict[str, Any]


@pytest.fixture
async def proxy(tmp_path: Path) -> AsyncIterator[Rig]:
    async with rig(f"sqlite:///{tmp_path / 'forge.db'}") as made:
        yield made


async def recorded(proxy: Rig) -> Cut:
    """Seal the attempt and cut what was recorded of it; nothing in it may break I1 to I4."""
    await proxy.seal()
    rows = await proxy.rows()
    calls = await proxy.store.read(lambda c: call_rows(c, proxy.attempt))
    report = DataReport()
    report.add(
        CheckedAttempt(
            id=proxy.attempt,
            state="ended",
            outcome="completed",
            not_trained="",
            mode="train",
            calls=tuple(
                CheckedCall(
                    row=call,
                    prompt_len=row.prompt_len,
                    completion_len=row.completion_len,
                    began_at=row.began_at,
                    ended_at=row.ended_at,
                )
                for row, call in zip(rows, calls, strict=True)
            ),
            samples=(),
        ),
        NO_LIMIT,
    )
    assert report.violations == []
    return cut(calls, NO_LIMIT)


def trained(found: Cut) -> list[list[str]]:
    """The answers that each sample trains, as texts."""
    return [[text for owned, text in _spans(sample) if owned] for sample in found.samples]


def context(found: Cut) -> list[list[str]]:
    """The sampled answers that each sample carries without training them."""
    return [[text for owned, text in _spans(sample) if not owned] for sample in found.samples]


def _spans(sample: Sample) -> list[tuple[bool, str]]:
    return [(s.owned, _text(sample.tokens[s.prompt_end : s.end])) for s in sample.spans]


def _text(tokens: Any) -> str:
    return "".join(map(chr, tokens)).rstrip("\2")


def untrained(found: Cut) -> list[str]:
    return sorted(reason.value for reason in found.untrained.values())


def rules_of(line: str) -> Rules:
    """The rules of a harness spec that has this line."""
    return Rules(parse(f"name: h\nsummary: a harness\napi: chat\nargv: [run]\n{line}\n", where="x"))


class Talk:
    """A conversation of the harness: appends whatever it gets, and its next message."""

    def __init__(self, proxy: Rig, client: httpx.AsyncClient, start: str, **more: Any) -> None:
        self.proxy, self.client, self.start = proxy, client, start
        self.body: Body = {"model": "m", "messages": [], **more}

    async def turn(self, text: str = "") -> str:
        said = {"role": "user", "content": text or self.start}
        self.body["messages"] = [*self.body["messages"], said]
        answer = await self.proxy.ask(self.client, self.body)
        assert answer.status_code == 200, answer.text
        message = answer.json()["choices"][0]["message"]
        self.body["messages"] = [*self.body["messages"], message]
        return str(message["content"])


# --- histories ---


async def test_case_1_appended_turns_are_one_sample(proxy: Rig) -> None:
    async with proxy.client() as client:
        talk = Talk(proxy, client, "start")
        for turn in range(3):
            await talk.turn(f"turn {turn}")
    found = await recorded(proxy)
    assert trained(found) == [["answer 1", "answer 2", "answer 3"]]
    (sample,) = found.samples
    asked = _text(sample.tokens[sample.loss_mask == 0])
    assert all(f"turn {turn}" in asked for turn in range(3)) and "answer" not in asked


async def test_case_5_a_nonce_that_a_rule_takes_out_breaks_nothing(tmp_path: Path) -> None:
    """Without the rule every call is a root of its own, and the drift report says that a prefix is volatile."""
    for ruled in (True, False):
        folder = tmp_path / str(ruled)
        folder.mkdir()
        more = (
            {"rules": rules_of("normalise: {remove: [{role: system, pattern: 'nonce [0-9]+'}]}")}
            if ruled
            else {}
        )
        async with rig(f"sqlite:///{folder / 'forge.db'}", **more) as proxy, proxy.client() as client:
            talk = Talk(proxy, client, "")
            system = {"role": "system", "content": ""}
            talk.body["messages"] = [system]
            for nonce in range(3):
                system["content"] = f"You are an agent. [nonce {nonce}{nonce}] " + "Work carefully. " * 20
                await talk.turn(f"turn {nonce}")
            found = await recorded(proxy)
        report = DriftReport()
        report.add(found)
        if ruled:
            assert trained(found) == [["answer 1", "answer 2", "answer 3"]]
            assert report.volatile_prefixes == 0
        else:
            assert trained(found) == [["answer 1"], ["answer 2"], ["answer 3"]]
            assert report.volatile_prefixes == 2


async def test_cases_6_7_and_8_compaction_and_parallel_sub_agents_have_samples_of_their_own(
    proxy: Rig,
) -> None:
    async with proxy.client() as client:
        main = Talk(proxy, client, "the long task")
        for turn in range(3):
            await main.turn(f"step {turn}")
        agents = [Talk(proxy, client, f"sub-agent {n}: look at part {n}") for n in range(8)]
        for _ in range(3):  # all at once, again and again
            await asyncio.gather(*(agent.turn("") for agent in agents))
        await main.turn("what did they find?")
        summary = await main.turn("sum it up")
        after = Talk(proxy, client, f"so far: {summary}. go on")
        await after.turn()
        await after.turn("and on")
    found = await recorded(proxy)
    assert len(found.samples) == 1 + 8 + 1
    lengths = sorted(len(answers) for answers in trained(found))
    assert lengths == [2] + [3] * 8 + [5]
    assert found.untrained == {}  # the summary, too, is trained: its tokens decide what follows
    assert any(summary in answers for answers in trained(found))


async def test_cases_9_and_10_forks_share_what_they_share_and_train_it_once(proxy: Rig) -> None:
    async with proxy.client() as client:
        main = Talk(proxy, client, "start")
        await main.turn()
        before = list(main.body["messages"])
        await main.turn("left")
        fork = Talk(proxy, client, "")
        fork.body["messages"] = before
        await fork.turn("right")
        halfway = Talk(proxy, client, "startle")  # parts within the first message
        await halfway.turn()
    found = await recorded(proxy)
    assert trained(found) == [["answer 1", "answer 2"], ["answer 3"], ["answer 4"]]
    assert context(found) == [[], ["answer 1"], []]
    assert found.samples[1].break_reason is BreakReason.FORK


async def test_case_20_an_edited_answer_is_context_and_the_sampled_one_is_trained_once(proxy: Rig) -> None:
    async with proxy.client() as client:
        talk = Talk(proxy, client, "start")
        await talk.turn()
        talk.body["messages"][-1] = {"role": "assistant", "content": "answer [redacted]"}
        await talk.turn("go on")
    found = await recorded(proxy)
    assert trained(found) == [["answer 1"], ["answer 2"]]
    assert "redacted" in _text(found.samples[1].tokens)
    assert int(found.samples[1].loss_mask.sum()) == len("answer 2") + 1


async def test_case_21_answers_that_were_never_sampled_are_context(proxy: Rig) -> None:
    shots = [
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "3 + 3?"},
    ]
    async with proxy.client() as client:
        await proxy.ask(client, {"model": "m", "messages": shots})
    found = await recorded(proxy)
    assert trained(found) == [["answer 1"]]
    assert int(found.samples[0].loss_mask.sum()) == len("answer 1") + 1


async def test_case_19_a_prefill_is_context_where_it_can_be_served_and_refused_where_not(proxy: Rig) -> None:
    """The chat API has no prefill: an assistant message at the end is one more message. The APIs that would
    continue it say that it is not supported."""
    ended = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Sure:"}]
    async with proxy.client() as client:
        await proxy.ask(client, {"model": "m", "messages": ended})
        for path, body in {
            "v1/messages": {"model": "m", "max_tokens": 9, "messages": ended},
            "v1beta/models/m:generateContent": {
                "contents": [
                    {"role": "user", "parts": [{"text": "hi"}]},
                    {"role": "model", "parts": [{"text": "Sure:"}]},
                ]
            },
            "v1/chat/completions": {"messages": ended, "continue_final_message": True},
        }.items():
            refused = await client.post(f"/a/{proxy.attempt}/{path}", json=body)
            assert refused.status_code == 400
            assert "not supported" in refused.json()["error"]["message"]
    found = await recorded(proxy)
    assert trained(found) == [["answer 1"]]
    assert "Sure:" in _text(found.samples[0].tokens[found.samples[0].loss_mask == 0])


async def test_case_18_the_close_of_an_answer_cut_at_its_limit_is_context(proxy: Rig) -> None:
    numbers = itertools.count()

    async def script(body: Body) -> ChatResult:
        if next(numbers):
            return result(body, "done")
        cut_short = np.array([ord(c) for c in "half an ans"], np.int32)  # the closing id was not sampled
        return result(
            body,
            "half an ans",
            completion_ids=cut_short,
            logprobs=np.full(cut_short.size, -0.5, np.float32),
            usage_completion=cut_short.size,
            finish_reason="length",
        )

    proxy.engine.script = script
    async with proxy.client() as client:
        talk = Talk(proxy, client, "start")
        await talk.turn()
        await talk.turn("go on")
    (sample,) = (await recorded(proxy)).samples
    assert [span.finish_reason for span in sample.spans] == ["length", "stop"]
    first = sample.spans[0]
    assert (sample.tokens[first.end], sample.loss_mask[first.end]) == (2, 0)  # the template's close
    assert int(sample.loss_mask.sum()) == len("half an ans") + len("done") + 1


# --- side calls, models, constraints ---


async def test_case_22_a_title_call_gives_no_sample_and_changes_none(tmp_path: Path) -> None:
    cuts = []
    for titled in (True, False):
        folder = tmp_path / str(titled)
        folder.mkdir()
        async with (
            rig(
                f"sqlite:///{folder / 'forge.db'}",
                rules=rules_of("side_calls: [{label: title, user: a title for this}]"),
            ) as proxy,
            proxy.client() as client,
        ):
            proxy.engine.script = _counted_by_turn
            talk = Talk(proxy, client, "start")
            await talk.turn()
            if titled:
                await proxy.ask(client, follow(hello("start"), _chat("turn 1"), "a title for this?"))
            await talk.turn("go on")
            cuts.append(await recorded(proxy))
    beside, alone = cuts
    assert untrained(beside) == ["side_call"] and untrained(alone) == []
    assert trained(beside) == trained(alone) == [["turn 1", "turn 2"]]
    for a, b in zip(beside.samples, alone.samples, strict=True):
        for name in ("tokens", "loss_mask", "logprobs", "versions"):
            assert np.array_equal(getattr(a, name), getattr(b, name))


async def _counted_by_turn(body: Body) -> ChatResult:
    return result(body, f"turn {(len(body['messages']) + 1) // 2}")


def _chat(text: str) -> Body:
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}


async def test_case_35_the_harness_names_models_but_the_run_has_one(proxy: Rig) -> None:
    """Whatever a harness calls it, it is the policy that answers: one forest. Another policy is another one."""
    async with proxy.client() as client:
        talk = Talk(proxy, client, "start")
        await talk.turn()
        talk.body["model"] = "small-fast"
        await talk.turn("go on")
    found = await recorded(proxy)
    assert trained(found) == [["answer 1", "answer 2"]]
    assert {body["model"] for body in proxy.engine.asked} == {"forge"}
    assert {call.forest_key for call in found.calls} == {"forge"}


@pytest.mark.parametrize("grammar", ["lift", "enforce"])
async def test_case_34_a_required_tool_is_lifted_or_makes_the_call_context(
    tmp_path: Path, grammar: str
) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    async with rig(f"sqlite:///{tmp_path / 'forge.db'}", grammar=grammar) as proxy, proxy.client() as client:
        talk = Talk(proxy, client, "start", tools=[tool], tool_choice="required")
        await talk.turn()
        talk.body["tool_choice"] = "auto"
        await talk.turn("go on")
        found = await recorded(proxy)
        first = (await proxy.rows())[0]
    if grammar == "lift":
        assert proxy.engine.asked[0]["tool_choice"] == "auto"
        assert first.flags == {"lifted": ["tool_choice"]}
        assert trained(found) == [["answer 1", "answer 2"]]
    else:
        assert untrained(found) == ["constrained"]
        assert (trained(found), context(found)) == ([["answer 2"]], [["answer 1"]])


# --- retries and deliveries ---


async def _lose(proxy: Rig, body: Body) -> None:
    """Ask, and lose the answer after it was recorded."""
    wire, count = Wire(proxy), len(await proxy.rows())
    await wire.send(body)
    rows = await proxy.until(lambda rows: len(rows) > count and rows[-1].end == "ok")
    wire.reset()
    # it can be read a moment before the proxy itself knows that it is written
    await eventually(
        lambda: any(
            a.call_id == rows[-1].id and a.lost for s in proxy.sessions_now() for a in s._open.values()
        )
    )


async def test_case_11_an_answer_lost_on_the_way_is_neither_trained_nor_continued(proxy: Rig) -> None:
    """The harness asks in other words, so that the lost answer cannot be given again."""
    await _lose(proxy, hello("start"))
    async with proxy.client() as client:
        talk = Talk(proxy, client, "start", max_tokens=50)
        await talk.turn()
        await talk.turn("go on")
    found = await recorded(proxy)
    assert trained(found) == [["answer 2", "answer 3"]]
    assert untrained(found)[0] in (Untrainable.NOT_DELIVERED, Untrainable.DELIVERY_UNKNOWN)
    assert (await proxy.rows())[2].parent_id == found.calls[1].id


async def test_case_11_a_lost_answer_that_is_given_again_is_trained_once(proxy: Rig) -> None:
    await _lose(proxy, hello("start"))
    async with proxy.client() as client:
        answer = (await proxy.ask(client, hello("start"))).json()
        await proxy.ask(client, follow(hello("start"), answer))
    found = await recorded(proxy)
    assert len(proxy.engine.asked) == 2
    assert trained(found) == [["answer 1", "answer 2"]]
    assert found.fault is None


async def test_case_12_a_bad_answer_that_was_taken_and_asked_for_again_is_trained(proxy: Rig) -> None:
    async with proxy.client() as client:
        await proxy.ask(client, hello("start"))  # taken, found to be garbage
        again = (await proxy.ask(client, hello("start"))).json()
        await proxy.ask(client, follow(hello("start"), again))
    found = await recorded(proxy)
    assert trained(found) == [["answer 1"], ["answer 2", "answer 3"]]
    assert [s.break_reason for s in found.samples] == [BreakReason.FIRST, BreakReason.RETRY]


async def test_case_13_of_the_last_calls_what_is_not_known_to_be_delivered_is_not_trained(proxy: Rig) -> None:
    first, second = Wire(proxy), Wire(proxy)
    await first.send(hello("start"), x_forge_relay_call="r1")
    await first.read()
    first.close()  # the relay has it; nobody says what became of it
    await eventually(lambda: all(a.line is None for s in proxy.sessions_now() for a in s._open.values()))
    await second.send(hello("start", max_tokens=50))
    await second.read()
    found = await recorded(proxy)
    assert trained(found) == [["answer 2"]]
    assert untrained(found) == ["delivery_unknown"]
    assert found.fault is None  # the attempt stays trainable
    second.close()


async def test_case_14_of_two_equal_calls_one_is_trained_and_continued(proxy: Rig) -> None:
    async def same(body: Body) -> ChatResult:
        return result(body, "the same")

    proxy.engine.script = same
    async with proxy.client() as client:
        await proxy.ask(client, hello("start"))
        again = (await proxy.ask(client, hello("start"))).json()
        await proxy.ask(client, follow(hello("start"), again))
    found = await recorded(proxy)
    assert trained(found) == [["the same", "the same"]]
    assert untrained(found) == ["duplicate"]
    rows = await proxy.rows()
    assert found.untrained == {rows[0].id: Untrainable.DUPLICATE} and rows[2].parent_id == rows[1].id


async def test_case_16_an_empty_answer_and_its_retry_are_no_chain(proxy: Rig) -> None:
    numbers = itertools.count()

    async def script(body: Body) -> ChatResult:
        if next(numbers):
            return result(body, "said")
        none = {"completion_ids": np.empty(0, np.int32), "logprobs": np.empty(0, np.float32)}
        return result(body, "", usage_completion=0, **none)

    proxy.engine.script = script
    async with proxy.client() as client:
        await proxy.ask(client, hello("start"))
        await proxy.ask(client, hello("start"))
    found = await recorded(proxy)
    assert trained(found) == [["said"]]
    assert untrained(found) == ["empty"]
    assert [row.parent_id for row in await proxy.rows()] == [None, None]


async def test_case_17_an_answer_that_was_cut_off_is_not_trained_whatever_the_harness_made_of_it(
    tmp_path: Path,
) -> None:
    """A harness that goes on from the part it saw: the part is context, the call is not trained and says why (how
    much of it arrived nobody knows), what is sampled after it is trained."""
    long = "word " * 2_000_000  # more than the kernel takes at once

    async def script(body: Body) -> ChatResult:
        return result(body, long if len(body["messages"]) == 1 else "after")

    async with rig(f"sqlite:///{tmp_path / 'forge.db'}", max_tokens=1 << 30) as proxy:
        proxy.engine.script = script
        wire = Wire(proxy)
        await wire.send(hello("start", stream=True))
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(PATIENCE):
            while b"word word" not in await loop.sock_recv(wire.sock, 65536):
                pass
        wire.reset()
        await proxy.until(lambda rows: rows[0].delivered == Delivery.NO)
        async with proxy.client() as client:
            part = follow(hello("start"), _chat("word word"), "go on")
            assert content((await proxy.ask(client, part)).json()) == "after"
        found = await recorded(proxy)
    assert untrained(found) == ["not_delivered"]
    assert trained(found) == [["after"]]
    assert int(found.samples[0].loss_mask.sum()) == len("after") + 1
    assert found.fault is None


async def test_case_17_a_call_that_its_client_left_has_no_tokens(proxy: Rig) -> None:
    go = proxy.engine.blocked()
    wire = Wire(proxy)
    await wire.send(hello("start"))
    await proxy.engine.arrived()
    wire.close()
    await proxy.until(lambda rows: rows[0].end == "client_gone")
    go.set()
    async with proxy.client() as client:
        await proxy.ask(client, hello("start"))
    found = await recorded(proxy)
    assert trained(found) == [["answer 1"]]
    assert [call.id for call in found.calls] == [(await proxy.rows())[1].id]


async def test_case_33_a_late_call_is_refused_and_one_in_flight_is_left_without_an_answer(proxy: Rig) -> None:
    async with proxy.client() as client, proxy.client() as late:
        await Talk(proxy, client, "start").turn()
        proxy.engine.blocked()
        flying = asyncio.create_task(proxy.ask(late, hello("in flight")))
        await proxy.engine.arrived()
        await proxy.engine.arrived()
        found = await recorded(proxy)
        assert (await flying).status_code == 409
        refused = await proxy.ask(client, hello("after the end"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "attempt_sealed")
    rows = await proxy.rows()
    assert [(row.end, row.untrainable) for row in rows] == [("ok", None), ("rejected", "not_ok")]
    assert trained(found) == [["answer 1"]]


async def test_case_31_no_two_rollouts_share_a_session(proxy: Rig) -> None:
    """What would be one session by mistake is refused at the door: a key opens its own attempt's path only."""
    mine, key = proxy.attempt, proxy.key
    other = await proxy.new_attempt()
    async with httpx.AsyncClient(
        base_url=proxy.url, headers={"Authorization": f"Bearer {key}"}, timeout=120
    ) as client:
        crossed = await client.post(f"/a/{other}/v1/chat/completions", json=hello())
        assert (crossed.status_code, crossed.json()["error"]["code"]) == (401, "invalid_api_key")
        assert (await client.post("/v1/chat/completions", json=hello())).status_code == 200
    assert len(await proxy.rows()) == 1
    proxy.attempt = other
    assert (mine, await proxy.rows()) == (mine, [])


# --- faults of the recording ---


async def test_case_26_a_stream_that_lost_ids_leaves_the_attempt_untrained(proxy: Rig) -> None:
    numbers = itertools.count()

    async def script(body: Body) -> ChatResult:
        whole = result(body, "answer")
        lost = 5 if next(numbers) == 1 else 0
        return result(body, "answer", usage_completion=whole.usage_completion + lost)

    proxy.engine.script = script
    async with proxy.client() as client:
        talk = Talk(proxy, client, "start")
        await talk.turn()
        await talk.turn("go on")
    found = await recorded(proxy)
    assert [row.untrainable for row in await proxy.rows()] == [None, Untrainable.COUNT_MISMATCH]
    assert (found.fault, found.samples) == (Fault.RECORD_INCOMPLETE, ())


@pytest.mark.parametrize("bad", [float("nan"), -9999.0, float("-inf"), None])
async def test_case_27_a_call_with_bad_logprobs_is_context_and_says_why(
    proxy: Rig, bad: float | None
) -> None:
    numbers = itertools.count()

    async def script(body: Body) -> ChatResult:
        answer = await proxy.engine.answer(body)
        if next(numbers):
            return answer
        logprobs = None
        if bad is not None:
            logprobs = np.full(answer.usage_completion, -0.5, np.float32)
            logprobs[3] = bad
        return result(body, "answer 1", logprobs=logprobs)

    proxy.engine.script = script
    async with proxy.client() as client:
        talk = Talk(proxy, client, "start")
        await talk.turn()
        await talk.turn("go on")
    found = await recorded(proxy)
    assert untrained(found) == ["no_logprobs" if bad is None else "bad_logprobs"]
    assert (trained(found), context(found)) == ([["answer 2"]], [["answer 1"]])


async def test_case_25_a_weight_update_between_calls_breaks_nothing(proxy: Rig) -> None:
    async with proxy.client() as client:
        talk = Talk(proxy, client, "start")
        for version in (3, 3, 4, 5):
            proxy.versions.current = version
            await talk.turn(f"under version {version}")
    (sample,) = (await recorded(proxy)).samples
    assert [span.version for span in sample.spans] == [3, 3, 4, 5]
    assert (sample.min_version, sample.max_version) == (3, 5)


async def test_case_32_what_a_crash_left_undecided_is_not_trained(tmp_path: Path) -> None:
    """The server dies between an answer's tokens and the word on its delivery: nobody knows, unless a later
    prompt shows it."""
    url = f"sqlite:///{tmp_path / 'forge.db'}"
    store = Store.open(url, create=True)
    try:
        proxy = Rig(store)
        proxy.attempt = await proxy.new_attempt()
        async with proxy.serving(), proxy.client() as client:
            answers = [(await proxy.ask(client, hello(text))).json() for text in ("one", "two")]
        # as it was when the tokens were written
        await store.write(lambda c: c.execute(sa.update(calls).values(delivered="unknown")))
        await proxy.lifecycle.recover()
        async with proxy.serving(), proxy.client() as client:
            await proxy.ask(client, follow(hello("one"), answers[0]))
            found = await recorded(proxy)
    finally:
        store.close()
    assert trained(found) == [["answer 1", "answer 3"]]
    assert untrained(found) == ["delivery_unknown"]
