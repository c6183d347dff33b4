"""vLLM as a process of ours: started in its own environment, adopted after a restart, ended with all it
started.

The process lives in a session and a working folder of its own and outlives a killed server by design: a
record (pid, start time, boot, port, model, digest of the command) lets the next server adopt it. The
record is written before the start and completed after it, so that a server killed in between still
finds the process.
"""

import asyncio
import contextlib
import hashlib
import os
import socket
import subprocess
from collections import deque
from pathlib import Path

import msgspec

from forge_server.domain.engine import EngineRefused, EngineUnavailable
from forge_server.domain.errors import EngineError
from forge_server.engine import process
from forge_server.engine.checkpoint import Policy
from forge_server.engine.client import EngineClient
from forge_server.engine.hosts import Address

PROGRAM = "vllm.entrypoints.openai.api_server"
EXTENSION = "forge_server.engine_ext.worker.ForgeWorkerExtension"

GRAMMAR_PARSERS = frozenset({"glm45", "glm47"})
"""vLLM's tool parsers that put every call with tools under a grammar, also where no request asks for one."""


class ManagedSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How to start vLLM. ``python`` is the engine environment's interpreter, ``staged`` the folder with
    our worker extension for PYTHONPATH, ``folder`` where record, log and working folder go."""

    python: Path
    staged: Path
    folder: Path
    served_model: str
    dtype: str
    max_model_len: int
    max_num_seqs: int
    cpu: bool
    tool_call_parser: str = ""
    reasoning_parser: str = ""
    flags: tuple[str, ...] = ()
    env: dict[str, str] = {}
    start_timeout_s: float = 900.0
    grace_s: float = 15.0


def command(spec: ManagedSpec, model: Path, port: int) -> list[str]:
    """vLLM's command line. ``vllm serve`` is not used: it does not start in the CPU wheel."""
    line = [str(spec.python), "-W", "ignore", "-m", PROGRAM, "--model", str(model)]
    line += ["--host", "127.0.0.1", "--port", str(port)]
    line += ["--served-model-name", spec.served_model, "--dtype", spec.dtype]
    line += ["--max-model-len", str(spec.max_model_len), "--max-num-seqs", str(spec.max_num_seqs)]
    # logprobs of the distribution that was sampled, untouched by the model's own sampling defaults
    line += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    line += ["--worker-extension-cls", EXTENSION, "--disable-uvicorn-access-log"]
    line.append("--enable-scale-out")  # render, generate and derender, for token-exact forwarding
    if spec.cpu:
        # a seeded request whose prefill is cut in two kills the CPU worker ("CPU Generator does not use offset")
        budget = max(spec.max_model_len, 2048)
        line += ["--enforce-eager", "--no-enable-chunked-prefill", "--max-num-batched-tokens", str(budget)]
    if spec.tool_call_parser:
        line += ["--enable-auto-tool-choice", "--tool-call-parser", spec.tool_call_parser]
    if spec.reasoning_parser:
        line += ["--reasoning-parser", spec.reasoning_parser]
    return [*line, *spec.flags]


def environment(spec: ManagedSpec) -> dict[str, str]:
    """The engine's environment: ours without our keys and settings, plus what vLLM needs."""
    inherited = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("FORGE_", "PYTHON")) and key != "VIRTUAL_ENV"
    }
    return inherited | variables(spec)


