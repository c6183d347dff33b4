"""Which weights a run trains, measures and goes on from while others come and go: runs that share a policy, a person
who puts another version live, checkpoints that are refused or gone."""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa
from controller_support import FakeTrainer, FakeWeights, World, eventually, settings, world, write_checkpoint

from forge_server.domain import policy
from forge_server.domain.engine import SwapReport
from forge_server.domain.errors import CheckpointError, Conflict, StoreError
from forge_server.domain.events import Applied, Event, RunPaused
from forge_server.domain.policy import Version
from forge_server.domain.run import RunEval
from forge_server.domain.states import PolicyState
from forge_server.store import batch_bodies
from forge_server.store import tables as t
from forge_server.trainer.batch import read

pytestmark = pytest.mark.timeout(120)


def slowly(w: World, is_slow: Callable[[Any, int], bool]) -> asyncio.Event:
    """Attempts for whose rollout (its row, and how many of its run began before) this holds make their calls only
    once the event is set."""
    calls, begun = w.attempts._calls, dict[str, int]()
    let = asyncio.Event()

    async def held(attempt_id: str, seqs: tuple[int, ...]) -> None:
        query = (
            sa.select(t.rollouts)
            .join(t.attempts, t.attempts.c.rollout_id == t.rollouts.c.id)
            .where(t.attempts.c.id == attempt_id)
        )
        row = await w.store.read(lambda c: c.execute(query).one())
        before = begun[row.run_id] = begun.get(row.run_id, -1) + 1
        if is_slow(row, before):
            await let.wait()
        await calls(attempt_id, seqs)

    w.attempts._calls = held  # type: ignore[method-assign]
    return let


async def ended(w: World, run_id: str, n: int) -> Any:
    """Whether ``n`` rollouts of the run have ended, or all of them (0)."""
    c = t.rollouts.c
    there = await w.rows(t.rollouts, c.run_id == run_id)
    done = [row for row in there if row.state == "ended"]
    return len(done) >= (n or len(there))


async def begun(w: World, run_id: str, n: int) -> bool:
    """Whether ``n`` rollouts of the run have been given to somebody."""
    there = await w.rows(t.rollouts, t.rollouts.c.run_id == run_id)
    return sum(row.state != "pending" for row in there) >= n


async def put_live_in_between(w: World, run_id: str, let: asyncio.Event, n: int) -> None:
    """Version 0 answers those of the run's ``n`` rollouts that are in flight when it is paused; earlier nobody may put
    it live."""
    await eventually(lambda: begun(w, run_id, n))
    with pytest.raises(Conflict, match="pause the run first"):
        await w.controller.activate(0)
    await w.runs.pause(run_id, "by a person")
    await w.controller.activate(0)
    let.set()
    await eventually(lambda: ended(w, run_id, 0))
    await w.runs.resume(run_id)


async def step(trainer: FakeTrainer, session: Any, run_id: str, k: int) -> int:
    while await trainer.batch(k) is None:
        pass
    return await trainer.report(k, *write_checkpoint(Path(session.checkpoint_dir), run_id, k))


async def versions_trained(w: World, run_id: str, k: int) -> set[int]:
    """The least and the greatest of those that sampled what batch ``k`` trains."""
    batch = read(await w.store.read(lambda c: batch_bodies.read(c, run_id, k)), k=k)
    return {batch.min_version, batch.max_version}


@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_what_anothers_weights_sampled_is_not_trained(
    database_url: str, tmp_path: Path, mode: str
) -> None:
    """A run is set aside for an older one in the middle of its cohort, and what is in flight goes on."""
    async with world(database_url, tmp_path) as w:
        await w.tasks()
        older = await w.runs.create(settings(name="older", steps=2))
        await eventually(lambda: w.launcher.launched)
        await w.runs.pause(older, "by a person")
        let = slowly(w, lambda row, before: row.run_id != older and before in (1, 3))
        younger = await w.runs.create(settings(name="younger", steps=1, mode=mode))
        await eventually(lambda: ended(w, younger, 2))
        await w.runs.resume(older)
        assert (await w.reached(younger, "paused")).reason == "policy_busy"
        trainer = w.trainer(older)
        session = await trainer.open()
        assert await step(trainer, session, older, 1) == 1
        await eventually(lambda: w.policies.current == 1)
        let.set()  # the slow ones ask version 1
        await eventually(lambda: ended(w, younger, 0))
        await step(trainer, session, older, 2)
        await w.reached(older, "completed")
        c = t.batches.c
        await eventually(lambda: w.rows(t.batches, c.run_id == younger))
        assert (await w.run_row(younger)).base_version == 0
        assert await versions_trained(w, younger, 1) == {0}
        dropped = await w.rows(t.groups, t.groups.c.run_id == younger, t.groups.c.dropped == "stale")
        assert dropped
        await w.runs.cancel(younger)


