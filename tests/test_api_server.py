"""A server as a whole: what it checks before it touches anything, who may run beside it, how it stops."""

import asyncio
import os
import socket
import stat
from pathlib import Path
from typing import Any

import pytest
from api_rig import Rig, attached, eventually, line, on, rig, run_table, settings
from engine_fake import FakeEngine

from forge_server.app import running, serve
from forge_server.domain.errors import ConfigError, Conflict, ForgeError, SpecError, StoreError
from forge_server.domain.events import Applied, Event, HoldBegan, HoldEnded
from forge_server.proxy.hold import Gate
from forge_server.runner import disk
from forge_server.services.data_folder import DataFolder, holder
from forge_server.services.engine_watch import EngineWatch
from forge_server.settings import EngineSettings, HarnessSettings, LocalSettings, ServerSettings, parse_runs


async def refused(folder: Path, kind: type[ForgeError], **sections: object) -> str:
    with pytest.raises(kind) as error:
        async with running(settings(folder, **sections)):
            raise AssertionError("it runs")
    return str(error.value)


# --- before anything is touched


async def test_a_missing_model_touches_nothing(tmp_path: Path) -> None:
    engine = EngineSettings(kind="managed", model="nowhere")
    told = await refused(tmp_path, ConfigError, engine=engine)
    assert "nowhere" in told and "[engine] model" in told
    assert not os.listdir(tmp_path)


async def test_an_unknown_harness_of_a_run_touches_nothing(tmp_path: Path) -> None:
    runs = parse_runs([run_table("r", harness="reac")], "")
    assert "react" in await refused(tmp_path, SpecError, run=runs)
    assert not os.listdir(tmp_path)


async def test_a_port_in_use_leaves_no_database(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for server in (ServerSettings(port=port, control_port=0), ServerSettings(port=0, control_port=port)):
            told = await refused(tmp_path, ConfigError, server=server)
            assert str(port) in told and "in use" in told and "port" in told
    assert os.listdir(tmp_path / "forge-data") == ["server.lock"]
    async with rig(tmp_path):
        pass


async def test_an_address_that_is_not_ours(tmp_path: Path) -> None:
    for host in ("203.0.113.1", "no.such.host.invalid"):
        told = await refused(tmp_path, ConfigError, server=ServerSettings(host=host, port=0, control_port=0))
        assert host in told


# --- beside another server


async def test_a_second_server_is_refused_and_harms_nobody(tmp_path: Path) -> None:
    async with rig(tmp_path) as api:
        told = await refused(tmp_path, ConfigError)
        assert str(os.getpid()) in told and "data_dir" in told
        assert api.server.listening.unix_path.exists()
        _, writer = await asyncio.open_unix_connection(api.server.listening.unix_path)
        writer.close()
        assert (
            tmp_path / "forge-data" / "control.url"
        ).read_text().strip() == api.server.listening.control_url
        assert holder(tmp_path / "forge-data") == str(os.getpid())
    assert holder(tmp_path / "forge-data") is None
    assert not (tmp_path / "forge-data" / "control.url").exists()


async def test_a_second_folder_on_the_same_database_is_refused(tmp_path: Path, database_url: str) -> None:
    async with rig(tmp_path / "one", **on(database_url)):
        assert "another forge-server" in await refused(tmp_path / "two", StoreError, **on(database_url))
    async with rig(tmp_path / "two", **on(database_url)):
        pass


async def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "forge-data").write_text("a file")
    assert "data folder" in await refused(tmp_path, ConfigError)
    with pytest.raises(ConfigError):
        holder(tmp_path / "forge-data")


# --- files


async def test_files_are_private(tmp_path: Path) -> None:
    async with rig(tmp_path) as api:
        data = api.server.settings.data_dir
        mode = stat.S_IMODE(data.stat().st_mode)
        assert mode == (0o711 if os.geteuid() == 0 else 0o700)
        for name in ("forge.db", "admin.key", "pod.sock", "server.lock"):
            assert stat.S_IMODE((data / name).stat().st_mode) == 0o600, name
        for file in data.glob("forge.db*"):
            assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    assert not (data / "pod.sock").exists()


