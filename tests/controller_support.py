"""A server around the real store, lifecycle, controller and trainer link, with scripted neighbours.

The engine's weights, the gate and the attempts are scripts; the trainer speaks the real protocol over real
HTTP with the trainer's own client. A ``World`` can be killed at any point and made again on its database.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import sqlalchemy as sa
import uvicorn
from litestar import Litestar, Router

from forge_server.api.listeners import bind_tcp
from forge_server.api.problem import HANDLERS
from forge_server.api.trainer import trainer_routes
from forge_server.controller.bell import Bells
from forge_server.controller.cohort import Cohorts
from forge_server.controller.keeper import Keeper
from forge_server.controller.launcher import Trainer, TrainerJob
from forge_server.controller.loop import Controller
from forge_server.controller.policies import Policies
from forge_server.controller.rounds import Rounds
from forge_server.controller.runs import Runs
from forge_server.controller.steering import Steering
from forge_server.controller.steps import Steps
from forge_server.controller.swap import Swapper
from forge_server.controller.trainer_link import TrainerLink
from forge_server.domain import events as e
from forge_server.domain.call import VersionSpan
from forge_server.domain.engine import SwapReport
from forge_server.domain.ids import CallIds, new_id
from forge_server.domain.run import RunSettings
from forge_server.evaluation.round import Evaluation
from forge_server.lifecycle.apply import Lifecycle
from forge_server.store import instance, keys
from forge_server.store import tables as t
from forge_server.store.database import Store
from forge_server.trainer.errors import Fenced, LinkFailed, RunEnded
from forge_server.trainer.link import Link
from forge_server.trajectory import codec

LIMIT_S = 150.0


async def eventually(check: Callable[[], Any], every_s: float = 0.02) -> Any:
    """The first true value of ``check`` (which may be a coroutine function), within the limit."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            found = check()
            if asyncio.iscoroutine(found):
                found = await found
            if found:
                return found
            await asyncio.sleep(every_s)


class FakeWeights:
    """An engine that loads what it is told. ``fail`` is raised once, before or instead of loading."""

    def __init__(self) -> None:
        self.loaded: list[int] = []
        self.fail: list[BaseException] = []

    async def swap(self, path: Path, version: int, manifest_sha256: str) -> SwapReport:
        if self.fail:
            raise self.fail.pop(0)
        self.loaded.append(version)
        return SwapReport(
            version=version,
            validate_s=0.0,
            pause_s=0.0,
            load_s=0.0,
            reset_s=0.0,
            probe_s=0.0,
            total_s=0.0,
            aborted_running=False,
            probe_max_gap=0.0,
            probe_moved=0.0,
            probe_tolerance=1e-3,
            probe_tokens=8,
        )


class FakeGate:
    """Counts; a release without its hold is a fault of the test."""

    def __init__(self) -> None:
        self.holds = 0

    async def hold(self, reason: str) -> None:
        self.holds += 1

    async def drained(self, seconds: float, /) -> bool:
        return True

    async def release(self) -> None:
        assert self.holds > 0
        self.holds -= 1


class FakeLauncher:
    """Launches nothing; counts. Tests play the trainer with ``World.trainer``."""

    def __init__(self) -> None:
        self.launched: list[TrainerJob] = []
        self.swept = 0

    async def launch(self, job: TrainerJob) -> Trainer:
        self.launched.append(job)
        return _Forever()

    async def sweep(self, run_id: str) -> bool:
        self.swept += 1
        return True


class _Forever:
    async def wait(self) -> str:
        await asyncio.Event().wait()
        return ""

    async def stop(self) -> None:
        return None


Reward = Callable[[e.EventRow, int, int], "float | str"]
"""(rollout's row, step, slot) -> its reward, or the kind of its end: ``infra``, ``crash``, ``hole``."""


