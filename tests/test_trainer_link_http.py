"""The trainer link over real HTTP: sessions, fencing, leases, batches, checkpoints — each act repeated."""

import asyncio
import json
import urllib.error
import urllib.request
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from controller_support import World, eventually, settings, world, write_checkpoint

from forge_server.store import keys
from forge_server.store import tables as t
from forge_server.trainer.errors import Fenced, LinkFailed, RunEnded

pytestmark = pytest.mark.timeout(120)


async def _ready(w: World, **changes: Any) -> str:
    """A run whose first batch is assembled; its loop then waits for the trainer."""
    await w.tasks()
    run_id = await w.runs.create(settings(**changes))
    await eventually(lambda: w.rows(t.batches))
    return run_id


async def _status(url: str, key: str, body: dict[str, Any] | None = None) -> int:
    def ask() -> int:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        try:
            with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=100) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            return error.code

    return await asyncio.to_thread(ask)


async def test_only_the_runs_own_trainer_key_opens_it(database_url: str, tmp_path: Path) -> None:
    async with world(database_url, tmp_path, drive=False) as w:
        run_id = await w.runs.create(settings())
        url = w.trainer_url(run_id) + "/sessions"
        body = {"world_size": 1}
        wrong = [
            "",
            "nonsense",
            keys.trainer_key(b"x" * 32, run_id),
            keys.trainer_key(w.secret, "ru-other"),
            keys.attempt_key(w.secret, run_id, "runner"),
        ]
        assert [await _status(url, key, body) for key in wrong] == [401] * 5
        # the right key: the run has no initial version yet, which passes
        assert await _status(url, keys.trainer_key(w.secret, run_id), body) == 503
        assert await _status(url, keys.trainer_key(w.secret, run_id), {"world_size": "x"}) == 400


async def test_a_session_tells_all_that_a_trainer_needs(database_url: str, tmp_path: Path) -> None:
    async with world(database_url, tmp_path) as w:
        run_id = await _ready(w, overrides=("b=2",), seed=7, save_every=2)
        session = await w.trainer(run_id).open()
        assert (session.next_batch, session.live_version, session.total_steps) == (1, 0, 2)
        assert (session.overrides, session.seed, session.save_every) == (["a=1", "b=2"], 7, 2)
        assert session.model_path == str(tmp_path / "initial")
        assert session.checkpoint_dir == str(tmp_path / run_id / "checkpoints")


async def test_the_servers_overrides_stay_what_the_run_has_trained_with(
    database_url: str, tmp_path: Path
) -> None:
    async with world(database_url, tmp_path, overrides=("a=0",)) as w:
        run_id = await _ready(w)
        await w.trainer(run_id).open()
    async with world(database_url, tmp_path) as w:
        trainer = w.trainer(run_id)
        session = await trainer.open()  # nothing is trained yet, so a wrong one may be mended
        assert session.overrides == ["a=1"]
        await trainer.report(1, *write_checkpoint(Path(session.checkpoint_dir), run_id, 1))
    async with world(database_url, tmp_path, overrides=("a=1", "lr=2")) as w:
        with pytest.raises(LinkFailed, match="remove it"):
            await w.trainer(run_id).open(resume_step=1)
    async with world(database_url, tmp_path, overrides=("a=2",)) as w:
        row = await w.reached(run_id, "paused")
        assert "another value of lr; remove it" in row.reason
        await w.runs.resume(run_id)
        with pytest.raises(LinkFailed, match="another value of a; restore '1'"):
            await w.trainer(run_id).open()
        assert "another value of a" in (await w.reached(run_id, "paused")).reason
    roomier = ("+a=1", "actor.ppo_max_token_len_per_gpu=4096", "actor.fsdp_config.param_offload=true")
    async with world(database_url, tmp_path, overrides=roomier) as w:
        await w.runs.resume(run_id)
        assert (await w.trainer(run_id).open(resume_step=1)).next_batch == 2


async def test_a_number_that_the_database_cannot_hold_is_the_requests_fault(
    database_url: str, tmp_path: Path
) -> None:
    async with world(database_url, tmp_path) as w:
        run_id = await _ready(w)
        url, key = w.trainer_url(run_id) + "/sessions", keys.trainer_key(w.secret, run_id)
        for number in (2**63, 10**25):
            assert await _status(url, key, {"world_size": number, "resume_step": 0}) == 400


