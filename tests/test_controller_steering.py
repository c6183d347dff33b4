"""What a person asks of a run that goes on: the mixture, an evaluation, a save. A wish outlives the server."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from controller_support import World, eventually, settings, world, write_checkpoint

from forge_server.domain.errors import Conflict, InvalidRequest, NotFound, TaskError
from forge_server.domain.mixture import read, shares, written
from forge_server.domain.run import EXTERNAL, RunEval
from forge_server.store import tables as t

pytestmark = pytest.mark.timeout(120)

EVAL = RunEval(k=2, at_start=False, at_end=False)


async def kinds(w: World, *wanted: str) -> list[str]:
    return [row.kind for row in await w.rows(t.events, t.events.c.kind.in_(wanted))]


async def drawn(w: World, run_id: str) -> list[str]:
    """The harness of each of the run's groups, in the order they were drawn."""
    query = (
        sa.select(t.rollouts.c.harness)
        .join(t.groups, t.groups.c.id == t.rollouts.c.group_id)
        .where(t.groups.c.run_id == run_id, t.rollouts.c.slot == 0)
        .order_by(t.groups.c.step, t.groups.c.created_at, t.groups.c.id)
    )
    return await w.store.read(lambda c: list(c.execute(query).scalars()))


# --- the mixture -------------------------------------------------------------------------------------------


async def test_a_mixture_holds_for_what_is_drawn_from_then_on(database_url: str, tmp_path: Path) -> None:
    run = settings(kind="record", steps=3, groups=8)
    async with world(database_url, tmp_path) as w:
        await w.tasks(8)
        w.attempts.paused.clear()
        run_id = await w.runs.create(run)
        await eventually(lambda: _count(w, 8))
        await w.steering.mix(run_id, {"react": 1, "mini": 3})
        await w.steering.mix(run_id, {"react": 2, "mini": 6})  # the same shares: nothing changes
    async with world(database_url, tmp_path) as w:  # another life of the server
        assert await w.runs.create(run) == run_id  # its table is what it was
        await w.reached(run_id, "completed")
        harnesses = await drawn(w, run_id)
        assert harnesses[:8] == ["react"] * 8
        # what was drawn before is not made up for: a quarter of the later ones is still react
        assert Counter(harnesses[8:]) == {"mini": 12, "react": 4}
        tasks = Counter(row.task_id for row in await w.rows(t.groups))
        assert set(tasks.values()) == {3}  # each task's turns are counted over both
        (event,) = await w.rows(t.events, t.events.c.kind == "mixture_set")
        assert event.data == {"harnesses": {"react": 1.0, "mini": 3.0}, "instead_of": {"react": 1.0}}


async def _count(w: World, groups: int) -> bool:
    return len(await w.rows(t.groups)) == groups


@pytest.mark.parametrize(
    ("weights", "told"),
    [
        ({}, "no harness"),
        ({"react": 0.0}, "must be above 0"),
        ({"react": 1.0, "mini": -1.0}, "must be above 0"),
        ({"react": float("nan")}, "must be above 0"),
        ({"react": float("inf")}, "must be above 0"),
        ({EXTERNAL: 1.0}, "no harness"),
    ],
)
async def test_a_mixture_that_is_none_is_refused(
    database_url: str, tmp_path: Path, weights: dict[str, float], told: str
) -> None:
    async with world(database_url, tmp_path, drive=False) as w:
        run_id = await w.runs.create(settings())
        with pytest.raises(InvalidRequest, match=told):
            await w.steering.mix(run_id, weights)
        assert (await w.run_row(run_id)).mixture is None
        assert not await kinds(w, "mixture_set")


async def test_a_mixture_needs_a_run_that_draws(database_url: str, tmp_path: Path) -> None:
    async with world(database_url, tmp_path, drive=False) as w:
        evaluated = await w.runs.create(settings(name="e", kind="eval"))
        outside = await w.runs.create(settings(name="o", kind="record", harness=EXTERNAL))
        ended = await w.runs.create(settings(name="x"))
        await w.runs.cancel(ended)
        for run_id, told in (
            (evaluated, "all at once"),
            (outside, "join by themselves"),
            (ended, "is cancelled"),
        ):
            with pytest.raises(Conflict, match=told):
                await w.steering.mix(run_id, {"react": 1.0, "mini": 1.0})
        with pytest.raises(NotFound):
            await w.steering.mix("ru-none", {"react": 1.0})


