"""Runs, tasks, idempotency and paging of the control API."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from api_rig import Rig, line, on, rig, run_table

from forge_server.client.http import ApiError, ForgeClient
from forge_server.client.schemas import TaskCreate
from forge_server.store import instance

# --- runs


async def test_a_run_from_creation_to_its_end(tmp_path: Path, database_url: str) -> None:
    """On SQLite and on Postgres."""
    async with rig(tmp_path, **on(database_url)) as api:
        made = await api.create_run("r")
        assert made["state"] in ("active", "paused") and made["settings"]["n"] == 8  # defaults are told
        again = await api.create_run("r")
        assert again["id"] == made["id"]
        found = await api.refused(
            409, "conflict", "POST", "/api/v1/runs", json={"settings": run_table("r", n=4)}
        )
        assert "'n'" in found.detail
        path = f"/api/v1/runs/{made['id']}"

        async def patch(**body: Any) -> str:
            answer = await api.http.patch(path, json=body)
            assert answer.status_code == 200, answer.text
            return str(answer.json()["state"])

        assert await patch(action="pause") == "paused"
        assert await patch(action="pause") == "paused"
        assert await patch(action="resume") == "active"
        assert await patch(in_flight=3) in ("active", "paused")  # paused by itself: it has no task
        assert "of 3 in flight" in (await api.http.get("/readyz")).text
        stored = [await api.server.store.read(lambda c, n=n: instance.in_flight(c, n)) for n in (8, 9)]
        assert stored == [3, 9]  # of later starts: a person's, until the settings say something else
        assert await patch(action="cancel") == "cancelled"
        assert await patch(action="cancel") == "cancelled"
        await api.refused(409, "conflict", "PATCH", path, json={"action": "resume"})
        for body in ({}, {"action": None}, {"in_flight": -1}, {"in_flight": 10**9}, {"action": "stop"}):
            await api.refused(400, "invalid-request", "PATCH", path, json=body)
        await api.refused(400, "invalid-request", "PATCH", path, json={"action": "resume", "in_flight": -1})
        assert (await api.http.get("/api/v1/runs/r")).json()["state"] == "cancelled"
        assert (await api.http.get("/api/v1/runs/r/metrics")).json() == []


async def test_a_run_named_like_the_id_of_another(tmp_path: Path) -> None:
    async with rig(tmp_path) as api:
        first = await api.create_run("first")
        await api.create_run(first["id"])
        answer = await api.http.get(f"/api/v1/runs/{first['id']}")
        assert answer.json()["name"] == "first"


async def test_run_names_survive_the_client(tmp_path: Path) -> None:
    async with rig(tmp_path) as api:
        await api.create_run("Größe 1+1 @ a:b.c")
        server = api.server

        def look() -> str:
            with ForgeClient(server.listening.control_url, server.admin_key) as client:
                return client.run("Größe 1+1 @ a:b.c").name

        assert await asyncio.to_thread(look) == "Größe 1+1 @ a:b.c"


# --- tasks


async def test_tasks_by_lines_and_by_path(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"name": "c", "instruction": "x", "verify": {"answer_file": "a", "equals": "b"}}\n')
    async with rig(tmp_path) as api:

        async def add(status: int = 201, **body: Any) -> dict[str, Any]:
            answer = await api.http.post("/api/v1/tasks", json={"taskset": "s"} | body)
            assert answer.status_code == status, answer.text
            return dict(answer.json())

        assert await add(tasks=[line("a"), line("b")]) == {"created": 2, "unchanged": 0, "renewed": 0}
        again = await add(tasks=[line("a")], path=str(file))
        assert again == {"created": 1, "unchanged": 1, "renewed": 0}
        found = await api.items("/api/v1/tasks", taskset="s")
        assert sorted(task["name"] for task in found) == ["a", "b", "c"]
        assert await api.items("/api/v1/tasks", taskset="other") == []

        # a mistake anywhere leaves everything as it was
        wrong = [
            [line("d"), line("a", instruction="Say something else.")],
            [line("d"), line("d")],
            [line("d"), {"name": "e"}],
            [line("d"), line("e", unknown=1)],
            [line("d"), line("e" * 200)],
            [line("d"), line("b", split="test")],
        ]
        for tasks in wrong:
            assert (await add(400, tasks=tasks))["type"] == "bad-task"
        assert (await add(400, tasks=[line("d")], path=str(tmp_path / "none")))["type"] == "bad-task"
        assert (await add(400))["type"] == "bad-task"
        assert len(await api.items("/api/v1/tasks")) == 3


# --- idempotency


async def test_an_idempotency_key_is_one_act(tmp_path: Path, database_url: str) -> None:
    async with rig(tmp_path, **on(database_url)) as api:

        async def post(key: str, **body: Any) -> Any:
            headers = {"idempotency-key": key}
            return await api.http.post("/api/v1/rollouts", json=body, headers=headers)

        twins = await asyncio.gather(*(post("twins", harness="h") for _ in range(12)))
        assert {answer.status_code for answer in twins} == {201}
        assert len({answer.text for answer in twins}) == 1
        assert len(await api.items("/api/v1/rollouts")) == 1
        assert (await post("twins", harness="h")).text == twins[0].text

        other = await post("twins", harness="another")
        assert other.status_code == 409 and "another body" in other.json()["detail"]
        headers = {"idempotency-key": "twins"}  # of another route it is another key
        answer = await api.http.post(
            "/api/v1/tasks", json={"taskset": "s", "tasks": [line("a")]}, headers=headers
        )
        assert answer.json() == {"created": 1, "unchanged": 0, "renewed": 0}

        # what was refused may be tried again under the same key
        assert (await post("later", run="late")).status_code == 404
        await api.create_run("late", harness="external")
        assert (await post("later", run="late")).status_code == 201
        await api.refused(
            400,
            "invalid-request",
            "POST",
            "/api/v1/rollouts",
            json={},
            headers={"idempotency-key": "k" * 129},
        )


async def test_twins_of_a_failing_act_do_not_overlap(tmp_path: Path) -> None:
    """While the first one fails, later ones wait for each other, however many come."""
    from forge_server.api.idempotent import Idempotency

    async with rig(tmp_path) as api:
        idempotency = Idempotency(api.server.store)
        inside = most = acts = 0

        async def act() -> int:
            nonlocal inside, most, acts
            inside, acts = inside + 1, acts + 1
            number, most = acts, max(most, inside)
            try:
                await asyncio.sleep(0)
                await api.server.store.read(lambda c: None)
                if number < 3:
                    raise RuntimeError("fails twice")
                return number
            finally:
                inside -= 1

        async def late(turns: int) -> int:
            for _ in range(turns):
                await api.server.store.read(lambda c: None)
            return await idempotency.run("k", "route", {}, act)

        answers = await asyncio.gather(*(late(i) for i in range(8)), return_exceptions=True)
        assert most == 1 and acts == 3
        assert [a for a in answers if not isinstance(a, RuntimeError)] == [3] * 6
        assert not idempotency._busy


# --- paging


async def pages(api: Rig, path: str, limit: int) -> list[list[str]]:
    found, cursor = [], None
    while True:
        params = {"limit": limit} | ({"cursor": cursor} if cursor else {})
        page = (await api.http.get(path, params=params)).json()
        assert page["as_of"] > 0
        found.append([item["name"] for item in page["items"]])
        cursor = page["next_cursor"]
        if cursor is None:
            return found


@pytest.mark.parametrize("limit", [1, 2, 5, 6, 7])
async def test_pages_are_the_list(tmp_path: Path, limit: int) -> None:
    names = [f"t{i}" for i in range(6)]
    async with rig(tmp_path) as api:
        body = {"taskset": "s", "tasks": [line(name) for name in names]}
        await api.http.post("/api/v1/tasks", json=body)
        found = await pages(api, "/api/v1/tasks", limit)
        assert sorted(name for page in found for name in page) == names
        assert all(len(page) == limit for page in found[:-1]) and 0 < len(found[-1]) <= limit


async def test_pages_do_not_shift_when_rows_are_added(tmp_path: Path) -> None:
    async with rig(tmp_path) as api:
        for name in ("a", "b", "c"):
            await api.create_run(name)
        first = (await api.http.get("/api/v1/runs", params={"limit": 2})).json()
        assert [run["name"] for run in first["items"]] == ["c", "b"]
        await api.create_run("d")
        cursor = first["next_cursor"]
        second = (await api.http.get("/api/v1/runs", params={"limit": 2, "cursor": cursor})).json()
        assert [run["name"] for run in second["items"]] == ["a"]


async def test_the_client_pages(tmp_path: Path) -> None:
    async with rig(tmp_path) as api:
        url, key = api.server.listening.control_url, api.server.admin_key

        def work() -> None:
            with ForgeClient(url, key) as client:
                client.create_tasks(TaskCreate(taskset="s", tasks=[line(f"t{i}") for i in range(1203)]))
                assert len(list(client.tasks("s"))) == 1203
                assert len(list(client.tasks("s", limit=501))) == 501
                assert list(client.tasks("other")) == []
                with pytest.raises(ApiError) as refused:
                    client.create_tasks(TaskCreate(taskset="s", tasks=[]))
                assert (refused.value.type, refused.value.status, refused.value.exit_code) == (
                    "bad-task",
                    400,
                    2,
                )

        await asyncio.to_thread(work)
