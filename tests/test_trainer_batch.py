"""What the trainer makes of a batch before any model sees it: checks, and one advantage per rollout."""

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from trainer_lab import TESTS, Row, Trainer, batch_body

from forge_server.assets import stage_package

pytestmark = pytest.mark.verl

# Batch bodies and estimators in; per batch the advantages, or why it was refused.
Answer = dict[str, list[float]] | str
Judge = Callable[[list[bytes], tuple[str, ...]], list[Answer]]
ESTIMATORS = (
    "grpo",
    "grpo_vectorized",
    "grpo_passk",
    "rloo",
    "rloo_vectorized",
    "opo",
    "gpg",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
)


def row(rollout: int, turns: int, temperature: float = 1.0) -> Row:
    spans = [(4 + 6 * turn, 8 + 6 * turn) for turn in range(turns)]
    tokens = list(range(5, 5 + spans[-1][1]))
    return Row(tokens, spans, rollout, temperature, logprobs=[-1.0] * len(tokens))


def cut(whole: Row) -> list[Row]:
    return [
        replace(whole, tokens=whole.tokens[:end], logprobs=whole.logprobs[:end], spans=[(start, end)])
        for start, end in whole.spans
    ]


@pytest.fixture
def judge(trainer_env: Path, tmp_path: Path) -> Judge:
    trainer = Trainer(trainer_env, stage_package("trainer", tmp_path / "staged"))

    def run(bodies: list[bytes], estimators: tuple[str, ...]) -> list[Answer]:
        files = [tmp_path / f"{index}.safetensors" for index in range(len(bodies))]
        for file, body in zip(files, bodies, strict=True):
            file.write_bytes(body)
        done = subprocess.run(
            [
                str(trainer.env / "bin" / "python"),
                str(TESTS / "trainer_advantages.py"),
                "1",
                *map(str, files),
            ],
            env=trainer.environ(),
            input=json.dumps(estimators),
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        found: list[Answer] = json.loads(done.stdout)
        return found

    return run


def test_i11_an_advantage_belongs_to_the_rollout_however_it_is_cut(judge: Judge) -> None:
    whole = [row(0, 3), row(1, 1), row(2, 2), row(3, 1), row(4, 2)]
    groups, rewards = [0, 0, 0, 1, 1, 1], [1.0, 0.0, 0.5, 0.0, 1.0, 0.0]  # the last has nothing to train
    bodies = [
        batch_body(1, rows, groups, rewards)
        for rows in (whole, [piece for each in whole for piece in cut(each)])
    ]
    one, other = judge(bodies, ESTIMATORS)
    assert isinstance(one, dict) and isinstance(other, dict)
    for name in ESTIMATORS:
        assert other[name] == pytest.approx(one[name], abs=1e-6), name
        assert any(one[name]), name
    # GRPO by hand: (reward - mean) / (deviation + 1e-6), over all rollouts of the group, the rowless too.
    assert one["grpo"][:3] == pytest.approx([1.0, -1.0, 0.0], abs=1e-5)
    deviation = (1 / 3) ** 0.5
    assert one["grpo"][3:5] == pytest.approx([(0 - 1 / 3) / deviation, (1 - 1 / 3) / deviation], abs=1e-5)


def test_a_batch_that_breaks_its_contract_is_refused_with_the_reason(judge: Judge) -> None:
    good = [row(0, 1), row(1, 1)]

    def body(
        rows: list[Row], groups: tuple[int, ...] = (0, 0), rewards: tuple[float, ...] = (1.0, 0.0)
    ) -> bytes:
        return batch_body(1, rows, list(groups), list(rewards))

    no_number = [replace(good[0], logprobs=[float("nan")] * len(good[0].tokens)), good[1]]
    answers = judge(
        [
            b"nonsense",
            batch_body(2, good, [0, 0], [1.0, 0.0]),
            body([row(0, 1, temperature=0.0), good[1]]),
            body(good, rewards=(float("nan"), 0.0)),
            body(good, groups=(0, 1)),
            body(no_number),
            body(good),
        ],
        ("grpo",),
    )
    expected = [
        "not a safetensors body",
        "says it is batch 2",
        "temperature 0.0",
        "a reward is not a number",
        "a single rollout",
        "sampling logprob is not a number",
    ]
    for answer, reason in zip(answers, expected, strict=False):
        assert reason in answer
    assert isinstance(answers[-1], dict)
