"""The backend before an API server that refuses, loses answers, and forgets."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kube_api import Api, kubeconfig, serving_api
from kube_rig import VALUES

from forge_server import assets
from forge_server.domain.errors import ClusterError
from forge_server.domain.events import Fact
from forge_server.scheduler.backend import Gone, Launch, LaunchFailed
from forge_server.scheduler.kubernetes import backend as backend_of
from forge_server.scheduler.kubernetes import rate
from forge_server.scheduler.kubernetes.backend import KubernetesBackend, KubernetesOptions
from forge_server.scheduler.kubernetes.client import Pods
from forge_server.scheduler.kubernetes.manifests import Templates
from forge_server.scheduler.kubernetes.rate import Capacity, Gate

STOPPED = {"name": "runner", "state": {"terminated": {"exitCode": 1, "reason": "Error"}}}
ALIVE = {"name": "runner", "state": {"running": {}}}


class World:
    """A backend and its API server; ``gone`` is what was told."""

    def __init__(self, api: Api, backend: KubernetesBackend, file: Path) -> None:
        self.api, self.backend, self.file = api, backend, file
        self.gone: list[Gone] = []
        self.deaf = False

    async def told(self, gone: Gone) -> None:
        if self.deaf:
            raise OSError("the database is full")
        self.gone.append(gone)

    async def until(self, holds: Callable[[], Any]) -> None:
        async with asyncio.timeout(150):
            while not holds():  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def launch(self, attempt: str = "at-1") -> dict[str, Any]:
        return await self.backend.launch(order(attempt))

    async def launched(self, attempt: str = "at-1") -> None:
        await self.launch(attempt)
        await self.until(lambda: attempt in self.backend._cache.found)


def order(attempt: str) -> Launch:
    return Launch(
        attempt_id=attempt,
        rollout_id="ro-1",
        run_id="ru-1",
        harness="react",
        join_token="t",
        memory_mb=100,
        pids=10,
        lifetime_s=100.0,
    )


@contextlib.asynccontextmanager
async def world(folder: Path, **changes: Any) -> AsyncIterator[World]:
    async with serving_api(folder) as (api, file):
        options = KubernetesOptions(
            instance="in-1", url="http://x", image="i", runner_image="r", values=VALUES, **changes
        )
        pods = await Pods.connect(str(file), "", "")
        backend = KubernetesBackend(pods, Templates(assets.folder("k8s_templates")), options)
        it = World(api, backend, file)
        await backend.start(it.told)
        await it.until(lambda: backend.room() > 0)
        try:
            yield it
        finally:
            async with asyncio.timeout(100):
                await backend.close(1.0)


async def test_a_create_whose_answer_was_lost_finds_its_own_pod(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        it.api.lose = 1
        handle = await it.launch()
        assert list(it.api.pods) == ["at-1"] and handle["uid"] == it.api.pods["at-1"]["metadata"]["uid"]
        assert it.api.creates == 2


async def test_launching_again_finds_the_pod(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        assert await it.launch() == await it.launch()


async def test_anothers_pod_is_not_ours(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        await it.api.put("at-1", lambda pod: pod["metadata"].update(labels={"forge-server/instance": "in-2"}))
        with pytest.raises(LaunchFailed, match="another server's pod"):
            await it.launch()
        assert it.api.deletes == []


@pytest.mark.parametrize(
    ("refusal", "fact"),
    [
        ((403, "Forbidden", 'User "forge" cannot create resource "pods"'), Fact.LAUNCH_FAILED),
        ((404, "NotFound", 'namespaces "n" not found'), Fact.LAUNCH_FAILED),
        ((422, "Invalid", "spec.nodeSelector: Invalid value"), Fact.LAUNCH_FAILED),
        ((422, "Invalid", "spec.containers[0].image: Required value"), Fact.BAD_SPEC),
        ((400, "BadRequest", "json: cannot unmarshal"), Fact.LAUNCH_FAILED),
    ],
)
async def test_what_will_not_mend_itself_fails(tmp_path: Path, refusal: Any, fact: Fact) -> None:
    async with world(tmp_path) as it:
        it.api.refusals = [refusal]
        with pytest.raises(LaunchFailed) as caught:
            await it.launch()
        assert caught.value.fact is fact and caught.value.evidence["status"] == refusal[0]
        assert it.api.creates == 1 and it.backend.room() > 0


async def test_what_may_mend_itself_is_waited_for(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        it.api.refusals = [
            (429, "TooManyRequests", "try again later"),
            (500, "InternalError", "etcdserver: request timed out"),
            (
                403,
                "Forbidden",
                'error looking up service account n/default: serviceaccount "default" not found',
            ),
            (403, "Forbidden", "pods is forbidden: status unknown for quota: q, resources: pods"),
            (409, "Conflict", 'Operation cannot be fulfilled on resourcequotas "q"'),
            (503, "ServiceUnavailable", "apiserver not ready"),
        ]
        await it.launch()
        assert it.api.creates == 7 and list(it.api.pods) == ["at-1"]


@pytest.mark.parametrize("lost", [False, True])
async def test_a_refusal_never_shuts_the_last_one_out(tmp_path: Path, lost: bool) -> None:
    """The gate opens after some that were taken, and there may be fewer of them under way than that."""
    async with world(tmp_path) as it:
        if lost:
            it.api.lose = 1
        else:
            it.api.refusals = [(429, "TooManyRequests", "try again later")]
        for number in range(Gate.OPENING):
            assert it.backend.room() == 1 or number == 0
            await it.launch(f"at-{number}")
        assert it.backend.room() > 1 and not it.backend.trouble


async def test_a_refusal_that_nobody_waits_out_any_more_is_an_old_one(tmp_path: Path) -> None:
    """The gate stays shut when fewer are launched than it needs to open. Nothing keeps those from starting that
    were: their startup clocks go on, and nobody is told of trouble."""
    async with world(tmp_path) as it:
        it.api.refusals = [(503, "ServiceUnavailable", "apiserver not ready")] * 2
        launching = asyncio.ensure_future(it.launch())
        await it.until(lambda: it.backend.trouble)
        assert "apiserver not ready" in it.backend.full
        await launching
        assert it.backend._gate.shut and (it.backend.trouble, it.backend.full) == ("", "")


async def test_one_that_is_given_up_on_leaves_its_turn_to_the_next(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        it.api.refusals = [(429, "TooManyRequests", "try again later")] * 1000
        launching = asyncio.ensure_future(it.launch())
        await it.until(lambda: it.backend.full)
        assert it.backend.room() == 0
        await it.backend.stop("at-1", 1.0)
        with pytest.raises(LaunchFailed):
            await launching
        assert it.backend.room() == 1 and not it.backend.trouble
        it.api.refusals = []
        await it.launch("at-2")


async def test_a_full_quota_is_no_trouble_and_is_not_stormed(tmp_path: Path) -> None:
    """Of those that wait one tries at a time; a pod that goes lets the next one in at once."""
    async with world(tmp_path) as it:
        it.api.quota = 1
        await it.launched("at-0")
        waiting = [asyncio.create_task(it.launch(f"at-{n}")) for n in range(1, 30)]
        await it.until(lambda: it.backend.full)
        assert "exceeded quota" in it.backend.full and it.backend.trouble == "" and it.backend.room() == 0
        await it.until(lambda: it.api.creates > 16)
        for n in range(1, 30):
            name = next(iter(it.api.pods))
            await it.api.remove(name)
            await it.until(lambda n=n: sum(task.done() for task in waiting) == n)
        assert it.api.creates < 30 + 16 + 2 * 30
        assert all(task.result()["pod"] for task in waiting)


async def test_credentials_are_read_again(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        it.api.token = "second"
        waiting = asyncio.create_task(it.launch())
        await it.until(lambda: it.backend.trouble)
        assert "401" in it.backend.trouble and not waiting.done()
        server = it.backend._pods.server
        kubeconfig(tmp_path, server, "second")
        await asyncio.wait_for(waiting, 100)


async def test_what_is_given_up_on_before_it_was_created_never_is(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        it.api.quota = 0
        waiting = asyncio.create_task(it.launch())
        await it.until(lambda: it.backend.full)
        stopping = asyncio.create_task(it.backend.stop("at-1", 1.0))
        with pytest.raises(LaunchFailed, match="given up on"):
            await asyncio.wait_for(waiting, 100)
        it.api.quota = None
        await it.backend.running()  # nothing is launching and nothing is there: the wait is over
        await asyncio.wait_for(stopping, 100)
        assert it.api.pods == {}


async def test_what_is_given_up_on_while_it_is_created_is_deleted(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        it.api.held = asyncio.Event()
        waiting = asyncio.create_task(it.launch())
        await it.until(lambda: it.api.creates)
        stopping = asyncio.create_task(it.backend.stop("at-1", 1.0))
        await it.until(lambda: it.api.deletes)
        it.api.held.set()
        await asyncio.wait_for(waiting, 100)
        await asyncio.wait_for(stopping, 100)
        assert it.api.pods == {} and it.gone == []


async def test_a_page_that_expired_begins_the_list_anew(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        for n in range(1100):
            await it.api.put(f"at-{n}")
        await it.until(lambda: len(it.backend._cache.found) == 1100)
        it.api.expire = 2  # the watch that begins next, and a page of the list that follows
        it.backend._cache.relist()
        await it.until(lambda: it.backend._cache.counts["expired"] == 2)
        await it.until(lambda: it.api.expire == 0 and not it.backend.blind)
        assert len(await it.backend.running()) == 1100 and it.gone == []


async def test_a_failed_list_concludes_nothing(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        await it.launched()
        await it.api.fail()
        await it.until(lambda: it.backend.blind)
        it.backend._cache.relist()
        with pytest.raises(ClusterError, match="etcdserver"):
            await it.backend.running()
        with pytest.raises(ClusterError):
            await it.backend.look("at-1")
        assert it.gone == [] and "at-1" in it.backend._cache.found and it.backend.room() == 0
        it.api.down = False
        await it.until(lambda: not it.backend.blind)
        assert await it.backend.running() == {"at-1"}


async def test_what_went_unseen_is_told_after_the_list(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        await it.launched("at-1")
        await it.launched("at-2")
        await it.api.fail()
        await it.until(lambda: it.backend.blind)
        del it.api.pods["at-1"]
        it.api.pods["at-2"]["metadata"]["uid"] = "another"  # of the same name
        it.api.expire = 1
        it.api.down = False
        await it.until(lambda: len(it.gone) == 2)
        assert {(g.attempt_id, g.fact) for g in it.gone} == {("at-1", Fact.POD_LOST), ("at-2", Fact.POD_LOST)}


async def test_a_fact_is_a_row_before_its_pod_is_deleted(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        await it.launched()
        it.deaf = True
        await it.api.status("at-1", phase="Failed", containerStatuses=[STOPPED])
        await it.until(lambda: "at-1" in it.backend._unsaid)
        assert it.api.deletes == []
        assert (await it.backend.look("at-1")).fact is Fact.PROCESS_GONE
        it.deaf = False
        await it.backend.running()
        await it.until(lambda: it.api.pods == {})
        (gone,) = it.gone
        assert gone.fact is Fact.PROCESS_GONE and gone.log == "last words\n"
        assert gone.evidence["containers"] == [{"name": "runner", "exit": 1, "reason": "Error"}]


async def test_i5_a_fact_is_told_to_who_looks_while_it_is_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log of a dead node's pod is waited for, and meanwhile a clock may be over."""
    asked, answered = asyncio.Event(), asyncio.Event()

    async def log(*given: object) -> str:
        asked.set()
        await answered.wait()
        return "last words"

    async with world(tmp_path) as it:
        monkeypatch.setattr(it.backend._pods, "log", log)
        await it.launched()
        lost = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}
        await it.api.status("at-1", phase="Running", containerStatuses=[ALIVE], conditions=[lost])
        await asyncio.wait_for(asked.wait(), 100)
        seen = await it.backend.look("at-1", silent=True)
        assert (seen.fact, seen.independent, it.gone) == (Fact.NODE_LOST, True, [])
        answered.set()
        await it.until(lambda: it.gone)
        (gone,) = it.gone
        assert (gone.fact, gone.evidence, gone.independent) == (seen.fact, seen.evidence, seen.independent)


