"""The policy loop from the first draw to the end of the run, with what can go wrong on the way."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from controller_support import FakeWeights, eventually, settings, world, write_checkpoint

from forge_server.domain.engine import EngineUnavailable
from forge_server.domain.errors import CheckpointError, ConfigError, Conflict
from forge_server.domain.run import RunEval
from forge_server.store import tables as t

pytestmark = pytest.mark.timeout(120)


async def test_a_run_trains_every_step_and_completes(database_url: str, tmp_path: Path) -> None:
    async with world(database_url, tmp_path) as w:
        await w.tasks()
        await w.tasks(3, "test")
        run_id = await w.runs.create(settings(eval=RunEval(k=2)))
        await eventually(lambda: w.launcher.launched)
        assert await w.trainer(run_id).run() == "ended"
        row = await w.reached(run_id, "completed")
        assert (row.step, row.base_version) == (2, 0)
        policies = await w.rows(t.policies)
        assert [(p.version, p.step, p.state, p.parent_version) for p in policies] == [
            (0, None, "retired", None),
            (1, 1, "retired", 0),
            (2, 2, "live", 1),
        ]
        assert w.weights.loaded == [1, 2]
        assert w.policies.current == 2 and w.gate.holds == 0
        first = await w.metrics(run_id, 1)
        assert first["reward/mean"] == 0.5 and first["pass_rate"] == 0.5
        assert first["groups/trained"] == 2 and first["rollouts/valid"] == 4
        assert first["tokens/trained"] == 4 * 6 and first["samples/merge_ratio"] == 1.0
        assert {"seconds/generate", "seconds/assemble", "seconds/train", "seconds/swap"} <= first.keys()
        assert (await w.metrics(run_id, 2))["staleness/max"] == 0
        assert (await w.metrics(run_id, 1, "trainer"))["loss"] == 0.5
        for step in (0, 2):
            measured = await w.metrics(run_id, step, "eval")
            assert measured["version"] == step and measured["reward/mean"] == 0.5
            assert measured["pass@2"] == 1.0
        trained = await w.rows(t.rollouts, t.rollouts.c.mode == "train")
        assert {r.policy_version for r in trained} == {0, 1}


async def test_evaluation_is_never_trained(database_url: str, tmp_path: Path) -> None:
    async with world(database_url, tmp_path) as w:
        await w.tasks()
        await w.tasks(3, "test")
        run_id = await w.runs.create(settings(steps=1, eval=RunEval(k=2)))
        await eventually(lambda: w.launcher.launched)
        await w.trainer(run_id).run()
        await w.reached(run_id, "completed")
        evaluated = {r.id for r in await w.rows(t.rollouts, t.rollouts.c.mode == "eval")}
        (batch,) = await w.rows(t.batches)
        assert len(evaluated) == 12 and not evaluated & set(batch.rollout_ids)


async def test_no_signal_draws_rounds_then_pauses_and_resumes_anew(database_url: str, tmp_path: Path) -> None:
    learnt = False

    def reward(row: Any, step: int, slot: int) -> float | str:
        if learnt:
            return float(slot % 2)
        return "hole" if slot == 2 else 0.0

    async with world(database_url, tmp_path, reward=reward) as w:
        await w.tasks()
        run_id = await w.runs.create(settings(steps=1, n=3, max_generation_batches=2))
        row = await w.reached(run_id, "paused")
        assert row.reason.startswith("no_signal") and row.step == 0
        groups = await w.rows(t.groups)
        assert len(groups) == 4 and {g.dropped for g in groups} == {"equal_rewards"}
        assert {g.round for g in groups} == {0, 1}
        figures = await w.metrics(run_id, 1)
        assert figures["groups/dropped_equal_rewards"] == 4 and figures["not_trained/call_missing"] == 4
        learnt = True
        await w.runs.resume(run_id)
        assert await w.trainer(run_id).run() == "ended"
        await w.reached(run_id, "completed")
        assert max(g.round for g in await w.rows(t.groups)) == 2
        figures = await w.metrics(run_id, 1)  # of what was trained, and nothing of what was dropped before
        assert figures["groups/drawn"] == 2 and not any("not_trained" in name for name in figures)


async def test_a_smaller_batch_is_trained_when_rounds_run_out(database_url: str, tmp_path: Path) -> None:
    def reward(row: Any, step: int, slot: int) -> float:
        return float(slot % 2) if row.task_id == "ta-train-0" else 1.0

    async with world(database_url, tmp_path, reward=reward) as w:
        await w.tasks(4)
        run_id = await w.runs.create(settings(steps=1, max_generation_batches=2))
        await w.trainer(run_id).run()
        await w.reached(run_id, "completed")
        figures = await w.metrics(run_id, 1)
        assert figures["groups/trained"] == 1 and figures["groups/drawn"] == 4
        assert figures["reward/mean"] == pytest.approx(7 / 8)  # all valid rollouts, not those of the batch


async def test_infra_failures_and_holes_leave_no_trace_in_a_batch(database_url: str, tmp_path: Path) -> None:
    ends: tuple[float | str, ...] = (0.0, 1.0, "infra", "crash", "hole")

    def reward(row: Any, step: int, slot: int) -> float | str:
        return ends[slot]

    async with world(database_url, tmp_path, reward=reward) as w:
        await w.tasks()
        run_id = await w.runs.create(settings(steps=1, groups=1, n=5, max_attempts=1))
        await w.trainer(run_id).run()
        await w.reached(run_id, "completed")
        (batch,) = await w.rows(t.batches)
        slots = {r.id: r.slot for r in await w.rows(t.rollouts)}
        assert sorted(slots[i] for i in batch.rollout_ids) == [0, 1, 3]
        figures = await w.metrics(run_id, 1)
        assert figures["rollouts/valid"] == 4
        assert figures["reward/mean"] == pytest.approx((0 + 1 + 0 + 1) / 4)
        assert figures["not_trained/call_missing"] == 1
        assert figures["outcome/infra_failure/evicted"] == 1 and figures["infra/death_rate"] == 0.2
        assert figures["outcome/policy_failure/verifier_crash"] == 1


async def test_a_rejected_checkpoint_leaves_the_old_policy_and_heals(
    database_url: str, tmp_path: Path
) -> None:
    weights = FakeWeights()
    weights.fail.append(CheckpointError("logprobs differ"))
    async with world(database_url, tmp_path, weights) as w:
        await w.tasks()
        run_id = await w.runs.create(settings())
        assert await w.trainer(run_id).run() == "fenced"
        row = await w.reached(run_id, "paused")
        assert "checkpoint_rejected" in row.reason and "logprobs differ" in row.reason
        assert w.policies.current == 0 and w.gate.holds == 0 and row.step == 1
        await w.runs.resume(run_id)
        trainer = w.trainer(run_id)
        assert await trainer.run(resume_step=1) == "ended"
        await w.reached(run_id, "completed")
        states = [(p.version, p.step, p.state) for p in await w.rows(t.policies)]
        assert states == [(0, None, "retired"), (1, 1, "rejected"), (2, 1, "retired"), (3, 2, "live")]
        assert sorted(trainer.batches) == [1, 2]  # it went back before the checkpoint that was refused


async def test_an_engine_fault_is_tried_again(database_url: str, tmp_path: Path) -> None:
    weights = FakeWeights()
    weights.fail += [EngineUnavailable("away"), EngineUnavailable("away")]
    async with world(database_url, tmp_path, weights) as w:
        await w.tasks()
        run_id = await w.runs.create(settings(steps=1))
        assert await w.trainer(run_id).run() == "ended"
        await w.reached(run_id, "completed")
        assert w.weights.loaded == [1] and w.gate.holds == 0


async def test_an_engine_that_stays_away_pauses_the_run(database_url: str, tmp_path: Path) -> None:
    weights = FakeWeights()
    weights.fail += [EngineUnavailable("away")] * 8
    async with world(database_url, tmp_path, weights) as w:
        await w.tasks()
        run_id = await w.runs.create(settings(steps=1))
        training = asyncio.create_task(w.trainer(run_id).run())
        row = await w.reached(run_id, "paused")
        assert "away" in row.reason and w.policies.current == 0
        await w.runs.resume(run_id)
        await w.reached(run_id, "completed")
        assert await training == "ended"


@pytest.mark.parametrize("phase", ["generating", "training"])
async def test_pause_and_resume(database_url: str, tmp_path: Path, phase: str) -> None:
    async with world(database_url, tmp_path) as w:
        await w.tasks()
        if phase == "generating":
            w.attempts.paused.clear()
        run_id = await w.runs.create(settings(steps=1))
        await eventually(lambda: w.rows(t.groups if phase == "generating" else t.batches))
        await w.runs.pause(run_id, "a person")
        w.attempts.paused.set()
        assert (await w.run_row(run_id)).reason == "a person"
        await eventually(lambda: w.launcher.swept > 0)  # a paused run has no trainer
        await w.runs.resume(run_id)
        assert await w.trainer(run_id).run() == "ended"
        await w.reached(run_id, "completed")
        assert len(await w.rows(t.batches)) == 1


@pytest.mark.parametrize("phase", ["generating", "training", "paused"])
async def test_cancel_ends_the_run_and_its_trainer(database_url: str, tmp_path: Path, phase: str) -> None:
    async with world(database_url, tmp_path) as w:
        await w.tasks()
        if phase == "generating":
            w.attempts.paused.clear()
        run_id = await w.runs.create(settings())
        await eventually(lambda: w.rows(t.groups if phase == "generating" else t.batches))
        session = await w.trainer(run_id).open()
        assert session.next_batch == 1
        if phase == "paused":
            await w.runs.pause(run_id, "a person")
        await w.runs.cancel(run_id)
        assert await w.trainer(run_id).run() == "ended"
        rollouts = await w.rows(t.rollouts)
        assert rollouts and {r.state for r in rollouts} == {"ended"}
        await eventually(lambda: not w.controller.driven)


async def test_async_generates_ahead_and_no_further_than_the_cap(database_url: str, tmp_path: Path) -> None:
    async with world(database_url, tmp_path) as w:
        await w.tasks()
        w.attempts.paused.clear()
        run_id = await w.runs.create(settings(mode="async", steps=4, max_staleness=1))

        async def drawn() -> bool:
            return len(await w.rows(t.groups)) == 4  # two batches of two

        await eventually(drawn)
        w.attempts.paused.set()
        await eventually(lambda: w.rows(t.batches))

        async def complete() -> bool:
            return {r.state for r in await w.rows(t.rollouts)} == {"ended"}

        await eventually(complete)
        assert await drawn()  # batch 1 waits for the trainer, and the other two groups for batch 2
        assert await w.trainer(run_id).run() == "ended"
        await w.reached(run_id, "completed")
        batches = await w.rows(t.batches)
        assert [len(b.rollout_ids) for b in batches] == [4] * 4
        figures = [await w.metrics(run_id, b.k) for b in batches]
        assert figures[0]["staleness/max"] == 0 and figures[1]["staleness/max"] == 1
        assert max(f["staleness/max"] for f in figures) <= 1
        steps = {g.id: g.batch_k - g.step for g in await w.rows(t.groups, t.groups.c.batch_k.is_not(None))}
        assert max(steps.values()) >= 1  # carried over


async def test_async_pauses_when_nothing_can_be_learnt(database_url: str, tmp_path: Path) -> None:
    async with world(database_url, tmp_path, reward=lambda row, step, slot: 1.0) as w:
        await w.tasks()
        run_id = await w.runs.create(settings(mode="async", max_generation_batches=3))
        assert (await w.reached(run_id, "paused")).reason.startswith("no_signal")
        groups = await w.rows(t.groups)
        assert len([g for g in groups if g.dropped == "equal_rewards"]) >= 6


async def test_async_draws_no_more_than_a_step_may_while_the_trainer_works(
    database_url: str, tmp_path: Path
) -> None:
    """Two groups have a signal, and are the first batch."""
    first: dict[str, None] = {}

    def reward(row: Any, step: int, slot: int) -> float:
        if len(first) < 2:
            first[row.group_id] = None
        return float(slot % 2) if row.group_id in first else 1.0

    async with world(database_url, tmp_path, reward=reward) as w:
        await w.tasks()
        run_id = await w.runs.create(settings(mode="async", max_generation_batches=2))
        trainer = w.trainer(run_id)
        await trainer.open()
        assert await trainer.batch(1)

        async def drawn() -> int:
            """Groups for the next step."""
            return len(await w.rows(t.groups, t.groups.c.batch_k.is_(None), t.groups.c.dropped == ""))

        async def enough() -> bool:
            return await drawn() >= 4

        await eventually(enough)
        for _ in range(20):
            w.bells.ring(run_id)
            await asyncio.sleep(0.05)
        assert await drawn() <= 4 + 2  # what was in flight when the fourth ended
        await asyncio.to_thread(trainer.link.report_metrics, 1, {"loss": 0.1})
        assert (await w.reached(run_id, "paused")).reason.startswith("no_signal")


async def test_async_draws_nothing_that_will_be_too_old(database_url: str, tmp_path: Path) -> None:
    """A batch is trained, and what is live has not learnt from it: what is drawn now must do for the next one."""
    async with world(database_url, tmp_path) as w:
        await w.tasks()
        first: dict[str, None] = {}
        go_on = asyncio.Event()

        async def before(attempt_id: str, seq: int) -> None:
            """Two groups come in; the others take long."""
            of = sa.select(t.rollouts.c.group_id).join(t.attempts, t.attempts.c.rollout_id == t.rollouts.c.id)
            query = of.where(t.attempts.c.id == attempt_id)
            group_id = await w.store.read(lambda c: c.execute(query).scalar_one())
            if len(first) < 2:
                first[group_id] = None
            if group_id not in first:
                await go_on.wait()

        w.attempts.before = before
        run_id = await w.runs.create(settings(mode="async", steps=4, export_every=2, max_staleness=1))
        trainer = w.trainer(run_id)
        session = await trainer.open()
        assert await trainer.batch(1)
        await asyncio.to_thread(trainer.link.report_metrics, 1, {"loss": 0.1})
        for _ in range(20):
            w.bells.ring(run_id)
            await asyncio.sleep(0.05)
        assert len(await w.rows(t.groups)) == 4  # those of batch 1, and two more
        go_on.set()
        for k in (2, 3, 4):
            assert await trainer.batch(k)
            if k % 2:
                await asyncio.to_thread(trainer.link.report_metrics, k, {"loss": 0.1})
            else:
                await trainer.report(k, *write_checkpoint(Path(session.checkpoint_dir), run_id, k))
        await w.reached(run_id, "completed")
        assert not await w.rows(t.groups, t.groups.c.dropped == "stale")


async def test_async_exports_less_often_than_it_trains(database_url: str, tmp_path: Path) -> None:
    async with world(database_url, tmp_path) as w:
        await w.tasks()
        run_id = await w.runs.create(settings(mode="async", steps=3, export_every=3, max_staleness=2))
        trainer = w.trainer(run_id)
        session = await trainer.open()
        for k in (1, 2, 3):
            assert await trainer.batch(k)
            await asyncio.to_thread(trainer.link.report_metrics, k, {"loss": 0.1})
        await trainer.report(3, *write_checkpoint(Path(session.checkpoint_dir), run_id, 3))
        await w.reached(run_id, "completed")
        assert w.weights.loaded == [1]


async def test_a_second_run_waits_for_the_policy(database_url: str, tmp_path: Path) -> None:
    async with world(database_url, tmp_path) as w:
        await w.tasks()
        first = await w.runs.create(settings(steps=1))
        second = await w.runs.create(settings(name="second", steps=1))
        assert (await w.reached(second, "paused")).reason == "policy_busy"
        await w.trainer(first).run()
        await w.reached(second, "active")
        await eventually(lambda: w.rows(t.batches, t.batches.c.run_id == second))
        assert await w.trainer(second).run() == "ended"
        assert (await w.run_row(second)).base_version == 1
        assert [p.parent_version for p in await w.rows(t.policies)] == [None, 0, 1]


async def test_a_run_that_waits_for_the_policy_is_paused_by_a_person(
    database_url: str, tmp_path: Path
) -> None:
    """It does not go on by itself any more, and who came after it has the policy."""
    async with world(database_url, tmp_path) as w:
        await w.tasks()
        first = await w.runs.create(settings(steps=1))
        second = await w.runs.create(settings(name="second", steps=1))
        third = await w.runs.create(settings(name="third", steps=1))
        for waiting in (second, third):
            assert (await w.reached(waiting, "paused")).reason == "policy_busy"
        await w.runs.pause(second, "by a person")
        assert (await w.run_row(second)).reason == "by a person"
        assert await w.trainer(first).run() == "ended"
        await w.reached(third, "active")
        assert await w.trainer(third).run() == "ended"
        await w.reached(third, "completed")
        row = await w.run_row(second)
        assert (row.state, row.reason) == ("paused", "by a person")
        await w.runs.resume(second)
        assert await w.trainer(second).run() == "ended"


async def test_a_run_waits_for_the_policy_also_when_its_trainer_cannot_be_ended_at_once(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on by itself all the same."""
    async with world(database_url, tmp_path) as w:
        await w.tasks()
        older = await w.runs.create(settings(name="older", steps=1))
        await eventually(lambda: w.launcher.launched)
        await w.runs.pause(older, "by a person")
        younger = await w.runs.create(settings(name="younger", steps=1))
        await eventually(lambda: len(w.launcher.launched) == 2)
        sweep, refused = w.launcher.sweep, ConfigError("the Job cannot be deleted")
        faults = [OSError("of any kind"), refused, None]  # and a cluster that does not answer

        async def shaky(run_id: str) -> bool:
            if run_id != younger or not faults:
                return await sweep(run_id)
            if (fault := faults.pop()) is not None:
                raise fault
            return False

        monkeypatch.setattr(w.launcher, "sweep", shaky)
        await w.runs.resume(older)

        def tried() -> bool:
            w.bells.ring(younger)
            return not faults

        await eventually(tried)
        row = await w.run_row(younger)
        assert (row.state, row.reason) == ("paused", "policy_busy")
        assert await w.trainer(older).run() == "ended"
        assert (await w.run_row(younger)).reason in ("policy_busy", "")
        await w.reached(younger, "active")
        assert await w.trainer(younger).run() == "ended"
        await w.reached(younger, "completed")