async def test_what_a_person_put_live_meanwhile_is_not_trained(database_url: str, tmp_path: Path) -> None:
    async with world(database_url, tmp_path) as w:
        await w.tasks()
        let = slowly(w, lambda row, before: before >= 4)  # those of the second step
        run_id = await w.runs.create(settings())
        trainer = w.trainer(run_id)
        session = await trainer.open()
        assert await step(trainer, session, run_id, 1) == 1
        await eventually(lambda: w.rows(t.groups, t.groups.c.step == 2))
        await put_live_in_between(w, run_id, let, 8)
        assert await step(trainer, session, run_id, 2) == 2
        assert await versions_trained(w, run_id, 2) == {1}
        await w.reached(run_id, "completed")


@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_a_reward_is_of_all_that_answered_also_beyond_the_length_limit(
    database_url: str, tmp_path: Path, mode: str
) -> None:
    """The second call of each rollout is not trained: it lies beyond the limit."""
    async with world(database_url, tmp_path) as w:
        await w.tasks()
        seen, waiting, let = list[str](), list[str](), asyncio.Event()

        async def before(attempt_id: str, seq: int) -> None:
            if seq == 0:
                seen.append(attempt_id)
            elif seen.index(attempt_id) >= 4:  # those of the second step
                waiting.append(attempt_id)
                await let.wait()

        w.attempts.before = before
        run_id = await w.runs.create(settings(mode=mode, max_staleness=0, max_sample_tokens=12))
        trainer = w.trainer(run_id)
        session = await trainer.open()
        assert await step(trainer, session, run_id, 1) == 1
        await eventually(lambda: len(waiting) == 4)  # version 1 has answered their first calls
        await put_live_in_between(w, run_id, let, 8)
        assert await step(trainer, session, run_id, 2) == 2
        await w.reached(run_id, "completed")
        (batch,) = await w.rows(t.batches, t.batches.c.k == 2)
        r, c = t.rollouts.c, t.calls.c
        query = (
            sa.select(c.seq, c.policy_version).distinct().join(t.rollouts, r.final_attempt_id == c.attempt_id)
        )
        query = query.where(r.id.in_(batch.rollout_ids)).order_by(c.seq, c.policy_version)
        answered = await w.store.read(lambda connection: [tuple(row) for row in connection.execute(query)])
        assert answered == [(0, 1), (1, 1)]
        assert (await w.metrics(run_id, 2))["staleness/max"] == 0


@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_an_engine_that_serves_no_version_of_the_policy_pauses_the_run(
    database_url: str, tmp_path: Path, mode: str
) -> None:
    """Nothing that it samples is trained; drawing again would help nothing."""
    async with world(database_url, tmp_path) as w:
        await w.tasks()
        calls = w.attempts._calls

        async def unknown(attempt_id: str, seqs: tuple[int, ...]) -> None:
            await calls(attempt_id, seqs)
            mark = sa.update(t.calls).where(t.calls.c.attempt_id == attempt_id)
            await w.store.write(lambda c: c.execute(mark.values(untrainable="unknown_version")) and None)

        w.attempts.policies = SimpleNamespace(current=-1)  # type: ignore[assignment]
        w.attempts._calls = unknown  # type: ignore[method-assign]
        run_id = await w.runs.create(settings(mode=mode, max_generation_batches=2))
        assert (await w.reached(run_id, "paused")).reason.startswith("no_signal")
        assert {group.dropped for group in await w.rows(t.groups)} <= {"too_few_valid", ""}


@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_equal_rewards_of_other_weights_say_nothing_of_these(
    database_url: str, tmp_path: Path, mode: str
) -> None:
    asked: set[str] = set()

    def reward(row: Any, step: int, slot: int) -> float:
        asked.add(row.id)
        return 0.0 if step == 2 and len(asked) <= 8 else float(slot % 2)

    async with world(database_url, tmp_path, reward=reward) as w:
        await w.tasks()
        let = slowly(w, lambda row, before: before >= 4)  # those of the second step
        run_id = await w.runs.create(settings(mode=mode, max_staleness=0, max_generation_batches=1))
        trainer = w.trainer(run_id)
        session = await trainer.open()
        assert await step(trainer, session, run_id, 1) == 1
        await put_live_in_between(w, run_id, let, 8)
        assert await step(trainer, session, run_id, 2) == 2
        await w.reached(run_id, "completed")
        assert await versions_trained(w, run_id, 2) == {1}
        if mode == "sync":
            figures = await w.metrics(run_id, 2)
            assert (figures["reward/mean"], figures["groups/drawn"], figures["groups/mixed_share"]) == (
                0.5,
                2,
                1,
            )


