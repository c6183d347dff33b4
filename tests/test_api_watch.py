"""What the API offers to those who watch: overview and alarms, filters and sorts, turns, segments, tokens, comparison,
and the events that were."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from api_rig import Rig, client, eventually, on
from hypothesis import given
from hypothesis import strategies as st
from test_api_events import Stream, stream
from tui_world import FEATURED, NOW, RUN, rollout_id, world

from forge_server.api import events as events_api
from forge_server.api.alarms import Facts, alarms
from forge_server.api.inspect import Conversations
from forge_server.client import schemas as s
from forge_server.client.http import ForgeClient
from forge_server.domain.events import Noted
from forge_server.services.vocabulary import Vocabulary


async def ask(api: Rig, kind: Any, path: str, /, **params: Any) -> Any:
    answer = await api.http.get(f"/api/v1{path}", params=params)
    assert answer.status_code == 200, answer.text
    return msgspec.json.decode(answer.content, type=kind)


async def test_one_answer_tells_whether_all_is_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, database_url: str
) -> None:
    async with world(tmp_path, monkeypatch, **on(database_url)) as api:
        found: s.Overview = await ask(api, s.Overview, "/overview")
        assert (
            found.run is not None and found.run.id == RUN
        )  # the one that goes on, not the one that has ended
        assert found.now == NOW
        assert found.attempts == {"queued": 1, "launching": 1, "running": 3, "verifying": 1}
        assert found.failures == {
            "policy_failure/agent_timeout": 4, "policy_failure/budget_calls": 3, "infra_failure/startup_timeout": 3,
            "cancelled/cancelled": 3,
        }  # fmt: skip
        assert found.lost == {"startup_timeout": 3}
        assert found.policy is not None and (found.policy.version, found.policy.state) == (11, "live")
        assert found.trainer is not None and found.trainer.alive
        assert found.rates.calls > 0 and found.rates.completion_tokens > 0
        assert [(alarm.level, alarm.name) for alarm in found.alarms] == [("error", "policy")]
        assert await ask(api, s.Overview, "/overview") == found  # one computation serves all who watch
        other: s.Overview = await ask(api, s.Overview, "/overview", run="baseline")
        assert other.run is not None and other.run.name == "baseline"
        await api.refused(404, "not-found", "GET", "/api/v1/overview?run=absent")

        # whoever steers sees it at once; the run that never ends is not the one that matters
        await api.register()
        changed = await api.http.patch(f"/api/v1/runs/{RUN}", json={"action": "pause", "in_flight": 5})
        assert changed.status_code == 200
        found = await ask(api, s.Overview, "/overview")
        assert found.run is not None and (found.run.id, found.run.state) == (RUN, "paused")
        assert found.in_flight == 5
        await api.http.patch(f"/api/v1/runs/{RUN}", json={"action": "cancel"})
        found = await ask(api, s.Overview, "/overview")
        assert found.run is not None and found.run.name == "external"  # it has a rollout that goes on


def facts(**changes: Any) -> Facts:
    run = s.RunView("r", "r", "train", "active", "", 1, {}, 0.0, None, {})
    healthy: dict[str, Any] = {
        "checks": [s.Check("engine", True)], "run": run, "trainer": s.TrainerView("training", 1, True, 0.0),
        "rejected": "", "infra_streak": 0, "breaker": 20, "lost": {}, "recent_attempts": 100, "held_s": 0.0,
        "silence_s": 0.0, "figures": {"groups/mixed_share": 0.6, "logprob_gap_mean": 1e-4},
    }  # fmt: skip
    return Facts(**(healthy | changes))


def run_in(state: str, reason: str = "") -> s.RunView:
    return s.RunView("r", "r", "train", state, reason, 1, {}, 0.0, None, {})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"run": None}, []),
        ({"checks": [s.Check("engine", False, "starting")]}, [("error", "engine")]),
        ({"run": run_in("paused", "breaker: 20 infra failures in a row")}, [("error", "paused")]),
        ({"run": run_in("paused", "paused by a person")}, [("warning", "paused")]),
        ({"run": run_in("failed", "x")}, [("error", "failed")]),
        ({"run": run_in("completed"), "trainer": s.TrainerView("", 1, False, 0.0)}, []),
        ({"trainer": s.TrainerView("update", 1, False, 0.0)}, [("error", "trainer")]),
        ({"rejected": "probe differs"}, [("error", "policy")]),
        ({"held_s": 121.0}, [("warning", "held")]),
        ({"infra_streak": 10}, [("warning", "breaker")]),
        ({"lost": {"pod_lost": 11}}, [("warning", "lost")]),
        ({"lost": {"pod_lost": 10}}, []),
        ({"silence_s": 121.0}, [("warning", "silence")]),
        ({"figures": {"nonfinite_gradients": 1.0}}, [("error", "gradients")]),
        ({"figures": {"logprob_gap_mean": 0.11}}, [("error", "logprobs")]),
        ({"figures": {"groups/mixed_share": 0.05}}, [("warning", "signal")]),
        ({"figures": {"groups/mixed_share": None, "staleness/dropped": 2.0}}, [("warning", "stale")]),
        ({"held_s": 999.0, "rejected": "x"}, [("error", "policy"), ("warning", "held")]),
    ],
)
def test_alarms_tell_what_is_wrong_errors_first(
    changes: dict[str, Any], expected: Sequence[tuple[str, str]]
) -> None:
    found = alarms(facts(**changes))
    assert [(alarm.level, alarm.name) for alarm in found] == expected
    assert all(alarm.what and alarm.mend for alarm in found)


async def test_lists_are_filtered_sorted_and_paged_by_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, database_url: str
) -> None:
    async with world(tmp_path, monkeypatch, **on(database_url)) as api:

        async def listed(**params: Any) -> list[s.RolloutView]:
            rows: list[s.RolloutView] = []
            cursor = None
            while True:
                more = {"cursor": cursor} if cursor else {}
                page: s.RolloutPage = await ask(api, s.RolloutPage, "/rollouts", limit=7, **params, **more)
                rows += page.items
                cursor = page.next_cursor
                if cursor is None:
                    assert len({row.id for row in rows}) == len(rows)
                    return rows

        everything = await listed()
        assert [row.id for row in everything] == [rollout_id(n) for n in reversed(range(43))]
        assert [row.id for row in await listed(order="asc")] == [rollout_id(n) for n in range(43)]
        for filters, holds in (
            ({"outcome": "infra_failure"}, lambda r: r.outcome == "infra_failure"),
            ({"kind": "budget_calls"}, lambda r: r.kind == "budget_calls"),
            ({"harness": "codex", "state": "active"}, lambda r: r.harness == "codex" and r.state == "active"),
            ({"task": "fix-typo"}, lambda r: r.task == "fix-typo"),
            ({"task": "ta-fix-typo"}, lambda r: r.task == "fix-typo"),
            ({"mode": "eval"}, lambda r: False),
            ({"text": "CLAUDE"}, lambda r: r.harness == "claude-code"),
            ({"text": "%"}, lambda r: False),
            ({"text": rollout_id(3)}, lambda r: r.id == rollout_id(3)),
        ):
            assert [r.id for r in await listed(**filters)] == [r.id for r in everything if holds(r)], filters
        by_reward = [row.reward for row in await listed(sort="reward")]
        known = [value for value in by_reward if value is not None]
        assert known == sorted(known, reverse=True) and by_reward[len(known) :] == [None] * (43 - len(known))
        ended = [row.ended_at or float("inf") for row in await listed(sort="ended", order="asc")]
        assert ended == sorted(ended)
        assert [row.attempts for row in await listed(sort="attempts")][:4] == [3, 3, 3, 1]

        featured = everything[42 - FEATURED]
        assert (featured.task, featured.phase, featured.calls, featured.tokens) == (
            "rename-keys",
            "ended",
            6,
            63,
        )
        page: s.RolloutPage = await ask(api, s.RolloutPage, "/rollouts", limit=1, sort="reward")
        for other in ({"sort": "created"}, {"sort": "reward", "cursor": "IngiCg=="}):
            params = {"cursor": page.next_cursor} | other
            await api.refused(400, "invalid-request", "GET", "/api/v1/rollouts", params=params)


async def test_a_rollout_can_be_read_from_every_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, database_url: str
) -> None:
    async with world(tmp_path, monkeypatch, **on(database_url)) as api:
        path = f"/rollouts/{rollout_id(FEATURED)}"
        detail: s.RolloutDetail = await ask(api, s.RolloutDetail, path)
        assert [(reward.source, reward.value) for reward in detail.rewards] == [("verifier", 1.0)]
        assert detail.group is not None and detail.group.rewards == [1.0, None, None, None]
        assert detail.instruction.startswith("Find the secret")

        turns: list[s.Turn] = await ask(api, list[s.Turn], f"{path}/turns")
        assert [(t.seq, t.after, t.agent) for t in turns] == [
            (0, None, ""), (1, None, ""), (2, 1, ""), (3, None, "searcher"), (4, 3, "searcher"), (5, 2, ""),
        ]  # fmt: skip
        assert [[m["role"] for m in t.messages] for t in turns] == [
            ["user"], ["system", "user"], ["tool"], ["user"], ["tool"], ["tool"],
        ]  # fmt: skip
        assert [t.tools for t in turns] == [[], ["shell", "Task"], [], [], [], []]
        assert turns[5].response["content"].startswith("The secret")
        assert await ask(api, list[s.Turn], f"{path}/turns", since=2, limit=2) == turns[2:4]

        cut: s.SegmentsView = await ask(api, s.SegmentsView, f"{path}/segments")
        assert [(x.break_reason, x.trained, x.length, x.calls) for x in cut.segments] == [
            ("root", 14, 25, [3]), ("first", 37, 85, [1, 2, 5]),
        ]  # fmt: skip
        assert cut.untrained == {0: "side_call", 4: "delivery_unknown"}

        found: s.TokensView = await ask(api, s.TokensView, f"{path}/segments/1/tokens")
        assert (found.length, len(found.ids), sum(found.mask)) == (85, 85, 37)
        assert found.text is not None and "".join(found.text).endswith(
            " The secret is blue whale. Done!<|im_end|>"
        )
        assert {v for v, m in zip(found.versions, found.mask, strict=True) if m} == {10, 11}
        part: s.TokensView = await ask(api, s.TokensView, f"{path}/segments/1/tokens", offset=80, limit=3)
        assert (part.offset, part.ids) == (80, found.ids[80:83])
        for absent in (f"{path}/segments/2/tokens", f"{path}/turns?attempt=at-x", "/rollouts/ro-x/turns"):
            await api.refused(404, "not-found", "GET", f"/api/v1{absent}")


@given(st.lists(st.lists(st.sampled_from([b"a", b"b", b"c"]), max_size=7), max_size=12))
def test_a_call_goes_on_from_the_one_with_which_it_shares_most(calls: list[list[bytes]]) -> None:
    conversations = Conversations()
    for seq, said in enumerate(calls):
        after, longest = None, 0
        for earlier, theirs in enumerate(calls[:seq]):
            common = next((n for n, (a, b) in enumerate(zip(theirs, said, strict=False)) if a != b), None)
            common = min(len(theirs), len(said)) if common is None else common
            if common >= max(longest, 1) and 2 * common >= len(theirs):
                after, longest = earlier, common
        assert conversations.add(seq, said) == (after, longest)


async def test_tasks_and_harnesses_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, database_url: str
) -> None:
    async with world(tmp_path, monkeypatch, **on(database_url)) as api:
        tasks: list[s.Comparison] = await ask(api, list[s.Comparison], "/runs/demo/compare", by="task")
        assert [task.name for task in tasks] == sorted(task.name for task in tasks)
        assert sum(task.rollouts for task in tasks) == 43 and {task.k for task in tasks} == {4}
        one = next(task for task in tasks if task.name == "sum-column")
        rows: s.RolloutPage = await ask(api, s.RolloutPage, "/rollouts", task="sum-column", run="demo")
        valid = [row for row in rows.items if row.outcome in ("completed", "policy_failure")]
        passed = sum(row.reward == 1.0 for row in valid)
        assert (one.valid, one.passed) == (len(valid), passed)
        assert one.pass_at_1 == pytest.approx(passed / len(valid))
        assert one.reward == pytest.approx(sum(row.reward or 0 for row in valid) / len(valid))
        assert one.calls == pytest.approx(sum(r.calls for r in rows.items if r.state == "ended") / one.ended)
        assert one.pass_hat_k is not None and one.pass_at_k is not None and one.pass_hat_k <= one.pass_at_k
        harnesses: list[s.Comparison] = await ask(
            api, list[s.Comparison], "/runs/demo/compare", by="harness", k=1
        )
        assert [each.name for each in harnesses] == ["claude-code", "codex", "react"]
        assert all(each.pass_at_k == each.pass_at_1 == each.pass_hat_k for each in harnesses)
        nothing = await ask(api, list[s.Comparison], "/runs/demo/compare", by="task", mode="eval")
        assert nothing == []


async def test_events_that_were_and_those_that_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, database_url: str
) -> None:
    async with world(tmp_path, monkeypatch, **on(database_url)) as api:
        seen: list[s.EventView] = []
        cursor = None
        while cursor is not None or not seen:
            more = {"cursor": cursor} if cursor else {}
            page: s.EventPage = await ask(api, s.EventPage, "/events/history", limit=9, run="demo", **more)
            seen += page.items
            cursor = page.next_cursor
        assert len(seen) == 60 and [e.id for e in seen] == sorted((e.id for e in seen), reverse=True)
        ends: s.EventPage = await ask(
            api, s.EventPage, "/events/history", kinds="rollout_ended,policy_live", rollout=rollout_id(3)
        )
        assert {event.kind for event in ends.items} == {"rollout_ended"}
        await api.refused(404, "not-found", "GET", "/api/v1/events?run=absent")

        # only what is asked for, gathered, from the database and then from memory
        params = {"since": 0, "run": "demo", "kinds": "policy_live,run_paused", "every": 0.05}
        async with client(api.server) as http, http.stream("GET", "/api/v1/events", params=params) as answer:
            events = Stream(answer)
            assert [e.kind for e in await events.take(10)] == ["policy_live"] * 10
            await api.register()
            await api.http.patch(f"/api/v1/runs/{RUN}", json={"action": "pause"})
            assert (await events.next()).kind == "run_paused"


async def test_a_watcher_costs_no_reads_once_it_is_level(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(tmp_path, monkeypatch) as api, stream(api) as events:
        await api.register()
        await events.next()
        reads = 0
        read = api.server.store.read

        async def counted(fn: Any) -> Any:
            nonlocal reads
            reads += getattr(fn, "__module__", "") == events_api.__name__  # others read by the clock
            return await read(fn)

        monkeypatch.setattr(api.server.store, "read", counted)
        for n in range(50):
            await api.server.lifecycle.apply(Noted(kind="told", data={"n": n}))
        told: list[int] = []
        while len(told) < 50:
            event = await events.next()
            told += [event.data["n"]] if event.kind == "told" else []
        assert told == list(range(50)) and reads == 0


async def test_the_client_follows_and_is_stopped_from_another_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(tmp_path, monkeypatch) as api:
        with ForgeClient(api.server.listening.control_url, api.server.admin_key) as forge:

            def follow() -> None:
                with forge.events(0, every=0.01) as found:
                    ready.append(found)
                    for batch in found:
                        seen.extend(event.id for event in batch)

            ready: list[Any] = []
            seen: list[int] = []
            task = asyncio.create_task(asyncio.to_thread(follow))
            await eventually(lambda: bool(ready))
            await api.register()
            history = await asyncio.to_thread(forge.history)
            await eventually(lambda: history.items[0].id in seen)
            ready[0].close()
            async with asyncio.timeout(120):
                await task
            assert seen == sorted(seen)


def test_the_text_of_tokens_of_both_kinds(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(
        '{"model": {"vocab": {"\\u0120the": 0, "\\u010a": 1, "\\u2581and": 2, "\\u00e9": 3, "plain": 4}},'
        ' "added_tokens": [{"id": 5, "content": "<|end|>"}]}'
    )
    pieces = Vocabulary(tmp_path)([0, 1, 2, 4, 5, 99])
    assert pieces == [" the", "\n", " and", "plain", "<|end|>", "�"]
    assert Vocabulary(None)([1]) is None
    assert Vocabulary(tmp_path / "absent")([1]) is None
