"""The part of forge-server that keeps pods in flight, for ``pods.py``: store, lifecycle, scheduler and backend are the
real ones; runners are played, their events applied as the runner's routes would.

    python benchmarks/pods_server.py DATABASE KUBECONFIG NAMESPACE N SOCKET

``pods_kubelet.py`` connects to SOCKET. Orders come by standard input, one line of JSON each, and are answered:

    {"do": "full"}                  waits until N runners run: how long it took, memory
    {"do": "open", "clock": true}   begins a stretch; without the clock that strikes every 5 ms it has no stalls
    {"do": "look"}                  what was seen since: CPU, events, stalls, slots, memory
    {"do": "list"}                  reads all pods into a second cache: seconds, pods
"""

import asyncio
import gc
import json
import logging
import sys
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any

import sqlalchemy as sa
import structlog
import uvloop

from forge_server import assets
from forge_server.commands.serve import collect_less_garbage
from forge_server.domain import events as e
from forge_server.domain.events import EventRow
from forge_server.domain.ids import CallIds, new_id
from forge_server.harness.load import load_all
from forge_server.harness.plan import TaskInput
from forge_server.lifecycle.apply import Lifecycle
from forge_server.scheduler.kubernetes.backend import KubernetesBackend, KubernetesOptions
from forge_server.scheduler.kubernetes.client import Pods
from forge_server.scheduler.kubernetes.manifests import Templates, selector
from forge_server.scheduler.kubernetes.watch import PodCache
from forge_server.scheduler.plans import PlanOptions, Plans
from forge_server.scheduler.scheduler import Options, Scheduler
from forge_server.scheduler.ticks import Ticks
from forge_server.store import instance
from forge_server.store import tables as t
from forge_server.store.database import Store

RUNS, SIZE, AHEAD = 2, 8, 20
"""Runs that share the slots; rollouts per group; groups that wait per run."""

TICK_S = 0.005
VALUES: dict[str, Any] = {
    "cpu": "10m",
    "pull_policy": "Never",
    "pull_secrets": [],
    "runtime_class": "",
    "priority_class": "",
    "node_selector": {},
    "tolerations": [],
}


class Timed(Pods):
    """Notes when a create is sent."""

    sent: "Stretch"

    async def create(self, manifest: dict[str, Any]) -> Any:
        self.sent.created()
        return await super().create(manifest)


class Tasks:
    async def input(self, task_id: str) -> TaskInput:
        return TaskInput(instruction="Copy the word.")

    async def verifier(self, task_id: str) -> bytes | None:
        return None


class Stretch:
    """What happens between two looks. A slot that is freed is filled by the next create."""

    def __init__(self) -> None:
        self._freed: deque[float] = deque()
        self.watched = asyncio.Event()
        self.open(0)

    def open(self, events: int) -> None:
        self._freed.clear()
        self.slots: list[float] = []
        self.gaps: list[float] = []
        self.own: list[float] = []
        self.collected = (0.0, 0, 0)
        self.ended: Counter[str] = Counter()
        self._events, self._cpu, self._began = events, time.process_time(), time.monotonic()

    def collecting(self, phase: str, what: dict[str, int]) -> None:
        """How long the garbage collector took at most; generation and what it found then."""
        if phase == "start":
            self._collecting = time.thread_time()
        else:
            took = time.thread_time() - self._collecting
            self.collected = max(self.collected, (took, what["generation"], what["collected"]))

    def freed(self) -> None:
        self._freed.append(time.monotonic())

    def created(self) -> None:
        if self._freed:
            self.slots.append(time.monotonic() - self._freed.popleft())

    async def tick(self) -> None:
        """A clock that should strike every 5 ms. ``gaps``: how late it did, ``own``: what the loop's thread computed
        meanwhile, so that it was late by our own doing."""
        while True:
            await self.watched.wait()
            due, used = time.perf_counter() + TICK_S, time.thread_time()
            await asyncio.sleep(TICK_S)
            self.gaps.append(time.perf_counter() - due)
            self.own.append(time.thread_time() - used)

    def seen(self, events: int) -> dict[str, Any]:
        return {
            "events": events - self._events,
            "cpu_s": time.process_time() - self._cpu,
            "seconds": time.monotonic() - self._began,
            "gaps": sorted(self.gaps)[-2000:],
            "own": sorted(self.own)[-2000:],
            "ticks": len(self.gaps),
            "collected": self.collected,
            "slots": self.slots,
            "ended": dict(self.ended),
            "memory": memory(),
        }


