"""The trainer's main loop: batch k -> update -> checkpoint k -> report, until the run has ended.

One SPMD job; every rank runs this, rank 0 alone speaks to the server and shares what it heard. Killed at any
point and started again, it goes on from the last complete checkpoint, fetches the same batch and ends with
the same weights (I8): nothing it holds in memory matters but what the next checkpoint will contain.

    torchrun --standalone --nproc-per-node N -m forge_server.trainer.worker
    python -m forge_server.trainer.worker                                     (the same for one process)

Environment: FORGE_TRAINER_URL (the run's trainer routes), FORGE_TRAINER_KEY, FORGE_TRAINER_DEVICE (cpu, cuda
or auto). Exit codes: 0 the run ended or the server said stop, 2 an override was refused, 3 fenced off, 1 all
else (torchrun turns every failure into 1).
"""

import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from forge_server.trainer import checkpoint, config, model, platform
from forge_server.trainer.batch import read
from forge_server.trainer.checkpoint import Checkpoint
from forge_server.trainer.errors import RunEnded, TrainerError
from forge_server.trainer.link import PATIENCE_S, Link, Session

T = TypeVar("T")
STOPPED = "stopped"


class Worker:
    """The job on one rank; ``link`` is None on all but rank 0."""

    def __init__(self, link: Link | None, device: str) -> None:
        self.link = link
        self.session, self.resume = self._open()
        if link is not None:
            link.keep_lease(self.session.lease_s)
        built = config.build(
            self.session.overrides,
            model_path=self.session.model_path,
            total_steps=self.session.total_steps,
            device=device,
        )
        model.check(self.session.model_path)

        # Seconds of imports, which come after what can be refused without them.
        from forge_server.trainer.update import Policy

        self.policy = Policy(built)
        if self.resume is not None:
            checkpoint.load(self.policy, self.resume)

    @property
    def folder(self) -> Path:
        return Path(self.session.checkpoint_dir)

    def run(self) -> None:
        """Train until the run has ended."""
        if self.resume is not None:
            self._report(self.resume.step, self.resume.metrics(), self.resume)
        k = self.resume.step + 1 if self.resume is not None else 1
        while (body := self._wait_for(k)) is not None:
            self._train(k, body)
            k += 1
        self._prune()

    def _open(self) -> tuple[Session, Checkpoint | None]:
        """Open the session for the checkpoint that is on disk; the first reply says where the disk is."""
        result: tuple[Session, Any] | str | None = None
        if self.link is not None:
            try:
                result = self._open_on(self.link)
            except RunEnded as ended:
                result = str(ended)
        heard = _share(result)
        if isinstance(heard, str):
            raise RunEnded(heard)
        return heard

    def _open_on(self, link: Link) -> tuple[Session, Checkpoint | None]:
        world_size = dist.get_world_size()
        session = link.open(world_size=world_size, resume_step=0, resume_manifest_sha256=None)
        folder = Path(session.checkpoint_dir)
        resume = checkpoint.newest_state(folder)
        if resume is not None:
            sha256 = resume.manifest_sha256
            session = link.open(world_size=world_size, resume_step=resume.step, resume_manifest_sha256=sha256)
        checkpoint.discard_unfinished(folder)
        if resume is not None and session.next_batch <= resume.step:
            # The server lost or rejected what came after: go back to where it stands. Once it has gone on from there
            # nothing tells the states that came after from those of its new way.
            checkpoint.forsake(folder, after=session.next_batch - 1)
            resume = checkpoint.newest_state(folder)
        return session, resume

    def _wait_for(self, k: int) -> bytes | None:
        """Batch ``k`` on every rank; None when there is nothing more to do."""
        self._enter("waiting", k)
        while True:
            heard: bytes | str | None = None
            if self.link is not None:
                try:
                    heard = STOPPED if self.link.stop.is_set() else self.link.poll_batch(k)
                except RunEnded:
                    heard = STOPPED
            heard = _share(heard)
            if heard == STOPPED:
                return None
            if isinstance(heard, bytes):
                return heard

    def _train(self, k: int, body: bytes) -> None:
        batch = read(body, k=k)
        self._enter("training", k)
        self._prune()
        metrics = self.policy.step(batch, seed=self.session.seed)
        wish = self._save_wanted()
        last = k >= self.session.total_steps
        export = last or k % self.session.export_every == 0
        state = last or k % self.session.save_every == 0 or wish != ""
        saved = None
        if export or state:
            self._enter("saving", k)
            started = time.perf_counter()
            saved = checkpoint.save(
                self.policy,
                self.folder,
                step=k,
                run=batch.run,
                fence=self.session.fence,
                export=export,
                state=state,
                metrics=_finite(metrics),
            )
            metrics["seconds/checkpoint"] = time.perf_counter() - started
        self._report(k, _finite(metrics), saved, wish)

    def _save_wanted(self) -> str:
        """On every rank the wish of a person to have this step's full state saved; "": there is none."""
        wish = None
        if self.link is not None:
            self.link.beat(patience_s=PATIENCE_S)
            wish = self.link.save
        return _share(wish)

    def _report(self, k: int, metrics: dict[str, float], saved: Checkpoint | None, wish: str = "") -> None:
        """Hand over what step ``k`` came to; repeated after a crash between writing and reporting, when the wish
        for the save is not known any more and is fulfilled once again."""
        if self.link is None:
            return
        _show(k, metrics)
        sha256 = saved.manifest_sha256 if saved is not None else None
        try:
            self.link.report_metrics(k, metrics, wish)
            if saved is not None and sha256 is not None:
                version = self.link.report_checkpoint(k, str(saved.path), sha256)
                print(json.dumps({"step": k, "version": version, "manifest_sha256": sha256}), flush=True)
        except RunEnded:
            self.link.stop.set()  # the other ranks hear of it when they wait for the next batch

    def _prune(self) -> None:
        if self.link is not None:
            checkpoint.prune(self.folder, acked_step=self.link.acked_step)

    def _enter(self, phase: str, step: int) -> None:
        if self.link is not None:
            self.link.enter(phase, step)


def _share(value: T | None) -> T:
    """Rank 0's value on every rank."""
    box: list[Any] = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]  # type: ignore[no-any-return]


def _show(k: int, metrics: dict[str, float]) -> None:
    bad = int(metrics.get("nonfinite_gradients", 0))
    if bad:
        print(f"step {k}: gradients of {bad} mini-batches were not numbers and were skipped", file=sys.stderr)
    shown = ("loss", "grad_norm", "lr", "reward_mean", "logprob_gap_mean", "tokens_trained", "seconds/step")
    print(json.dumps({"step": k} | {name: metrics[name] for name in shown if name in metrics}), flush=True)


def _finite(metrics: dict[str, float]) -> dict[str, float]:
    """JSON has no NaN; a step whose gradients were not numbers says so in ``nonfinite_gradients``."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def main() -> None:
    """Run the job; the exit code says how it ended."""
    device = platform.start(os.environ.get("FORGE_TRAINER_DEVICE", "auto"))
    link = (
        Link(os.environ["FORGE_TRAINER_URL"], os.environ["FORGE_TRAINER_KEY"])
        if dist.get_rank() == 0
        else None
    )
    code = 0
    try:
        Worker(link, device).run()
    except RunEnded as ended:
        print(f"the run has ended: {ended}", flush=True)
    except TrainerError as error:
        print(f"Error: {error}", file=sys.stderr, flush=True)
        code = error.exit_code
    if code:
        # The other ranks wait in a collective that will not come: torchrun ends them.
        os._exit(code)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
