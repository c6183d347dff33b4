"""``manifest.json`` of a checkpoint folder: what the engine may load, to the byte.

It names every file under ``huggingface/`` with digest and size, every tensor with shape and dtype, and a
probe: the logprobs that the trainer itself computes for a fixed text, so that whoever loads the weights can
tell that they are in force. A checkpoint is known by the SHA-256 of its manifest's bytes.

    python -m forge_server.trainer.manifest make FOLDER [--run ID]     FOLDER/huggingface must hold a model
    python -m forge_server.trainer.manifest verify FOLDER
"""

import argparse
import hashlib
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

from forge_server.trainer.errors import CheckpointInvalid

SCHEMA = 1
NAME = "manifest.json"
WEIGHTS = "huggingface"
PROBE_TEXT = (
    "The agent reads the task, lists the files, writes a patch, runs the tests and says what it found."
)
PROBE_TOKENS = 64


def write(
    folder: Path, *, step: int, run: str, world_size: int, probe_ids: list[int], probe_logprobs: list[float]
) -> str:
    """Write ``folder/manifest.json`` for ``folder/huggingface``; returns the manifest's SHA-256."""
    if not all(math.isfinite(value) for value in probe_logprobs):
        raise CheckpointInvalid(
            f"step {step}: the model's logprobs are not numbers; these weights are of no use"
        )
    weights = folder / WEIGHTS
    body = {
        "schema": SCHEMA,
        "step": step,
        "run": run,
        "world_size": world_size,
        "files": {
            path.relative_to(folder).as_posix(): {"sha256": _digest(path), "size": path.stat().st_size}
            for path in sorted(weights.rglob("*"))
            if path.is_file()
        },
        "tensors": _tensors(weights),
        "probe": {"token_ids": probe_ids, "logprobs": probe_logprobs},
    }
    data = json.dumps(body, indent=1, sort_keys=True).encode()
    with open(folder / NAME, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return hashlib.sha256(data).hexdigest()


def digest(folder: Path) -> str | None:
    """SHA-256 of the folder's manifest; None when it has none (a resume state without an export)."""
    path = folder / NAME
    return _digest(path) if path.is_file() else None


def verify(folder: Path) -> dict[str, Any]:
    """Compare the folder with its manifest, which is returned. Raises CheckpointInvalid, naming the file."""
    path = folder / NAME
    if not path.is_file():
        raise CheckpointInvalid(f"{folder} has no {NAME}")
    manifest: dict[str, Any] = json.loads(path.read_bytes())
    if manifest.get("schema") != SCHEMA:
        raise CheckpointInvalid(f"{path} has schema {manifest.get('schema')!r}, expected {SCHEMA}")
    present = {
        file.relative_to(folder).as_posix() for file in (folder / WEIGHTS).rglob("*") if file.is_file()
    }
    for name in sorted(present ^ set(manifest["files"])):
        raise CheckpointInvalid(
            f"{folder / name} is {'not in the manifest' if name in present else 'missing'}"
        )
    for name, expected in manifest["files"].items():
        file = folder / name
        if file.stat().st_size != expected["size"] or _digest(file) != expected["sha256"]:
            raise CheckpointInvalid(f"{file} does not have the digest its manifest names")
    if _tensors(folder / WEIGHTS) != manifest["tensors"]:
        raise CheckpointInvalid(f"{folder / WEIGHTS}: tensors differ from the manifest")
    return manifest


def probe_ids(tokenizer: Any) -> list[int]:
    """The probe text in the model's own tokens."""
    ids: list[int] = tokenizer.encode(PROBE_TEXT, add_special_tokens=False)[:PROBE_TOKENS]
    if len(ids) < 2:
        raise CheckpointInvalid("the tokenizer makes fewer than two tokens of the probe text")
    return ids


def make(folder: Path, *, run: str) -> str:
    """Manifest of an initial model, version 0; the probe is computed by transformers, float32 on CPU."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    weights = folder / WEIGHTS
    ids = probe_ids(AutoTokenizer.from_pretrained(weights))
    model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1].float()
    logprobs = logits.log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    return write(folder, step=0, run=run, world_size=1, probe_ids=ids, probe_logprobs=[0.0, *logprobs])


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _tensors(weights: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(weights.glob("*.safetensors")):
        with open(path, "rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        header.pop("__metadata__", None)
        found |= {
            name: {"shape": tensor["shape"], "dtype": tensor["dtype"]} for name, tensor in header.items()
        }
    if not found:
        raise CheckpointInvalid(f"{weights} has no safetensors weights")
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="forge_server.trainer.manifest")
    commands = parser.add_subparsers(dest="command", required=True)
    maker = commands.add_parser("make", help="write manifest.json for FOLDER/huggingface")
    maker.add_argument("folder", type=Path)
    maker.add_argument("--run", default="")
    verifier = commands.add_parser("verify", help="compare FOLDER with its manifest.json")
    verifier.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    try:
        if arguments.command == "make":
            print(make(arguments.folder, run=arguments.run))
        else:
            verify(arguments.folder)
            print(digest(arguments.folder))
    except CheckpointInvalid as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