def memory() -> dict[str, float]:
    """Megabytes now and at most."""
    found = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(("VmRSS:", "VmHWM:")):
            found[line[:5]] = int(line.split()[1]) / 1024
    return {"now": found["VmRSS"], "most": found["VmHWM"]}


class Bench:
    store: Store
    lifecycle: Lifecycle
    scheduler: Scheduler
    backend: KubernetesBackend
    pods: Timed

    def __init__(self, n: int) -> None:
        self.n, self.stretch = n, Stretch()
        self.running: set[str] = set()
        self._full = asyncio.Event()
        self._ids, self._tasks = CallIds(), set()
        self._over: Counter[str] = Counter()

    async def runs(self) -> None:
        """The runs and the groups that are ahead."""
        task = {
            "id": "ta-1",
            "name": "copy",
            "taskset": "s",
            "digest": "d",
            "instruction": "i",
            "definition": {},
        }
        task["created_at"] = time.time()
        await self.store.write(lambda c: c.execute(sa.insert(t.tasks), task))
        for _ in range(RUNS):
            run_id = new_id("ru")
            settings = {
                "name": run_id,
                "kind": "record",
                "taskset": "s",
                "harness": "react",
                "max_seconds": 86400.0,
            }
            event = e.RunCreated(run_id=run_id, name=run_id, kind="record", settings=settings)
            assert (await self.lifecycle.apply(event)).applied
            for _ in range(self.n // SIZE // RUNS + AHEAD):
                await self.group(run_id)

    async def group(self, run_id: str) -> None:
        group_id = new_id("gr")
        common = {
            "run_id": run_id,
            "harness": "react",
            "mode": "record",
            "task_id": "ta-1",
            "group_id": group_id,
        }
        rollouts = tuple(
            e.RolloutCreated(rollout_id=new_id("ro"), slot=slot, max_attempts=100, **common)
            for slot in range(SIZE)
        )
        created = e.GroupCreated(
            group_id=group_id, run_id=run_id, task_id="ta-1", step=1, mode="record", rollouts=rollouts
        )
        await self.lifecycle.apply(created)

    def heard(self, row: EventRow) -> None:
        if row.kind == "attempt_ended":
            self.stretch.freed()
            self.stretch.ended[f"{row.data['outcome']}/{row.data['kind']}"] += 1
            self.running.discard(row.attempt_id or "")
        elif row.kind == "rollout_ended" and row.run_id is not None:
            self._over[row.run_id] += 1  # groups hardly ever end whole here: they are followed by as many
            if self._over[row.run_id] % SIZE == 0:
                self.spawn(self.group(row.run_id))

    # --- runners ----------------------------------------------------------------------------------------

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            word, _, name = line.decode().strip().partition(" ")
            self.spawn(self.begin(name) if word == "run" else self.end(name, writer))

    async def begin(self, name: str) -> None:
        apply = self.lifecycle.apply
        await apply(e.RunnerJoined(attempt_id=name, nonce="0" * 32))
        if (await apply(e.HarnessStarted(attempt_id=name, agent_s=86400.0))).ok:
            now = time.time()
            row = {"id": self._ids.next(), "attempt_id": name, "seq": 0, "dialect": "chat", "mode": "record"}
            row |= {"request_digest": b"x", "began_at": now, "ended_at": now, "end": "ok", "status": 200}
            await self.store.insert(t.calls, row)
            self.running.add(name)
            if len(self.running) >= self.n:
                self._full.set()

    async def end(self, name: str, writer: asyncio.StreamWriter) -> None:
        for event in (
            e.AttemptSealed(attempt_id=name),
            e.VerifierFetched(attempt_id=name, verify_s=60.0),
            e.RewardReported(attempt_id=name, value=1.0, source="verifier"),
            e.RunnerFinished(
                attempt_id=name, exit_code=0, verifier=e.VerifierReport(status="ok", exit_code=0)
            ),
        ):
            await self.lifecycle.apply(event)
        writer.write(f"left {name}\n".encode())

    def spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: Any) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            print(f"server: {task.exception()!r}", file=sys.stderr, flush=True)

    # --- orders -----------------------------------------------------------------------------------------

    @property
    def events(self) -> int:
        return self.backend._cache.counts["event"]

    async def full(self) -> dict[str, Any]:
        began = time.monotonic()
        while not self._full.is_set():
            try:
                await asyncio.wait_for(self._full.wait(), 10.0)
            except TimeoutError:
                print(
                    f"{len(self.running)} run, {len(self.scheduler.live)} in flight",
                    file=sys.stderr,
                    flush=True,
                )
        return {"seconds": time.monotonic() - began, "memory": memory(), "running": len(self.running)}

    async def open(self, clock: bool) -> dict[str, Any]:
        if clock:
            self.stretch.watched.set()
        else:
            self.stretch.watched.clear()
        self.stretch.open(self.events)
        return {}

    async def look(self) -> dict[str, Any]:
        return self.stretch.seen(self.events)

    async def list(self) -> dict[str, Any]:
        began, found = time.monotonic(), Counter[str]()
        me = await instance.load(self.store)
        cache = PodCache(self.pods, selector(me.id), lambda pod: found.update(["pod"]), lambda pod: None)
        keeping = asyncio.create_task(cache.keep())
        await cache.synced.wait()
        keeping.cancel()
        return {"seconds": time.monotonic() - began, "pods": found["pod"]}