async def test_a_failed_pod_may_be_kept_to_be_looked_at(tmp_path: Path) -> None:
    async with world(tmp_path, keep_failed_s=3.0) as it:
        await it.launched()
        await it.api.status("at-1", phase="Failed", containerStatuses=[STOPPED])
        await it.until(lambda: it.gone)
        await it.backend.stop("at-1", 1.0)
        assert await it.backend.running() == frozenset() and it.api.deletes == []
        await it.until(lambda: it.api.pods == {})


async def test_a_pod_that_does_not_leave_is_removed_by_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend_of, "_LEAVING_S", 0.3)
    async with world(tmp_path) as it:
        it.api.lingering = True
        await it.launched()
        stopping = asyncio.create_task(it.backend.stop("at-1", 1.0))
        async with asyncio.timeout(150):
            while it.api.pods:
                await it.backend.running()
                await asyncio.sleep(0.05)
        await asyncio.wait_for(stopping, 100)
        graces = [grace for _, grace in it.api.deletes]
        assert graces[0] == 1 and graces.index(0) == len(graces) - 1 and it.gone == []


async def test_a_closer_look(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        await it.launched()
        await it.api.status("at-1", phase="Running", containerStatuses=[ALIVE])
        alive = await it.backend.look("at-1")
        assert alive.fact is None and alive.evidence["containers"] == [{"name": "runner", "running": True}]
        await it.api.status("at-1", conditions=[{"type": "Ready", "status": "False"}])
        assert (await it.backend.look("at-1")).fact is None
        lost = await it.backend.look("at-1", silent=True)
        assert lost.fact is Fact.NODE_LOST and lost.independent
        del it.api.pods["at-1"]  # and the watch does not tell
        lists = it.api.lists
        missing = await it.backend.look("at-1")
        assert missing.fact is Fact.POD_LOST and missing.independent
        await it.until(lambda: it.api.lists > lists and it.gone)  # it has noticed that it was blind


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(rate, "time", SimpleNamespace(monotonic=lambda: self.now))


async def passes(gate: Gate) -> int | None:
    """The turn, or None when one has to wait."""
    entering = asyncio.ensure_future(gate.enter())
    await asyncio.sleep(0)
    if not entering.done():
        entering.cancel()
        await asyncio.wait([entering])
        return None
    return entering.result()


async def test_a_gate_is_shut_by_a_refusal_and_opened_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, gate = Clock(monkeypatch), Gate(longest_s=8.0)
    turns = [await passes(gate) for _ in range(5)]
    for turn in turns:
        gate.refused(turn or 0)  # those of one burst count once
    assert gate.shut and await passes(gate) is None
    pause = 0.25
    for _ in range(10):
        clock.now += pause
        turn = await passes(gate)
        assert turn is not None and await passes(gate) is None  # one at a time
        gate.refused(turn)
        pause = min(2 * pause, 8.0)
    gate.hint()
    assert await passes(gate) is not None
    for _ in range(Gate.OPENING):
        assert gate.shut
        gate.taken()
        assert await passes(gate) is not None
    assert not gate.shut and [await passes(gate) for _ in range(3)] != [None] * 3


async def test_a_gate_waits_as_long_as_it_is_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, gate = Clock(monkeypatch), Gate()
    gate.refused(await passes(gate) or 0, wait_s=30.0)
    clock.now += 29.0
    assert await passes(gate) is None
    clock.now += 1.1
    assert await passes(gate) is not None


def test_capacity_is_what_found_a_node_and_one_more_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, capacity = Clock(monkeypatch), Capacity()
    assert capacity.room(5000) > 1_000_000
    for _ in range(10):
        capacity.full(7)
    assert [capacity.room(n) for n in (0, 6, 7, 20)] == [7, 1, 0, 0]
    clock.now += Capacity.FIRST_S
    assert [capacity.room(7), capacity.room(8)] == [1, 0]
    capacity.full(7)  # it found none either
    clock.now += Capacity.FIRST_S
    assert capacity.room(7) == 1
    capacity.grown(8)  # it did
    assert capacity.room(8) == 1
    capacity.grown(40)
    assert capacity.room(40) == 5
