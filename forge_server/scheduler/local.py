"""The local backend: every attempt is a runner process on this machine, its harness in a sandbox.

The runner is outside the sandbox, the harness and the verifier inside. Invariant I7: a runner lives no longer
than this server (its stdin is a pipe that only the server holds: at its end it dies, and its sandbox with
it), and what a killed server could not tidy up is cleared at the next start.
"""

import asyncio
import base64
import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, Literal, Protocol

import msgspec
import structlog

from forge_server.domain.errors import ForgeError
from forge_server.domain.events import Fact
from forge_server.domain.ids import new_id
from forge_server.harness.plan import Plan
from forge_server.runner import disk
from forge_server.runner.confine import in_the_way, kill_user
from forge_server.runner.main import DISMISSED
from forge_server.runner.pack import pack
from forge_server.runner.place import remove_tree
from forge_server.scheduler import leftovers
from forge_server.scheduler.backend import PLENTY, Gone, Launch, LaunchFailed, Look, OnGone
from forge_server.scheduler.limits import Cgroups, clear_instance
from forge_server.scheduler.sandbox import Sandbox, probe
from forge_server.scheduler.uids import UserIds

log = structlog.get_logger(__name__)
LOG_TAIL = 64 * 1024
PIPE_BYTES = 32 * 1024  # what surely fits into a pipe at once
INSTALLS = 32  # harnesses that may be installed at a time


class HarnessHome(Protocol):
    def __call__(self, harness: str) -> Path | None:
        """The environment that the harness is installed in; None when it needs none. Raises ForgeError."""


class LocalOptions(msgspec.Struct, frozen=True, kw_only=True):
    """``pod_url``: ``http://HOST:PORT`` or ``unix:/PATH`` of the pod-facing listener. ``folder``: where
    attempts have their files, ours alone. ``disk_mb``: what an attempt may write there, in MiB. ``show``: further
    folders that every sandbox sees, read-only.
    """

    instance: str
    pod_url: str
    folder: Path
    min_sandbox: str = "namespaces"
    disk_mb: int = 10240
    show: tuple[str, ...] = ()