async def main(database: str, kubeconfig: str, namespace: str, n: str, path: str) -> None:
    bench = Bench(int(n))
    bench.store = Store.open(f"sqlite:///{database}", create=True)
    bench.lifecycle = Lifecycle(bench.store, breaker_after=1 << 30)
    me = await instance.load(bench.store)
    await bench.lifecycle.recover()
    bench.lifecycle.subscribe(bench.heard)
    await bench.runs()
    bench.pods = await Timed.connect(kubeconfig, "", namespace)  # type: ignore[assignment]
    bench.pods.sent = bench.stretch
    options = KubernetesOptions(
        instance=me.id,
        url="http://10.0.0.1:1",
        image="x",
        runner_image="x",
        values=VALUES,
        create_per_s=500.0,
    )
    bench.backend = KubernetesBackend(bench.pods, Templates(assets.folder("k8s_templates")), options)
    plans = Plans(
        bench.store,
        load_all([assets.folder("harness_specs")]),
        Tasks(),
        PlanOptions(model="forge", window=32768, memory_mb=64),
    )
    limits = Options(in_flight=bench.n, heartbeat_lost_s=1e9)
    bench.scheduler = Scheduler(bench.store, bench.lifecycle, bench.backend, plans, me.secret, limits)
    listening = await asyncio.start_unix_server(bench.serve, path)
    collect_less_garbage()
    gc.callbacks.append(bench.stretch.collecting)
    await bench.scheduler.start()
    ticks = Ticks()
    ticks.every(instance.BEAT_S, "liveness", bench.lifecycle.beat)
    ticks.every(1.0, "deadlines", bench.scheduler.sweep)
    ticks.every(10.0, "reconcile", bench.scheduler.reconcile)
    ticks.start()
    clock = asyncio.create_task(bench.stretch.tick())
    orders = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    print(json.dumps({"instance": me.id}), flush=True)
    while line := await orders.readline():
        order = json.loads(line)
        what = getattr(bench, order.pop("do"))
        print(json.dumps(await what(**order)), flush=True)
    clock.cancel()
    ticks.stop()
    listening.close()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    uvloop.run(main(*sys.argv[1:]))