def test_a_mixture_is_written_as_it_is_read() -> None:
    weights = read(["react=2", "my=odd=0.5"])
    assert weights == {"react": 2.0, "my=odd": 0.5}
    assert read(written(weights).split()) == weights
    assert shares(weights) == "my=odd 20%, react 80%"
    for word in ("react", "react=", "=2", "react=two", ""):
        with pytest.raises(InvalidRequest, match="NAME=WEIGHT"):
            read([word])
    for word in ("react=0", "react=-1", "react=nan", "react=inf"):
        with pytest.raises(InvalidRequest, match="'react' must be above 0"):
            read([word])
    with pytest.raises(InvalidRequest, match="twice"):
        read(["react=1", "react=2"])


# --- an evaluation now -------------------------------------------------------------------------------------


async def _at_the_trainer(w: World, **changes: Any) -> str:
    """A run whose first batch waits for the trainer."""
    await w.tasks()
    run_id = await w.runs.create(settings(**changes))
    await eventually(lambda: w.rows(t.batches))
    return run_id


async def test_an_evaluation_is_made_when_it_is_asked_for(database_url: str, tmp_path: Path) -> None:
    async with world(database_url, tmp_path) as w:
        await w.tasks(3, "test")
        run_id = await _at_the_trainer(w, eval=EVAL)
        w.attempts.paused.clear()
        asked = await w.steering.evaluate(run_id)
        assert (asked.version, asked.step, asked.split, asked.tasks, asked.k) == (0, 0, "test", 3, 2)
        with pytest.raises(Conflict, match="asked for already"):
            await w.steering.evaluate(run_id)
        w.attempts.paused.set()
        await eventually(lambda: kinds(w, "evaluation_done"))
        assert (await w.metrics(run_id, 0, "eval"))["pass@2"] == 1.0
        assert not (await w.run_row(run_id)).evaluation_asked
        with pytest.raises(Conflict, match="step 0 was evaluated already"):
            await w.steering.evaluate(run_id)
        assert await w.trainer(run_id).run() == "ended"
        await w.reached(run_id, "completed")
        assert not await w.metrics(run_id, 2, "eval")  # asked for once, made once
        assert await kinds(w, "evaluation_asked", "evaluation_done") == [
            "evaluation_asked",
            "evaluation_done",
        ]


async def test_a_wish_for_an_evaluation_outlives_the_server(database_url: str, tmp_path: Path) -> None:
    """Killed before it is begun, and again in its middle."""
    async with world(database_url, tmp_path) as w:
        await w.tasks(3, "test")
        run_id = await _at_the_trainer(w, eval=EVAL)
        await w.controller.stop()
        await w.steering.evaluate(run_id)
    async with world(database_url, tmp_path) as w:
        w.attempts.paused.clear()
        await eventually(lambda: w.rows(t.groups, t.groups.c.mode == "eval"))
    async with world(database_url, tmp_path) as w:
        await eventually(lambda: kinds(w, "evaluation_done"))
        assert (await w.metrics(run_id, 0, "eval"))["tasks/measured"] == 3
        assert len(await w.rows(t.groups, t.groups.c.mode == "eval")) == 3


async def test_a_round_that_is_under_way_is_not_asked_for_again(database_url: str, tmp_path: Path) -> None:
    async with world(database_url, tmp_path) as w:
        await w.tasks()
        await w.tasks(3, "test")
        w.attempts.paused.clear()
        run_id = await w.runs.create(settings(eval=RunEval(k=2)))
        await eventually(lambda: w.rows(t.groups, t.groups.c.mode == "eval"))
        with pytest.raises(Conflict, match="being evaluated"):
            await w.steering.evaluate(run_id)


