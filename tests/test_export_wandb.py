"""The offline run for Weights & Biases: written by its library, read back, and found by its ``sync``."""

import json
import os
import socket
import struct
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from api_rig import rig
from wandb.proto.wandb_internal_pb2 import Record

from forge_server.commands.data import export
from forge_server.domain.errors import ConfigError
from forge_server.export.whole import ExportError
from forge_server.store import tables as t

pytestmark = pytest.mark.timeout(180)

BLOCK = 32768
FIGURES = (
    (1, "controller", {"reward/mean": 0.25, "nothing": None}),
    (1, "trainer", {"loss": -0.5, "lr": 1e-5}),
    (2, "controller", {"reward/mean": 0.5}),
    (300, "trainer", {"loss": 0.125}),
)


def records(data: bytes) -> Iterator[Record]:
    """LevelDB's log format behind seven bytes of their own."""
    assert data[:4] == b":W&B"
    at, whole = 7, b""
    while at < len(data):
        left = BLOCK - at % BLOCK
        if left < 7:
            at += left
            continue
        _crc, length, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # the whole of a record, or its last part
            yield Record.FromString(whole)
            whole = b""


def history(data: bytes) -> list[dict[str, float]]:
    return [
        {
            "/".join(item.nested_key) or item.key: json.loads(item.value_json)
            for item in record.history.item
            if item.nested_key != ["_runtime"]  # of the export
        }
        for record in records(data)
        if record.WhichOneof("record_type") == "history"
    ]


@pytest.fixture
def nobody() -> Iterator[tuple[str, threading.Event]]:
    """An address at which nobody must call, and whether somebody has."""
    called = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def wait() -> None:
            try:
                while True:
                    listening.accept()[0].close()
                    called.set()
            except OSError:
                return

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", called
        listening.shutdown(socket.SHUT_RDWR)
        thread.join(30)


@pytest.fixture
async def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A run with figures, in the database of ``forge.toml`` here."""
    async with rig(tmp_path) as api:
        made = await api.create_run("r")

        def rows(c: sa.Connection) -> None:
            c.execute(sa.update(t.runs).values(created_at=1000.0))
            for step, source, metrics in FIGURES:
                row = {"run_id": made["id"], "step": step, "source": source}
                c.execute(sa.insert(t.step_metrics).values(metrics=metrics, at=1000.5 + step, **row))

        await api.server.store.write(rows)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "forge.toml").touch()
    return made


def test_figures_are_read_back(
    run: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    nobody: tuple[str, threading.Event],
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Whatever the environment says to the library, and whatever else is in the process."""
    monkeypatch.setitem(sys.modules, "openai", types.ModuleType("openai"))  # it would be told to use another
    url, called = nobody
    hostile = {
        "WANDB_MODE": "online",
        "WANDB_RUN_ID": "other",
        "WANDB_DIR": "elsewhere",
        "WANDB_ENTITY": "someone",
        "WANDB_SERVICE": "3-1-tcp-localhost-1-2",
        "WANDB_BASE_URL": url,
    }
    for name, value in {**hostile, "HTTPS_PROXY": url, "HTTP_PROXY": url, "NO_PROXY": ""}.items():
        monkeypatch.setenv(name, value)
    export("r", "wandb", None, None, None)
    said = capfd.readouterr()
    assert said.out.replace("\n", "").endswith("run-" + run["id"] + ".wandb: 5 figures")
    assert "wandb" not in said.err
    folder = tmp_path / "r.wandb" / f"offline-run-19700101_001640-{run['id']}"
    assert [path.name for path in folder.iterdir()] == [f"run-{run['id']}.wandb"]
    assert {path.name for path in tmp_path.iterdir()} == {"forge-data", "forge.toml", "r.wandb"}
    data = (folder / f"run-{run['id']}.wandb").read_bytes()
    told = history(data)
    assert told == [
        {
            "_step": 1,
            "_timestamp": 1001.5,
            "controller/reward/mean": 0.25,
            "trainer/loss": -0.5,
            "trainer/lr": 1e-5,
        },
        {"_step": 2, "_timestamp": 1002.5, "controller/reward/mean": 0.5},
        {"_step": 300, "_timestamp": 1300.5, "trainer/loss": 0.125},
    ]
    assert [*records(data)][-1].WhichOneof("record_type") == "exit"
    kinds = {record.WhichOneof("record_type"): record for record in records(data)}
    about = kinds["run"].run
    assert (about.run_id, about.display_name, about.project) == (run["id"], "r", "forge-server")
    assert about.job_type == "record"
    config = {item.key: json.loads(item.value_json) for item in about.config.update}
    assert config["harness"] == "react" and config["steps"] == 1
    assert not {"environment", "files", "output", "stats"} & kinds.keys()
    for private in (tmp_path, sys.prefix, Path(__file__).parent):
        assert str(private).encode() not in data
    assert about.host == "forge-server" and not called.is_set()
    assert "WANDB_ERROR_REPORTING" not in os.environ


def test_sync_finds_it_and_it_is_written_again(run: dict[str, Any], tmp_path: Path) -> None:
    export("r", "wandb", "out", None, None)
    (file,) = (tmp_path / "out").glob("*/*.wandb")
    assert run["id"] in to_sync()
    marker = file.with_name(f"{file.name}.synced")
    marker.touch()
    assert "No runs to sync" in to_sync()
    before = history(file.read_bytes())
    export("r", "wandb", "out", None, None)
    assert [*(tmp_path / "out").glob("*/*")] == [file]
    assert history(file.read_bytes()) == before and run["id"] in to_sync()


def to_sync() -> str:
    """What its command line would upload."""
    done = subprocess.run(
        [sys.executable, "-m", "wandb", "sync", "--dry-run", "out"],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "WANDB_ERROR_REPORTING": "false"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_what_cannot_be_written_is_told(
    run: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ExportError, match="min-reward"):
        export("r", "wandb", None, 0.5, None)
    with pytest.raises(ExportError, match="choose another place"):
        export("r", "wandb", "forge.toml", None, None)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(
        ConfigError, match=r"--format wandb needs wandb, .*pip install 'forge-server\[wandb\]'"
    ):
        export("r", "wandb", None, None, None)
    assert not (tmp_path / "r.wandb").exists()
