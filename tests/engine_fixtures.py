"""A tiny model and one real vLLM that serves it, for every test that needs them.

``tiny_model``   session: checkpoints ``step_00000`` .. ``step_00003`` of one tiny Qwen3 (untied, float32).
``vllm_server``  session: vLLM on it, started with exactly the command line of a managed engine.
``vllm_pool``    function: an EnginePool attached to it, settled on version 0 whatever ran before.
"""

import contextlib
import hashlib
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from forge_server import assets
from forge_server.engine import process
from forge_server.engine.attach import AttachedHost
from forge_server.engine.checkpoint import Policy
from forge_server.engine.managed import ManagedSpec, _free_port, command, environment
from forge_server.engine.pool import EnginePool

START_LIMIT_S = 400.0


@dataclass(frozen=True)
class TinyModel:
    """``checkpoint(k)`` is a whole checkpoint folder; ``initial`` the Hugging Face folder of number 0."""

    folder: Path

    def checkpoint(self, number: int) -> Path:
        return self.folder / f"step_{number:05d}"

    def sha256(self, number: int) -> str:
        return hashlib.sha256(self.checkpoint(number).joinpath("manifest.json").read_bytes()).hexdigest()

    def policy(self, number: int) -> Policy:
        return Policy(number, self.checkpoint(number), self.sha256(number))

    @property
    def initial(self) -> Path:
        return self.checkpoint(0) / "huggingface"


@dataclass(frozen=True)
class VllmServer:
    """A running vLLM: base URL without ``/v1``, model name, and the checkpoints it fits."""

    url: str
    model: str
    tiny: TinyModel
    log: Path


@pytest.fixture(scope="session")
def tiny_model(engine_env: Path, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    folder = tmp_path_factory.mktemp("tiny")
    script = Path(__file__).with_name("tiny_model.py")
    line = [str(engine_env / "bin" / "python"), str(script), str(folder), "0", "1", "2", "3"]
    subprocess.run(line, check=True, timeout=300, capture_output=True)
    return TinyModel(folder)


def managed_spec(engine_env: Path, tiny: TinyModel, folder: Path) -> ManagedSpec:
    """How the tests start vLLM; small, float32."""
    return ManagedSpec(
        python=engine_env / "bin" / "python",
        staged=assets.stage_package("engine_ext", folder / "staged"),
        folder=folder,
        served_model="forge",
        dtype="float32",
        max_model_len=4096,
        max_num_seqs=8,
        cpu=True,
        tool_call_parser="hermes",
        start_timeout_s=START_LIMIT_S,
        env={"OMP_NUM_THREADS": "1"},
    )


@pytest.fixture(scope="session")
def vllm_server(
    engine_env: Path, tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmServer]:
    folder = tmp_path_factory.mktemp("vllm")
    spec = managed_spec(engine_env, tiny_model, folder)
    port = _free_port()
    log = folder / "engine.log"
    with log.open("wb") as out:
        server = subprocess.Popen(
            command(spec, tiny_model.initial, port),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=environment(spec),
            start_new_session=True,
        )
    try:
        _wait_listening(f"http://127.0.0.1:{port}/health", server, log)
        yield VllmServer(f"http://127.0.0.1:{port}", spec.served_model, tiny_model, log)
    finally:
        _end(server, folder)


@pytest.fixture
async def vllm_pool(vllm_server: VllmServer) -> AsyncIterator[EnginePool]:
    pool = EnginePool(
        [AttachedHost(vllm_server.url)],
        model=vllm_server.model,
        policy=vllm_server.tiny.policy(0),
        request_timeout_s=120,
        drain_s=60,
        start_timeout_s=120,
    )
    pool.start()
    await pool.wait_ready(120)
    yield pool
    await pool.close()


def _wait_listening(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        assert server.poll() is None, f"vLLM ended while starting:\n{log.read_text()[-3000:]}"
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.25)
    raise AssertionError(f"vLLM did not start within {START_LIMIT_S:g} s:\n{log.read_text()[-3000:]}")


def _end(server: subprocess.Popen[bytes], folder: Path) -> None:
    """TERM, then KILL, everything of the server's session."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in process.members(server.pid, folder.resolve()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + 20
        while process.members(server.pid, folder.resolve()) and time.monotonic() < deadline:
            server.poll()
            time.sleep(0.05)
    server.wait(timeout=20)