def test_a_folder_that_was_there_keeps_its_mode(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with DataFolder(tmp_path):
        assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


# --- runs of the settings


async def test_a_changed_run_is_refused_before_another_is_created(tmp_path: Path) -> None:
    async with rig(tmp_path, run=parse_runs([run_table("old")], "")):
        pass
    runs = parse_runs([run_table("new"), run_table("old", seed=7)], "")
    told = await refused(tmp_path, Conflict, run=runs)
    assert "old" in told and "'seed'" in told
    async with rig(tmp_path) as api:
        assert [run["name"] for run in await api.items("/api/v1/runs")] == ["old"]


async def test_a_run_whose_harness_is_not_there_any_more_is_paused(tmp_path: Path, database_url: str) -> None:
    """Also one whose mixture a person set since; a run that has ended, or has its harness, is left alone."""
    for name in ("mine", "other"):
        (tmp_path / "harnesses" / name).mkdir(parents=True)
        text = f"name: {name}\nsummary: s\napi: chat\nargv: ['true']\n"
        (tmp_path / "harnesses" / name / "spec.yaml").write_text(text)
    all_of_it = on(database_url) | {"harness": HarnessSettings(paths=("harnesses",))}

    async def states(api: Rig) -> dict[str, str]:
        return {run["name"]: run["state"] for run in await api.items("/api/v1/runs")}

    async with rig(tmp_path, **all_of_it) as api:
        body: dict[str, Any] = {"taskset": "set", "tasks": [line("a")]}
        assert (await api.http.post("/api/v1/tasks", json=body)).status_code == 201
        await api.create_run("kept")
        await api.create_run("lost", harness="mine")
        await api.create_run("over", harness="mine")
        await api.create_run("mixed")
        for name, change in (("over", {"action": "cancel"}), ("mixed", {"harnesses": {"other": 1}})):
            assert (await api.http.patch(f"/api/v1/runs/{name}", json=change)).status_code == 200
    for _ in range(2):
        async with rig(tmp_path, **on(database_url)) as api:
            paused = {"kept": "active", "lost": "paused", "over": "cancelled", "mixed": "paused"}
            assert await states(api) == paused
            run = (await api.http.get("/api/v1/runs/lost")).json()
            assert "there is no harness 'mine'" in run["reason"]
            body = {"action": "resume"}
            await api.refused(400, "bad-spec", "PATCH", "/api/v1/runs/lost", json=body)
            await api.refused(409, "conflict", "PATCH", "/api/v1/runs/over", json=body)
            assert await states(api) == paused
    async with rig(tmp_path, **on(database_url)) as api:
        found = await api.http.patch("/api/v1/runs/mixed", json={"harnesses": {"react": 1}, **body})
        assert found.status_code == 200 and found.json()["state"] == "active"
    async with rig(tmp_path, **all_of_it) as api:
        assert (await api.http.patch("/api/v1/runs/lost", json=body)).json()["state"] == "active"


# --- life and death


async def test_a_failing_part_ends_the_server(tmp_path: Path) -> None:
    """A background task that should never end takes the server down with its reason."""
    plain = settings(tmp_path)
    stop = asyncio.Event()
    with pytest.raises(RuntimeError, match="deliveries has ended"):
        async with running(plain) as server, asyncio.timeout(120):
            server._background[0].cancel()
            await server.failed
    async with asyncio.timeout(120):
        task = asyncio.create_task(serve(plain, stop))
        await eventually((tmp_path / "forge-data" / "control.url").exists)
        stop.set()
        await task


async def test_a_start_that_fails_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from forge_server.scheduler.local import LocalBackend

    async def fail(*_: object) -> None:
        raise ConfigError("the backend does not start")

    before = asyncio.all_tasks()
    with monkeypatch.context() as patched:
        patched.setattr(LocalBackend, "start", fail)
        assert "does not start" in await refused(tmp_path, ConfigError)
    await eventually(lambda: not asyncio.all_tasks() - before)
    assert sorted(set(os.listdir(tmp_path / "forge-data")) - {"local"}) == [
        "admin.key",
        "forge.db",
        "forge.db.lock",
        "server.lock",
    ]
    async with rig(tmp_path):
        pass


async def test_a_stop_while_it_starts_gives_up_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from forge_server.controller.policies import Policies

    reached = asyncio.Event()

    async def hang(*_: object) -> None:
        reached.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(Policies, "serving", hang)
    stop = asyncio.Event()
    async with asyncio.timeout(120):
        task = asyncio.create_task(serve(settings(tmp_path), stop))
        await reached.wait()
        stop.set()
        await task
    assert holder(tmp_path / "forge-data") is None


async def test_nothing_keeps_running_after_a_stop(tmp_path: Path) -> None:
    before = asyncio.all_tasks()
    async with FakeEngine().serving() as engine, rig(tmp_path, **attached(engine.url)) as api:
        await api.ready()
        await api.create_run("r", harness="external")
    await eventually(lambda: not asyncio.all_tasks() - before)


async def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "LEAST", 1 << 60)
    async with rig(tmp_path, local=LocalSettings(min_sandbox="none", disk_mb=1 << 40)) as api:
        answer = await api.http.get("/readyz")
    assert answer.status_code == 503
    (found,) = [check for check in answer.json()["checks"] if check["name"] == "attempts"]
    assert not found["ok"] and "MiB left on the disk" in found["detail"]


# --- the engine watch


class Engine:
    ready, reason = False, "loading"


async def test_a_database_that_stumbles_does_not_end_the_engine_watch() -> None:
    engine, gate, told = Engine(), Gate(), []
    faults = 2

    async def apply(event: Event) -> Applied:
        nonlocal faults
        if faults:
            faults -= 1
            raise StoreError("the disk is full")
        told.append(type(event))
        return Applied()

    launches: list[bool] = []
    task = asyncio.create_task(EngineWatch(engine, gate, apply, launches.append).run())
    await eventually(lambda: gate.held)
    faults, engine.ready = 2, True
    await eventually(lambda: launches == [False, True])
    assert not gate.held
    assert told == [HoldBegan, HoldEnded] and launches == [False, True]
    assert not task.done()
    task.cancel()
