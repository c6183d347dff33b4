"""A harness on somebody's laptop: what the documentation shows is run, and what happens when the laptop vanishes."""

import asyncio
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from api_rig import Rig, attached, line, on, rig
from engine_fake import FakeEngine
from ports import free_port

from forge_server.client import schemas as s
from forge_server.client.http import ForgeClient, ServerUnreachable
from forge_server.client.rollout import ExternalRollout, rollout
from forge_server.domain.errors import ForgeError, StoreError
from forge_server.domain.events import Applied, Event, RewardReported
from forge_server.settings import ServerSettings
from forge_server.store import tables as t

pytestmark = pytest.mark.timeout(180)

ROOT = Path(__file__).resolve().parents[1]
_FENCE = re.compile(r"^```(sh|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)


async def detail(api: Rig, rollout_id: str) -> dict[str, Any]:
    answer = await api.http.get(f"/api/v1/rollouts/{rollout_id}")
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def silent_for(api: Rig, rollout_id: str, seconds: float) -> None:
    """As if so much time had passed since its last sign of life."""
    a = t.attempts.c
    moved = sa.update(t.attempts).where(a.rollout_id == rollout_id).values(heartbeat_at=time.time() - seconds)
    await api.server.store.write(lambda c: c.execute(moved) and None)


async def ended(api: Rig, rollout_id: str) -> dict[str, Any]:
    async with asyncio.timeout(120):
        while (found := (await detail(api, rollout_id))["rollout"])["state"] != "ended":  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    return dict(found)


async def test_a_laptop_that_vanishes(tmp_path: Path, database_url: str) -> None:
    """With a TTL its rollout is lost after it; without one it waits for its agent clock."""
    async with (
        FakeEngine().serving() as engine,
        rig(tmp_path, **on(database_url), **attached(engine.url)) as api,
    ):
        await api.ready()
        lost, patient = await api.register(ttl_s=60), await api.register()
        async with httpx.AsyncClient(trust_env=False, timeout=120) as http:
            for each in (lost, patient):
                answer = await http.post(
                    f"{each['base_url']}/v1/chat/completions",
                    json={"model": "forge", "messages": [{"role": "user", "content": "hi"}]},
                    headers={"authorization": f"Bearer {each['agent_key']}"},
                )
                assert answer.status_code == 200
        await silent_for(api, lost["rollout_id"], 61)
        await silent_for(api, patient["rollout_id"], 61)
        found = await ended(api, lost["rollout_id"])
        assert (found["outcome"], found["kind"]) == ("policy_failure", "runner_lost")
        assert (await detail(api, patient["rollout_id"]))["rollout"]["state"] == "active"
        a = t.attempts.c
        over = sa.update(t.attempts).where(a.rollout_id == patient["rollout_id"])
        for clock in (
            "agent_deadline",
            "verify_deadline",
        ):  # half an hour later; and nobody has the last word
            await eventually_due(api, patient["rollout_id"], clock)
            await api.server.store.write(
                lambda c, clock=clock: c.execute(over.values({clock: time.time() - 1})) and None
            )
        found = await ended(api, patient["rollout_id"])
        assert (found["outcome"], found["kind"]) == ("policy_failure", "agent_timeout")
        run = (await api.http.get("/api/v1/runs/external")).json()
        assert run["rollouts"] == {"policy_failure": 2}


async def eventually_due(api: Rig, rollout_id: str, clock: str) -> None:
    """Wait until the attempt is under this clock."""
    column = t.attempts.c[clock]
    query = sa.select(column).where(t.attempts.c.rollout_id == rollout_id)
    async with asyncio.timeout(120):
        while await api.server.store.read(lambda c: c.execute(query).scalar()) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_one_that_never_called_is_nobodys_failure(tmp_path: Path) -> None:
    async with rig(tmp_path) as api:
        lost = await api.register(ttl_s=5)
        await silent_for(api, lost["rollout_id"], 6)
        assert (await ended(api, lost["rollout_id"]))["outcome"] == "infra_failure"


async def test_the_client_sends_heartbeats_and_hears_that_it_should_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forge_server.client.rollout.BEATS_PER_TTL", 60)
    async with rig(tmp_path) as api:
        url, key = api.server.listening.control_url, api.server.admin_key
        seen: dict[str, Any] = {}

        def work() -> None:
            with (
                ForgeClient(url, key) as client,
                pytest.raises(ForgeError),
                rollout(client, ttl_s=60.0) as mine,
            ):
                seen["id"] = mine.registration.rollout_id
                client.rollout_action(mine.registration.rollout_id, "cancel")
                assert mine.stop.wait(120)
                seen["reason"] = mine.stop_reason
                mine.reward(1.0)

        await asyncio.to_thread(work)
        assert seen["reason"] == "ended"
        assert (await detail(api, seen["id"]))["rollout"]["outcome"] == "cancelled"


async def test_a_reward_waits_for_a_server_that_restarts(tmp_path: Path) -> None:
    ports = ServerSettings(port=free_port(), control_port=free_port())
    async with FakeEngine().serving() as engine:
        async with rig(tmp_path, server=ports, **attached(engine.url)) as api:
            await api.ready()
            with ForgeClient(api.server.listening.control_url, api.server.admin_key) as client:
                block = rollout(client)
                mine = await asyncio.to_thread(block.__enter__)
            async with httpx.AsyncClient(trust_env=False, timeout=120) as http:
                answer = await http.post(
                    f"{mine.base_url}/chat/completions",
                    json={"model": "forge", "messages": [{"role": "user", "content": "hi"}]},
                    headers={"authorization": f"Bearer {mine.agent_key}"},
                )
                assert answer.status_code == 200
        rewarded = asyncio.create_task(asyncio.to_thread(mine.reward, 1.0))
        await asyncio.sleep(0.5)
        assert not rewarded.done()
        async with rig(tmp_path, server=ports, **attached(engine.url)) as api:
            await rewarded
            await asyncio.to_thread(block.__exit__, None, None, None)
            found = await ended(api, mine.registration.rollout_id)
            assert (found["outcome"], found["reward"]) == ("completed", 1.0)


async def test_a_reward_waits_for_a_database_in_trouble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig(tmp_path) as api:
        apply, refused = api.server.lifecycle.apply, []

        async def stumbling(event: Event, **more: Any) -> Applied:
            if isinstance(event, RewardReported) and len(refused) < 2:
                refused.append(event)
                raise StoreError("the disk that holds the database is full")
            return await apply(event, **more)

        monkeypatch.setattr(api.server.lifecycle, "apply", stumbling)

        def work() -> str:
            with ForgeClient(api.server.listening.control_url, api.server.admin_key) as client:
                with rollout(client) as mine:
                    mine.reward(0.5)
                return mine.registration.rollout_id

        found = await detail(api, await asyncio.to_thread(work))
        assert len(refused) == 2 and [reward["value"] for reward in found["rewards"]] == [0.5]


async def test_a_server_that_stays_away_is_told_and_hides_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forge_server.client.rollout.AWAY_S", 0.5)
    async with rig(tmp_path) as api:
        with ForgeClient(api.server.listening.control_url, api.server.admin_key) as client:
            blocks = [rollout(client) for _ in range(2)]
            mine, other = [await asyncio.to_thread(block.__enter__) for block in blocks]
    with pytest.raises(ServerUnreachable, match=r"no forge-server took seal for 0\.5 s \(ConnectError\)"):
        await asyncio.to_thread(mine.reward, 1.0)
    for block, error in zip(blocks, (KeyboardInterrupt(), ValueError("mine")), strict=True):
        with pytest.raises(type(error)):
            await asyncio.to_thread(block.gen.throw, error)
    assert not mine.finished and not other.finished


async def test_what_is_not_scored_fails_no_task_and_is_no_reward(tmp_path: Path, database_url: str) -> None:
    async with (
        FakeEngine().serving() as engine,
        rig(tmp_path, **on(database_url), **attached(engine.url)) as api,
    ):
        await api.ready()
        await api.http.post("/api/v1/tasks", json={"taskset": "s", "tasks": [line("one")]})
        url, key = api.server.listening.control_url, api.server.admin_key

        def ask(mine: ExternalRollout) -> int:
            """Make a call; returns its id."""
            answer = httpx.post(
                f"{mine.base_url}/chat/completions",
                json={"model": "forge", "messages": [{"role": "user", "content": "hi"}]},
                headers={"authorization": f"Bearer {mine.agent_key}"},
                trust_env=False,
                timeout=120,
            )
            assert answer.status_code == 200, answer.text
            return int(answer.json()["id"].removeprefix("chatcmpl-"), 16)

        def work() -> list[s.Comparison]:
            with ForgeClient(url, key) as client:
                with rollout(client, task="one", mode="eval") as mine:
                    ask(mine)
                with rollout(client, task="one") as mine:
                    mine.reward(1.0, call_id=ask(mine))
                with rollout(client, task="one") as mine:
                    ask(mine)
                    mine.reward(0.5)
                return client.compare("external", "task")

        (compared,) = await asyncio.to_thread(work)
        ends = [(row["outcome"], row["reward"]) for row in await api.items("/api/v1/rollouts")]
        assert sorted(ends, key=str) == [("completed", 0.5), ("completed", None), ("task_failure", None)]
        assert (compared.valid, compared.reward) == (1, 0.5)
        (task,) = await api.server.store.read(lambda c: c.execute(sa.select(t.tasks)).all())
        assert task.state == "ready"


async def test_heartbeats_keep_it_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One a second; time passes in the database."""
    monkeypatch.setattr("forge_server.client.rollout.BEATS_PER_TTL", 60)
    async with rig(tmp_path) as api:
        url, key = api.server.listening.control_url, api.server.admin_key
        a = t.attempts.c.heartbeat_at

        async def heard() -> float:
            return float(await api.server.store.read(lambda c: c.execute(sa.select(a)).scalar_one()))

        with ForgeClient(url, key) as client:
            block = rollout(client, ttl_s=60.0)
            mine = await asyncio.to_thread(block.__enter__)
            try:
                for _ in range(3):
                    await silent_for(api, mine.registration.rollout_id, 30)
                    async with asyncio.timeout(120):
                        while await heard() < time.time() - 25:  # noqa: ASYNC110
                            await asyncio.sleep(0.05)
                assert (await detail(api, mine.registration.rollout_id))["rollout"]["state"] == "active"
            finally:
                await asyncio.to_thread(block.__exit__, None, None, None)


def examples(language: str) -> list[str]:
    """Of the section about rollouts from outside, in order; what needs Codex or Claude Code has tests of its own."""
    text = (ROOT / "docs" / "api.md").read_text().partition("## Registering a rollout from outside")[2]
    return [body for kind, body in _FENCE.findall(text) if kind == language]


def environment(api: Rig) -> dict[str, str]:
    return {
        **os.environ,
        "URL": api.server.listening.control_url,
        "KEY": api.server.admin_key,
        "FORGE_URL": api.server.listening.control_url,
        "FORGE_KEY": api.server.admin_key,
        "no_proxy": "127.0.0.1",
    }


async def test_the_curl_examples(tmp_path: Path) -> None:
    script = examples("sh")[0]
    assert script.count("curl") == 6 and "heartbeat" in script
    async with FakeEngine().serving() as engine, rig(tmp_path, **attached(engine.url)) as api:
        await api.ready()
        await api.http.post("/api/v1/tasks", json={"taskset": "s", "tasks": [line("a")]})
        done = await asyncio.to_thread(
            lambda: subprocess.run(
                ["bash", "-euo", "pipefail", "-c", script.replace("curl -s", "curl -sf")],
                cwd=tmp_path,
                env=environment(api),
                capture_output=True,
                text=True,
                timeout=150,
                check=False,
            )
        )
        assert done.returncode == 0, done.stdout + done.stderr
        (item,) = await api.items("/api/v1/rollouts")
        assert (item["outcome"], item["reward"], item["harness"]) == ("completed", 1.0, "mine")
        calls = (await api.http.get(f"/api/v1/rollouts/{item['id']}/calls")).json()
        assert [call["end"] for call in calls] == ["ok"]


async def test_the_python_example(tmp_path: Path) -> None:
    script = examples("python")[0]
    assert "rollout(" in script
    harness = """
import httpx
def my_harness(base_url, api_key):
    body = {"model": "forge", "messages": [{"role": "user", "content": "hi"}]}
    headers = {"authorization": f"Bearer {api_key}"}
    answer = httpx.post(f"{base_url}/chat/completions", json=body, headers=headers, trust_env=False, timeout=120)
    answer.raise_for_status()
"""
    async with FakeEngine().serving() as engine, rig(tmp_path, **attached(engine.url)) as api:
        await api.ready()
        done = await asyncio.to_thread(
            lambda: subprocess.run(
                [sys.executable, "-c", harness + script],
                cwd=tmp_path,
                env=environment(api),
                capture_output=True,
                text=True,
                timeout=150,
                check=False,
            )
        )
        assert done.returncode == 0, done.stdout + done.stderr
        (item,) = await api.items("/api/v1/rollouts")
        assert (item["outcome"], item["reward"]) == ("completed", 1.0)
