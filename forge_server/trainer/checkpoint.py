"""Checkpoint folders: complete or absent, and never pruned before the engine serves something newer.

    step_00012/huggingface/   weights for the engine      (every ``export_every`` steps)
    step_00012/state/         veRL's resume state         (every ``save_every`` steps, and when asked for)
    step_00012/manifest.json  written with an export
    step_00012/metrics.json   what was reported for this step, to be reported again after a crash

A folder is filled under a hidden name, synced, then renamed: whoever sees the final name sees all of it. A
replay that comes out with the same manifest keeps the folder that is there; one that differs, or finds that
folder damaged, takes the next free name (``step_00012_r2``), since the old bytes may be what the engine
serves (I8).
"""

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from forge_server.trainer import manifest
from forge_server.trainer.errors import CheckpointInvalid

if TYPE_CHECKING:
    from forge_server.trainer.update import Policy

STATE = "state"
METRICS = "metrics.json"
_FOLDER = re.compile(r"step_(\d{5,})(?:_r(\d+))?")
_STATE_CONTENTS = ["model", "optimizer", "extra"]
_EXPORT_CONTENTS = ["hf_model"]


@dataclass(frozen=True)
class Checkpoint:
    """One complete folder."""

    step: int
    path: Path
    replay: int = 1

    @property
    def has_state(self) -> bool:
        return (self.path / STATE).is_dir()

    @property
    def manifest_sha256(self) -> str | None:
        return manifest.digest(self.path)

    def metrics(self) -> dict[str, float]:
        path = self.path / METRICS
        return json.loads(path.read_text()) if path.is_file() else {}


def complete(folder: Path) -> list[Checkpoint]:
    """Complete checkpoints in ``folder``, oldest first."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _FOLDER.fullmatch(path.name)
        if match:
            found.append(Checkpoint(int(match[1]), path, int(match[2] or 1)))
    return sorted(found, key=lambda checkpoint: (checkpoint.step, checkpoint.replay))


def newest_state(folder: Path, *, at_most: int | None = None) -> Checkpoint | None:
    """The newest checkpoint that training can go on from, of those up to step ``at_most``."""
    usable = [c for c in complete(folder) if c.has_state and (at_most is None or c.step <= at_most)]
    return usable[-1] if usable else None


def discard_unfinished(folder: Path) -> None:
    """Remove what dead processes left half-written. Only the holder of the session may call it."""
    for path in folder.glob(".step_*"):
        shutil.rmtree(path, ignore_errors=True)


def forsake(folder: Path, *, after: int) -> None:
    """Let nothing go on from steps after ``after``. Their weights stay: the engine may serve them (I8). Only the holder
    of the session may call it, after ``discard_unfinished``."""
    for checkpoint in complete(folder):
        if checkpoint.step > after and checkpoint.has_state:
            weights = checkpoint.manifest_sha256 is not None
            _remove(
                checkpoint.path / STATE if weights else checkpoint.path,
                folder / f".{checkpoint.path.name}.old",
            )


def prune(folder: Path, *, acked_step: int) -> None:
    """Remove checkpoints older than the one the engine acknowledged; what training resumes from stays, also if all
    that is newer than that one is rejected."""
    states = (newest_state(folder), newest_state(folder, at_most=acked_step))
    needed = {state.path for state in states if state is not None}
    for checkpoint in complete(folder):
        if checkpoint.step < acked_step and checkpoint.path not in needed:
            _remove(checkpoint.path, folder / f".{checkpoint.path.name}.old")


def _remove(path: Path, doomed: Path) -> None:
    """Under another name first: a folder that is being removed must not look complete."""
    path.rename(doomed)
    shutil.rmtree(doomed)


def save(
    policy: "Policy",
    folder: Path,
    *,
    step: int,
    run: str,
    fence: int,
    export: bool,
    state: bool,
    metrics: dict[str, float],
) -> Checkpoint:
    """Write checkpoint ``step``. Collective; returns the same on every rank once it is durable."""
    unfinished = folder / f".step_{step:05d}.f{fence}"
    if dist.get_rank() == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    dist.barrier()
    manager = policy.engine.checkpoint_manager
    manager.checkpoint_save_contents = _STATE_CONTENTS * state + _EXPORT_CONTENTS * export
    policy.actor.save_checkpoint(str(unfinished), global_step=step)
    manager.previous_saved_paths.clear()  # veRL's own retention knows nothing of acknowledgements
    for path in unfinished.glob(f"*_rank_{dist.get_rank()}.pt"):
        _sync(path)
    dist.barrier()
    ids = manifest.probe_ids(policy.tokenizer)
    logprobs = policy.log_probs(ids) if export else []
    result: list[Any] = [None]
    if dist.get_rank() == 0:
        _arrange(unfinished, export=export, state=state)
        if export:
            world_size = dist.get_world_size()
            manifest.write(
                unfinished, step=step, run=run, world_size=world_size, probe_ids=ids, probe_logprobs=logprobs
            )
        (unfinished / METRICS).write_text(json.dumps(metrics))
        result = [_settle(unfinished, folder, step)]
    dist.broadcast_object_list(result, src=0)
    saved: Checkpoint = result[0]
    return saved


def load(policy: "Policy", checkpoint: Checkpoint) -> None:
    """Restore weights, optimiser, schedule. Collective. Raises CheckpointInvalid for another world size."""
    state = checkpoint.path / STATE
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if not (state / f"model_world_size_{world_size}_rank_{rank}.pt").is_file():
        raise CheckpointInvalid(
            f"{state} was not written by a job of {world_size} processes, and veRL's state is bound to the "
            "world size: start the trainer with the number of processes it had"
        )
    policy.actor.load_checkpoint(str(state))


def _arrange(unfinished: Path, *, export: bool, state: bool) -> None:
    """veRL's flat folder -> ours."""
    if not export:
        shutil.rmtree(unfinished / manifest.WEIGHTS)
    if state:
        (unfinished / STATE).mkdir()
    for path in [entry for entry in unfinished.iterdir() if entry.is_file()]:
        if state:
            path.rename(unfinished / STATE / path.name)
        else:
            path.unlink()


def _settle(unfinished: Path, folder: Path, step: int) -> Checkpoint:
    """Publish the folder under its step's name, or give it up for an equal and sound one that is there already."""
    last = next((c for c in reversed(complete(folder)) if c.step == step), None)
    sha256 = manifest.digest(unfinished)
    if last is None or sha256 is None or last.manifest_sha256 != sha256 or not _sound(last.path):
        replay = last.replay + 1 if last is not None else 1
        final = folder / (f"step_{step:05d}" if replay == 1 else f"step_{step:05d}_r{replay}")
        publish(unfinished, final)
        return Checkpoint(step, final, replay)
    if not last.has_state and (unfinished / STATE).is_dir():
        publish(unfinished / STATE, last.path / STATE)
    shutil.rmtree(unfinished)
    return last


def _sound(path: Path) -> bool:
    """Whether the weights are still those of the manifest: they may be why the step is replayed."""
    try:
        manifest.verify(path)
    except (CheckpointInvalid, OSError):
        return False
    return True


def publish(unfinished: Path, final: Path) -> None:
    """Make a finished folder durable and give it its final name; it is readable by the engine's user."""
    for path in (*unfinished.rglob("*"), unfinished):
        path.chmod(0o755 if path.is_dir() else 0o644)
        _sync(path)
    unfinished.rename(final)
    _sync(final.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
