"""The worker extension's checks, without vLLM: nothing is loaded that does not fit what is loaded."""

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forge_server.engine_ext.worker import ForgeWorkerExtension


class Worker(ForgeWorkerExtension):
    """As vLLM mixes the extension into its worker."""

    def __init__(self, model: Path) -> None:
        self.model_config = SimpleNamespace(model=str(model), dtype="torch.float32")
        self.reloaded: list[str] = []

    def reload_weights(self, weights_path: str) -> None:
        self.reloaded.append(weights_path)
        self.model_config.model = weights_path


def write(folder: Path, shapes: dict[str, list[int]], *, file: str = "model.safetensors") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in shapes.items():
        size = 4
        for n in shape:
            size *= n
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    (folder / file).write_bytes(len(text).to_bytes(8, "little") + text + bytes(at))


def manifest(folder: Path, shapes: dict[str, list[int]]) -> tuple[str, str]:
    text = json.dumps({"tensors": {n: {"shape": s, "dtype": "F32"} for n, s in shapes.items()}})
    (folder / "manifest.json").write_text(text)
    return str(folder / "manifest.json"), hashlib.sha256(text.encode()).hexdigest()


SHAPES = {"a.weight": [2, 3], "b.weight": [4]}


@pytest.fixture
def worker(tmp_path: Path) -> Worker:
    write(tmp_path / "initial", SHAPES)
    return Worker(tmp_path / "initial")


def test_what_fits_is_accepted_and_loaded(worker: Worker, tmp_path: Path) -> None:
    write(tmp_path / "new", SHAPES)
    assert worker.forge_check_checkpoint(str(tmp_path / "new"), *manifest(tmp_path / "new", SHAPES)) == {
        "fault": ""
    }
    assert worker.forge_check_checkpoint(str(tmp_path / "new"), "", "") == {"fault": ""}
    assert worker.reloaded == []
    worker.forge_load_checkpoint(str(tmp_path / "new"))
    assert worker.reloaded == [str(tmp_path / "new")]
    assert worker.forge_describe() == {"path": str(tmp_path / "new"), "dtype": "float32", "tensors": 2}


def test_sharded_weights_are_read_through_their_index(worker: Worker, tmp_path: Path) -> None:
    new = tmp_path / "new"
    write(new, {"a.weight": [2, 3]}, file="one.safetensors")
    write(new, {"b.weight": [4]}, file="two.safetensors")
    index = {"weight_map": {"a.weight": "one.safetensors", "b.weight": "two.safetensors"}}
    (new / "model.safetensors.index.json").write_text(json.dumps(index))
    assert worker.forge_check_checkpoint(str(new), *manifest(new, SHAPES)) == {"fault": ""}


@pytest.mark.parametrize(
    ("shapes", "named"),
    [
        ({"a.weight": [2, 3]}, "tensor names differ from the loaded model's (b.weight)"),
        ({**SHAPES, "c": [1]}, "tensor names differ from the loaded model's (c)"),
        ({"a.weight": [3, 2], "b.weight": [4]}, "tensor a.weight has shape [3, 2]"),
    ],
)
def test_what_does_not_fit_is_named(
    worker: Worker, tmp_path: Path, shapes: dict[str, list[int]], named: str
) -> None:
    write(tmp_path / "new", shapes)
    for stated in (("", ""), manifest(tmp_path / "new", shapes)):
        assert named in worker.forge_check_checkpoint(str(tmp_path / "new"), *stated)["fault"]


def test_files_and_manifest_must_agree(worker: Worker, tmp_path: Path) -> None:
    new = tmp_path / "new"
    write(new, SHAPES)
    path, sha256 = manifest(new, {"a.weight": [2, 3]})
    assert "name different tensors" in worker.forge_check_checkpoint(str(new), path, sha256)["fault"]
    path, _ = manifest(new, {"a.weight": [6], "b.weight": [4]})
    assert "not the one that was announced" in worker.forge_check_checkpoint(str(new), path, sha256)["fault"]
    path, sha256 = manifest(new, {"a.weight": [6], "b.weight": [4]})
    assert "in the manifest" in worker.forge_check_checkpoint(str(new), path, sha256)["fault"]


@pytest.mark.parametrize("content", [b"", b"\xff" * 16, (3).to_bytes(8, "little") + b"{}x"])
def test_files_that_are_no_weights_are_named(worker: Worker, tmp_path: Path, content: bytes) -> None:
    new = tmp_path / "new"
    new.mkdir()
    (new / "model.safetensors").write_bytes(content)
    assert "cannot be read" in worker.forge_check_checkpoint(str(new), "", "")["fault"]
    assert "cannot be read" in worker.forge_check_checkpoint(str(tmp_path / "none"), "", "")["fault"]


def test_weights_that_end_early_are_named(worker: Worker, tmp_path: Path) -> None:
    write(tmp_path / "new", SHAPES)
    file = tmp_path / "new" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert "cut short" in worker.forge_check_checkpoint(str(tmp_path / "new"), "", "")["fault"]
