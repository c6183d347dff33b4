"""The whole loop on real parts: attempts in sandboxes, recorded calls, rewards, samples, veRL updates, new weights
live — with each process killed in the middle of it."""

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from whole_loop import Lab, metrics, report, run_settings, with_environment

pytestmark = [pytest.mark.vllm, pytest.mark.verl, pytest.mark.sandbox, pytest.mark.timeout(1500)]

FLOAT32_LIMIT = 1e-3
"""Largest difference between a recorded logprob and the trainer's recomputation on the same weights."""


@pytest.fixture(scope="module")
def lab(tiny_model, trainer_env: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A server with a managed engine; the tests of this module use it one after the other."""
    made = Lab(tmp_path_factory.mktemp("loop"), tiny_model.initial)
    made.up()
    try:
        made.import_tasks()
        made.wait("the engine is ready", lambda: made.client().ready().ready, 600.0)
        yield made
    finally:
        made.down()
    assert made.leftovers() == []


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_recorded_logprobs_are_the_trainers(lab: Lab, temperature: float) -> None:
    """I2: at both temperatures, before and after a swap, engine and trainer agree on every trained token."""
    name = f"temperature-{temperature}"
    with lab.client() as client:
        client.create_run(run_settings(name, temperature=temperature))
    lab.finish(name)
    found = metrics(lab, name)
    for step in (1, 2):
        trainer = found[step, "trainer"]
        print(
            f"T={temperature} step {step}: gap mean {trainer['logprob_gap_mean']:.2e}"
            f" max {trainer['logprob_gap_max']:.2e}"
        )
        assert trainer["logprob_gap_max"] <= FLOAT32_LIMIT
        assert trainer["tokens_trained"] > 0
        assert found[step, "controller"]["swap/probe_max_gap"] <= FLOAT32_LIMIT
    assert found[2, "trainer"]["version_min"] > found[1, "trainer"]["version_max"]
    counts = report(lab, name)
    assert counts["calls"] > 0 and counts["samples"] > 0
    assert counts["tokens.trained"] == sum(found[k, "trainer"]["tokens_trained"] for k in (1, 2))


def test_mini_swe_agent_runs_unmodified(lab: Lab) -> None:
    """The harness from PyPI runs tasks against the real engine: whatever the model babbles is recorded exactly."""
    lab.cli("env", "create", "mini-swe-agent")
    settings = run_settings(
        "mini", kind="record", harness="mini-swe-agent", steps=1, groups=2, n=1, max_calls=6
    )
    settings.pop("overrides")
    with lab.client() as client:
        client.create_run(settings)
    lab.finish("mini")
    counts = report(lab, "mini")
    assert counts["calls"] >= 2 and counts["calls.ok"] >= 2
    assert counts["samples"] >= 1
    kinds = {
        row.kind
        for row in lab.query(
            "SELECT r.kind FROM rollouts r JOIN runs u ON u.id = r.run_id WHERE u.name = 'mini'"
        )
    }
    assert kinds <= {"ok", "harness_exit", "budget_calls", "context_overflow", "agent_timeout"}


def _whole(lab: Lab, name: str, steps: int, rollouts_per_step: int) -> None:
    """What must hold of a run that was disturbed: nothing lost, nothing doubled, nothing trained twice."""
    view = lab.run(name)
    assert view.step == steps
    batches = lab.query(f"SELECT k, rollout_ids, state FROM batches WHERE run_id = '{view.id}' ORDER BY k")
    assert [b.k for b in batches] == list(range(1, steps + 1))
    assert {b.state for b in batches} == {"trained"}
    open_calls = lab.query(
        "SELECT c.id FROM calls c JOIN attempts a ON a.id = c.attempt_id JOIN rollouts r ON r.id = a.rollout_id "
        f"WHERE r.run_id = '{view.id}' AND c.\"end\" IS NULL"
    )
    assert open_calls == []
    not_ended = lab.query(f"SELECT id FROM rollouts WHERE run_id = '{view.id}' AND state <> 'ended'")
    assert not_ended == []
    versions = lab.query(f"SELECT version FROM policies WHERE run_id = '{view.id}'")
    assert len(versions) >= steps
    counts = report(lab, name)
    assert counts["calls"] > 0
    lost = lab.query(
        f"SELECT id FROM rollouts WHERE run_id = '{view.id}' AND outcome NOT IN ('completed', 'policy_failure')"
    )
    assert lost == []  # every rollout survived by a further attempt
    charged = lab.query(f"SELECT id FROM rollouts WHERE run_id = '{view.id}' AND kind = 'agent_timeout'")
    assert charged == []


def _middle(lab: Lab, name: str) -> None:
    """Wait until step 2 is under way: some of its rollouts have ended, some are active."""

    def under_way() -> bool:
        view = lab.run(name)
        return view.step >= 1 and view.rollouts.get("active", 0) >= 1

    lab.wait(f"{name} is in the middle of step 2", under_way, 600.0)


def test_I6_I12_the_server_is_killed_in_the_middle(lab: Lab) -> None:
    with lab.client() as client:
        client.create_run(run_settings("kill-server", steps=3, n=4))
    _middle(lab, "kill-server")
    engine = lab.engine_pid()
    lab.kill()
    lab.up()
    lab.finish("kill-server")
    assert lab.engine_pid() == engine  # adopted, not started again
    _whole(lab, "kill-server", 3, 8)


def test_I6_the_engine_is_killed_in_the_middle(lab: Lab) -> None:
    with lab.client() as client:
        client.create_run(run_settings("kill-engine", steps=3, n=4))
    _middle(lab, "kill-engine")
    os.kill(lab.engine_pid(), signal.SIGKILL)
    lab.finish("kill-engine")
    _whole(lab, "kill-engine", 3, 8)


def test_I8_the_trainer_is_killed_in_the_middle(lab: Lab) -> None:
    with lab.client() as client:
        run_id = client.create_run(run_settings("kill-trainer", steps=3, n=4)).id
    _middle(lab, "kill-trainer")
    for pid in lab.trainer_pids(run_id):
        with contextlib.suppress(ProcessLookupError):  # with its parent
            os.kill(pid, signal.SIGKILL)
    lab.finish("kill-trainer")
    _whole(lab, "kill-trainer", 3, 8)


def test_I5_I6_a_runner_is_killed_in_the_middle(lab: Lab) -> None:
    with lab.client() as client:
        client.create_run(run_settings("kill-runner", steps=3, n=4))
    _middle(lab, "kill-runner")

    def killed() -> bool:
        """One that is there: those that are found may end meanwhile."""
        rows = lab.query(
            "SELECT a.handle FROM attempts a JOIN rollouts r ON r.id = a.rollout_id JOIN runs u ON u.id = r.run_id "
            "WHERE u.name = 'kill-runner' AND a.state <> 'ended' AND a.handle IS NOT NULL"
        )
        for row in rows:
            with contextlib.suppress(ProcessLookupError):
                os.kill(json.loads(row.handle)["pid"], signal.SIGKILL)
                return True
        return False

    lab.wait("a runner is killed", killed, 600.0)
    lab.finish("kill-runner")
    _whole(lab, "kill-runner", 3, 8)
    assert with_environment("FORGE_NOTHING=1") == []


def test_an_orderly_stop_leaves_nothing_running(lab: Lab) -> None:
    """Last in this module: the server stops, and everything of it with it."""
    lab.down()
    assert lab.leftovers() == []
    lab.up()