def variables(spec: ManagedSpec) -> dict[str, str]:
    """What vLLM needs in its environment."""
    fixed = {
        "PYTHONPATH": str(spec.staged),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # pause, reload, cache resets; hence loopback only
    }
    if spec.cpu:
        # without the first the first request with logprobs compiles for half a minute
        fixed |= {"TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    if spec.tool_call_parser in GRAMMAR_PARSERS:
        fixed["VLLM_ENFORCE_STRICT_TOOL_CALLING"] = "0"
    return fixed | spec.env


class Record(msgspec.Struct, frozen=True):
    """``engine.json``: the process that was started last; ``identity`` None: it was about to be."""

    digest: str
    model: str
    port: int
    identity: process.Identity | None = None


def running_engine(folder: Path) -> str | None:
    """The URL of the engine that runs with its record in ``folder``; None when there is none."""
    try:
        record = msgspec.json.decode((folder / "engine.json").read_bytes(), type=Record)
    except (OSError, msgspec.MsgspecError):
        return None
    if record.identity is None or not process.is_alive(record.identity):
        return None
    return f"http://127.0.0.1:{record.port}"


class ManagedHost:
    """One vLLM process after the other, at most one at a time."""

    def __init__(self, spec: ManagedSpec) -> None:
        self._spec = spec
        self._cwd = spec.folder.resolve() / "cwd"
        self._record_file = spec.folder / "engine.json"
        self.log_file = spec.folder / "engine.log"
        self._child: subprocess.Popen[bytes] | None = None
        self._identity: process.Identity | None = None

    async def up(self, policy: Policy) -> Address:
        """Adopt the engine that runs, if it was started as we would, else start one. Raises EngineError."""
        record = self._read_record()
        if (
            record
            and record.identity
            and record.digest == self._digest()
            and process.is_alive(record.identity)
        ):
            self._identity = record.identity
            await self._listening(record.port)
            return self._address(record)
        await self.discard()
        return await self._start(policy)

    async def gone(self) -> None:
        if self._identity is not None:
            await process.exited(self._identity)
            self._reap()

    async def discard(self) -> None:
        """End the process and all that it started, also what an earlier server left behind."""
        record = self._read_record()
        leaders = process.sessions(self._cwd, PROGRAM)
        if record and record.identity and record.identity.boot == process.boot_id():
            leaders.add(record.identity.pid)  # the leader may be gone and its workers still there
        for leader in leaders:
            await process.end_session(leader, self._cwd, grace_s=self._spec.grace_s)
        self._reap()
        self._identity = None
        self._record_file.unlink(missing_ok=True)

    async def _start(self, policy: Policy) -> Address:
        weights = policy.weights
        if weights is None or not (weights / "config.json").exists():
            raise EngineError(
                "there is no model to start the engine with",
                where=str(weights),
                mend="set [engine] model to a Hugging Face folder",
            )
        record = Record(self._digest(), str(weights), _free_port())
        self._cwd.mkdir(parents=True, exist_ok=True)
        self._write_record(record)
        self._child = self._launch(command(self._spec, weights, record.port))
        self._identity = process.identify(self._child.pid)
        record = msgspec.structs.replace(record, identity=self._identity)
        self._write_record(record)
        await self._listening(record.port)
        return self._address(record)

    def _launch(self, line: list[str]) -> subprocess.Popen[bytes]:
        """Not asyncio's subprocess: that would kill the engine when the loop is closed."""
        if self.log_file.exists():
            self.log_file.replace(self.log_file.with_suffix(".log.1"))
        try:
            with self.log_file.open("wb") as log:
                return subprocess.Popen(
                    line,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=self._cwd,
                    env=environment(self._spec),
                    start_new_session=True,
                )
        except OSError as error:
            raise EngineError(
                f"the engine cannot be started ({error.strerror})",
                where=str(self._spec.python),
                mend="run `forge-server env create engine`",
            ) from error

    async def _listening(self, port: int) -> None:
        """Wait until the process answers ``/health``. Raises EngineError when it ends or takes too long."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._spec.start_timeout_s
        client = EngineClient(f"http://127.0.0.1:{port}", self._spec.served_model)
        try:
            while self._identity is not None and process.is_alive(self._identity):
                with contextlib.suppress(EngineUnavailable, EngineRefused):
                    await client.call("GET", "/health", timeout_s=10.0)
                    return
                if loop.time() > deadline:
                    await self.discard()
                    raise EngineError(
                        f"the engine did not start within {self._spec.start_timeout_s:g} s",
                        where=str(self.log_file),
                        mend="see the log, or raise [engine] start_timeout_s",
                    )
                await asyncio.sleep(0.25)
        finally:
            await client.close()
        self._reap()
        raise EngineError(
            f"the engine ended while starting:\n{self._last_lines()}",
            where=str(self.log_file),
            mend="see the log",
        )

    def _address(self, record: Record) -> Address:
        return Address(f"http://127.0.0.1:{record.port}", loaded=Path(record.model))

    def _digest(self) -> str:
        """Of everything that makes one engine another, apart from model and port."""
        extension = self._spec.staged / Path(*EXTENSION.split(".")[:-1]).with_suffix(".py")
        code = extension.read_text() if extension.exists() else ""
        parts = (command(self._spec, Path("MODEL"), 0), sorted(variables(self._spec).items()), code)
        return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()

    def _read_record(self) -> Record | None:
        try:
            return msgspec.json.decode(self._record_file.read_bytes(), type=Record)
        except (OSError, msgspec.MsgspecError):
            return None

    def _write_record(self, record: Record) -> None:
        fresh = self._record_file.with_suffix(".json.new")
        fresh.write_bytes(msgspec.json.encode(record))
        fresh.replace(self._record_file)

    def _reap(self) -> None:
        if self._child is not None and self._child.poll() is not None:
            self._child = None

    def _last_lines(self) -> str:
        try:
            with self.log_file.open(errors="replace") as log:
                return "".join(deque(log, maxlen=12)).rstrip()
        except OSError:
            return ""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