@pytest.mark.parametrize("kind", ["eval", "train"])
async def test_a_round_of_evaluation_is_of_one_version(database_url: str, tmp_path: Path, kind: str) -> None:
    async with world(database_url, tmp_path) as w:
        await w.tasks()
        await w.tasks(3, "test")
        first = await w.runs.create(settings(name="first", steps=1))
        await w.trainer(first).run()
        await w.reached(first, "completed")
        let = slowly(w, lambda row, before: row.mode == "eval" and before >= 2)
        how = {"split": "test"} if kind == "eval" else {"eval": RunEval(k=2)}
        run_id = await w.runs.create(settings(name="measured", kind=kind, steps=1, **how))
        await eventually(lambda: ended(w, run_id, 2))
        await put_live_in_between(w, run_id, let, 6)
        measured = await eventually(lambda: w.metrics(run_id, 0, "eval"))
        r, c = t.rollouts.c, t.calls.c
        query = (
            sa.select(c.policy_version)
            .distinct()
            .join(t.rollouts, r.final_attempt_id == c.attempt_id)
            .join(t.groups, t.groups.c.id == r.group_id)
            .where(r.run_id == run_id, r.mode == "eval", t.groups.c.dropped == "")
        )
        answered = await w.store.read(lambda connection: list(connection.execute(query).scalars()))
        assert answered == [measured["version"]]
        assert measured["rollouts/valid"] == 6
        if kind == "train":
            assert answered == [1]  # which it trains
            await w.runs.cancel(run_id)


async def test_a_checkpoint_that_is_refused_after_its_trainer_came_again_is_made_anew(
    database_url: str, tmp_path: Path
) -> None:
    weights = FakeWeights()
    async with world(database_url, tmp_path, weights) as w:
        await w.tasks()
        await w.tasks(3, "test")
        plan = RunEval(k=2, at_start=False, at_end=False)
        run_id = await w.runs.create(settings(eval=plan))
        trainer = w.trainer(run_id)
        session = await trainer.open()
        assert await trainer.batch(1)
        w.attempts.paused.clear()
        await w.steering.evaluate(run_id)  # before which nothing is loaded
        await eventually(lambda: w.rows(t.groups, t.groups.c.mode == "eval"))
        made = write_checkpoint(Path(session.checkpoint_dir), run_id, 1)
        assert await trainer.report(1, *made) == 1
        again = w.trainer(run_id)
        assert (await again.open(resume_step=1)).next_batch == 2
        assert await again.report(1, *made) == 1
        weights.fail.append(CheckpointError("logprobs differ"))
        w.attempts.paused.set()
        assert "logprobs differ" in (await w.reached(run_id, "paused")).reason
        await w.runs.resume(run_id)
        assert await w.trainer(run_id).run(resume_step=0) == "ended"
        await w.reached(run_id, "completed")
        states = {(row.version, row.step): row.state for row in await w.rows(t.policies)}
        assert states == {(0, None): "retired", (1, 1): "rejected", (2, 1): "retired", (3, 2): "live"}