async def test_a_newer_session_fences_off_every_older_one(database_url: str, tmp_path: Path) -> None:
    async with world(database_url, tmp_path) as w:
        run_id = await _ready(w)
        old, new = w.trainer(run_id), w.trainer(run_id)
        first, second = await old.open(), await new.open()
        assert second.fence == first.fence + 1
        path, digest = write_checkpoint(Path(first.checkpoint_dir), run_id, 1)
        for act in (
            lambda: asyncio.to_thread(old.link.beat),
            lambda: old.batch(1),
            lambda: old.report(1, path, digest),
        ):
            with pytest.raises(Fenced):
                await act()
        assert len(await w.rows(t.policies)) == 1 and not await w.rows(
            t.step_metrics, t.step_metrics.c.source == "trainer"
        )
        assert await new.batch(1)
        (state,) = [b.state for b in await w.rows(t.batches)]
        assert state == "fetched"


async def test_a_fenced_off_trainer_leaves_its_long_poll(database_url: str, tmp_path: Path) -> None:
    async with world(database_url, tmp_path) as w:
        run_id = await _ready(w)
        trainer = w.trainer(run_id)
        await trainer.open()
        waiting = asyncio.create_task(trainer.batch(2))
        await w.trainer(run_id).open()
        with pytest.raises(Fenced):
            await asyncio.wait_for(waiting, 100)


async def test_a_batch_is_the_same_bytes_each_time(database_url: str, tmp_path: Path) -> None:
    async with world(database_url, tmp_path) as w:
        run_id = await _ready(w)
        trainer = w.trainer(run_id)
        await trainer.open()
        first = await trainer.batch(1)
    async with world(database_url, tmp_path) as w:
        trainer = w.trainer(run_id)
        await trainer.open()
        assert first is not None and [await trainer.batch(1) for _ in range(2)] == [first, first]
        (row,) = await w.rows(t.batches)
        assert row.sha256 == sha256(first).hexdigest() and row.size == len(first)
        damage = sa.update(t.batch_parts).values(body=first[:-1] + b"\0")
        await w.store.write(lambda c: c.execute(damage) and None)
        with pytest.raises((LinkFailed, ConnectionError)):
            await trainer.batch(1)


async def test_reports_may_be_repeated(database_url: str, tmp_path: Path) -> None:
    async with world(database_url, tmp_path) as w:
        run_id = await _ready(w)
        trainer = w.trainer(run_id)
        session = await trainer.open()
        path, digest = write_checkpoint(Path(session.checkpoint_dir), run_id, 1)
        assert {await trainer.report(1, path, digest) for _ in range(3)} == {1}
        other, changed = write_checkpoint(Path(session.checkpoint_dir), run_id, 1, "replayed differently")
        assert await trainer.report(1, other, changed) == 2  # never the same number for other bytes
        with pytest.raises(Fenced):
            await trainer.report(9, path, digest)  # there is no such batch


async def test_acknowledgement_follows_the_engine(database_url: str, tmp_path: Path) -> None:
    async with world(database_url, tmp_path) as w:
        run_id = await _ready(w)
        trainer = w.trainer(run_id)
        session = await trainer.open()
        await asyncio.to_thread(trainer.link.beat)
        assert trainer.link.acked_step == 0
        await trainer.report(1, *write_checkpoint(Path(session.checkpoint_dir), run_id, 1))
        await eventually(lambda: w.policies.current == 1)
        await asyncio.to_thread(trainer.link.beat)
        assert trainer.link.acked_step == 1


async def test_the_trainer_goes_back_to_where_the_run_stands(database_url: str, tmp_path: Path) -> None:
    async with world(database_url, tmp_path) as w:
        run_id = await _ready(w)
        assert (await w.trainer(run_id).open(resume_step=5)).next_batch == 2
        assert (await w.trainer(run_id).open(resume_step=1)).next_batch == 2


async def test_an_ended_run_says_gone(database_url: str, tmp_path: Path) -> None:
    async with world(database_url, tmp_path) as w:
        run_id = await _ready(w)
        trainer = w.trainer(run_id)
        await trainer.open()
        waiting = asyncio.create_task(trainer.batch(2))
        await w.runs.cancel(run_id)
        with pytest.raises(RunEnded):
            await asyncio.wait_for(waiting, 100)
        await asyncio.to_thread(trainer.link.beat)
        assert trainer.link.stop.is_set()
        with pytest.raises(RunEnded):
            await trainer.open()
