"""A managed engine's life as a process: started, adopted, ended with all it started, strangers left alone.

The program is a stand-in that listens like vLLM, starts a worker in its session and ignores TERM.
"""

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import uvloop
from engine_fake import until

from forge_server.domain.errors import EngineError
from forge_server.engine import process
from forge_server.engine.checkpoint import Policy
from forge_server.engine.managed import (
    GRAMMAR_PARSERS,
    ManagedHost,
    ManagedSpec,
    Record,
    command,
    environment,
    variables,
)

STAND_IN = f"""#!{sys.executable}
import http.server, os, signal, subprocess, sys
mode = os.environ.get("STAND_IN", "")
if mode == "die":
    print("no such model, giving up", flush=True)
    sys.exit(3)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
    def log_message(self, *args): pass
port = int(sys.argv[sys.argv.index("--port") + 1])
if mode == "deaf":
    signal.pause()
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def spec(tmp_path: Path) -> ManagedSpec:
    program = tmp_path / "stand-in"
    program.write_text(STAND_IN)
    program.chmod(0o755)
    return ManagedSpec(
        python=program,
        staged=tmp_path,
        folder=tmp_path / "engine",
        served_model="forge",
        dtype="float32",
        max_model_len=128,
        max_num_seqs=2,
        cpu=True,
        start_timeout_s=120,
        grace_s=0.2,
    )


@pytest.fixture
def policy(tmp_path: Path) -> Policy:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    return Policy(0, model)


@pytest.fixture
async def host(spec: ManagedSpec) -> AsyncIterator[ManagedHost]:
    host = ManagedHost(spec)
    yield host
    await host.discard()


def record_of(spec: ManagedSpec) -> Record:
    return msgspec.json.decode((spec.folder / "engine.json").read_bytes(), type=Record)


def running(spec: ManagedSpec, leader: int) -> list[int]:
    return process.members(leader, spec.folder.resolve() / "cwd")


def test_the_command_line_samples_and_reports_the_plain_distribution(spec: ManagedSpec) -> None:
    line = " ".join(command(spec, Path("M"), 7))
    for part in (
        "--logprobs-mode processed_logprobs",
        "--generation-config vllm",
        "--host 127.0.0.1 --port 7",
        "--dtype float32",
        "--worker-extension-cls forge_server.engine_ext.worker.ForgeWorkerExtension",
        "--enforce-eager",
    ):
        assert part in line
    assert "--tool-call-parser" not in line
    tools = msgspec.structs.replace(spec, tool_call_parser="hermes", cpu=False, flags=("--seed", "1"))
    line = " ".join(command(tools, Path("M"), 7))
    assert "--enable-auto-tool-choice --tool-call-parser hermes" in line and "--enforce-eager" not in line
    assert line.endswith("--seed 1")


def test_the_engine_never_sees_our_keys(spec: ManagedSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORGE_SECURITY__ADMIN_KEY", "secret")
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    found = environment(msgspec.structs.replace(spec, env={"OMP_NUM_THREADS": "3"}))
    assert "secret" not in found.values() and found["PYTHONPATH"] == str(spec.staged)
    assert found["OMP_NUM_THREADS"] == "3" and found["TORCH_COMPILE_DISABLE"] == "1"


@pytest.mark.parametrize(
    ("parser", "free"), [("", False), ("hermes", False), ("glm45", True), ("glm47", True)]
)
def test_no_tool_parser_samples_under_a_grammar_of_its_own(
    spec: ManagedSpec, parser: str, free: bool
) -> None:
    found = variables(msgspec.structs.replace(spec, tool_call_parser=parser))
    assert found.get("VLLM_ENFORCE_STRICT_TOOL_CALLING") == ("0" if free else None)


@pytest.mark.vllm
def test_the_tool_parsers_with_a_grammar_of_their_own_are_known(engine_env: Path) -> None:
    """As vLLM's sources have it: a default level there is what puts plain calls under a grammar."""
    [package] = engine_env.glob("lib/python*/site-packages/vllm/tool_parsers")
    files = [file.stem for file in package.glob("*.py") if "default_tool_strict_level =" in file.read_text()]
    table = (package / "__init__.py").read_text()
    named = re.findall(r'"([^"]+)": \(\s*"([^"]+)"', table)
    assert {name for name, file in named if file in files} == GRAMMAR_PARSERS


async def test_it_starts_and_ends_with_all_it_started(
    spec: ManagedSpec, host: ManagedHost, policy: Policy
) -> None:
    address = await host.up(policy)
    assert address.loaded == policy.path
    identity = record_of(spec).identity
    assert identity is not None
    await until(lambda: len(running(spec, identity.pid)) == 2)
    await host.discard()
    assert running(spec, identity.pid) == [] and not (spec.folder / "engine.json").exists()