async def test_a_refusal_that_could_not_be_written_pauses_the_run_all_the_same(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the last step, after which its trainer was let go."""
    weights = FakeWeights()
    async with world(database_url, tmp_path, weights) as w:
        await w.tasks()
        run_id = await w.runs.create(settings(steps=1))
        apply, refused = w.lifecycle.apply, asyncio.Event()

        async def shaky(event: Event, **more: Any) -> Applied:
            if isinstance(event, RunPaused) and not refused.is_set():
                refused.set()
                raise StoreError("the disk that holds the database is full")
            return await apply(event, **more)

        monkeypatch.setattr(w.lifecycle, "apply", shaky)
        weights.fail.append(CheckpointError("logprobs differ"))
        trainer = w.trainer(run_id)
        session = await trainer.open()
        assert await step(trainer, session, run_id, 1) == 1
        assert "logprobs differ" in (await w.reached(run_id, "paused")).reason
        assert refused.is_set()
        launched = len(w.launcher.launched)
        await w.runs.resume(run_id)
        await eventually(lambda: len(w.launcher.launched) > launched)
        assert await w.trainer(run_id).run() == "ended"
        await w.reached(run_id, "completed")


class Held(FakeWeights):
    """The first load takes until ``go``, and then finds the checkpoint at fault."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.go = asyncio.Event(), asyncio.Event()

    async def swap(self, path: Path, version: int, manifest_sha256: str) -> SwapReport:
        if not self.asked.is_set():
            self.asked.set()
            await self.go.wait()
            raise CheckpointError("logprobs differ")
        return await super().swap(path, version, manifest_sha256)


async def test_what_was_trained_on_a_refused_checkpoint_is_trained_again(
    database_url: str, tmp_path: Path
) -> None:
    """It is refused when the trainer has made the next step of it, which is not exported."""
    weights = Held()
    async with world(database_url, tmp_path, weights) as w:
        await w.tasks()
        run_id = await w.runs.create(settings(steps=4, mode="async", export_every=2, max_staleness=2))
        trainer = w.trainer(run_id)
        session = await trainer.open()

        async def metrics(trainer: FakeTrainer, k: int) -> None:
            while await trainer.batch(k) is None:
                pass
            await asyncio.to_thread(trainer.link.report_metrics, k, {"loss": 0.5})

        await metrics(trainer, 1)
        await metrics(trainer, 2)
        await eventually(lambda: w.rows(t.batches, t.batches.c.k == 3))
        made = write_checkpoint(Path(session.checkpoint_dir), run_id, 2)
        await asyncio.to_thread(trainer.link.report_checkpoint, 2, *made)
        await weights.asked.wait()
        await metrics(trainer, 3)
        weights.go.set()
        assert "logprobs differ" in (await w.reached(run_id, "paused")).reason
        await w.runs.resume(run_id)
        again = w.trainer(run_id)
        assert (await again.open(resume_step=3)).next_batch == 2
        assert await step(again, session, run_id, 2) == 2
        await metrics(again, 3)
        assert await step(again, session, run_id, 4) == 3
        await w.reached(run_id, "completed")
        states = {(row.version, row.step): row.state for row in await w.rows(t.policies)}
        assert states == {(0, None): "retired", (1, 2): "rejected", (2, 2): "retired", (3, 4): "live"}


async def test_the_load_of_a_base_is_no_figure_of_the_run(database_url: str, tmp_path: Path) -> None:
    """The base was made by another run, in a step of that one."""
    async with world(database_url, tmp_path) as w:
        await w.tasks()
        older = await w.runs.create(settings(name="older", steps=2))
        await w.trainer(older).run()
        await w.reached(older, "completed")
        assert "seconds/swap" in await w.metrics(older, 2)
        younger = await w.runs.create(settings(name="younger", steps=1))
        await eventually(lambda: w.rows(t.groups, t.groups.c.run_id == younger))
        await w.runs.pause(younger, "by a person")
        await w.controller.activate(0)
        await w.runs.resume(younger)
        await eventually(lambda: w.policies.current == 2)
        await w.trainer(younger).run()
        await w.reached(younger, "completed")
        assert "seconds/swap" in await w.metrics(younger, 1)
        assert await w.metrics(younger, 2) == {}


async def test_a_base_that_is_gone_pauses_the_run_with_the_reason(database_url: str, tmp_path: Path) -> None:
    """It was live once, so that its row will never say ``rejected``."""
    async with world(database_url, tmp_path) as w:
        await w.tasks()
        older = await w.runs.create(settings(name="older", steps=3))
        trainer = w.trainer(older)
        session = await trainer.open()
        await step(trainer, session, older, 1)
        await eventually(lambda: w.policies.current == 1)
        await w.runs.pause(older, "by a person")
        younger = await w.runs.create(settings(name="younger"))
        await eventually(lambda: w.rows(t.batches, t.batches.c.run_id == younger))
        await w.runs.resume(older)
        await w.reached(younger, "paused")
        await step(trainer, session, older, 2)
        await eventually(lambda: w.policies.current == 2)
        await asyncio.to_thread(trainer.link.beat)
        assert trainer.link.acked_step == 1  # the younger goes on from it
        shutil.rmtree(Path(session.checkpoint_dir) / "step_00001")
        await step(trainer, session, older, 3)
        await w.reached(older, "completed")
        row = await eventually(lambda: _paused(w, younger))
        assert "step_00001" in row.reason
        refusals = await w.rows(t.events, t.events.c.run_id == younger, t.events.c.kind == "run_paused")
        assert len(refusals) == 2  # policy_busy, and this


async def _paused(w: World, run_id: str) -> Any:
    row = await w.run_row(run_id)
    return row if row.state == "paused" and row.reason != "policy_busy" else None


async def test_the_last_batch_before_an_export_is_waited_for(database_url: str, tmp_path: Path) -> None:
    """What the version before it samples is too old from the moment on at which its metrics are told."""
    async with world(database_url, tmp_path) as w:
        await w.tasks()
        calls = w.attempts._calls

        async def take_a_while(attempt_id: str, seqs: tuple[int, ...]) -> None:
            await calls(attempt_id, seqs)
            await asyncio.sleep(0.3)

        w.attempts._calls = take_a_while  # type: ignore[method-assign]
        run_id = await w.runs.create(settings(steps=4, mode="async", export_every=2, max_staleness=1))
        trainer = w.trainer(run_id)
        session = await trainer.open()
        for k in range(1, 5):
            while await trainer.batch(k) is None:
                pass
            made = write_checkpoint(Path(session.checkpoint_dir), run_id, k)
            await asyncio.to_thread(trainer.link.report_metrics, k, {"loss": 0.5})
            await asyncio.sleep(0.7)  # it is on its way
            if k % 2 == 0:
                await asyncio.to_thread(trainer.link.report_checkpoint, k, *made)
        await w.reached(run_id, "completed")
        assert not await w.rows(t.events, t.events.c.kind == "run_paused")
        assert all([(await w.metrics(run_id, k))["staleness/max"] <= 1 for k in range(1, 5)])


async def test_sound_weights_take_the_place_of_damaged_ones(database_url: str, tmp_path: Path) -> None:
    """A trainer that makes a checkpoint again finds the folder of before damaged, and writes another."""
    async with world(database_url, tmp_path) as w:
        await w.tasks()
        run_id = await w.runs.create(settings())
        trainer = w.trainer(run_id)
        session = await trainer.open()
        assert await step(trainer, session, run_id, 1) == 1
        await eventually(lambda: w.policies.current == 1)
        path, digest = write_checkpoint(Path(session.checkpoint_dir), run_id, 1)
        sound = shutil.copytree(path, f"{path}_r2")
        assert await trainer.report(1, sound, digest) == 1
        (version,) = await w.rows(t.policies, t.policies.c.version == 1)
        assert (version.path, version.state) == (sound, "live")
        assert w.moved == [(1, Path(path)), (1, Path(sound))]


async def test_a_rollout_beyond_the_length_limit_counts_in_its_group(
    database_url: str, tmp_path: Path
) -> None:
    """It has no sample: the first call of every second rollout is not to be trained, and the limit cuts the rest."""
    async with world(database_url, tmp_path) as w:
        calls = w.attempts._calls

        async def constrained(attempt_id: str, seqs: tuple[int, ...]) -> None:
            await calls(attempt_id, seqs)
            slot = sa.select(t.rollouts.c.slot).join(t.attempts, t.attempts.c.rollout_id == t.rollouts.c.id)
            slot = slot.where(t.attempts.c.id == attempt_id)
            first = sa.update(t.calls).where(t.calls.c.attempt_id == attempt_id, t.calls.c.seq == 0)

            def write(connection: sa.Connection) -> None:
                if connection.execute(slot).scalar_one() == 1:
                    connection.execute(first.values(untrainable="constrained"))

            await w.store.write(write)

        w.attempts._calls = constrained  # type: ignore[method-assign]
        await w.tasks()
        run_id = await w.runs.create(settings(steps=1, max_sample_tokens=12))
        assert await w.trainer(run_id).run() == "ended"
        await w.reached(run_id, "completed")
        (batch,) = await w.rows(t.batches)
        assert len(batch.rollout_ids) == 4
        assert len({row.rollout_id for row in await w.rows(t.samples)}) == 2


def test_only_what_the_run_made_or_began_from_may_be_trained() -> None:
    def version(number: int, step: int | None, run: str | None) -> Version:
        state = PolicyState.RETIRED
        return Version(name="p", version=number, state=state, path="", run_id=run, step=step)

    versions = [version(0, None, None), version(1, 1, "a"), version(2, 1, "b"), version(3, 2, "b")]
    versions += [version(4, 2, "a"), version(5, 2, "a")]  # made twice
    assert policy.usable(versions, "a", 0, 0) == {0, 1, 4, 5}
    assert policy.usable(versions, "a", 0, 1) == {1, 4, 5}
    assert policy.usable(versions, "a", 0, 2) == {4, 5}
    assert policy.usable(versions, "c", 3, -1) == {3}
    assert policy.acknowledged_step(versions, "a", {1}) == 1
    assert policy.acknowledged_step(versions, "a", {0, 2, 5}) == 2
