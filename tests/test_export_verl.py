"""Exported rows in the real veRL: the documentation's examples run in its environment."""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from test_export_mappings import example
from test_trajectory_samples import SYSTEM, call, grow

from forge_server.domain.sample import Sample
from forge_server.export.mappings import MAPPINGS
from forge_server.export.mappings.source import TrainedRollout
from forge_server.export.whole import whole_file
from forge_server.trajectory.samples import cover

pytestmark = pytest.mark.verl
TESTS = Path(__file__).parent


def rollout(slot: int, samples: tuple[Sample, ...], advantage: float) -> TrainedRollout:
    return TrainedRollout(
        id=f"ro-{slot}",
        group_id="gr-1",
        task_id="ta-1",
        harness="react",
        slot=slot,
        number=slot,
        group_number=0,
        reward=0.5 + advantage,
        advantage=advantage,
        samples=samples,
    )


def test_verl_reads_what_is_written_and_means_the_same(trainer_env: Path, tmp_path: Path) -> None:
    one = cover([call(i, p, c) for i, (p, c) in enumerate(grow(3, SYSTEM))], 1 << 30).samples
    two = cover([call(0, SYSTEM, [1, 2, 3]), call(1, [*SYSTEM, 9, 9], [4, 5])], 1 << 30).samples
    assert (len(one), len(two)) == (1, 2)
    rollouts = [rollout(0, one, 0.5), rollout(1, two, -0.5)]
    for target in ("verl", "verl-v1", "areal"):
        with whole_file(tmp_path / f"first.{target}.jsonl") as part:
            rows = [row for each in rollouts for row in MAPPINGS[target](each)]
            part.write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / f"{target}.py").write_text(example(f"first.{target}.jsonl"))
    done = subprocess.run(
        [trainer_env / "bin" / "python", TESTS / "export_verl.py", "verl.py", "verl-v1.py", "areal.py"],
        env={**os.environ, "PYTHONPATH": str(TESTS.parent), "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    classic, v1, areal = json.loads(done.stdout.splitlines()[-1])

    samples = [*one, *two]
    wanted = [
        each.advantage * sample.loss_mask[sample.prompt_len :] for each in rollouts for sample in each.samples
    ]

    def same(found: list[list[float]], which: list[int]) -> None:
        for row, i in zip(found, which, strict=True):
            assert np.trim_zeros(np.asarray(row), "b") == pytest.approx(np.trim_zeros(wanted[i], "b"))

    assert (classic["rows"], classic["joined"], classic["kept"]) == (3, 6, [0, 1])
    assert classic["tokens"] == sum(sample.tokens.size for sample in samples)
    assert classic["trained"] == sum(int(sample.loss_mask.sum()) for sample in samples)
    same(classic["ours"], [0, 1, 2])
    same(classic["one_row_per_rollout"], [0, 1])  # veRL agrees with ours where a rollout is one row
    assert v1["keys"] == ["gr-1_0_0", "gr-1_1_0", "gr-1_1_1"]
    same(v1["advantages"], [0, 1, 2])  # and its V1 trainer however a rollout was cut
    assert v1["prompts"] == [sample.tokens[: sample.prompt_len].tolist() for sample in samples]
    for found, sample in zip(areal, samples, strict=True):
        n = sample.tokens.size
        assert found["input_ids"] == [[1, n], "torch.int64"]
        assert found["attention_mask"] == [[1, n], "torch.bool"]
        assert found["logprobs"] == [[1, n], "torch.float32"]
        assert found["rewards"][0] == [1]
