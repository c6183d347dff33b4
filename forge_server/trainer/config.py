"""veRL's Hydra config for one run: our defaults, the user's overrides verbatim, then what the server decides.

An override is accepted only if this trainer really reads it. Whatever would be ignored (rollout, data,
reward, critic, trainer settings: those are the server's) and whatever is wrong when a rollout has several
samples (sequence-level ratios and means: a rollout cut in three would count three times, I11) is refused by
name.

    python -m forge_server.trainer.config OVERRIDE...      exit 0, or 2 with the refusal
"""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from forge_server.trainer.errors import OverrideRefused

ACTOR = "actor_rollout_ref.actor"
REF = "actor_rollout_ref.ref"
MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"
CORRECTION = "algorithm.rollout_correction"

# Every key that reaches the update; a name covers what is below it.
READ = (
    "algorithm.adv_estimator",
    "algorithm.norm_adv_by_std_in_grpo",
    f"{CORRECTION}.rollout_is",
    f"{CORRECTION}.rollout_is_threshold",
    f"{CORRECTION}.rollout_is_batch_normalize",
    f"{CORRECTION}.rollout_rs",
    f"{CORRECTION}.rollout_rs_threshold",
    f"{CORRECTION}.bypass_mode",
    f"{ACTOR}.optim",
    f"{ACTOR}.strategy",
    f"{ACTOR}.fsdp_config",
    f"{ACTOR}.ulysses_sequence_parallel_size",
    f"{ACTOR}.ppo_mini_batch_size",
    f"{ACTOR}.ppo_epochs",
    f"{ACTOR}.ppo_max_token_len_per_gpu",
    f"{ACTOR}.clip_ratio_low",
    f"{ACTOR}.clip_ratio_high",
    f"{ACTOR}.clip_ratio_c",
    f"{ACTOR}.policy_loss",
    f"{ACTOR}.loss_agg_mode",
    f"{ACTOR}.entropy_coeff",
    f"{ACTOR}.use_kl_loss",
    f"{ACTOR}.kl_loss_coef",
    f"{ACTOR}.kl_loss_type",
    f"{ACTOR}.entropy_from_logits_with_chunking",
    f"{ACTOR}.entropy_from_logits_chunk_size",
    f"{ACTOR}.entropy_checkpointing",
    f"{ROLLOUT}.log_prob_max_token_len_per_gpu",
    f"{REF}.fsdp_config",
    f"{REF}.log_prob_max_token_len_per_gpu",
    f"{REF}.ulysses_sequence_parallel_size",
    f"{MODEL}.trust_remote_code",
    f"{MODEL}.external_lib",
    f"{MODEL}.use_shm",
    f"{MODEL}.override_config",
    f"{MODEL}.enable_gradient_checkpointing",
    f"{MODEL}.enable_activation_offload",
    f"{MODEL}.use_remove_padding",
    f"{MODEL}.use_liger",
)