class Attempts:
    """Plays scheduler, runner, harness and proxy for every rollout as soon as it is pending."""

    def __init__(self, store: Store, lifecycle: Lifecycle, policies: Policies, reward: Reward) -> None:
        self.store, self.lifecycle, self.policies, self.reward = store, lifecycle, policies, reward
        self.paused = asyncio.Event()
        self.paused.set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.before: Callable[[str, int], Awaitable[None]] | None = None
        """(attempt, seq) Waited for before each call."""
        self._ids = CallIds()
        lifecycle.subscribe(self._hear)

    async def start(self) -> None:
        query = sa.select(t.rollouts.c.id).where(t.rollouts.c.state == "pending")
        for rollout_id in await self.store.read(lambda c: list(c.execute(query).scalars())):
            self._spawn(rollout_id)

    def _hear(self, row: e.EventRow) -> None:
        if row.kind in ("rollout_created", "rollout_pending") and row.rollout_id is not None:
            self._spawn(row.rollout_id)
        elif row.kind == "run_resumed":
            task = asyncio.create_task(self.start())
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    def _spawn(self, rollout_id: str) -> None:
        task = asyncio.create_task(self._play(rollout_id))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _play(self, rollout_id: str) -> None:
        await self.paused.wait()
        query = (
            sa.select(t.rollouts, t.groups.c.step, t.runs.c.state.label("run_state"))
            .join(t.groups, t.groups.c.id == t.rollouts.c.group_id)
            .join(t.runs, t.runs.c.id == t.rollouts.c.run_id)
            .where(t.rollouts.c.id == rollout_id)
        )
        row = await self.store.read(lambda c: c.execute(query).one())
        result = self.reward(row, row.step, row.slot)
        attempt_id = new_id("at")
        apply = self.lifecycle.apply
        applied = await apply(e.AttemptQueued(attempt_id=attempt_id, rollout_id=rollout_id, backend="local"))
        if not applied.applied:
            return
        await apply(e.AttemptLaunching(attempt_id=attempt_id, startup_s=600))
        await apply(e.RunnerJoined(attempt_id=attempt_id, nonce="n"))
        if result == "infra":
            await apply(e.BackendFact(attempt_id=attempt_id, fact=e.Fact.EVICTED, evidence={}))
            return
        await apply(e.HarnessStarted(attempt_id=attempt_id, agent_s=600))
        await self._calls(attempt_id, seqs=(0, 2) if result == "hole" else (0, 1))
        await apply(e.AttemptSealed(attempt_id=attempt_id))
        await apply(e.VerifierFetched(attempt_id=attempt_id, verify_s=60))
        status, code = "ok", 0
        if isinstance(result, float):
            await apply(e.RewardReported(attempt_id=attempt_id, value=result, source="verifier"))
        elif result == "hole":
            await apply(e.RewardReported(attempt_id=attempt_id, value=1.0, source="verifier"))
        else:
            status, code = "crash", 1
        await apply(
            e.RunnerFinished(
                attempt_id=attempt_id,
                exit_code=code,
                verifier=e.VerifierReport(status=status),  # type: ignore[arg-type]
            )
        )

    async def _calls(self, attempt_id: str, seqs: tuple[int, ...]) -> None:
        """Calls that continue each other: prompt, completion, tool output, completion."""
        prompt = np.arange(1, 9, dtype=np.int32)
        rows: list[tuple[Any, dict[str, Any]]] = []
        for seq in seqs:
            if self.before is not None:
                await self.before(attempt_id, seq)
            completion = np.array([100 + seq, 101, 2], np.int32)
            call_id, version = self._ids.next(), self.policies.current
            spans = [VersionSpan(version, 0, completion.size)]
            logprobs = np.full(completion.size, -0.5, np.float32)
            call = {
                "id": call_id,
                "attempt_id": attempt_id,
                "seq": seq,
                "dialect": "chat",
                "mode": "record",
                "request_digest": b"d" * 16,
                "began_at": 1.0,
                "ended_at": 2.0,
                "end": "ok",
                "status": 200,
                "delivered": "yes",
                "forest_key": "k",
                "prefix_len": 0,
                "prompt_len": int(prompt.size),
                "completion_len": int(completion.size),
                "finish_reason": "stop",
                "policy_version": version,
                "temperature": 1.0,
            }
            tokens = {
                "call_id": call_id,
                "data": codec.encode(prompt, 0, completion, logprobs, spans),
                "prompt_digest": codec.digest(prompt),
            }
            rows += [(t.calls, call), (t.call_tokens, tokens)]
            prompt = np.concatenate((prompt, completion, np.array([50 + seq, 51], np.int32)))
        await self.store.write_rows(rows)


