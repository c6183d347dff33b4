"""Supervised fine-tuning by veRL's trainer on pre-tokenised rows."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from trainer_lab import TESTS, Row, Trainer

from forge_server.assets import stage_package

pytestmark = [pytest.mark.verl, pytest.mark.timeout(900)]

END_OF_TURN = 12
ANSWER = [7, 8, 9, 10, 11, END_OF_TURN]


def test_it_lowers_the_loss_and_exports_a_model_that_loads(trainer_env: Path, tmp_path: Path) -> None:
    trainer = Trainer(trainer_env, stage_package("trainer", tmp_path / "staged"))
    made = trainer.run(str(TESTS / "tiny_model.py"), str(tmp_path / "models"), "0")
    assert made.returncode == 0, made.stderr
    model = tmp_path / "models" / "step_00000" / "huggingface"
    tokens = [[20 + (7 * row + 3 * place) % 200 for place in range(10)] + ANSWER for row in range(12)]
    masks = [[0] * 10 + [1] * len(ANSWER)] * len(tokens)
    too_long = ([5] * 200, [1] * 200)
    table = {
        "tokens": pa.array([*tokens, too_long[0]], pa.list_(pa.int32())),
        "loss_mask": pa.array([*masks, too_long[1]], pa.list_(pa.uint8())),
    }
    pq.write_table(pa.table(table), tmp_path / "rows.parquet")

    def train(*more: str) -> tuple[int, list[dict[str, float]], str]:
        done = trainer.run(
            *("-m", "forge_server.trainer.sft", "--data", str(tmp_path / "rows.parquet")),
            *("--model", str(model), "--out", str(tmp_path / "sft"), "--steps", "6", "--lr", "5e-3"),
            *("--batch", "4", "--max-length", "64", *more),
        )
        return (
            done.returncode,
            [json.loads(s) for s in done.stdout.splitlines() if s[:1] == "{" and '"' in s],
            done.stderr,
        )

    code, lines, errors = train("optim.weight_decay=0.0")
    assert code == 0, errors
    assert lines[0] == {"rows": 12}  # the long one was left out whole
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 6
    assert losses[-1] < 0.7 * losses[0]

    out = tmp_path / "sft"
    verified = trainer.run("-m", "forge_server.trainer.manifest", "verify", str(out))
    assert verified.returncode == 0, verified.stderr
    assert sorted(path.name for path in out.iterdir()) == ["huggingface", "manifest.json"]
    rows = [Row(line, [(10, 16)], 0) for line in tokens[:4]]
    before, after = trainer.score(model, rows), trainer.score(out / "huggingface", rows)
    assert all(
        new[15] > old[15] for old, new in zip(before, after, strict=True)
    )  # the end of the turn is learned

    code, _, errors = train()
    assert code == 1
    assert "exists already" in errors
    code, _, errors = train("--out", str(tmp_path / "other"), "trainer.seed=3")
    assert code == 2
    assert "trainer.seed=3" in errors