SEQUENCE_PARALLEL = f"set {ACTOR}.ulysses_sequence_parallel_size, which the reference follows"
BY_TOKENS = f"micro-batches are cut by tokens; use {ACTOR}.ppo_max_token_len_per_gpu"
# Why a key that a veRL user may expect to work does not; the longest matching name speaks.
REFUSED = {
    "algorithm.use_kl_in_reward": f"rewards are per rollout here; use {ACTOR}.use_kl_loss",
    "algorithm.gamma": "the reward of a rollout belongs to all its tokens alike; nothing is discounted",
    "algorithm.filter_groups": "the server chooses the groups of a batch",
    f"{CORRECTION}.loss_type": f"set {ACTOR}.policy_loss.loss_mode instead",
    f"{ACTOR}.optim.total_training_steps": "the run's number of steps is set with the run",
    f"{ACTOR}.clip_ratio": f"veRL reads the two sides; use {ACTOR}.clip_ratio_low and {ACTOR}.clip_ratio_high",
    f"{ACTOR}.fsdp_config.dtype": f"the engine does not read it; use {ACTOR}.fsdp_config.mixed_precision",
    f"{ACTOR}.fsdp_config.strategy": f"veRL sets it; use {ACTOR}.strategy",
    f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size": SEQUENCE_PARALLEL,
    f"{REF}.fsdp_config.dtype": f"the engine does not read it; use {REF}.fsdp_config.mixed_precision",
    f"{REF}.fsdp_config.strategy": f"veRL sets it; use {ACTOR}.strategy",
    f"{REF}.fsdp_config.ulysses_sequence_parallel_size": SEQUENCE_PARALLEL,
    f"{ACTOR}.grad_clip": f"veRL's engine does not read it; use {ACTOR}.optim.clip_grad",
    f"{ACTOR}.use_torch_compile": f"the engine does not read it; use {ACTOR}.fsdp_config.use_torch_compile",
    f"{ACTOR}.use_dynamic_bsz": BY_TOKENS,
    f"{ACTOR}.ppo_micro_batch_size": BY_TOKENS,
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": BY_TOKENS,
    f"{ACTOR}.loss_scale_factor": "it belongs to a sequence-level loss_agg_mode, which is refused",
    f"{ACTOR}.shuffle": "mini-batches are whole rollouts, balanced in tokens, the same on every replay",
    f"{ACTOR}.checkpoint": "checkpoints follow the run's export_every and save_every",
    f"{MODEL}.path": "the model is set with the run",
    f"{MODEL}.use_fused_kernels": "fused kernels take one temperature for all rows; rows carry their own",
    f"{MODEL}.lora_rank": "adapters cannot be exported to the engine yet; train the full weights",
    ROLLOUT: "rollouts are the server's: the engine's and proxy's settings apply",
    "data": "data come from the server's batches",
    "critic": "there is no critic; use a group baseline such as algorithm.adv_estimator=grpo",
    "reward": "rewards come with the rollouts",
    "reward_model": "rewards come with the rollouts",
    "custom_reward_function": "rewards come with the rollouts",
    "trainer": "the loop is the server's; its settings are the run's",
    "distillation": "there is no teacher in this loop",
}
NOT_READ = "this trainer does not read it, so it would be ignored"

ESTIMATORS = (
    "grpo",
    "grpo_vectorized",
    "grpo_passk",
    "rloo",
    "rloo_vectorized",
    "opo",
    "gpg",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
)
DIVIDING_BY_CHOICE = ("grpo", "grpo_passk")
TOKEN_LOSSES = ("vanilla", "dppo_tv", "dppo_kl", "gpg", "dro", "cispo")
# Read by veRL or by ``update`` as numbers that divide or bound.
COUNTS = (
    f"{ACTOR}.ppo_epochs",
    f"{ACTOR}.ppo_mini_batch_size",
    f"{ACTOR}.ppo_max_token_len_per_gpu",
    f"{ROLLOUT}.log_prob_max_token_len_per_gpu",
    f"{REF}.log_prob_max_token_len_per_gpu",
    f"{ACTOR}.ulysses_sequence_parallel_size",
)
TOKEN_AGGREGATIONS = ("token-mean", "token-sum")
TOKEN_REJECTIONS = ("token_k1", "token_k2", "token_k3")

DEFAULTS: dict[str, Any] = {
    "algorithm.adv_estimator": "grpo",
    f"{CORRECTION}.rollout_is": "token",
    f"{CORRECTION}.rollout_is_threshold": 2.0,
    f"{ACTOR}.strategy": "fsdp2",
}
_FLOAT32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
CPU_DEFAULTS: dict[str, Any] = {
    f"{ACTOR}.ppo_max_token_len_per_gpu": 2048,  # what stays in the cache is faster
    f"{ACTOR}.fsdp_config.mixed_precision": _FLOAT32,
    f"{ACTOR}.fsdp_config.use_torch_compile": False,
    f"{REF}.fsdp_config.mixed_precision": _FLOAT32,
    f"{REF}.fsdp_config.use_torch_compile": False,
    f"{MODEL}.use_remove_padding": False,
    f"{MODEL}.enable_gradient_checkpointing": False,
}


def build(overrides: list[str], *, model_path: str, total_steps: int, device: str) -> DictConfig:
    """The ``ppo_trainer`` config of a run. Raises OverrideRefused, which names the override."""
    config = check(overrides, device=device)
    forced = {
        f"{MODEL}.path": model_path,
        f"{ACTOR}.optim.total_training_steps": total_steps,
        f"{ACTOR}.checkpoint.save_contents": ["model", "optimizer", "extra", "hf_model"],
        f"{ACTOR}.checkpoint.load_contents": ["model", "optimizer", "extra"],
        f"{ACTOR}.use_dynamic_bsz": True,
        f"{ROLLOUT}.name": "external",
    }
    set_values(config, forced)
    return config