def write_checkpoint(folder: Path, run_id: str, step: int, text: str = "") -> tuple[str, str]:
    """A checkpoint folder as far as the controller looks at it; its path and the manifest's sha256."""
    path = folder / f"step_{step:05d}"
    path.mkdir(parents=True, exist_ok=True)
    raw = json.dumps({"schema": 1, "step": step, "run": run_id, "text": text}).encode()
    (path / "manifest.json").write_bytes(raw)
    return str(path), sha256(raw).hexdigest()


class QuickLink(Link):
    """Gives up on a server that is away after seconds, so that no thread outlives its test."""

    def _call(self, *args: Any, patience_s: float, **more: Any) -> Any:
        return super()._call(*args, patience_s=min(patience_s, 3.0), **more)


class FakeTrainer:
    """The real protocol client in threads; trains by writing a checkpoint."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.batches: dict[int, str] = {}

    async def open(self, resume_step: int = 0) -> Any:
        """A server that answers that the run is not so far is waited for."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                try:
                    return await asyncio.to_thread(
                        self.link.open, world_size=1, resume_step=resume_step, resume_manifest_sha256=None
                    )
                except LinkFailed as error:
                    if "is away: HTTP 503" not in str(error):
                        raise

    async def batch(self, k: int) -> bytes | None:
        return await asyncio.to_thread(self.link.poll_batch, k)

    async def report(self, k: int, path: str, digest: str) -> int:
        await asyncio.to_thread(self.link.report_metrics, k, {"loss": 0.5, "grad_norm": 1.0})
        return await asyncio.to_thread(self.link.report_checkpoint, k, path, digest)

    async def run(self, resume_step: int = 0) -> str:
        """Train until the run ends or another session takes over."""
        try:
            session = await self.open(resume_step)
            k = session.next_batch
            if k > 1:  # the crash may have been between the checkpoint and its report
                await self.report(k - 1, *write_checkpoint(Path(session.checkpoint_dir), self.run_id, k - 1))
            while True:
                body = await self.batch(k)
                if body is None:
                    continue
                self.batches[k] = sha256(body).hexdigest()
                path, digest = write_checkpoint(Path(session.checkpoint_dir), self.run_id, k)
                await self.report(k, path, digest)
                await asyncio.to_thread(self.link.beat)
                k += 1
        except RunEnded:
            return "ended"
        except Fenced:
            return "fenced"

    @property
    def run_id(self) -> str:
        return self.link.url.split("/")[-2]


def alternating(row: Any, step: int, slot: int) -> float:
    """Every group has a signal."""
    return float(slot % 2)


class DyingStore(Store):
    """Takes ``left`` more writes (None: any number)."""

    left: int | None = None

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.dead = asyncio.Event()

    async def write(self, *args: Any, **more: Any) -> Any:
        await self._live()
        return await super().write(*args, **more)

    async def write_rows(self, *args: Any, **more: Any) -> None:
        await self._live()
        await super().write_rows(*args, **more)

    async def _live(self) -> None:
        if self.left is not None:
            if self.left <= 0:
                self.dead.set()
                await asyncio.Event().wait()
            self.left -= 1


