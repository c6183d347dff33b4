"""A checkpoint that is not whole is refused by name before any engine is touched."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_fake import make_checkpoint

from forge_server.domain.errors import CheckpointError
from forge_server.engine.checkpoint import Policy, read, version_of


def flip_a_byte(folder: Path) -> None:
    file = folder / "huggingface" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def cut_short(folder: Path) -> None:
    file = folder / "huggingface" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def lose_a_file(folder: Path) -> None:
    (folder / "huggingface" / "config.json").unlink()


def add_weights(folder: Path) -> None:
    (folder / "huggingface" / "more.safetensors").write_bytes(b"x")


def lose_the_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def touch_the_manifest(folder: Path) -> None:
    with (folder / "manifest.json").open("a") as file:
        file.write(" ")


def lose_the_folder(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))


@pytest.mark.parametrize(
    ("harm", "named"),
    [
        (flip_a_byte, "model.safetensors is corrupt"),
        (cut_short, "the manifest says"),
        (lose_a_file, "config.json cannot be read"),
        (add_weights, "more.safetensors is not in the manifest"),
        (lose_the_manifest, "manifest.json: cannot be read"),
        (touch_the_manifest, "sha256 differs"),
        (lose_the_folder, "no such folder"),
    ],
)
def test_harm_is_named(tmp_path: Path, harm: Callable[[Path], None], named: str) -> None:
    folder, sha256 = make_checkpoint(tmp_path, 1)
    policy = Policy(1, folder, sha256)
    assert read(policy).weights == folder / "huggingface"
    harm(folder)
    with pytest.raises(CheckpointError, match=named):
        read(policy)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"schema": 2}, "has schema 2"),
        ({"probe": {"token_ids": [1], "logprobs": [0.0]}}, "no usable probe"),
        ({"probe": {"token_ids": [1, 2], "logprobs": [0.0]}}, "no usable probe"),
        ({"files": {"../../outside": {"sha256": "", "size": 0}}}, "lies outside"),
        ({"files": 7}, "is no manifest"),
    ],
)
def test_a_wrong_manifest_is_named(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    folder, _ = make_checkpoint(tmp_path, 1)
    file = folder / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    with pytest.raises(CheckpointError, match=named):
        read(Policy(1, folder, sha256))


def test_the_initial_model_needs_no_manifest(tmp_path: Path) -> None:
    folder, _ = make_checkpoint(tmp_path, 0)
    bare = read(Policy(0, folder / "huggingface"))
    assert bare.weights == folder / "huggingface" and bare.probe is None


def test_labels_carry_their_version() -> None:
    assert version_of(Policy(12, None, "ab" * 32).label) == 12
    assert version_of(Policy(0, None).label) == 0
    assert version_of("default") is None
    assert version_of("forge-swapping") is None
