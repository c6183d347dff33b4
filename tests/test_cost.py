"""What a run has cost: cuts of its wall-clock that add up, and agree with what was measured otherwise."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa
from api_rig import on, rig
from controller_support import World, eventually, settings, world
from hypothesis import given
from hypothesis import strategies as st

from forge_server.api import cost as route
from forge_server.client.cost import Cost
from forge_server.client.http import ForgeClient
from forge_server.commands import runs
from forge_server.domain.clock import Interval, beyond, union
from forge_server.evaluation.cost import loop_time
from forge_server.settings import CostSettings
from forge_server.store import tables as t

pytestmark = pytest.mark.timeout(120)

PRICES = CostSettings(gpu_hour=4.0, engine_gpus=2, trainer_gpus=1, pod_hour={"local": 0.5})
SPANS = st.lists(
    st.tuples(st.integers(-2, 14), st.integers(-2, 14)).map(lambda s: Interval(*sorted(s))), max_size=4
)


@given(st.integers(0, 12), SPANS, SPANS, SPANS, SPANS, SPANS)
def test_every_moment_of_a_run_is_in_one_phase(
    end: int, down: Any, paused: Any, swap: Any, train: Any, made: Any
) -> None:
    """Against a look at the middle of every second."""
    found = loop_time(Interval(0, end), down=down, paused=paused, swap=swap, train=train, generate=made)
    expected = dict.fromkeys(msgspec.structs.asdict(found), 0.0)
    for second in range(end):
        a, b, c, d, e = (
            any(i.begin <= second < i.end for i in spans) for spans in (down, paused, swap, train, made)
        )
        rest = "both_s" if d and e else "train_s" if d else "generate_s" if e else "wait_s"
        expected["down_s" if a else "paused_s" if b else "swap_s" if c else rest] += 1
    assert msgspec.structs.asdict(found) == expected


async def trained(w: World, steps: int) -> Cost:
    await w.tasks()
    run_id = await w.runs.create(settings(steps=steps))
    await eventually(lambda: w.launcher.launched)
    assert await w.trainer(run_id).run() == "ended"
    await w.reached(run_id, "completed")
    return await w.store.read(lambda c: route.read(c, run_id, PRICES))


async def test_the_figures_of_a_run_add_up_to_its_wall_clock(database_url: str, tmp_path: Path) -> None:
    async with world(database_url, tmp_path) as w:
        cost = await trained(w, 3)
        run = await w.run_row(cost.run)
        batches = await w.rows(t.batches)
        attempts = await w.rows(t.attempts)
        rollouts = await w.rows(t.rollouts)
        holds = await w.rows(t.holds, t.holds.c.reason == "weight_update")
        assert len(holds) == 3 and cost.wall_s == run.ended_at - run.created_at
        assert sum(msgspec.structs.astuple(cost.loop)) == pytest.approx(cost.wall_s, rel=0.001)
        # what was measured elsewhere, by the controller's own clock
        assert cost.loop.swap_s == pytest.approx(sum(hold.end_at - hold.begin_at for hold in holds))
        updates = [
            Interval(hold.begin_at, hold.end_at) for hold in holds
        ]  # these go before whatever else happens
        trained_in = union(Interval(batch.fetched_at, batch.trained_at) for batch in batches)
        in_training = sum(i.end - i.begin for whole in trained_in for i in beyond(whole, updates))
        assert cost.loop.train_s + cost.loop.both_s == pytest.approx(in_training, rel=0.05, abs=0.01)
        flown = union(Interval(a.created_at, a.ended_at) for a in attempts)
        flying = sum(i.end - i.begin for whole in flown for i in beyond(whole, updates))
        assert cost.loop.generate_s + cost.loop.both_s == pytest.approx(flying, rel=0.05, abs=0.01)
        # the life of rollouts
        time = cost.time
        assert time.total_s == pytest.approx(sum(r.ended_at - r.created_at for r in rollouts))
        parts = time.idle_s + time.startup_s + time.agent_s + time.verify_s
        assert parts == pytest.approx(time.total_s, rel=0.05, abs=1.0)
        assert time.engine_s + time.held_s <= time.agent_s + 1e-6
        # money
        lines = {line.what: line for line in cost.lines}
        assert lines["engine"].hours * 3600 == pytest.approx(2 * cost.wall_s, rel=0.05)
        pods = sum(a.ended_at - a.created_at for a in attempts) / 3600
        (local,) = [line for name, line in lines.items() if name.startswith("attempts")]
        assert local.hours == cost.pod_hours == pytest.approx(pods)
        assert local.cost == pytest.approx(0.5 * pods)
        assert cost.gpu_hours == pytest.approx(lines["engine"].hours + lines["trainer"].hours)
        assert 0 < lines["trainer"].hours * 3600 <= cost.wall_s
        assert cost.total == pytest.approx(4.0 * cost.gpu_hours + 0.5 * pods)
        assert (cost.rollouts, cost.ended, cost.solved) == (12, 12, 6)
        assert cost.per_rollout == pytest.approx(cost.total / 12)
        assert cost.per_solved == pytest.approx(cost.total / 6)


async def test_a_paused_run_costs_no_gpu(
    database_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rows of a run of 100 s that was paused for 30 s, had no server for 10 s, and lost one attempt."""
    async with rig(tmp_path, cost=PRICES, **on(database_url)) as api:
        run_id = "ru-1"
        run = {
            "id": run_id,
            "name": "run",
            "kind": "record",
            "state": "completed",
            "settings": {"harness": "react"},
        }

        def rows(c: sa.Connection) -> None:
            c.execute(sa.insert(t.runs).values(created_at=1000.0, ended_at=1100.0, **run))
            for at, kind in ((1020.0, "run_paused"), (1050.0, "run_resumed")):
                c.execute(sa.insert(t.events).values(at=at, kind=kind, run_id=run_id, data={}))
            c.execute(sa.insert(t.holds).values(reason="server_down", begin_at=1060.0, end_at=1070.0))
            rollout = {"run_id": run_id, "harness": "react", "mode": "record", "state": "ended"}
            c.execute(
                sa.insert(t.rollouts).values(
                    id="ro-1", created_at=1000.0, ended_at=1100.0, reward=1.0, **rollout
                )
            )
            attempt = {"rollout_id": "ro-1", "state": "ended", "backend": "local"}
            c.execute(
                sa.insert(t.attempts).values(
                    id="at-1", number=1, created_at=1000.0, launched_at=1000.5, ended_at=1010.0, **attempt
                )
            )
            c.execute(
                sa.insert(t.attempts).values(
                    id="at-2",
                    number=2,
                    created_at=1050.0,
                    launched_at=1050.5,
                    running_at=1052.5,
                    sealed_at=1092.5,
                    ended_at=1100.0,
                    **attempt,
                )
            )
            for seq in range(2):
                c.execute(
                    sa.insert(t.calls).values(
                        id=seq,
                        attempt_id="at-2",
                        seq=seq,
                        dialect="chat",
                        mode="record",
                        request_digest=b"x",
                        began_at=1055.0,
                        engine_ms=3000.0,
                        held_ms=500.0,
                        completion_len=10,
                    )
                )

        await api.server.store.write(rows)
        answer = await api.http.get("/api/v1/runs/run/cost")
        cost = msgspec.json.decode(answer.content, type=Cost)
        assert cost.loop.paused_s == 30 and cost.loop.down_s == 10
        assert cost.loop.generate_s == 10 + 40 and cost.loop.wait_s == 10
        assert cost.time.total_s == 100 and cost.time.idle_s == 40
        assert (cost.time.startup_s, cost.time.agent_s, cost.time.verify_s) == (12.5, 40, 7.5)
        assert (cost.time.engine_s, cost.time.held_s, cost.completion_tokens) == (6.0, 1.0, 20)
        assert (cost.start_up.attempts, cost.start_up.p50_s, cost.start_up.most_s) == (1, 2.0, 2.0)
        assert [line.what for line in cost.lines] == ["engine", "attempts local"]
        assert cost.lines[0].hours * 3600 == pytest.approx(2 * 50)
        assert cost.pod_hours * 3600 == pytest.approx(60)
        assert cost.per_solved == cost.total == pytest.approx((100 * 4.0 + 60 * 0.5) / 3600)
        url, key = api.server.listening.control_url, api.server.admin_key
        await asyncio.to_thread(runs.show, "run", url, key, as_json=False, with_cost=True, plot=False)
        told = capsys.readouterr().out
        assert "engine" in told and "0.02778 gpu" in told and "0.119 USD per solved" in told
        assert "where its 1 min 40 s went" in told
        missing = await api.http.get("/api/v1/runs/no/cost")
        assert missing.status_code == 404


async def test_a_run_without_anything_costs_nothing(tmp_path: Path) -> None:
    async with rig(tmp_path) as api:
        await api.create_run(kind="record")
        url, key = api.server.listening.control_url, api.server.admin_key

        def ask() -> Cost:
            with ForgeClient(url, key) as client:
                return client.cost("run")

        cost = await asyncio.to_thread(ask)
        assert (cost.total, cost.lines, cost.per_solved, cost.start_up.p50_s) == (0, [], None, None)
        assert cost.loop.wait_s + cost.loop.paused_s == pytest.approx(cost.wall_s)