class World:
    """One life of the server on the database at ``url``."""

    def __init__(
        self,
        store: DyingStore,
        folder: Path,
        weights: FakeWeights,
        reward: Reward,
        overrides: tuple[str, ...],
    ) -> None:
        self.store, self.folder, self.weights = store, folder, weights
        self.lifecycle = Lifecycle(store)
        self.bells = Bells()
        self.gate = FakeGate()
        self.launcher = FakeLauncher()
        self.moved: list[tuple[int, Path]] = []
        self.policies = Policies(store, self.lifecycle, "default")
        self.cohorts = Cohorts(store, self.lifecycle)
        self.link = TrainerLink(
            store,
            self.lifecycle,
            self.bells,
            lambda run_id: folder / run_id / "checkpoints",
            lambda version, path: self.moved.append((version, path)),
            overrides=overrides,
        )
        self.swapper = Swapper(self.policies, self.lifecycle, weights, self.gate, drain_s=5.0)
        self.evaluation = Evaluation(store, self.cohorts)
        self.attempts = Attempts(store, self.lifecycle, self.policies, reward)
        self.controller = Controller(
            store,
            self.lifecycle,
            self.bells,
            self.policies,
            self.swapper,
            Rounds(store, self.lifecycle, self.cohorts, self.policies, self.evaluation),
            self._steps,
            self._keeper,
            lambda run_id: self.launcher.sweep(run_id),
            engine_backoff_s=0.01,
            leave_s=0.0,
        )
        self.runs = Runs(store, self.lifecycle, "default", self.controller.follow)
        self.steering = Steering(store, self.lifecycle, lambda run: None)
        self.secret = b""
        self.url = ""

    def _steps(self) -> Steps:
        return Steps(
            self.store,
            self.lifecycle,
            self.cohorts,
            self.policies,
            self.swapper,
            self.link,
            self.evaluation,
            window=4096,
        )

    def _keeper(self, run_id: str, changed: Callable[[], None]) -> Keeper:
        job = TrainerJob(run_id=run_id, url=self.trainer_url(run_id), key="k", folder=self.folder / run_id)
        return Keeper(self.store, self.launcher, job, changed, first_backoff_s=0.01)

    def trainer_url(self, run_id: str) -> str:
        return f"{self.url}/api/v1/runs/{run_id}/trainer"

    def trainer(self, run_id: str) -> FakeTrainer:
        return FakeTrainer(QuickLink(self.trainer_url(run_id), keys.trainer_key(self.secret, run_id)))

    async def tasks(self, count: int = 6, split: str = "train") -> None:
        rows = [
            {
                "id": f"ta-{split}-{n}",
                "name": f"{split}-{n}",
                "taskset": "s",
                "split": split,
                "digest": "d",
                "instruction": "i",
                "definition": {},
                "created_at": 0.0,
            }
            for n in range(count)
        ]
        await self.store.write(lambda c: c.execute(sa.insert(t.tasks), rows) and None)

    async def rows(self, table: sa.Table, *where: Any) -> list[Any]:
        query = sa.select(table).where(*where).order_by(*table.primary_key)
        return await self.store.read(lambda c: list(c.execute(query).all()))

    async def run_row(self, run_id: str) -> Any:
        return (await self.rows(t.runs, t.runs.c.id == run_id))[0]

    async def reached(self, run_id: str, state: str) -> Any:
        async def check() -> Any:
            row = await self.run_row(run_id)
            return row if row.state == state else None

        return await eventually(check)

    async def metrics(self, run_id: str, step: int, source: str = "controller") -> dict[str, Any]:
        c = t.step_metrics.c
        rows = await self.rows(t.step_metrics, c.run_id == run_id, c.step == step, c.source == source)
        return dict(rows[0].metrics) if rows else {}


@asynccontextmanager
async def world(
    url: str,
    folder: Path,
    weights: FakeWeights | None = None,
    reward: Reward = alternating,
    *,
    drive: bool = True,
    writes: int | None = None,
    overrides: tuple[str, ...] = ("a=1",),
) -> AsyncIterator[World]:
    """One life of a server. With ``writes`` the database takes that many more, and then never answers again:
    what a kill leaves behind.
    """
    store = DyingStore.open(url, create=True)
    w = World(store, folder, weights or FakeWeights(), reward, overrides)
    w.secret = (await instance.load(store)).secret
    routes = trainer_routes(w.link, lambda key: keys.verify(w.secret, key))
    app = Litestar([Router("/api/v1", route_handlers=routes)], exception_handlers=HANDLERS)
    sock = bind_tcp("127.0.0.1", 0, "test")
    w.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    server = uvicorn.Server(
        uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=1)
    )
    serving = asyncio.create_task(server.serve([sock]))
    try:
        await w.policies.open(folder / "initial")
        if drive:
            await w.lifecycle.recover()
            store.left = writes
            await w.attempts.start()
            await w.controller.start()
        yield w
    finally:
        server.should_exit = True
        w.link.close()
        await w.controller.stop()
        for task in list(w.attempts.tasks):
            task.cancel()
        await serving
        sock.close()
        store.close()


def settings(**changes: Any) -> RunSettings:
    base: dict[str, Any] = {
        "name": "r",
        "taskset": "s",
        "harness": "react",
        "steps": 2,
        "groups": 2,
        "n": 2,
        "max_attempts": 2,
    }
    return RunSettings(**{**base, **changes})
