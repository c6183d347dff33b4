"""``forge-server up`` as a process: one sentence when it cannot start, a clean and bounded stop on a signal."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from api_rig import line, run_table
from engine_fake import FakeEngine

from forge_server.client.http import ForgeClient
from forge_server.client.schemas import TaskCreate

FORGE = [sys.executable, "-m", "forge_server.cli"]
QUIET = "[server]\nport = 0\ncontrol_port = 0\n"
LIMIT_S = 180.0


def environ() -> dict[str, str]:
    return {name: text for name, text in os.environ.items() if not name.startswith("FORGE_")}


@contextlib.contextmanager
def up(folder: Path, text: str = QUIET) -> Iterator["subprocess.Popen[str]"]:
    """The server as a process, once it answers."""
    (folder / "forge.toml").write_text(text)
    stale = address_in(folder)
    process = subprocess.Popen([*FORGE, "up"], cwd=folder, stderr=subprocess.PIPE, text=True, env=environ())
    try:
        wait(lambda: address_in(folder) not in ("", stale) or process.poll() is not None)
        assert process.poll() is None, process.communicate()[1]
        yield process
    finally:
        process.kill()
        process.communicate(timeout=LIMIT_S)


def address_in(folder: Path) -> str:
    try:
        return (folder / "forge-data" / "control.url").read_text()
    except FileNotFoundError:
        return ""


def wait(holds: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    end = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def refused(folder: Path, text: str, code: int, *words: str) -> str:
    """It does not start: one sentence on stderr, no log, this exit code."""
    if text:
        (folder / "forge.toml").write_text(text)
    done = subprocess.run(
        [*FORGE, "up"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=environ(),
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert done.stdout == "" and done.stderr.startswith("forge-server: "), done.stderr
    assert done.stderr.count("\n") == 1 and "Traceback" not in done.stderr, done.stderr
    for word in words:
        assert word in done.stderr
    return done.stderr


def test_what_cannot_start(tmp_path: Path) -> None:
    refused(tmp_path, "[server]\nprot = 1\n", 2, "did you mean 'port'?")
    refused(
        tmp_path, '[engine]\nkind = "attach"\nurl = "http://127.0.0.1:1"\nmodel = "none"\n', 2, "config.json"
    )
    refused(tmp_path, QUIET + '[harness]\npaths = ["none"]\n', 1, "[harness] paths")
    assert os.listdir(tmp_path) == ["forge.toml"]  # nothing half done
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused(tmp_path, f"[server]\nport = {port}\ncontrol_port = 0\n", 2, str(port), "in use")
    refused(tmp_path, QUIET + '[store]\nurl = "postgresql://127.0.0.1:1/none"\n', 1, "127.0.0.1")
    assert not (tmp_path / "forge-data" / "forge.db").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_it_cleanly(tmp_path: Path, number: signal.Signals) -> None:
    with up(tmp_path) as process:
        url = (tmp_path / "forge-data" / "control.url").read_text().strip()
        with ForgeClient(url, (tmp_path / "forge-data" / "admin.key").read_text().strip()) as client:
            assert client.runs() == []
        began = time.monotonic()
        process.send_signal(number)
        _, err = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, err
        assert "Traceback" not in err and "stopping" in err
        assert time.monotonic() - began < LIMIT_S
    left = set(os.listdir(tmp_path / "forge-data"))
    assert left == {"admin.key", "forge.db", "forge.db.lock", "server.lock", "local"}


def test_a_second_server_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    with up(tmp_path) as process:
        refused(tmp_path, "", 2, str(process.pid), "data_dir")
        assert process.poll() is None
        assert (tmp_path / "forge-data" / "pod.sock").exists()
        with ForgeClient(
            (tmp_path / "forge-data" / "control.url").read_text().strip(),
            (tmp_path / "forge-data" / "admin.key").read_text().strip(),
        ) as client:
            assert not client.ready().ready  # it has no engine


def test_a_second_server_on_the_same_database_is_refused(tmp_path: Path) -> None:
    """In a folder of its own, so that only the database is shared."""
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    with up(one) as process:
        database = one / "forge-data" / "forge.db"
        said = refused(two, f'{QUIET}[store]\nurl = "sqlite:///{database}"\n', 1, str(database))
        assert f"another forge-server (process {process.pid}) uses this database" in said
        assert "stop it first, or give this one its own [store] url" in said
        assert process.poll() is None


def test_after_a_kill_it_starts_again(tmp_path: Path) -> None:
    with up(tmp_path) as process:
        process.kill()
        process.wait(LIMIT_S)
        assert address_in(tmp_path)  # stale
    with up(tmp_path) as process:
        process.terminate()
        assert process.wait(LIMIT_S) == 0


def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    """Here the stop takes long, since a request that never ends is given its grace."""
    with up(tmp_path) as process:
        url = (tmp_path / "forge-data" / "control.url").read_text().strip()
        host, _, port = url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), LIMIT_S) as hanging:
            body = b"POST /api/v1/runs HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %s\r\ncontent-length: 9\r\n\r\n"
            key = (tmp_path / "forge-data" / "admin.key").read_text().strip()
            hanging.sendall(body % key.encode())
            with ForgeClient(url, key) as client:
                client.runs()  # the server has looked at its sockets since
            process.terminate()
            assert process.stderr is not None
            assert any('"stopping"' in text for text in process.stderr)
            process.terminate()
            assert process.wait(LIMIT_S) == 128 + signal.SIGTERM


def test_a_signal_while_it_starts(tmp_path: Path) -> None:
    """The database does not answer: the start is given up, and the exit does not wait for it for ever."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        (tmp_path / "forge.toml").write_text(QUIET + f'[store]\nurl = "postgresql://u@127.0.0.1:{port}/x"\n')
        process = subprocess.Popen(
            [*FORGE, "up"], cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=environ()
        )
        try:
            silent.settimeout(LIMIT_S)
            connection, _ = silent.accept()
            with connection:
                process.terminate()
                assert process.wait(LIMIT_S) == 0
        finally:
            process.kill()
            process.communicate(timeout=LIMIT_S)


