"""A harness outside of any sandbox, behind the runner's own relay, at a server that is a process of its own: what a pod
is to a server that dies and comes back. The model is scripted.
"""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from harness_policies import INSTRUCTION
from ports import free_port
from scripted_engine import ScriptedEngine

from forge_server.client.http import ForgeClient
from forge_server.client.rollout import rollout
from forge_server.environments import path_of
from forge_server.export import reports
from forge_server.export.records import attempts, find_run
from forge_server.harness.plan import PlanLimits, TaskInput, build_plan
from forge_server.harness.spec import Spec
from forge_server.runner.place import fill
from forge_server.runner.relay import Relay
from forge_server.store import tables as t
from forge_server.store.database import Store
from forge_server.trajectory.attempt import cut
from forge_server.trajectory.check import Violation

LIMIT_S = 300.0


class ServerProcess:
    """``forge-server up`` on fixed ports, to be killed and started again."""

    def __init__(self, folder: Path, engine: ScriptedEngine) -> None:
        self.folder, self._window = folder, engine.window
        ports = [free_port(), free_port()]
        self.url, self._control = (f"http://127.0.0.1:{port}" for port in ports)
        (folder / "forge.toml").write_text(
            f"[server]\nport = {ports[0]}\ncontrol_port = {ports[1]}\n"
            f'[engine]\nkind = "attach"\nurl = "{engine.url}"\nmax_model_len = {engine.window}\n'
        )
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when it serves."""
        names = {name: text for name, text in os.environ.items() if not name.startswith("FORGE_")}
        with open(self.folder / "log", "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "forge_server.cli", "up"], cwd=self.folder, stderr=log, env=names
            )
        _wait(self._ready)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(LIMIT_S)

    def client(self) -> ForgeClient:
        return ForgeClient(self._control, (self.folder / "forge-data" / "admin.key").read_text().strip())

    def _ready(self) -> bool:
        assert self._process is not None and self._process.poll() is None, (self.folder / "log").read_text()
        with contextlib.suppress(Exception), self.client() as client:
            return bool(client.ready().ready)
        return False


@dataclass(frozen=True)
class Outside:
    """What became of it. ``calls``: rows by seq."""

    exit_code: int
    work: Path
    log: str
    calls: list[Any]
    samples: int
    violations: list[Violation]


@contextlib.contextmanager
def server_process(folder: Path, engine: ScriptedEngine) -> Iterator[ServerProcess]:
    served = ServerProcess(folder, engine)
    served.start()
    try:
        yield served
    finally:
        served.kill()


def run_outside(served: ServerProcess, spec: Spec, folder: Path) -> Outside:
    """The standard task, to its end. The rollout is one that registered itself."""
    work, home = folder / "work", folder / "home"
    work.mkdir(parents=True)
    limits = PlanLimits(
        model="forge",
        heartbeat_s=5.0,
        agent_s=600.0,
        verify_s=60.0,
        grace_s=5.0,
        pids=512,
        memory_mb=4096,
        window=131_072,
        output=8192,
    )
    plan = build_plan(spec, TaskInput(instruction=INSTRUCTION, workdir=str(work)), limits)
    assert spec.install is not None
    env = path_of(spec.install.env or spec.name)
    with (
        served.client() as client,
        socket.create_server(("127.0.0.1", 0)) as door,
        rollout(client, harness=spec.name) as external,
    ):
        registered = external.registration
        relay = Relay(door, served.url, registered.attempt_id)
        relay.start()
        values = {
            "base_url": f"http://127.0.0.1:{door.getsockname()[1]}/a/{registered.attempt_id}",
            "agent_key": registered.agent_key,
            "model": plan.model,
            "instruction": plan.instruction,
            "workdir": str(work),
            "home": str(home),
            "env": str(env),
            "python": sys.executable,
            "forge": "",
        }
        for file in plan.files:
            path = home / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(fill(file.content, values))
        home.mkdir(exist_ok=True)
        plain = {"PATH": f"{env}/bin:/usr/local/bin:/usr/bin:/bin", "HOME": str(home), "LANG": "C.UTF-8"}
        done = subprocess.run(
            [fill(part, values) for part in plan.argv],
            input=fill(plan.stdin or "", values).encode(),
            cwd=work,
            env=plain | {name: fill(text, values) for name, text in plan.env.items()},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=LIMIT_S,
            check=False,
        )
        read, lost = relay.receipts.final(5.0)
        relay.close()
        external._post("events", {"events": [{"kind": "receipts", "read": read, "lost": lost}]})
        external.reward(1.0)
        external.finish(done.returncode)
    store = Store.open(f"sqlite:///{served.folder / 'forge-data' / 'forge.db'}", lock=False)
    try:
        run = find_run(store, "external", limits.window)
        (attempt,) = [one for one in attempts(store, run) if one.id == registered.attempt_id]
        rows = [call.row for call in attempt.calls]
        return Outside(
            done.returncode,
            work,
            done.stdout.decode(errors="replace"),
            _calls(store, registered.attempt_id),
            len(cut(rows, run.limit).samples),
            reports.check(store, run).violations,
        )
    finally:
        store.close()


def _calls(store: Store, attempt_id: str) -> list[Any]:
    query = sa.select(t.calls).where(t.calls.c.attempt_id == attempt_id).order_by(t.calls.c.seq)
    return list(store.read_now(lambda c: c.execute(query).all()))


def _wait(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)
