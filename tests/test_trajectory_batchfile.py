"""The batch file: readable by the format's own library, and the same bytes for the same input (I8, I11)."""

import json

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from test_trajectory_samples import SYSTEM, call, grow

from forge_server.domain.states import Delivery
from forge_server.trainer.batch import read
from forge_server.trajectory.batchfile import BatchRollout, write_batch
from forge_server.trajectory.samples import cover


def rollouts() -> list[BatchRollout]:
    straight = cover([call(i, p, c) for i, (p, c) in enumerate(grow(3, SYSTEM))], 1000).samples
    broken = cover([call(0, SYSTEM, [1, 2]), call(1, [*SYSTEM, 9, 9], [3], temperature=0.7)], 1000).samples
    return [
        BatchRollout("ro-1", "gr-1", 1.0, straight),
        BatchRollout("ro-2", "gr-1", 0.25, broken),
        BatchRollout("ro-3", "gr-2", 0.0, straight),
        BatchRollout("ro-4", "gr-2", 1.0, ()),
    ]


def test_the_formats_own_library_reads_it(tmp_path) -> None:  # type: ignore[no-untyped-def]
    body = write_batch("ru-1", 7, rollouts(), seed=3)
    t = safetensors.numpy.load(body)
    kinds = {name: (str(array.dtype), array.ndim) for name, array in t.items()}
    assert kinds == {
        "tokens": ("int32", 1),
        "loss_mask": ("uint8", 1),
        "logprobs": ("float32", 1),
        "versions": ("int32", 1),
        "row_offsets": ("int64", 1),
        "prompt_len": ("int32", 1),
        "rollout": ("int32", 1),
        "row_temperature": ("float32", 1),
        "rollout_group": ("int32", 1),
        "rollout_reward": ("float32", 1),
        "span_row": ("int32", 1),
        "span_start": ("int32", 1),
        "span_end": ("int32", 1),
    }
    assert t["rollout"].tolist() == [0, 1, 1, 2]
    assert t["rollout_group"].tolist() == [0, 0, 1, 1]
    assert t["rollout_reward"].tolist() == [1.0, 0.25, 0.0, 1.0]
    assert t["row_temperature"].tolist() == [1.0, 1.0, np.float32(0.7), 1.0]
    rows = [sample for rollout in rollouts() for sample in rollout.samples]
    for i, sample in enumerate(rows):
        here = slice(int(t["row_offsets"][i]), int(t["row_offsets"][i + 1]))
        for name in ("tokens", "loss_mask", "logprobs", "versions"):
            assert np.array_equal(t[name][here], getattr(sample, name))
        mask = np.zeros(sample.tokens.size)
        for row, start, end in zip(t["span_row"], t["span_start"], t["span_end"], strict=True):
            if row == i:
                mask[start:end] = 1
        assert np.array_equal(mask, sample.loss_mask)
        assert t["prompt_len"][i] == mask.argmax()
    path = tmp_path / "batch.safetensors"
    path.write_bytes(body)
    with safetensors.safe_open(path, "numpy") as file:
        metadata = file.metadata()
    assert metadata == {
        "schema": "1",
        "run": "ru-1",
        "k": "7",
        "rollouts": json.dumps(["ro-1", "ro-2", "ro-3", "ro-4"], separators=(",", ":")),
        "groups": '["gr-1","gr-2"]',
        "min_version": "0",
        "max_version": "2",
        "seed": "3",
    }


def test_the_trainer_reads_what_the_server_writes() -> None:
    batch = read(write_batch("ru-1", 7, rollouts(), seed=3), k=7)
    assert (batch.run, batch.rollouts, batch.trained_per_rollout()) == ("ru-1", 4, [60, 3, 60, 0])
    assert [row.temperature for row in batch.rows] == [1.0, 1.0, np.float32(0.7), 1.0]


def test_i8_equal_batches_are_equal_bytes_and_others_are_not() -> None:
    assert write_batch("ru-1", 7, rollouts(), seed=3) == write_batch("ru-1", 7, rollouts(), seed=3)
    assert write_batch("ru-1", 7, rollouts(), seed=3) != write_batch("ru-1", 8, rollouts(), seed=3)


def test_tensors_are_aligned_and_without_gaps() -> None:
    body = write_batch("ru-1", 7, rollouts(), seed=3)
    size = int.from_bytes(body[:8], "little")
    header = json.loads(body[8 : 8 + size])
    assert size % 8 == 0
    header.pop("__metadata__")
    end = 0
    for entry in header.values():
        begin, after = entry["data_offsets"]
        assert begin == end
        assert begin % {"I64": 8, "I32": 4, "F32": 4, "U8": 1}[entry["dtype"]] == 0
        end = after
    assert 8 + size + end == len(body)


def test_a_batch_without_a_row_is_refused() -> None:
    nothing = cover([call(0, SYSTEM, [1], delivered=Delivery.NO)], 1000).samples
    with pytest.raises(ValueError, match="sample"):
        write_batch("ru-1", 1, [BatchRollout("ro-1", "gr-1", 1.0, nothing)], seed=0)