async def test_an_evaluation_that_cannot_be_is_refused(database_url: str, tmp_path: Path) -> None:
    async with world(database_url, tmp_path) as w:
        run_id = await _at_the_trainer(w, name="plain")
        with pytest.raises(Conflict, match=r"\[run\.eval\]"):
            await w.steering.evaluate(run_id)
        await w.runs.cancel(run_id)
        with pytest.raises(Conflict, match="is cancelled"):
            await w.steering.evaluate(run_id)
        run_id = await w.runs.create(settings(name="testless", eval=EVAL))
        await eventually(lambda: w.rows(t.batches, t.batches.c.run_id == run_id))
        with pytest.raises(TaskError, match="'test' is ready"):
            await w.steering.evaluate(run_id)
        await w.runs.pause(run_id, "a person")
        with pytest.raises(Conflict, match="resume it first"):
            await w.steering.evaluate(run_id)
        with pytest.raises(NotFound):
            await w.steering.evaluate("ru-none")
        assert not await kinds(w, "evaluation_asked")


async def test_a_wish_that_fails_does_not_stop_the_run_again(database_url: str, tmp_path: Path) -> None:
    async with world(database_url, tmp_path) as w:
        run_id = await _at_the_trainer(w, eval=EVAL)
        asked = sa.update(t.runs).values(evaluation_asked=True)  # its tasks have gone since
        await w.store.write(lambda c: c.execute(asked) and None)
        w.bells.ring(run_id)
        assert "'test' is ready" in (await w.reached(run_id, "paused")).reason
        (event,) = await w.rows(t.events, t.events.c.kind == "evaluation_failed")
        assert "'test' is ready" in event.data["reason"]
        await w.runs.resume(run_id)
        assert await w.trainer(run_id).run() == "ended"
        await w.reached(run_id, "completed")


# --- a save now --------------------------------------------------------------------------------------------


async def test_a_save_reaches_the_trainer_and_is_answered_once(database_url: str, tmp_path: Path) -> None:
    async with world(database_url, tmp_path) as w:
        run_id = await _at_the_trainer(w, save_every=5, steps=3)
        assert (await w.steering.save(run_id)).asked
    async with world(database_url, tmp_path) as w:  # another life of the server
        again = await w.steering.save(run_id)
        assert again.asked and "already" in again.detail
        assert await kinds(w, "save_asked") == ["save_asked"]
        trainer = w.trainer(run_id)
        session = await trainer.open()
        await asyncio.to_thread(trainer.link.beat)
        wish = trainer.link.save
        assert wish

        async def report(saved: str) -> None:
            await asyncio.to_thread(trainer.link.report_metrics, 1, {"loss": 0.5}, saved)

        await report("")  # of a step that was saved before it heard of the wish
        await report("another")
        await asyncio.to_thread(trainer.link.beat)
        assert trainer.link.save == wish
        await report(wish)
        await report(wish)
        await asyncio.to_thread(trainer.link.beat)
        assert trainer.link.save == ""
        (event,) = await w.rows(t.events, t.events.c.kind == "state_saved")
        assert event.data == {"step": 1}
        path, digest = write_checkpoint(Path(session.checkpoint_dir), run_id, 1)
        await trainer.report(1, path, digest)
        assert (await w.steering.save(run_id)).detail.startswith("the state is saved at the end")


async def test_a_save_that_need_not_or_cannot_be(database_url: str, tmp_path: Path) -> None:
    async with world(database_url, tmp_path) as w:
        run_id = await _at_the_trainer(w)
        answer = await w.steering.save(run_id)
        assert not answer.asked and "every step is saved" in answer.detail
        await w.runs.pause(run_id, "a person")
        with pytest.raises(Conflict, match="resume it first"):
            await w.steering.save(run_id)
        await w.runs.cancel(run_id)
        with pytest.raises(Conflict, match="is cancelled"):
            await w.steering.save(run_id)
        recorded = await w.runs.create(settings(name="rec", kind="record", harness=EXTERNAL))
        with pytest.raises(Conflict, match="has a trainer"):
            await w.steering.save(recorded)
        last = await w.runs.create(settings(name="last", steps=1, save_every=5))
        await eventually(lambda: w.rows(t.batches, t.batches.c.run_id == last))
        trainer = w.trainer(last)
        await trainer.open()
        await asyncio.to_thread(trainer.link.report_metrics, 1, {"loss": 0.5})
        with pytest.raises(Conflict, match="its state is saved"):
            await w.steering.save(last)
        assert not await kinds(w, "save_asked")