async def test_a_signal_while_a_harness_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The installation is ended, and the stop waits for none."""
    programs, spec = tmp_path / "bin", tmp_path / "harnesses" / "slow"
    programs.mkdir()
    spec.mkdir(parents=True)
    began = tmp_path / "npm.pid"
    npm = programs / "npm"
    npm.write_text(f"#!/bin/sh\necho $$ > {began}.new\nmv {began}.new {began}\nexec sleep 1000\n")
    npm.chmod(0o755)
    spec.joinpath("spec.yaml").write_text(
        "name: slow\nsummary: s\napi: chat\ninstall: {npm: [slow], size_mb: 1}\nargv: ['true']\n"
    )
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    async with FakeEngine().serving() as engine:
        text = f'[engine]\nkind = "attach"\nurl = "{engine.url}"\n'
        text += '[local]\nmin_sandbox = "none"\n[harness]\npaths = ["harnesses"]\n'
        await asyncio.to_thread(stop_while_installing, tmp_path, QUIET + text, began)


def stop_while_installing(folder: Path, text: str, began: Path) -> None:
    with up(folder, text) as process:
        key = (folder / "forge-data" / "admin.key").read_text().strip()
        with ForgeClient(address_in(folder).strip(), key) as client:
            client.create_tasks(TaskCreate(taskset="set", tasks=[line("a")]))
            client.create_run(run_table("run", harness="slow", groups=1, n=4))
            wait(began.exists)
        npm = Path("/proc", began.read_text().strip())
        assert npm.exists()
        process.terminate()
        assert process.wait(LIMIT_S / 2) == 0
        assert not npm.exists()


def test_logs_of_a_service_are_json_lines(tmp_path: Path) -> None:
    import json

    with up(tmp_path) as process:
        process.terminate()
        _, err = process.communicate(timeout=LIMIT_S)
    records = [json.loads(text) for text in err.splitlines()]
    up_record = next(record for record in records if record["event"] == "up")
    assert up_record["level"] == "info" and up_record["control"].startswith("http://")
    assert all("timestamp" in record for record in records)
    assert (tmp_path / "forge-data" / "admin.key").read_text().strip() not in err
