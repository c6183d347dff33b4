"""Which veRL overrides the trainer takes, and which it refuses by name."""

from pathlib import Path

import pytest
from trainer_lab import Trainer

from forge_server.assets import stage_package

pytestmark = pytest.mark.verl


@pytest.fixture(scope="module")
def trainer(trainer_env: Path, tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    return Trainer(trainer_env, stage_package("trainer", tmp_path_factory.mktemp("staged")))


def test_overrides_that_reach_the_update_are_taken(trainer: Trainer) -> None:
    done = trainer.run(
        "-m",
        "forge_server.trainer.config",
        "actor_rollout_ref.actor.optim.lr=1e-5",
        "actor_rollout_ref.actor.optim.lr_warmup_steps=10",
        "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
        "actor_rollout_ref.actor.clip_ratio_high=0.28",
        "actor_rollout_ref.actor.loss_agg_mode=token-sum",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.policy_loss.loss_mode=cispo",
        "+actor_rollout_ref.model.override_config.attn_implementation=eager",
        "+actor_rollout_ref.actor.fsdp_config.mixed_precision={param_dtype:bf16}",
        "algorithm.adv_estimator=rloo",
        "algorithm.rollout_correction.rollout_rs=token_k1",
        "algorithm.rollout_correction.rollout_rs_threshold='0.5_2.0'",
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean", "counts a rollout once per sample"),
        ("actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum", "counts a rollout once per sample"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=gspo", "how a rollout is cut"),
        ("algorithm.rollout_correction.rollout_is=sequence", "not the ratio of the rollout"),
        ("algorithm.rollout_correction.rollout_rs=seq_mean_k1", "how a rollout is cut"),
        ("algorithm.adv_estimator=gae", "no group baseline"),
        ("algorithm.use_kl_in_reward=true", "use_kl_loss"),
        ("actor_rollout_ref.rollout.temperature=0.7", "rollouts are the server's"),
        ("actor_rollout_ref.rollout.mode=async", "rollouts are the server's"),
        ("actor_rollout_ref.model.path=elsewhere", "the model is set with the run"),
        ("actor_rollout_ref.model.lora_rank=8", "adapters"),
        ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4", "ppo_max_token_len_per_gpu"),
        ("trainer.total_epochs=3", "the loop is the server's"),
        ("data.train_batch_size=8", "the server's batches"),
        ("model_engine=megatron", "ignored"),
        ("actor_rollout_ref.actor.no_such_key=1", "ignored"),
        ("actor_rollout_ref.actor.optim.no_such_key=1", "does not accept"),
        ("actor_rollout_ref.actor.clip_ratio=0.4", "clip_ratio_low"),
        ("actor_rollout_ref.model.tiled_mlp.enabled=true", "ignored"),
        ("actor_rollout_ref.actor.fsdp_config.dtype=float16", "actor.fsdp_config.mixed_precision"),
        ("actor_rollout_ref.ref.fsdp_config.dtype=float16", "ref.fsdp_config.mixed_precision"),
        ("actor_rollout_ref.actor.fsdp_config.strategy=fsdp", "use actor_rollout_ref.actor.strategy"),
        ("actor_rollout_ref.actor.ulysses_sequence_parallel_size=2", "only flash attention"),
        ("actor_rollout_ref.ref.ulysses_sequence_parallel_size=2", "cut alike"),
        ("actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=2", "the reference follows"),
        ("algorithm.rollout_correction.rollout_rs=token_k1", "rollout_correction.rollout_rs_threshold"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=dro", "policy_loss.dro_beta"),
        ("actor_rollout_ref.actor.ppo_epochs=0", "at least 1"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=0", "at least 1"),
        ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=-1", "at least 1"),
        ("actor_rollout_ref.actor.fsdp_config={param_offload:true,strategy:fsdp}", "actor.strategy"),
        ("actor_rollout_ref.actor.optim={lr:1e-5,total_training_steps:3}", "number of steps"),
        ("~data", "deletions"),
        ("nonsense", "not a Hydra override"),
    ],
)
def test_overrides_that_would_lie_are_refused_by_name(trainer: Trainer, override: str, reason: str) -> None:
    done = trainer.run("-m", "forge_server.trainer.config", override)
    assert done.returncode == 2
    assert override.partition("=")[0].lstrip("~") in done.stderr
    assert reason in done.stderr


def test_a_choice_that_the_estimator_does_not_read_is_refused(trainer: Trainer) -> None:
    choice = "algorithm.norm_adv_by_std_in_grpo=false"
    for estimator, code in {"grpo": 0, "grpo_passk": 0, "grpo_vectorized": 2, "rloo": 2}.items():
        done = trainer.run(
            "-m", "forge_server.trainer.config", f"algorithm.adv_estimator={estimator}", choice
        )
        assert done.returncode == code, done.stderr
        assert code == 0 or (choice in done.stderr and estimator in done.stderr)


def test_a_sequence_is_cut_over_gpus_with_flash_attention_only(trainer: Trainer) -> None:
    cut = "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"
    attention = "+actor_rollout_ref.model.override_config.attn_implementation="
    assert (
        trainer.run("-m", "forge_server.trainer.config", cut, f"{attention}flash_attention_2").returncode == 0
    )
    for other in ("sdpa", "eager", "null"):
        done = trainer.run("-m", "forge_server.trainer.config", cut, attention + other)
        assert done.returncode == 2 and cut in done.stderr, done.stderr
