"""A whole forge-server as its user has it: a folder with forge.toml, `forge-server up` as a process, the CLI and
the API beside it. Real vLLM, real veRL, real sandboxes; only the model is tiny and random."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from forge_server.client.http import ForgeClient, ServerUnreachable
from forge_server.client.schemas import RunView, TaskCreate
from forge_server.engine.managed import Record

FORGE = [sys.executable, "-m", "forge_server.cli"]

SETTINGS = """
[server]
port = 0
control_port = 0
[engine]
kind = "managed"
model = "{model}"
dtype = "float32"
max_model_len = {window}
max_num_seqs = 16
[scheduler]
in_flight = 4
heartbeat_s = 1.0
[trainer]
threads = 1
lease_s = 20.0
"""

VERIFIER = """#!/bin/bash
# an arbitrary reward, never the same twice: no group is without a signal, so every step trains the groups it drew
echo "0.$(date +%N)" > /logs/verifier/reward.txt
"""


def tasks(count: int) -> list[dict[str, Any]]:
    return [
        {
            "name": f"task-{i}",
            "instruction": f"Write {i} to answer.txt",
            "files": {"note.txt": f"{i}\n"},
            "verify": {"script": VERIFIER},
        }
        for i in range(count)
    ]


def run_settings(name: str, **changes: Any) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "name": name,
        "taskset": "loop",
        "harness": "react",
        "steps": 2,
        "groups": 2,
        "n": 3,
        "max_seconds": 120.0,
        "max_calls": 4,
        "max_completion_tokens": 24,
        "overrides": ["actor_rollout_ref.actor.optim.lr=1e-4"],
    }
    return plain | changes


class Lab:
    """One folder and the server in it."""

    def __init__(self, folder: Path, model: Path, window: int = 8192) -> None:
        self.folder = folder
        self.data = folder / "forge-data"
        (folder / "forge.toml").write_text(SETTINGS.format(model=model, window=window))
        self._process: subprocess.Popen[bytes] | None = None

    def up(self, limit_s: float = 300.0) -> int:
        """Start the server; returns its pid once the control listener answers."""
        (self.data / "control.url").unlink(missing_ok=True)
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen([*FORGE, "up"], cwd=self.folder, stdout=log, stderr=log)
        self.wait("the server answers", self._answers, limit_s)
        return self._process.pid

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.log()
        if not (self.data / "control.url").exists():
            return False
        with contextlib.suppress(ServerUnreachable), self.client() as client:
            client.runs()
            return True
        return False

    def kill(self) -> None:
        """SIGKILL, as the kernel does it when memory runs out."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(120)

    def down(self) -> None:
        """An orderly stop: everything that must not outlive the server is gone on return."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(120)

    def client(self) -> ForgeClient:
        url = (self.data / "control.url").read_text().strip()
        return ForgeClient(url, (self.data / "admin.key").read_text().strip())

    def cli(self, *words: str, ok: bool = True) -> str:
        done = subprocess.run(
            [*FORGE, *words], cwd=self.folder, capture_output=True, text=True, timeout=900, check=False
        )
        assert (done.returncode == 0) is ok, done.stdout + done.stderr
        return done.stdout + done.stderr

    def import_tasks(self, count: int = 6) -> None:
        with self.client() as client:
            client.create_tasks(TaskCreate(taskset="loop", tasks=tasks(count)))

    def run(self, name: str) -> RunView:
        with self.client() as client:
            return client.run(name)

    def finish(self, name: str, limit_s: float = 600.0) -> RunView:
        """Wait until the run has completed."""

        def over() -> bool:
            view = self.run(name)
            assert view.state not in ("paused", "failed", "cancelled"), f"{view.reason}\n{self.log()}"
            return view.state == "completed"

        self.wait(f"run {name} completes", over, limit_s)
        return self.run(name)

    def wait(self, what: str, holds: Callable[[], bool], limit_s: float) -> None:
        end = time.monotonic() + limit_s
        while not holds():
            assert time.monotonic() < end, f"not within {limit_s} s: {what}\n{self.log()}"
            time.sleep(0.1)

    def log(self) -> str:
        return (self.folder / "server.log").read_text()[-6000:]

    def query(self, text: str) -> list[Any]:
        engine = sa.create_engine(f"sqlite:///{self.data / 'forge.db'}")
        try:
            with engine.connect() as connection:
                return list(connection.execute(sa.text(text)).all())
        finally:
            engine.dispose()

    def engine_pid(self) -> int:
        import msgspec

        record = msgspec.json.decode((self.data / "engine" / "engine.json").read_bytes(), type=Record)
        assert record.identity is not None
        return record.identity.pid

    def trainer_pids(self, run_id: str) -> list[int]:
        return with_environment(f"FORGE_TRAINER_RUN={run_id}")

    def leftovers(self) -> list[str]:
        """Command lines of every process that still works for this folder."""
        found = []
        for pid in os.listdir("/proc"):
            if not pid.isdigit():
                continue
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                cwd = os.readlink(f"/proc/{pid}/cwd")
                if str(self.folder) in words or cwd.startswith(str(self.folder)):
                    found.append(f"{pid} {words}")
        return found


def with_environment(mark: str) -> list[int]:
    found = []
    for pid in os.listdir("/proc"):
        if pid.isdigit():
            with contextlib.suppress(OSError):
                if mark.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    found.append(int(pid))
    return found


def metrics(lab: Lab, run: str) -> dict[tuple[int, str], dict[str, Any]]:
    with lab.client() as client:
        return {(m.step, m.source): m.metrics for m in client.metrics(run)}


def report(lab: Lab, run: str) -> dict[str, Any]:
    """The data check's report; fails on a violation."""
    text = lab.cli("check", "--data", run, "--json")
    found: dict[str, Any] = json.loads(text)
    assert found["violations"] == []
    return found["counts"]
