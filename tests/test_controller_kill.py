"""I8 and I12: the server is killed between any two writes of a run, and later lives finish the run."""

import asyncio
from collections import Counter
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from controller_support import (
    FakeTrainer,
    FakeWeights,
    World,
    eventually,
    settings,
    world,
    write_checkpoint,
)

from forge_server.domain.errors import CheckpointError
from forge_server.domain.states import PolicyState
from forge_server.store import batch_bodies
from forge_server.store import tables as t

pytestmark = pytest.mark.timeout(600)


def _steps_on_disk(folder: Path, run_id: str) -> int:
    found = (folder / run_id / "checkpoints").glob("step_*")
    return max((int(path.name.removeprefix("step_")) for path in found), default=0)


async def _bodies(w: World, run_id: str) -> dict[int, bytes]:
    rows = await w.rows(t.batches, t.batches.c.run_id == run_id)
    return {row.k: await w.store.read(lambda c, k=row.k: batch_bodies.read(c, run_id, k)) for row in rows}


async def _whole(w: World, run_id: str, steps: int) -> None:
    """Everything that a finished run must show, however often the server died on the way."""
    batches = await w.rows(t.batches, t.batches.c.run_id == run_id)
    bodies = await _bodies(w, run_id)
    assert [b.k for b in batches] == list(range(1, steps + 1)) == sorted(bodies)
    assert all(sha256(bodies[b.k]).hexdigest() == b.sha256 for b in batches)
    trained = Counter(i for b in batches for i in b.rollout_ids)
    assert trained and max(trained.values()) == 1  # nothing is trained twice
    groups = await w.rows(t.groups, t.groups.c.run_id == run_id)
    rollouts = {r.id: r for r in await w.rows(t.rollouts, t.rollouts.c.run_id == run_id)}
    assert {r.state for r in rollouts.values()} == {"ended"}
    in_batch = {g.id: g.batch_k for g in groups}
    for batch in batches:
        assert {in_batch[rollouts[i].group_id] for i in batch.rollout_ids} == {batch.k}
    policies = await w.rows(t.policies)
    assert [p.step for p in policies if p.state == "live"] == [steps]
    assert Counter(p.step for p in policies if p.step) == Counter(range(1, steps + 1))
    for step in range(1, steps + 1):
        assert (await w.metrics(run_id, step))["groups/trained"] == 2


async def _live(url: str, folder: Path, writes: int | None, seen: dict[int, set[str]]) -> bool:
    """One life with a trainer beside it; whether the run was completed in it."""
    async with world(url, folder, writes=writes) as w:
        run_id = (await w.rows(t.runs))[0].id
        trainer = w.trainer(run_id)
        training = asyncio.create_task(trainer.run(_steps_on_disk(folder, run_id)))
        dead = asyncio.create_task(w.store.dead.wait())
        done = asyncio.create_task(w.reached(run_id, "completed"))
        await asyncio.wait({dead, done}, return_when=asyncio.FIRST_COMPLETED)
        completed = done.done()
        if completed:
            await training
            await _whole(w, run_id, 2)
        for task in (training, dead, done):
            task.cancel()
        for k, digest in trainer.batches.items():
            seen.setdefault(k, set()).add(digest)
    return completed


@pytest.mark.parametrize(("mode", "every"), [("sync", 0), ("sync", 3), ("async", 5)])
async def test_a_run_survives_kills_between_any_two_writes(
    database_url: str, tmp_path: Path, every: int, mode: str
) -> None:
    seen: dict[int, set[str]] = {}
    async with world(database_url, tmp_path, drive=False) as w:
        await w.tasks()
        await w.runs.create(settings(mode=mode))
    lives = [9 + every]
    while not await _live(database_url, tmp_path, lives[-1], seen):
        lives.append(lives[-1] + 8)
    assert len(lives) > 3
    assert {k: len(digests) for k, digests in seen.items()} == {1: 1, 2: 1}  # byte-identical each time


async def _until(w: World, run_id: str, state: PolicyState) -> None:
    """Bring version 1 of the run into ``state`` without a controller."""
    trainer: FakeTrainer = w.trainer(run_id)
    session = await trainer.open()
    path, digest = write_checkpoint(Path(session.checkpoint_dir), run_id, 1)
    assert await trainer.report(1, path, digest) == 1
    for to in (PolicyState.LOADING, PolicyState.LIVE):
        row = await w.policies.get(1)
        if row.state is state:
            return
        await w.policies.move(row, to)


@pytest.mark.parametrize("state", [PolicyState.EXPORTED, PolicyState.LOADING, PolicyState.LIVE])
@pytest.mark.parametrize("refused", [False, True])
async def test_each_policy_state_is_finished_after_a_restart(
    database_url: str, tmp_path: Path, state: PolicyState, refused: bool
) -> None:
    async with world(database_url, tmp_path) as w:
        await w.tasks()
        run_id = await w.runs.create(settings())
        await eventually(lambda: w.rows(t.batches))
    async with world(database_url, tmp_path, drive=False) as w:
        await _until(w, run_id, state)
    weights = FakeWeights()
    weights.fail += [CheckpointError("probe")] if refused else []
    async with world(database_url, tmp_path, weights) as w:
        if refused and state is not PolicyState.LIVE:
            row = await w.reached(run_id, "paused")
            assert "probe" in row.reason and w.policies.current == 0
            assert (await w.policies.get(1)).state is PolicyState.REJECTED
            return

        async def live() -> bool:
            return (await w.policies.get(1)).state is PolicyState.LIVE and w.policies.current == 1

        await eventually(live)
        assert w.weights.loaded == ([] if state is PolicyState.LIVE else [1])
        assert (await w.policies.get(0)).state is PolicyState.RETIRED
        await eventually(lambda: w.rows(t.batches, t.batches.c.k == 2))
        rows: list[Any] = await w.rows(t.rollouts)
        assert {r.policy_version for r in rows} == {0, 1} and w.gate.holds == 0
        holds = sa.select(sa.func.count()).where(t.holds.c.end_at.is_(None))
        assert await w.store.read(lambda c: c.execute(holds).scalar_one()) == 0