class _Runner:
    """One runner process."""

    def __init__(self, process: subprocess.Popen[bytes], uid: int, folder: Path, log: IO[bytes]) -> None:
        self.process, self.uid, self.folder, self.log = process, uid, folder, log
        self.pidfd = os.pidfd_open(process.pid)
        self.gone = asyncio.Event()
        self.trial: asyncio.Future[str] | None = None  # of a trial: what it printed

    def write(self, text: bytes) -> None:
        """Give it its order; if it is gone already, its exit tells."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):
            self.process.stdin.write(text)
            self.process.stdin.flush()


class LocalBackend:
    """Lives as long as the server; see ``scheduler.backend.Backend``."""

    name: Literal["local"] = "local"
    trouble = ""

    def __init__(self, options: LocalOptions, harness_home: HarnessHome) -> None:
        self._options, self._home = options, harness_home
        self._runners: dict[str, _Runner] = {}
        self._ended: dict[str, Gone] = {}  # how they ended, until that is a row
        self._unsaid: set[str] = set()  # it could not be written, and is said again
        self._was_full = False  # when it was last asked
        self._tasks: set[asyncio.Task[None]] = set()
        self._users: UserIds | None = None
        self._on_gone: OnGone | None = None
        self.sandbox: Sandbox | None = None
        self._cgroups = Cgroups("", [])
        self._installing: dict[str, asyncio.Future[Path | None]] = {}
        self._installers = ThreadPoolExecutor(
            INSTALLS, "install"
        )  # minutes each: not among the threads of others

    @property
    def full(self) -> str:
        """One attempt within its limit may leave too little of the disk for another to begin."""
        try:
            return disk.short(str(self.attempts), self._options.disk_mb << 20)
        except OSError as error:  # there is no such folder yet, or no more
            return str(error)

    def room(self) -> int:
        """Otherwise what this machine bears is what ``in_flight`` says."""
        full = self.full
        if bool(full) != self._was_full:
            self._was_full = bool(full)
            log.warning("no attempt is launched", reason=full or "there is room again")
        return 0 if full else PLENTY

    @property
    def forge(self) -> Path:
        """The folder of the packed programs."""
        return self._options.folder / "forge"

    @property
    def attempts(self) -> Path:
        """The folder with one folder per attempt."""
        return self._options.folder / "attempts"

    async def start(self, on_gone: OnGone) -> None:
        self._on_gone = on_gone
        self.sandbox = probe(self._options.min_sandbox)
        self._users = UserIds.hold() if self.sandbox.own_user else None
        await asyncio.to_thread(self._prepare)
        log.info("local backend", sandbox=str(self.sandbox), limits=self._cgroups.kind or "rlimits only")

    def _prepare(self) -> None:
        killed = leftovers.kill_runners(self._options.instance)
        if os.geteuid() == 0:
            clear_instance(self._options.instance)
            self._cgroups = Cgroups.find(self._options.instance)
        self.attempts.mkdir(parents=True, exist_ok=True)
        removed = leftovers.remove_folders(self.attempts)
        if killed or removed:
            log.warning("cleared what an earlier life left", runners=killed, folders=removed)
        pack(self.forge)

    async def launch(self, launch: Launch) -> dict[str, Any]:
        try:
            home = await self._home_of(launch.harness)
        except ForgeError as error:
            raise LaunchFailed(Fact.LAUNCH_FAILED, {"error": str(error)}) from None
        about = {"url": self._options.pod_url, "token": launch.join_token}
        runner = self._start(launch.attempt_id, home, launch.workdir, launch.memory_mb, launch.pids, about)
        started = leftovers.started_at(runner.process.pid)
        return {"pid": runner.process.pid, "started": started, "uid": runner.uid}

    async def _home_of(self, harness: str) -> Path | None:
        """Where the harness is installed, after that if need be. Launches that ask meanwhile share what comes of it,
        also a failure; one that is given up leaves it to the others."""
        under_way = self._installing.get(harness)
        if under_way is None:
            under_way = asyncio.get_running_loop().run_in_executor(self._installers, self._home, harness)
            self._installing[harness] = under_way
            under_way.add_done_callback(lambda done: self._installing.pop(harness))
        return await asyncio.shield(under_way)

    async def trial(self, plan: Plan, verifier: bytes) -> str:
        """Run an attempt that no row knows of: ``plan``, then ``verifier``; returns what the runner printed.

        Raises LaunchFailed.
        """
        attempt_id, limits = new_id("at"), plan.limits
        order = {"plan": msgspec.to_builtins(plan), "verifier": base64.b64encode(verifier).decode()}
        about = {"url": self._options.pod_url, "token": "", "trial": order}
        runner = self._start(attempt_id, None, plan.workdir, limits.memory_mb, limits.pids, about)
        runner.trial = asyncio.get_running_loop().create_future()
        try:
            return await runner.trial
        except asyncio.CancelledError:
            await self.stop(attempt_id, 0.0)
            raise

    def _start(
        self,
        attempt_id: str,
        home: Path | None,
        workdir: str,
        memory_mb: int,
        pids: int,
        about: dict[str, Any],
    ) -> _Runner:
        sandbox = self.sandbox
        assert sandbox is not None, "not started"
        show = sorted({sandbox.prefix, *_folders_of(home), *self._options.show})
        if sandbox.level == "namespaces" and (place := in_the_way(workdir, show)):
            error = (
                f"the work folder {workdir} cannot be made in the local sandbox, where {place} is read-only: "
                "give the task another workdir, such as /workspace, or use the kubernetes backend"
            )
            raise LaunchFailed(Fact.BAD_SPEC, {"error": error})
        uid = -1
        try:
            uid = self._users.take() if self._users else -1
            cgroups = self._cgroups.make(attempt_id, memory_mb, pids)
            return self._spawn(attempt_id, uid, home, show, {**about, "cgroups": cgroups})
        except OSError as error:
            self._give_back(uid)
            self._cgroups.remove(attempt_id)
            raise LaunchFailed(Fact.LAUNCH_FAILED, {"error": str(error)}) from None

    def _spawn(
        self, attempt_id: str, uid: int, home: Path | None, show: list[str], about: dict[str, Any]
    ) -> _Runner:
        sandbox = self.sandbox
        assert sandbox is not None, "not started"
        folder = self.attempts / attempt_id
        order = {
            **about,
            "attempt": attempt_id,
            "level": sandbox.level,
            "uid": uid,
            "python": sandbox.python,
            "bwrap": sandbox.bwrap,
            "forge": str(self.forge),
            "env": str(home) if home else "",
            "read_only": show,
            "root": str(folder),
            "disk_mb": self._options.disk_mb,
            "tidy": True,
        }
        output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the runner is gone
        process = subprocess.Popen(
            [sandbox.python, "-I", "-S", str(self.forge / "runner.pyz")],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            cwd="/",
            env={"PATH": "/usr/bin:/bin", **leftovers.marks(self._options.instance, attempt_id)},
            start_new_session=True,
        )
        runner = _Runner(process, uid, folder, output)
        self._runners[attempt_id] = runner
        asyncio.get_running_loop().add_reader(runner.pidfd, self._exited, attempt_id)
        text = json.dumps(order).encode() + b"\n"
        if len(text) <= PIPE_BYTES:
            runner.write(text)
        else:
            asyncio.get_running_loop().run_in_executor(None, runner.write, text)
        return runner

    async def stop(self, attempt_id: str, grace_s: float) -> None:
        runner = self._runners.get(attempt_id)
        if runner is None:
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(runner.pidfd, signal.SIGTERM)
        try:
            await asyncio.wait_for(runner.gone.wait(), grace_s)
        except TimeoutError:
            if attempt_id in self._runners:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(runner.pidfd, signal.SIGKILL)
            await runner.gone.wait()

    async def running(self) -> frozenset[str]:
        again, self._unsaid = self._unsaid, set()
        for attempt_id in again:
            self._begin(self._say(self._ended[attempt_id]))
        return frozenset(name for name, runner in self._runners.items() if runner.trial is None)

    async def look(self, attempt_id: str, *, silent: bool = False) -> Look:
        if (gone := self._ended.get(attempt_id)) is not None:
            return Look(evidence=gone.evidence, fact=gone.fact, independent=gone.independent)
        if attempt_id in self._runners:
            return Look(evidence={"runner": "it runs"})
        return Look(evidence={"runner": "there is none"}, fact=Fact.PROCESS_GONE)

    async def close(self, grace_s: float) -> None:
        self._installers.shutdown(wait=False, cancel_futures=True)
        await asyncio.gather(*(self.stop(attempt_id, grace_s) for attempt_id in tuple(self._runners)))
        await asyncio.to_thread(self._cgroups.close)
        if self._users:
            self._users.close()
            self._users = None

    def _exited(self, attempt_id: str) -> None:
        """The runner's process has ended: collect it and say so. Whoever looks is told at once; tidying up may take
        minutes."""
        runner = self._runners[attempt_id]
        asyncio.get_running_loop().remove_reader(runner.pidfd)
        code = runner.process.wait()
        assert runner.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            runner.process.stdin.close()
        size = runner.log.seek(0, os.SEEK_END)
        runner.log.seek(max(0, size - LOG_TAIL))
        text = runner.log.read().decode("utf-8", "replace")
        runner.log.close()
        if runner.trial is None:
            self._ended[attempt_id] = self._gone(attempt_id, code, text)
        self._begin(self._tidy(attempt_id, runner, code, text))

    def _gone(self, attempt_id: str, code: int, text: str) -> Gone:
        assert self.sandbox is not None
        # A runner that somebody killed, or that lost its server, was not brought down by the agent, which a
        # sandbox keeps from it; one that stumbled may have been.
        independent = self.sandbox.level != "none" and (code < 0 or code == DISMISSED)
        return Gone(
            attempt_id=attempt_id,
            fact=Fact.PROCESS_GONE,
            evidence={"runner_exit": code, "sandbox": self.sandbox.level},
            independent=independent,
            log=text,
        )

    async def _tidy(self, attempt_id: str, runner: _Runner, code: int, text: str) -> None:
        """Free the attempt's user id only after nothing of the attempt is left."""
        try:
            await asyncio.to_thread(self._clear, attempt_id, runner, code)
        except Exception:  # what hangs in the disk does not even die of SIGKILL
            log.exception(
                "an attempt left something behind: its user id is not used again", attempt=attempt_id
            )
        else:
            self._give_back(runner.uid)
        del self._runners[attempt_id]
        os.close(runner.pidfd)  # not earlier: until now it may be asked to stop
        runner.gone.set()
        if runner.trial is None:
            await self._say(self._ended[attempt_id])
        elif not runner.trial.done():
            runner.trial.set_result(text)

    async def _say(self, gone: Gone) -> None:
        """Say how an attempt ended. If that cannot be written now, the next reconcile has it said again."""
        assert self._on_gone is not None
        try:
            await self._on_gone(gone)
        except Exception as error:
            log.warning("the end of an attempt is not written yet", attempt=gone.attempt_id, error=str(error))
            self._unsaid.add(gone.attempt_id)
        else:
            del self._ended[gone.attempt_id]

    def _clear(self, attempt_id: str, runner: _Runner, code: int) -> None:
        if code != 0 and runner.uid >= 0:  # one that ended well has seen to it
            kill_user(runner.uid)
        self._cgroups.remove(attempt_id)
        if runner.folder.exists():
            remove_tree(str(runner.folder))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _give_back(self, uid: int) -> None:
        if self._users and uid >= 0:
            self._users.give_back(uid)


def _folders_of(home: Path | None) -> set[str]:
    """What a harness's environment needs to be seen: itself, and the interpreter that a venv links to."""
    if home is None:
        return set()
    folders = {str(home)}
    config = home / "pyvenv.cfg"
    if config.exists():
        for line in config.read_text().splitlines():
            key, _, value = line.partition("=")
            if key.strip() == "home":
                folders.add(str(Path(value.strip()).resolve().parent))
    return folders
