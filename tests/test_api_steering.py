"""Steering a run by the API and its client: the mixture, an evaluation, a checkpoint. On SQLite and on Postgres."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from api_rig import Rig, on
from tui_world import RUN, world

from forge_server.client.http import ApiError, ForgeClient
from forge_server.client.schemas import RunPatch
from forge_server.commands import runs as commands
from forge_server.store import tables as t

PATH = f"/api/v1/runs/{RUN}"


async def settings(api: Rig, **changes: Any) -> None:
    def write(connection: sa.Connection) -> None:
        now = connection.execute(sa.select(t.runs.c.settings).where(t.runs.c.id == RUN)).scalar_one()
        connection.execute(sa.update(t.runs).where(t.runs.c.id == RUN).values(settings=now | changes))

    await api.server.store.write(write)


async def events(api: Rig, kind: str) -> list[dict[str, Any]]:
    found = await api.items("/api/v1/events/history", kinds=kind)
    return [event["data"] for event in found]


async def view(api: Rig) -> dict[str, Any]:
    return dict((await api.http.get(PATH)).json())


async def test_the_mixture_of_a_run_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, database_url: str
) -> None:
    async with world(tmp_path, monkeypatch, **on(database_url)) as api:
        before = await view(api)
        assert before["harnesses"] == {"react": 1}
        answer = await api.http.patch("/api/v1/runs/demo", json={"harnesses": {"react": 2, "codex": 1}})
        assert answer.status_code == 200 and answer.json()["harnesses"] == {"react": 2, "codex": 1}
        assert (await view(api))["settings"] == before["settings"]  # what it was created with
        assert await events(api, "mixture_set") == [
            {"harnesses": {"react": 2, "codex": 1}, "instead_of": {"react": 1}}
        ]

        async def refused(harnesses: Any, status: int, kind: str, told: str, **more: Any) -> None:
            found = await api.refused(status, kind, "PATCH", PATH, json={"harnesses": harnesses, **more})
            assert told in found.detail

        await refused({"absent": 1}, 400, "bad-spec", "there is no harness 'absent'")
        await refused({}, 400, "invalid-request", "no harness to draw")
        await refused({"react": 0}, 400, "invalid-request", "must be above 0")
        await refused({"react": "nan"}, 400, "invalid-request", "must be above 0")
        await refused({"react": "much"}, 400, "invalid-request", "float")
        await refused({"absent": 1}, 400, "bad-spec", "'absent'", action="cancel")  # then nothing is done
        assert (await view(api))["state"] == "active"
        await api.http.patch(PATH, json={"action": "cancel"})
        await refused({"react": 1}, 409, "conflict", "the run is cancelled")
        assert (await view(api))["harnesses"] == {"react": 2, "codex": 1}
        assert len(await events(api, "mixture_set")) == 1


async def test_an_evaluation_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, database_url: str) -> None:
    async with world(tmp_path, monkeypatch, **on(database_url)) as api:
        found = await api.refused(409, "conflict", "POST", f"{PATH}/evaluate")
        assert "the run has no evaluation" in found.detail and "[run.eval]" in found.detail
        await settings(api, eval={"split": "test"})
        found = await api.refused(400, "bad-task", "POST", f"{PATH}/evaluate")
        assert "'test' is ready" in found.detail
        await settings(api, eval={"split": "train", "k": 2, "max_tasks": 4})
        answers = [
            await api.http.post("/api/v1/runs/demo/evaluate", headers={"Idempotency-Key": "k"}) for _ in "ab"
        ]
        assert [answer.status_code for answer in answers] == [200, 200]
        asked = {"version": 11, "step": 11, "split": "train", "tasks": 4, "k": 2}
        assert [answer.json() for answer in answers] == [asked, asked]
        assert (await view(api))["asked"] == ["evaluation"]
        watched = (await api.http.get("/api/v1/overview", params={"run": RUN})).json()
        assert watched["run"]["asked"] == ["evaluation"]
        assert await events(api, "evaluation_asked") == [{"version": 11, "step": 11}]
        found = await api.refused(409, "conflict", "POST", f"{PATH}/evaluate")
        assert "asked for already" in found.detail
        await api.http.patch(PATH, json={"action": "cancel"})
        assert (await view(api))["asked"] == []  # it will never come


async def test_a_checkpoint_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, database_url: str) -> None:
    async with world(tmp_path, monkeypatch, **on(database_url)) as api:
        answer = await api.http.post(f"{PATH}/checkpoint")
        assert answer.status_code == 200
        assert answer.json() == {"asked": False, "detail": "every step is saved as it is: save_every is 1"}
        assert await events(api, "save_asked") == []
        await settings(api, save_every=5)
        details = []
        for _ in range(2):
            answer = await api.http.post(f"{PATH}/checkpoint")
            assert answer.status_code == 200 and answer.json()["asked"]
            details.append(answer.json()["detail"])
        assert details[1] == f"asked for already: {details[0]}"
        assert (await view(api))["asked"] == ["save"]
        assert await events(api, "save_asked") == [{}]
        await api.http.patch(PATH, json={"action": "pause"})
        found = await api.refused(409, "conflict", "POST", f"{PATH}/checkpoint")
        assert "resume it first" in found.detail


async def test_the_client_steers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(tmp_path, monkeypatch) as api:
        server = api.server

        def act(client: ForgeClient) -> None:
            assert client.patch_run("demo", RunPatch(harnesses={"codex": 1.0})).harnesses == {"codex": 1.0}
            acts: list[Callable[[], Any]] = [
                lambda: client.patch_run("demo", RunPatch(harnesses={"absent": 1.0})),
                lambda: client.evaluate_run("demo"),
                lambda: client.checkpoint_run("absent"),
            ]
            refused = []
            for each in acts:
                with pytest.raises(ApiError) as error:
                    each()
                refused.append(error.value.status)
            assert refused == [400, 409, 404]
            assert not client.checkpoint_run("demo").asked

        with ForgeClient(server.listening.control_url, server.admin_key) as client:
            await asyncio.to_thread(act, client)


async def test_the_commands_steer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with world(tmp_path, monkeypatch) as api:
        server = api.server
        where = (server.listening.control_url, server.admin_key)

        async def told(command: Callable[..., None], *words: Any) -> str:
            capsys.readouterr()
            await asyncio.to_thread(command, "demo", *words, *where)
            lines = capsys.readouterr().out.splitlines()
            return " ".join(" ".join(line for line in lines if not line.startswith("20")).split())

        mixed = "demo groups are drawn in codex 75%, react 25% from now on"
        assert await told(commands.change, 4, ["react=1", "codex=3"]) == (
            f"{mixed} 4 attempts in flight, of all runs together"
        )
        assert server.scheduler.in_flight == 4
        await settings(api, eval={"split": "train", "k": 2}, save_every=5)
        assert await told(commands.evaluate) == (
            "demo version 11 of step 11 is measured: 6 tasks of split train, 2 rollouts each"
        )
        assert await told(commands.checkpoint) == (
            "demo the state is saved at the end of the trainer's next step"
        )