def check(overrides: list[str], *, device: str) -> DictConfig:
    """Compose ``overrides`` over the defaults and refuse what this trainer cannot honour."""
    keys = keys_of(overrides)
    for text, names in keys.items():
        reason = next(filter(None, map(_refusal, names)), None)
        if reason is not None:
            raise OverrideRefused(f"override {text!r} is refused: {reason}")
    config = composed("ppo_trainer", overrides)
    defaults = DEFAULTS | (CPU_DEFAULTS if device == "cpu" else {}) | attention_default(MODEL, device)
    if config.algorithm.rollout_correction.bypass_mode:
        del defaults[f"{CORRECTION}.rollout_is"]
    set_untouched(config, defaults, keys)
    _check_values(config)
    return config


def composed(name: str, overrides: list[str]) -> DictConfig:
    """veRL's config ``name`` with ``overrides``. Raises OverrideRefused for a key it does not have."""
    try:
        with initialize_config_dir(str(_verl_configs()), version_base=None):
            return compose(name, overrides=overrides)
    except (HydraException, OmegaConfBaseException) as error:
        raise OverrideRefused(f"veRL's config does not accept the overrides: {error}") from None


def keys_of(overrides: list[str]) -> dict[str, list[str]]:
    """Override text -> the config keys it sets. Raises OverrideRefused for what is no plain assignment."""
    found = {}
    for text in overrides:
        try:
            parsed = OverridesParser.create().parse_override(text)
        except HydraException as error:
            raise OverrideRefused(f"override {text!r} is not a Hydra override: {error}") from None
        if parsed.is_delete() or parsed.is_sweep_override():
            raise OverrideRefused(
                f"override {text!r} is refused: deletions and sweeps have no meaning for one run"
            )
        found[text] = list(_leaves(parsed.key_or_group, parsed.value()))
    return found


def _leaves(key: str, value: Any) -> Iterator[str]:
    """``key``, or what a mapping given for it sets one by one: Hydra merges it."""
    if not isinstance(value, dict) or not value:
        yield key
        return
    for name, below in value.items():
        yield from _leaves(f"{key}.{name}", below)


def _below(key: str, name: str) -> bool:
    return key == name or key.startswith(name + ".")


def _refusal(key: str) -> str | None:
    """Why ``key`` is refused, or None when it is read."""
    read = max((len(name) for name in READ if _below(key, name)), default=0)
    refused = max((name for name in REFUSED if _below(key, name)), key=len, default="")
    if read > len(refused):
        return None
    return REFUSED[refused] if refused else NOT_READ


def _touched(key: str, users: set[str]) -> bool:
    return any(_below(key, user) or _below(user, key) for user in users)


def _check_values(config: DictConfig) -> None:
    """Refuse values that are wrong when a rollout has several samples, that another value makes ignored, or that the
    first batch would stumble over."""
    actor = config.actor_rollout_ref.actor
    _check_algorithm(config.algorithm)
    _one_of(
        f"{ACTOR}.loss_agg_mode",
        actor.loss_agg_mode,
        TOKEN_AGGREGATIONS,
        "a sequence-level mean counts a rollout once per sample it was cut into",
    )
    _one_of(
        f"{ACTOR}.policy_loss.loss_mode",
        actor.policy_loss.loss_mode,
        TOKEN_LOSSES,
        "it works on whole samples or micro-batches, so it changes with how a rollout is cut",
    )
    if actor.policy_loss.loss_mode == "dro" and not (actor.policy_loss.dro_beta or 0) > 0:
        raise OverrideRefused(
            f"override '{ACTOR}.policy_loss.loss_mode=dro' is refused without {ACTOR}.policy_loss.dro_beta: "
            "the penalty has no default; set it above 0"
        )
    _one_of(
        f"{ACTOR}.strategy",
        actor.strategy,
        ("fsdp", "fsdp2"),
        "checkpoints are written by veRL's FSDP engine",
    )
    for key in COUNTS:
        value = OmegaConf.select(config, key)
        if not isinstance(value, int) or value < 1:
            raise OverrideRefused(
                f"override '{key}={value}' is refused: it must be a whole number of at least 1"
            )
    _check_parallel(config.actor_rollout_ref)


