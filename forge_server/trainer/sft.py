"""Supervised fine-tuning by veRL's SFT trainer, on rows whose tokens and loss mask are as they were recorded.

    python -m forge_server.trainer.sft --data rows.parquet --model MODEL --out CHECKPOINT --epochs 2

(or under torchrun). Columns of the parquet file: ``tokens`` list<int32>, ``loss_mask`` list<uint8>; the mask
says what is learned, the end-of-turn token included. The outcome is a checkpoint folder: ``huggingface/`` and
``manifest.json``. Progress is one JSON line per step. Further arguments are veRL overrides, taken verbatim.
"""

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig

from forge_server.trainer import checkpoint, config, manifest, model, platform, sft_rows
from forge_server.trainer.errors import CheckpointInvalid, OverrideRefused, TrainerError

# Set by the command's own flags, or by what a checkpoint folder is; an override of them would be lost.
FORCED = (
    "model.path",
    "data.train_files",
    "data.custom_cls",
    "data.max_length",
    "data.train_batch_size",
    "data.train_max_samples",
    "data.pad_mode",
    "optim.lr",
    "checkpoint",
    "trainer",
)
_FLOAT32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}


class Progress:
    """Takes the place of veRL's tracking: one JSON line per step."""

    def __init__(self, *_: Any, config: dict[str, Any], **__: Any) -> None:
        self.steps = config["trainer"]["total_training_steps"]

    def log(self, data: dict[str, Any], step: int) -> None:
        names = ("train/loss", "train/grad_norm", "train/lr", "train/global_tokens", "val/loss")
        shown = {
            name.replace("train/", "").replace("/", "_"): float(data[name]) for name in names if name in data
        }
        print(json.dumps({"step": step, "of": self.steps} | shown), flush=True)


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Flags, and the rest as veRL overrides."""
    parser = argparse.ArgumentParser(prog="forge_server.trainer.sft")
    parser.add_argument("--data", type=Path, required=True, help="parquet file of tokens and loss_mask")
    parser.add_argument("--model", type=Path, required=True, help="folder of the model to start from")
    parser.add_argument("--out", type=Path, required=True, help="checkpoint folder to write; must not exist")
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--steps", type=int)
    length.add_argument("--epochs", type=int)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--batch", type=int, default=32, help="rows per step, over all processes")
    parser.add_argument("--max-length", type=int, default=8192, help="longer rows are left out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run", default="", help="run id to note in the manifest")
    parser.add_argument("overrides", nargs="*", help="veRL overrides, KEY=VALUE")
    parsed = parser.parse_args(arguments)
    return parsed, parsed.overrides


def build(
    options: argparse.Namespace, overrides: list[str], *, rows: int, work: Path, device: str
) -> DictConfig:
    """veRL's SFT config. Raises OverrideRefused for what the flags or the checkpoint folder decide."""
    keys = config.keys_of(overrides)
    for text, names in keys.items():
        if any(key == name or key.startswith(name + ".") for key in names for name in FORCED):
            raise OverrideRefused(
                f"override {text!r} is refused: the command's flags and its output decide it"
            )
    ranks = dist.get_world_size()
    batch = min(options.batch, rows) // ranks * ranks
    if batch == 0:
        raise OverrideRefused(f"{rows} rows cannot be spread over {ranks} processes")
    steps_per_epoch = rows // batch
    steps = options.steps or options.epochs * steps_per_epoch
    built = config.composed("sft_trainer_engine", overrides)
    defaults: dict[str, Any] = {
        "engine.strategy": "fsdp2",
        "data.max_token_len_per_gpu": max(8192, options.max_length),
        "data.num_workers": 0,
    } | config.attention_default("model", device)
    if device == "cpu":
        defaults |= {
            "engine.use_torch_compile": False,
            "engine.mixed_precision": _FLOAT32,
            "model.use_remove_padding": False,
            "model.enable_gradient_checkpointing": False,
        }
    config.set_untouched(built, defaults, keys)
    config.set_values(
        built,
        {
            "model.path": str(options.model),
            "optim.lr": options.lr,
            "data.train_files": str(options.data),
            "data.custom_cls": {"path": sft_rows.__file__, "name": "TokenRows"},
            "data.max_length": options.max_length,
            "data.train_batch_size": batch,
            "checkpoint.save_contents": ["hf_model"],
            "checkpoint.load_contents": [],
            "trainer.default_local_dir": str(work),
            "trainer.total_training_steps": steps,
            "trainer.total_epochs": -(-steps // steps_per_epoch),
            "trainer.save_freq": -1,
            "trainer.test_freq": -1,
            "trainer.resume_mode": "disable",
            "trainer.device": device,
            "trainer.seed": options.seed,
            "trainer.logger": [],
        },
    )
    return built


def train(options: argparse.Namespace, overrides: list[str], device: str) -> str | None:
    """Train and write the checkpoint folder; returns its manifest's SHA-256 on rank 0."""
    if options.out.exists():
        raise CheckpointInvalid(f"{options.out} exists already; name a folder that does not")
    rows = len(sft_rows.read_rows(str(options.data), options.max_length))
    if not rows:
        raise CheckpointInvalid(
            f"{options.data} has no row of at most {options.max_length} tokens to train on"
        )
    work = options.out.with_name(f".{options.out.name}.sft")
    if dist.get_rank() == 0:
        shutil.rmtree(work, ignore_errors=True)
        print(json.dumps({"rows": rows}), flush=True)
    built = build(options, overrides, rows=rows, work=work, device=device)
    model.check(str(options.model))

    # Seconds of imports, which come after what can be refused without them.
    from verl.trainer import sft_trainer

    from forge_server.trainer.update import token_log_probs

    torch.manual_seed(options.seed)
    sft_trainer.Tracking = Progress
    trainer = sft_trainer.SFTTrainer(built)
    trainer.train_sampler.seed = options.seed
    trainer.fit()

    ids = manifest.probe_ids(trainer.model_config.tokenizer)
    logprobs = token_log_probs(trainer.training_client.infer_batch, ids)
    if dist.get_rank() != 0:
        return None
    steps = built.trainer.total_training_steps
    unfinished = work / "unfinished"
    unfinished.mkdir()
    (work / f"global_step_{steps}" / manifest.WEIGHTS).rename(unfinished / manifest.WEIGHTS)
    sha256 = manifest.write(
        unfinished,
        step=0,
        run=options.run,
        world_size=dist.get_world_size(),
        probe_ids=ids,
        probe_logprobs=logprobs,
    )
    checkpoint.publish(unfinished, options.out)
    shutil.rmtree(work)
    return sha256


def main() -> None:
    """The command line."""
    options, overrides = parse(sys.argv[1:])
    device = platform.start(os.environ.get("FORGE_TRAINER_DEVICE", "auto"))
    try:
        sha256 = train(options, overrides, device)
    except TrainerError as error:
        print(f"Error: {error}", file=sys.stderr, flush=True)
        os._exit(error.exit_code)
    if sha256 is not None:
        print(json.dumps({"checkpoint": str(options.out), "manifest_sha256": sha256}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
