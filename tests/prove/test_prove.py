"""The long proofs judge rightly: figures and findings from databases whose content is known."""

from pathlib import Path
from typing import Any

import kills
import pytest
import seeds
import sqlalchemy as sa

from forge_server.store import tables as t
from forge_server.store.database import Store


def result(gain: float | None, *, control: bool = False, minutes: float = 5.0) -> seeds.Result:
    return seeds.Result(seed=1, control=control, minutes=minutes, gain=gain)


@pytest.mark.parametrize(
    ("results", "good"),
    [
        ([result(0.3)] * 5 + [result(0.01, control=True)], True),
        ([result(0.3)] * 4 + [result(None), result(0.01, control=True)], True),
        ([result(0.3)] * 3 + [result(0.1)] * 2 + [result(0.0, control=True)], False),
        ([result(0.3)] * 5 + [result(0.1, control=True)], False),
        ([result(0.3)] * 5 + [result(None, control=True)], False),
        ([result(0.3)] * 5, False),
        ([result(0.3, minutes=26.0)] * 2 + [result(0.3)] * 3 + [result(0.0, control=True)], False),
    ],
)
def test_all_seeds_but_one_and_the_control_must_pass(results: list[seeds.Result], good: bool) -> None:
    assert seeds.verdict(results) is good


class Data:
    """A database with one run, filled row by row; ``query`` as the whole loop's lab has it."""

    def __init__(self, folder: Path) -> None:
        (folder / "forge.toml").write_text("")
        self.folder = folder
        data = folder / "forge-data"
        data.mkdir()
        url = f"sqlite:///{data / 'forge.db'}"
        Store.open(url, create=True).close()
        self.engine = sa.create_engine(url)
        self.add(t.runs, id="ru", name="demo", kind="train", state="completed", settings={}, created_at=0.0)

    def add(self, table: sa.Table, **row: Any) -> None:
        with self.engine.begin() as connection:
            connection.execute(sa.insert(table), row)

    def rollout(self, number: int, **changes: Any) -> None:
        row = {"id": f"ro{number}", "run_id": "ru", "harness": "react", "mode": "train", "state": "ended"}
        row |= {"outcome": "completed", "kind": "ok", "created_at": 0.0, "final_attempt_id": f"at{number}"}
        self.add(t.rollouts, **(row | changes))

    def attempt(self, number: int, **changes: Any) -> None:
        row = {"id": f"at{number}", "rollout_id": f"ro{number}", "number": 1, "state": "ended"}
        row |= {"backend": "local", "outcome": "completed", "kind": "ok", "created_at": 0.0}
        self.add(t.attempts, **(row | changes))

    def ended(self, kind: str, number: int) -> None:
        column = {
            "rollout_ended": {"rollout_id": f"ro{number}"},
            "attempt_ended": {"attempt_id": f"at{number}"},
        }
        self.add(t.events, at=0.0, kind=kind, run_id="ru", data={}, **column[kind])

    def batch(self, k: int, *rollouts: int) -> None:
        ids = [f"ro{number}" for number in rollouts]
        row = {"run_id": "ru", "k": k, "state": "trained", "sha256": "", "size": 0, "stats": {}}
        self.add(t.batches, rollout_ids=ids, created_at=0.0, **row)

    def query(self, text: str) -> list[Any]:
        with self.engine.connect() as connection:
            return list(connection.execute(sa.text(text)).all())


@pytest.fixture
def data(tmp_path: Path) -> Data:
    return Data(tmp_path)


def test_the_figures_of_a_demo_are_read_from_what_it_leaves(data: Data) -> None:
    for task, (before, after) in enumerate([(0.0, 1.0), (0.0, 1.0), (1.0, 1.0), (0.0, 0.0)]):
        row = {"name": f"t{task}", "taskset": "lookup", "split": "heldout", "state": "ready", "digest": ""}
        columns = {c.name for c in t.tasks.columns if not c.nullable and c.server_default is None}
        blank = {name: "" for name in columns - row.keys() - {"id", "created_at"}}
        data.add(t.tasks, id=f"ta{task}", created_at=0.0, **blank, **row)
        for version, reward in ((0, before), (2, after)):
            data.rollout(
                10 * task + version, mode="eval", task_id=f"ta{task}", reward=reward, policy_version=version
            )
    for step, source, metrics in (
        (0, "eval", {"version": 0, "reward/mean": 0.25, "reward/low95": 0.0, "reward/high95": 0.5}),
        (1, "controller", {"reward/mean": 0.4}),
        (2, "controller", {"reward/mean": 0.6}),
        (2, "eval", {"version": 2, "reward/mean": 0.75, "reward/low95": 0.5, "reward/high95": 1.0}),
    ):
        data.add(t.step_metrics, run_id="ru", step=step, source=source, metrics=metrics, at=0.0)
    found = seeds.measure(data.folder, seed=3, control=False, minutes=7.0)
    assert (found.before, found.after, found.gain, found.tasks) == (0.25, 0.75, 0.5, 4)
    assert found.after_interval == (0.5, 1.0)
    assert found.curve == [(0, 0.4), (1, 0.6)]
    assert found.passed
    assert "gain 0.500" in seeds.told(found)


def test_a_demo_that_was_not_measured_twice_has_no_gain(data: Data) -> None:
    with pytest.raises(ValueError, match="0 held-out rounds"):
        seeds.measure(data.folder, seed=3, control=False, minutes=7.0)


def test_a_run_that_went_well_has_no_findings(data: Data) -> None:
    for number in (1, 2):
        data.rollout(number)
        data.attempt(number)
        data.ended("rollout_ended", number)
        data.ended("attempt_ended", number)
        data.batch(number, number)
    assert kills.findings(data, "ru", 2) == []


def test_what_went_wrong_is_found(data: Data) -> None:
    data.rollout(1, final_attempt_id="at9")
    data.attempt(1)
    data.rollout(2, outcome="infra_failure", kind="runner_lost")
    data.attempt(2, kind="agent_timeout", running_at=100.0, sealed_at=230.0)
    data.add(t.holds, reason="server_down", begin_at=90.0, end_at=130.0)
    for _ in range(2):
        data.ended("rollout_ended", 1)
    data.ended("attempt_ended", 1)
    data.batch(1, 1, 2)
    data.batch(2, 1)
    columns = {c.name for c in t.samples.columns if not c.nullable and c.server_default is None}
    row = {"rollout_id": "ro1", "attempt_id": "at1", "break_reason": "first", "call_ids": []}
    data.add(t.samples, **{name: 0 for name in columns - row.keys()}, **row)
    found = "\n".join(kills.findings(data, "ru", 3))
    for what in (
        "not 1 to 3",
        "rollouts in two batches: ['ro1']",
        "rollouts lost for good: ['ro2 infra_failure/runner_lost']",
        "trained, but not valid: ['ro2']",
        "rollout_ended more than once: ['ro1']",
        "rollout_ended never: ['ro2']",
        "attempt_ended never: ['at2']",
        "samples of dead attempts: ['at1']",
        "charged for time that was not theirs: ['at2 after 100.0 s of 120']",
    ):
        assert what in found