async def test_the_next_server_adopts_it(spec: ManagedSpec, host: ManagedHost, policy: Policy) -> None:
    address = await host.up(policy)
    pid = record_of(spec).identity
    other = ManagedHost(spec)
    assert await other.up(policy) == address
    assert record_of(spec).identity == pid
    ended = asyncio.create_task(other.gone())
    assert pid is not None
    os.kill(pid.pid, signal.SIGKILL)
    await asyncio.wait_for(ended, 120)  # seen although it is not this host's child


async def test_other_flags_are_another_engine(spec: ManagedSpec, host: ManagedHost, policy: Policy) -> None:
    await host.up(policy)
    old = record_of(spec).identity
    assert old is not None
    other = ManagedHost(msgspec.structs.replace(spec, flags=("--seed", "1")))
    await other.up(policy)
    assert not process.is_alive(old)
    await other.discard()


async def test_orphaned_workers_are_ended_before_the_next_start(
    spec: ManagedSpec, host: ManagedHost, policy: Policy
) -> None:
    await host.up(policy)
    old = record_of(spec).identity
    assert old is not None
    await until(lambda: len(running(spec, old.pid)) == 2)
    os.kill(old.pid, signal.SIGKILL)
    await asyncio.wait_for(host.gone(), 120)
    assert len(running(spec, old.pid)) == 1
    await host.up(policy)
    assert running(spec, old.pid) == []


async def test_a_server_killed_between_start_and_record_finds_it_all_the_same(
    spec: ManagedSpec, host: ManagedHost, policy: Policy
) -> None:
    await host.up(policy)
    record = record_of(spec)
    assert record.identity is not None
    unfinished = msgspec.structs.replace(record, identity=None)
    (spec.folder / "engine.json").write_bytes(msgspec.json.encode(unfinished))
    other = ManagedHost(spec)
    await other.up(policy)
    assert not process.is_alive(record.identity)
    await other.discard()


async def test_a_stranger_with_the_recorded_pid_is_left_alone(
    spec: ManagedSpec, host: ManagedHost, policy: Policy
) -> None:
    stranger = await asyncio.create_subprocess_exec("sleep", "600", start_new_session=True)
    try:
        false = process.Identity(stranger.pid, 1, process.boot_id())
        spec.folder.mkdir()
        record = Record("old", "model", 1, false)
        (spec.folder / "engine.json").write_bytes(msgspec.json.encode(record))
        await host.up(policy)
        assert stranger.returncode is None
    finally:
        stranger.kill()
        await stranger.wait()


async def test_an_engine_that_dies_at_start_shows_its_last_words(spec: ManagedSpec, policy: Policy) -> None:
    host = ManagedHost(msgspec.structs.replace(spec, env={"STAND_IN": "die"}))
    with pytest.raises(EngineError, match="no such model, giving up"):
        await host.up(policy)


async def test_an_engine_that_never_listens_is_given_up_and_ended(spec: ManagedSpec, policy: Policy) -> None:
    host = ManagedHost(msgspec.structs.replace(spec, env={"STAND_IN": "deaf"}, start_timeout_s=1.0))
    with pytest.raises(EngineError, match="did not start within 1 s"):
        await host.up(policy)
    assert not process.sessions(spec.folder.resolve() / "cwd", "stand-in")


async def test_a_missing_environment_or_model_is_named(
    spec: ManagedSpec, policy: Policy, tmp_path: Path
) -> None:
    host = ManagedHost(msgspec.structs.replace(spec, python=tmp_path / "nowhere"))
    with pytest.raises(EngineError, match="env create engine"):
        await host.up(policy)
    with pytest.raises(EngineError, match="no model to start"):
        await host.up(Policy(0, tmp_path / "empty"))


def test_the_end_of_a_process_is_seen_on_the_servers_loop() -> None:
    """The server runs on uvloop, whose readers are not asyncio's."""
    child = subprocess.Popen(["sleep", "600"])

    async def watch() -> None:
        identity = process.identify(child.pid)
        assert identity is not None
        ended = asyncio.create_task(process.exited(identity))
        await asyncio.sleep(0)
        child.kill()
        await asyncio.wait_for(ended, 120)
        await asyncio.wait_for(process.exited(identity), 120)  # at once, when it is gone already

    try:
        uvloop.run(watch())
    finally:
        child.kill()
        child.wait()
