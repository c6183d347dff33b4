"""Rollouts that a harness registers itself: from registration to reward, over real HTTP."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from api_rig import Rig, attached, line, on, rig
from engine_fake import FakeEngine

from forge_server.client.http import ForgeClient
from forge_server.client.rollout import rollout
from forge_server.client.schemas import Registration
from forge_server.domain.errors import ForgeError

CALL = {"model": "forge", "messages": [{"role": "user", "content": "hi"}]}


async def detail(api: Rig, rollout_id: str) -> dict[str, Any]:
    answer = await api.http.get(f"/api/v1/rollouts/{rollout_id}")
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def pod(registered: dict[str, Any], key: str, what: str, body: dict[str, Any]) -> int:
    async with httpx.AsyncClient(trust_env=False, timeout=120) as http:
        headers = {"authorization": f"Bearer {registered[key]}"}
        answer = await http.post(f"{registered['base_url']}/{what}", json=body, headers=headers)
        return answer.status_code


def ask(registration: Registration) -> int:
    answer = httpx.post(
        f"{registration.base_url}/v1/chat/completions",
        json=CALL,
        headers={"authorization": f"Bearer {registration.agent_key}"},
        trust_env=False,
        timeout=120,
    )
    return answer.status_code


async def test_an_external_rollout_with_the_client(tmp_path: Path, database_url: str) -> None:
    async with (
        FakeEngine().serving() as engine,
        rig(tmp_path, **on(database_url), **attached(engine.url)) as api,
    ):
        await api.ready()
        await api.http.post("/api/v1/tasks", json={"taskset": "s", "tasks": [line("a")]})
        url, key = api.server.listening.control_url, api.server.admin_key
        ids: list[str] = []

        def work() -> None:
            with ForgeClient(url, key) as client:
                with rollout(client, task="a", harness="mine") as mine:
                    ids.append(mine.registration.rollout_id)
                    assert mine.registration.instruction == "Say hello."
                    assert ask(mine.registration) == 200
                    mine.reward(0.75, detail={"tests": 3})
                    assert ask(mine.registration) == 409  # sealed
                    mine.reward(0.75)  # repeats are harmless
                    mine.finish()
                    mine.finish()
                with pytest.raises(ZeroDivisionError), rollout(client) as mine:
                    ids.append(mine.registration.rollout_id)
                    raise ZeroDivisionError
                with pytest.raises(ForgeError, match="finite"), rollout(client) as mine:
                    ids.append(mine.registration.rollout_id)
                    assert ask(mine.registration) == 200
                    mine.reward(1e9)
                with rollout(client) as mine:  # recorded only
                    ids.append(mine.registration.rollout_id)
                    assert ask(mine.registration) == 200

        await asyncio.to_thread(work)
        scored, raised, nonsense, recorded = [await detail(api, id) for id in ids]
        assert scored["rollout"]["state"] == "ended"
        assert (scored["rollout"]["outcome"], scored["rollout"]["reward"]) == ("completed", 0.75)
        assert scored["rollout"]["harness"] == "mine" and len(scored["attempts"]) == 1
        assert scored["attempts"][0]["backend"] == "external"
        assert raised["rollout"]["outcome"] == "infra_failure"  # it never called
        assert raised["rollout"]["reward"] is None
        assert nonsense["rollout"]["outcome"] == "policy_failure"
        assert (recorded["rollout"]["outcome"], recorded["rollout"]["reward"]) == ("completed", None)
        run = (await api.http.get("/api/v1/runs/external")).json()
        assert run["kind"] == "record" and sum(run["rollouts"].values()) == 4
        path = f"/api/v1/rollouts/{ids[0]}"
        (call,) = (await api.http.get(f"{path}/calls", params={"messages": True})).json()
        assert (call["end"], call["delivered"], call["completion_len"]) == ("ok", "yes", 2)
        assert call["request"] == CALL["messages"] and call["response"]["content"] == "hi"
        (call,) = (await api.http.get(f"{path}/calls")).json()
        assert call["request"] is None
        for part in ("samples", "logs"):
            assert (await api.http.get(f"{path}/{part}")).json() == []


async def test_its_keys_open_its_own_attempt_only(tmp_path: Path) -> None:
    """I10, on the pod-facing listener."""
    async with rig(tmp_path) as api:
        one, two = await api.register(), await api.register()
        reward = {"value": 1.0, "source": "external"}
        assert await pod(one | {"runner_key": two["runner_key"]}, "runner_key", "reward", reward) == 401
        assert await pod(one, "agent_key", "reward", reward) == 401
        assert await pod(one | {"k": api.server.admin_key}, "k", "reward", reward) == 401
        assert await pod(one, "runner_key", "reward", reward) == 200
        assert await pod(one, "runner_key", "seal", {}) == 200
        assert await pod(one, "runner_key", "finish", {"exit_code": 0, "verifier": {"status": "ok"}}) == 200
        assert (await detail(api, two["rollout_id"]))["rollout"]["state"] == "active"


async def test_without_an_engine_a_call_is_refused_at_once_and_told_why(tmp_path: Path) -> None:
    async with rig(tmp_path) as api:
        registered = await api.register()
        async with httpx.AsyncClient(trust_env=False, timeout=20.0) as http:
            answer = await http.post(
                f"{registered['base_url']}/v1/chat/completions",
                json=CALL,
                headers={"authorization": f"Bearer {registered['agent_key']}"},
            )
        assert answer.status_code == 503 and "not configured" in answer.text


async def test_cancel_and_retry(tmp_path: Path) -> None:
    async with rig(tmp_path) as api:
        one, two = await api.register(), await api.register()
        path = f"/api/v1/rollouts/{one['rollout_id']}"
        answer = await api.http.post(f"{path}/cancel")
        assert answer.json()["rollout"]["outcome"] == "cancelled"
        assert (await api.http.post(f"{path}/cancel")).status_code in (200, 409)
        await api.refused(409, "conflict", "POST", f"{path}/retry")
        await api.refused(409, "conflict", "POST", f"/api/v1/rollouts/{two['rollout_id']}/retry")
        assert await pod(one, "runner_key", "reward", {"value": 1.0, "source": "external"}) == 409
        assert (await detail(api, one["rollout_id"]))["rollout"]["reward"] is None


async def test_what_a_registration_names_must_be_there_once(tmp_path: Path) -> None:
    async with rig(tmp_path) as api:
        for taskset in ("one", "two"):
            await api.http.post("/api/v1/tasks", json={"taskset": taskset, "tasks": [line("same")]})
        await api.refused(409, "conflict", "POST", "/api/v1/rollouts", json={"task": "same"})
        task = (await api.items("/api/v1/tasks", taskset="two"))[0]
        registered = await api.register(task=task["id"])
        assert registered["instruction"] == "Say hello."
        run = await api.create_run("mine", harness="external")
        await api.register(run="mine")
        await api.register(run=run["id"])
        await api.http.patch("/api/v1/runs/mine", json={"action": "cancel"})
        await api.refused(409, "conflict", "POST", "/api/v1/rollouts", json={"run": "mine"})


async def test_a_run_that_takes_no_rollouts_tells_the_way_out(tmp_path: Path) -> None:
    async with rig(tmp_path) as api:
        await api.register()
        await api.http.patch("/api/v1/runs/external", json={"action": "pause"})
        found = await api.refused(409, "conflict", "POST", "/api/v1/rollouts", json={})
        assert "paused; resume it" in found.detail
        await api.http.patch("/api/v1/runs/external", json={"action": "resume"})
        await api.register()
        await api.http.patch("/api/v1/runs/external", json={"action": "cancel"})
        found = await api.refused(409, "conflict", "POST", "/api/v1/rollouts", json={})
        assert 'cancelled; a name is used once: create a run of kind "record"' in found.detail
        await api.create_run("mine", kind="record", harness="external")
        await api.register(run="mine")
        states = [item["state"] for item in await api.items("/api/v1/rollouts")]
        assert states == ["active", "ended", "ended"]  # and none that was refused


async def test_windows_tells_how_a_harness_ended(tmp_path: Path, database_url: str) -> None:
    """0xC0000005 has no place in a signed column of 32 bits."""
    async with rig(tmp_path, **on(database_url)) as api:
        for told, kept in ((0xC0000005, -1073741819), (-(2**31), -(2**31)), (2**31 - 1, 2**31 - 1), (3, 3)):
            registered = await api.register()
            assert await pod(registered, "runner_key", "finish", {"exit_code": told}) == 200
            (attempt,) = (await detail(api, registered["rollout_id"]))["attempts"]
            assert attempt["exit_code"] == kept


@pytest.mark.parametrize("number", [10**25, -(10**25), 2**63])
async def test_numbers_that_no_column_holds_are_refused(
    tmp_path: Path, database_url: str, number: int
) -> None:
    async with rig(tmp_path, **on(database_url)) as api:
        registered = await api.register()
        for route, body in (
            ("reward", {"value": 1.0, "source": "external", "call_id": number}),
            ("events", {"events": [{"kind": "receipts", "read": [number]}]}),
            ("events", {"events": [{"kind": "receipts", "lost": [number]}]}),
            ("events", {"events": [{"kind": "harness_exited", "exit_code": number}]}),
            ("finish", {"exit_code": number}),
        ):
            assert await pod(registered, "runner_key", route, body) == 400, route
        assert (await detail(api, registered["rollout_id"]))["rollout"]["state"] == "active"


async def test_lists_are_filtered(tmp_path: Path) -> None:
    async with rig(tmp_path) as api:
        await api.create_run("mine", harness="external")
        one, two = await api.register(run="mine"), await api.register()
        await api.http.post(f"/api/v1/rollouts/{one['rollout_id']}/cancel")

        async def ids(**params: Any) -> list[str]:
            return [item["id"] for item in await api.items("/api/v1/rollouts", **params)]

        assert await ids() == [two["rollout_id"], one["rollout_id"]]
        assert await ids(run="mine") == [one["rollout_id"]]
        assert await ids(state="ended") == [one["rollout_id"]]
        assert await ids(state="active", run="external") == [two["rollout_id"]]
        assert await ids(state="pending") == []


async def test_a_rollout_survives_a_restart_of_the_server(tmp_path: Path) -> None:
    """Its keys are the instance's; what was registered before may be finished after."""
    async with FakeEngine().serving() as engine, rig(tmp_path, **attached(engine.url)) as api:
        await api.ready()
        registered = await api.register()
        assert await asyncio.to_thread(ask, msgspec.convert(registered, Registration)) == 200
    async with rig(tmp_path) as api:
        moved = registered | {"base_url": f"{api.server.listening.pod_url}/a/{registered['attempt_id']}"}
        assert await pod(moved, "runner_key", "reward", {"value": 1.0, "source": "external"}) == 200
        assert await pod(moved, "runner_key", "seal", {}) == 200
        assert await pod(moved, "runner_key", "finish", {"exit_code": 0, "verifier": {"status": "ok"}}) == 200
        assert (await detail(api, registered["rollout_id"]))["rollout"]["reward"] == 1.0
