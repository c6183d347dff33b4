"""The trainer's worker in veRL's environment, against a stand-in of the server over real HTTP."""

import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from subprocess import Popen
from typing import Any

import numpy as np
import pytest
from trainer_lab import TESTS, FakeServer, Row, Trainer, batch_body, weights

from forge_server.assets import stage_package

pytestmark = [pytest.mark.verl, pytest.mark.timeout(900)]

LR = "actor_rollout_ref.actor.optim.lr=1e-3"
STEPS = 3


@pytest.fixture(scope="module")
def trainer(trainer_env: Path, tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    return Trainer(trainer_env, stage_package("trainer", tmp_path_factory.mktemp("staged")))


@pytest.fixture(scope="module")
def model(trainer: Trainer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 with random weights and a tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    done = trainer.run(str(TESTS / "tiny_model.py"), str(folder), "0")
    assert done.returncode == 0, done.stderr
    return folder / "step_00000" / "huggingface"


class Cohort:
    """Four groups of four rollouts of several turns, half of each rewarded; scored by the first model."""

    def __init__(self, trainer: Trainer, model: Path) -> None:
        rng = random.Random(0)

        def some(least: int, most: int) -> list[int]:
            return [rng.randrange(5, 300) for _ in range(rng.randrange(least, most))]

        self.rows: list[Row] = []
        self.groups: list[int] = []
        self.rewards: list[float] = []
        for group in range(4):
            prompt = some(8, 20)
            for n in range(4):
                tokens, spans = list(prompt), []
                for _ in range(rng.randrange(1, 4)):
                    said = some(5, 15)
                    spans.append((len(tokens), len(tokens) + len(said)))
                    tokens += said + some(2, 8)  # the tool's answer
                self.rows.append(Row(tokens, spans, len(self.groups), temperature=(1.0, 0.7, 1.3)[n % 3]))
                self.groups.append(group)
                self.rewards.append(float(n % 2))
        for row, logprobs in zip(self.rows, trainer.score(model, self.rows), strict=True):
            row.logprobs = logprobs

    def body(self, k: int) -> bytes:
        return batch_body(k, self.rows, self.groups, self.rewards)

    def batches(self) -> dict[int, bytes]:
        return {k: self.body(k) for k in range(1, STEPS + 1)}

    def cut(self) -> list[Row]:
        """The same rollouts with one row per turn: each turn's context repeated, each token trained once."""
        return [
            replace(row, tokens=row.tokens[:end], spans=[(start, end)], logprobs=row.logprobs[:end])
            for row in self.rows
            for start, end in row.spans
        ]


@pytest.fixture(scope="module")
def cohort(trainer: Trainer, model: Path) -> Cohort:
    return Cohort(trainer, model)


@pytest.fixture
def serve(model: Path, tmp_path: Path) -> Iterator[Callable[..., FakeServer]]:
    servers: list[FakeServer] = []

    def start(batches: dict[int, bytes], **session: Any) -> FakeServer:
        session = {"overrides": [LR]} | session
        servers.append(FakeServer(model, tmp_path / f"checkpoints-{len(servers)}", batches, **session))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


class Uninterrupted:
    """One whole run; several tests look at it."""

    def __init__(self, trainer: Trainer, model: Path, cohort: Cohort, folder: Path) -> None:
        self.server = FakeServer(model, folder, cohort.batches(), overrides=[LR])
        self.server.acknowledge = False
        self.folder = folder
        try:
            self.done = trainer.work(self.server)
        finally:
            self.server.close()
        assert self.done.returncode == 0, self.done.stderr

    def checkpoint(self, step: int) -> Path:
        return self.folder / f"step_{step:05d}"


@pytest.fixture(scope="module")
def uninterrupted(
    trainer: Trainer, model: Path, cohort: Cohort, tmp_path_factory: pytest.TempPathFactory
) -> Uninterrupted:
    return Uninterrupted(trainer, model, cohort, tmp_path_factory.mktemp("run") / "checkpoints")


def test_rewarded_rollouts_become_likelier_and_context_is_not_trained(
    trainer: Trainer, model: Path, cohort: Cohort, uninterrupted: Uninterrupted
) -> None:
    before = trainer.score(model, cohort.rows)
    after = trainer.score(uninterrupted.checkpoint(STEPS) / "huggingface", cohort.rows)

    def gain(reward: float, trained: bool) -> float:
        changes = [
            new - old
            for row, olds, news in zip(cohort.rows, before, after, strict=True)
            if cohort.rewards[row.rollout] == reward
            for old, new, mask in zip(olds[1:], news[1:], row.mask()[1:], strict=True)
            if bool(mask) is trained
        ]
        return float(np.mean(changes))

    assert gain(1.0, True) > 0.5
    assert gain(0.0, True) < -0.5
    # The context of both moves with the shared weights, but not one against the other.
    assert abs(gain(1.0, False) - gain(0.0, False)) < 0.3 * (gain(1.0, True) - gain(0.0, True))


def test_logprobs_of_engine_and_trainer_agree_at_each_rows_temperature(uninterrupted: Uninterrupted) -> None:
    first = uninterrupted.server.metrics[1]
    assert first["logprob_gap_max"] < 1e-4
    assert first["is_mean"] == pytest.approx(1.0, abs=1e-4)


def test_metrics_tell_of_the_step(cohort: Cohort, uninterrupted: Uninterrupted) -> None:
    metrics = uninterrupted.server.metrics
    assert sorted(metrics) == [1, 2, 3]
    assert {"loss", "pg_loss", "ppo_kl", "clip_fraction", "entropy", "grad_norm"} <= set(metrics[2])
    assert {"is_mean", "is_max", "logprob_gap_mean", "logprob_gap_max"} <= set(metrics[2])
    assert metrics[2]["rollouts"] == 16
    assert metrics[2]["groups"] == 4
    assert metrics[2]["tokens_trained"] == sum(int(row.mask().sum()) for row in cohort.rows)
    assert metrics[2]["lr"] == pytest.approx(1e-3)
    assert metrics[2]["nonfinite_gradients"] == 0
    assert metrics[2]["seconds/step"] > 0 and metrics[2]["seconds/checkpoint"] > 0


def test_a_run_is_pulled_to_its_end_and_every_checkpoint_reported(uninterrupted: Uninterrupted) -> None:
    server = uninterrupted.server
    assert server.served == [1, 2, 3, 4]  # 4 was answered 410
    assert [report["k"] for report in server.checkpoints] == [1, 2, 3]
    assert [Path(report["path"]).name for report in server.checkpoints] == [
        "step_00001",
        "step_00002",
        "step_00003",
    ]
    # Nothing was acknowledged, so nothing was pruned.
    assert sorted(path.name for path in uninterrupted.folder.iterdir()) == [
        "step_00001",
        "step_00002",
        "step_00003",
    ]


def test_what_training_may_have_to_go_back_to_is_not_pruned(trainer: Trainer, tmp_path: Path) -> None:
    """Step 9 is served and 10 not yet: if 10 is refused, training goes on from the state of step 5."""
    for k in range(1, 11):
        (tmp_path / f"step_{k:05d}" / ("state" if k % 5 == 0 else "huggingface")).mkdir(parents=True)
    code = (
        "import sys; from pathlib import Path; from forge_server.trainer import checkpoint as c; "
        "folder = Path(sys.argv[1]); c.prune(folder, acked_step=9); "
        "print([x.step for x in c.complete(folder)], c.newest_state(folder, at_most=9).step)"
    )
    done = trainer.run("-c", code, str(tmp_path))
    assert done.stdout.strip() == "[5, 9, 10] 5", done.stderr


def test_nothing_goes_on_from_what_was_made_of_rejected_weights(trainer: Trainer, tmp_path: Path) -> None:
    """Step 4 was refused when 7 was trained: the states of 4 to 7 are given up, the weights of 4 may be served."""
    for k in range(1, 8):
        (tmp_path / f"step_{k:05d}" / "state").mkdir(parents=True)
    for k in (2, 4):
        (tmp_path / f"step_{k:05d}" / "manifest.json").write_text("{}")
    code = (
        "import sys; from pathlib import Path; from forge_server.trainer import checkpoint as c; "
        "folder = Path(sys.argv[1]); c.forsake(folder, after=3); "
        "print([x.step for x in c.complete(folder)], c.newest_state(folder).step)"
    )
    done = trainer.run("-c", code, str(tmp_path))
    assert done.stdout.strip() == "[1, 2, 3, 4] 3", done.stderr
    assert not any(path.name.startswith(".") for path in tmp_path.iterdir())


def test_a_manifest_verifies_and_a_flipped_byte_is_found(
    trainer: Trainer, uninterrupted: Uninterrupted, tmp_path: Path
) -> None:
    folder = tmp_path / "step_00003"
    shutil.copytree(uninterrupted.checkpoint(3), folder)
    verify = ("-m", "forge_server.trainer.manifest", "verify", str(folder))
    done = trainer.run(*verify)
    assert (done.returncode, done.stdout.strip()) == (
        0,
        uninterrupted.server.checkpoints[2]["manifest_sha256"],
    )

    file = folder / "huggingface" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    done = trainer.run(*verify)
    assert done.returncode == 1
    assert "model.safetensors does not have the digest" in done.stderr


def test_a_manifest_made_for_a_model_has_the_probe_the_trainer_would_give(
    trainer: Trainer, uninterrupted: Uninterrupted, tmp_path: Path
) -> None:
    written = json.loads((uninterrupted.checkpoint(3) / "manifest.json").read_text())
    folder = tmp_path / "initial"
    shutil.copytree(uninterrupted.checkpoint(3) / "huggingface", folder / "huggingface")
    done = trainer.run("-m", "forge_server.trainer.manifest", "make", str(folder), "--run", "ru-test")
    assert done.returncode == 0, done.stderr
    made = json.loads((folder / "manifest.json").read_text())
    assert made["files"] == written["files"]
    assert made["tensors"] == written["tensors"]
    assert made["probe"]["token_ids"] == written["probe"]["token_ids"]
    assert made["probe"]["logprobs"] == pytest.approx(written["probe"]["logprobs"], abs=1e-4)


class Killed:
    """Kills the worker, from inside the server, before it gets an answer."""

    def __init__(self) -> None:
        self.process: Popen[str] | None = None

    def started(self, process: Popen[str]) -> None:
        self.process = process

    def __call__(self) -> int:
        assert self.process is not None
        self.process.kill()
        self.process.wait(60)
        return 503


def test_killed_at_any_point_the_weights_come_out_the_same(
    trainer: Trainer,
    cohort: Cohort,
    uninterrupted: Uninterrupted,
    serve: Callable[..., FakeServer],
) -> None:
    server = serve(cohort.batches())
    folder = Path(server.session["checkpoint_dir"])
    kill = Killed()
    server.on[("heartbeat", "saving", 2)] = kill  # updated, nothing written
    server.on[("metrics", 3)] = kill  # written, nothing reported
    lives = []
    while not lives or lives[-1].returncode != 0:
        assert len(lives) < 3, lives[-1].stderr
        lives.append(trainer.work(server, started=kill.started))
    assert [life.returncode for life in lives] == [-9, -9, 0]

    assert [session["resume_step"] for session in server.sessions] == [0, 0, 1, 0, 3]
    assert sorted(server.metrics) == [1, 2, 3]
    ours = {report["k"]: report["manifest_sha256"] for report in server.checkpoints}
    theirs = {report["k"]: report["manifest_sha256"] for report in uninterrupted.server.checkpoints}
    assert ours == theirs  # the manifest names the digest of every weight, bit for bit
    # Step 3 was acknowledged in the end: what is older is gone, and so is what the killed ones left.
    assert [path.name for path in folder.iterdir()] == ["step_00003"]


def test_a_state_that_was_asked_for_is_saved_once_and_gone_on_from(
    trainer: Trainer, cohort: Cohort, uninterrupted: Uninterrupted, serve: Callable[..., FakeServer]
) -> None:
    server = serve(cohort.batches(), save_every=5)
    server.acknowledge = False
    server.on[("heartbeat", "training", 1)] = lambda: setattr(server, "save", "wish")
    kill = Killed()
    server.on[("heartbeat", "training", 3)] = kill
    lives = [trainer.work(server, started=kill.started) for _ in range(2)]
    assert [life.returncode for life in lives] == [-9, 0], lives[-1].stderr

    assert server.saved == {1: "wish"}
    assert [session["resume_step"] for session in server.sessions] == [0, 0, 1]
    assert server.served == [1, 2, 3, 2, 3, 4]
    folder = Path(server.session["checkpoint_dir"])
    states = [(folder / f"step_{step:05d}" / "state").exists() for step in (1, 2, 3)]
    assert states == [True, False, True]  # the last step always is
    ours = {report["k"]: report["manifest_sha256"] for report in server.checkpoints}
    theirs = {report["k"]: report["manifest_sha256"] for report in uninterrupted.server.checkpoints}
    assert ours == theirs


def test_sent_back_it_replays_and_keeps_what_differs_apart(
    trainer: Trainer, cohort: Cohort, uninterrupted: Uninterrupted, serve: Callable[..., FakeServer]
) -> None:
    """I8: the same batch gives the same folder; another one never writes over weights that may be served."""
    other_rewards = [1.0 - reward for reward in cohort.rewards]
    batches = cohort.batches() | {3: batch_body(3, cohort.rows, cohort.groups, other_rewards)}
    server = serve(batches)
    folder = Path(server.session["checkpoint_dir"])
    shutil.copytree(uninterrupted.folder, folder)
    server.send_back_to = 2
    server.acknowledge = False
    done = trainer.work(server)
    assert done.returncode == 0, done.stderr

    assert server.served == [2, 3, 4]
    theirs = [report["manifest_sha256"] for report in uninterrupted.server.checkpoints]
    reports = [(Path(r["path"]).name, r["manifest_sha256"]) for r in server.checkpoints]
    assert reports[:2] == [("step_00001", theirs[0]), ("step_00002", theirs[1])]
    assert reports[2][0] == "step_00003_r2"
    assert reports[2][1] != theirs[2]
    assert sorted(path.name for path in folder.iterdir()) == [
        "step_00001",
        "step_00002",
        "step_00003",
        "step_00003_r2",
    ]
    # a life that came now would go on from the step that was made anew
    states = sorted(path.parent.name for path in folder.glob("*/state"))
    assert states == ["step_00001", "step_00002", "step_00003_r2"]


def test_a_replay_that_comes_out_the_same_does_not_keep_damaged_weights(
    trainer: Trainer, cohort: Cohort, uninterrupted: Uninterrupted, serve: Callable[..., FakeServer]
) -> None:
    server = serve(cohort.batches())
    folder = Path(server.session["checkpoint_dir"])
    shutil.copytree(uninterrupted.folder, folder)
    file = folder / "step_00003" / "huggingface" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    server.send_back_to = 3
    server.acknowledge = False
    done = trainer.work(server)
    assert done.returncode == 0, done.stderr

    report = server.checkpoints[-1]
    assert Path(report["path"]).name == "step_00003_r2"
    assert report["manifest_sha256"] == uninterrupted.server.checkpoints[2]["manifest_sha256"]
    done = trainer.run("-m", "forge_server.trainer.manifest", "verify", report["path"])
    assert done.returncode == 0, done.stderr


def test_i11_how_a_rollout_is_cut_changes_no_gradient(
    trainer: Trainer, cohort: Cohort, serve: Callable[..., FakeServer]
) -> None:
    """Over two mini-batches: they too are the same, since they are chosen by trained tokens."""
    overrides = [
        LR,
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.use_kl_loss=true",
    ]
    rows = cohort.cut()
    assert len(rows) > len(cohort.rows)
    bodies = cohort.body(1), batch_body(1, rows, cohort.groups, cohort.rewards)
    servers = [serve({1: body}, overrides=overrides) for body in bodies]
    for server in servers:
        done = trainer.work(server)
        assert done.returncode == 0, done.stderr

    whole, cut = (server.metrics[1] for server in servers)
    assert (whole["rows"], cut["rows"]) == (len(cohort.rows), len(rows))
    for name in ("tokens_trained", "rollouts", "groups", "advantage_max"):
        assert cut[name] == whole[name]
    assert cut["mini_batches"] == cut["optimizer_steps"] == 2
    for name in ("loss", "pg_loss", "kl_loss", "grad_norm", "entropy"):
        assert cut[name] == pytest.approx(whole[name], rel=1e-3)
    one, other = (weights(Path(server.checkpoints[0]["path"])) for server in servers)
    gap = max(float(np.abs(one[name] - other[name]).max()) for name in one)
    assert gap < 1e-4  # a step of Adam moves a weight by 1e-3, whichever way its gradient points


def test_fenced_off_it_stops_before_it_writes(
    trainer: Trainer, cohort: Cohort, serve: Callable[..., FakeServer]
) -> None:
    server = serve(cohort.batches())
    server.on[("heartbeat", "saving", 1)] = lambda: 409
    done = trainer.work(server)
    assert done.returncode == 3
    assert "another session has taken over" in done.stderr
    assert server.checkpoints == []
    assert not Path(server.session["checkpoint_dir"]).exists()


def test_a_refused_override_is_named(
    trainer: Trainer, cohort: Cohort, serve: Callable[..., FakeServer]
) -> None:
    server = serve(cohort.batches(), overrides=["actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean"])
    done = trainer.work(server)
    assert done.returncode == 2
    assert "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean" in done.stderr
    assert server.served == []


def test_two_ranks_make_the_same_first_step_and_skip_gradients_that_are_not_numbers(
    trainer: Trainer, cohort: Cohort, uninterrupted: Uninterrupted, serve: Callable[..., FakeServer]
) -> None:
    huge = [reward * 3e38 for reward in cohort.rewards]
    server = serve(
        {1: cohort.body(1), 2: batch_body(2, cohort.rows, cohort.groups, huge)},
        overrides=[
            LR,
            "algorithm.norm_adv_by_std_in_grpo=false",
            "actor_rollout_ref.actor.optim.lr_warmup_steps=2",
        ],
        save_every=5,
    )
    server.acknowledge = False
    server.save = "wish"
    done = trainer.work(server, ranks=2)
    assert done.returncode == 0, done.stderr

    first, second, alone = server.metrics[1], server.metrics[2], uninterrupted.server.metrics[1]
    spread = np.std([0.0, 1.0, 0.0, 1.0], ddof=1)  # what the other run divided each advantage by
    for name in ("loss", "grad_norm"):
        assert first[name] == pytest.approx(alone[name] * spread, rel=1e-4)
    for name in ("entropy", "tokens_trained", "rollouts"):
        assert first[name] == pytest.approx(alone[name], rel=1e-4)
    assert first["lr"] == 0.0  # veRL's warm-up starts from nothing
    assert second["lr"] == pytest.approx(5e-4)

    assert second["nonfinite_gradients"] == 1
    assert second["optimizer_steps"] == 0
    assert "grad_norm" not in second
    folders = [Path(report["path"]) for report in server.checkpoints]
    one, other = (weights(folder) for folder in folders)
    assert all(np.array_equal(one[name], other[name]) for name in one)
    # the first was asked for of rank 0, the last step always is; each rank has written its part
    states = [sorted(path.name for path in (folder / "state").glob("model_*.pt")) for folder in folders]
    assert states == [[f"model_world_size_2_rank_{rank}.pt" for rank in (0, 1)]] * 2
    assert server.saved == {1: "wish"}