async def test_a_run_is_known_by_its_name(database_url: str, tmp_path: Path) -> None:
    async with world(database_url, tmp_path, drive=False) as w:
        run_id = await w.runs.create(settings(eval=RunEval(k=2)))
        assert await w.runs.create(settings(eval=RunEval(k=2))) == run_id
        with pytest.raises(Conflict, match=r"eval\.k"):
            await w.runs.create(settings(eval=RunEval(k=3)))


async def test_a_run_without_tasks_pauses_with_the_mend(database_url: str, tmp_path: Path) -> None:
    async with world(database_url, tmp_path) as w:
        run_id = await w.runs.create(settings())
        assert "task import" in (await w.reached(run_id, "paused")).reason
        await w.tasks()
        await w.runs.resume(run_id)
        await eventually(lambda: w.rows(t.batches))


async def test_evaluation_and_recording_runs_end_by_themselves(database_url: str, tmp_path: Path) -> None:
    async with world(database_url, tmp_path) as w:
        await w.tasks()
        await w.tasks(3, "test")
        evaluated = await w.runs.create(settings(kind="eval", split="test", n=4))
        await w.reached(evaluated, "completed")
        figures = await w.metrics(evaluated, 0, "eval")
        assert figures["tasks/measured"] == 3 and figures["pass@1"] == 0.5
        assert figures["reward/low95"] <= 0.5 <= figures["reward/high95"]
        recorded = await w.runs.create(settings(name="rec", kind="record", steps=2))
        await w.reached(recorded, "completed")
        assert len(await w.rows(t.groups, t.groups.c.run_id == recorded)) == 4
        assert not await w.rows(t.batches) and not w.launcher.launched


async def test_oversampled_groups_train_n_rollouts_and_count_the_rest(
    database_url: str, tmp_path: Path
) -> None:
    """Each task meets each harness of the mixture on the way, too."""
    async with world(database_url, tmp_path, reward=lambda row, step, slot: float(slot)) as w:
        await w.tasks(2)
        mixture = {"react": 1.0, "mini": 1.0}
        run = settings(steps=3, groups=2, n=3, oversample=2, harness="", harnesses=mixture)
        run_id = await w.runs.create(run)
        await eventually(lambda: w.launcher.launched)
        await w.trainer(run_id).run()
        await w.reached(run_id, "completed")
        for step in (1, 2, 3):
            found = await w.metrics(run_id, step)
            assert found["rollouts/drawn"] == 10 and found["rollouts/valid"] == found["rollouts/trained"] == 6
            assert found["surplus/stopped"] == found["outcome/cancelled/surplus"] == 4
        assert {len(batch.rollout_ids) for batch in await w.rows(t.batches)} == {6}
        rollouts = await w.rows(t.rollouts, t.rollouts.c.slot == 0)
        assert {(r.task_id, r.harness) for r in rollouts} == {
            (task.id, harness) for task in await w.rows(t.tasks) for harness in mixture
        }