def _check_algorithm(algorithm: DictConfig) -> None:
    correction = algorithm.rollout_correction
    _one_of("algorithm.adv_estimator", algorithm.adv_estimator, ESTIMATORS, "it has no group baseline")
    if not algorithm.norm_adv_by_std_in_grpo and algorithm.adv_estimator not in DIVIDING_BY_CHOICE:
        raise OverrideRefused(
            "override 'algorithm.norm_adv_by_std_in_grpo=false' is refused together with "
            f"adv_estimator={algorithm.adv_estimator}: only {' and '.join(DIVIDING_BY_CHOICE)} read it"
        )
    _one_of(
        f"{CORRECTION}.rollout_is",
        correction.rollout_is,
        ("token", None),
        "a ratio over a sample is not the ratio of the rollout",
    )
    for rejection in (correction.rollout_rs or "").split(","):
        _one_of(
            f"{CORRECTION}.rollout_rs",
            rejection.strip() or None,
            (*TOKEN_REJECTIONS, None),
            "it rejects by sample, so it changes with how a rollout is cut",
        )
    if correction.bypass_mode and (correction.rollout_is or correction.rollout_rs):
        raise OverrideRefused(
            f"override '{CORRECTION}.bypass_mode=true' is refused together with rollout_is or rollout_rs: "
            "the recorded logprobs are taken as the old ones, so there is no gap to correct"
        )
    for name in ("rollout_is", "rollout_rs"):
        if correction[name] and correction[f"{name}_threshold"] is None:
            raise OverrideRefused(
                f"override '{CORRECTION}.{name}={correction[name]}' is refused without "
                f"{CORRECTION}.{name}_threshold: there is no default"
            )


def _check_parallel(sections: DictConfig) -> None:
    """Refuse a sequence cut over several GPUs where its attention or its reference would not fit together."""
    size, of_reference = (
        int(section.ulysses_sequence_parallel_size) for section in (sections.actor, sections.ref)
    )
    if of_reference != size:
        raise OverrideRefused(
            f"override '{REF}.ulysses_sequence_parallel_size={of_reference}' is refused: the reference scores the "
            f"policy's rows, so they are cut alike; {SEQUENCE_PARALLEL}"
        )
    attention = sections.model.override_config.get("attn_implementation", "flash_attention_2")
    if size > 1 and not str(attention).startswith("flash_attention"):
        raise OverrideRefused(
            f"override '{ACTOR}.ulysses_sequence_parallel_size={size}' is refused with {attention} attention: only "
            "flash attention sees beyond a rank's part of the sequence; install flash_attn, and set "
            f"+{MODEL}.override_config.attn_implementation=flash_attention_2"
        )


def _one_of(key: str, value: Any, allowed: tuple[Any, ...], reason: str) -> None:
    if value not in allowed:
        choices = ", ".join("null" if choice is None else str(choice) for choice in allowed)
        raise OverrideRefused(f"override '{key}={value}' is refused: {reason}; use one of {choices}")


def attention_default(section: str, device: str) -> dict[str, Any]:
    """veRL asks for flash attention; without it, torch's own attention."""
    if device == "cpu" or importlib.util.find_spec("flash_attn") is None:
        return {f"{section}.override_config.attn_implementation": "sdpa"}
    return {}


def set_untouched(config: DictConfig, defaults: dict[str, Any], keys: dict[str, list[str]]) -> None:
    """Set those of ``defaults`` that no user override (``keys``, of ``keys_of``) speaks about."""
    users = {key for names in keys.values() for key in names}
    set_values(config, {key: value for key, value in defaults.items() if not _touched(key, users)})


def set_values(config: DictConfig, values: dict[str, Any]) -> None:
    """Set keys of ``config``, adding those it lacks."""
    with open_dict(config):
        for key, value in values.items():
            OmegaConf.update(config, key, value, merge=False, force_add=True)


def _verl_configs() -> Path:
    """veRL's config folder, found without importing veRL (which takes seconds)."""
    spec = importlib.util.find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        raise OverrideRefused("veRL is not installed in this environment")
    return Path(spec.submodule_search_locations[0]) / "trainer" / "config"


def main() -> None:
    """Check the overrides given as arguments."""
    try:
        check(sys.argv[1:], device="cpu")
    except OverrideRefused as error:
        sys.exit(_fail(error))


def _fail(error: OverrideRefused) -> int:
    print(error, file=sys.stderr)
    return error.exit_code


if __name__ == "__main__":
    main()
