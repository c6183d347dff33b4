"""One step of the policy on one batch, by veRL's own actor worker.

    recompute logprobs -> token-level importance correction -> advantages -> clipped update

Every rank reads the whole batch and computes the same corrections and advantages; only forward and backward
passes are split over ranks, as ``layout`` says. Padding rows carry no loss, and count in nothing but veRL's
``ppo_kl`` and clip fractions, which are means over micro-batches: one of padding alone counts there as 0. Given the
same weights, optimiser state, batch and seed, a step is the same bit for bit (I8): the random state is set anew for
each step.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from omegaconf import DictConfig
from verl.protocol import DataProto
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.metric import reduce_metrics
from verl.workers.engine_workers import ActorRolloutRefWorker

from forge_server.trainer import advantage
from forge_server.trainer.batch import Batch, Row
from forge_server.trainer.layout import PADDING, Layout, arrange

# veRL's names of what the update itself reports -> ours.
UPDATE_METRICS = {
    "loss": "loss",
    "actor/pg_loss": "pg_loss",
    "actor/ppo_kl": "ppo_kl",
    "actor/pg_clipfrac": "clip_fraction",
    "actor/pg_clipfrac_lower": "clip_fraction_lower",
    "kl_loss": "kl_loss",
}
# Of veRL's correction metrics those per token; its per-row ones change with how a rollout is cut.
CORRECTION_METRICS = {
    "rollout_corr/rollout_is_mean": "is_mean",
    "rollout_corr/rollout_is_std": "is_std",
    "rollout_corr/rollout_is_min": "is_min",
    "rollout_corr/rollout_is_max": "is_max",
    "rollout_corr/rollout_is_ratio_fraction_high": "is_fraction_high",
    "rollout_corr/rollout_is_ratio_fraction_low": "is_fraction_low",
    "rollout_corr/rollout_is_eff_sample_size": "is_effective_sample_size",
    "rollout_corr/rollout_rs_masked_fraction": "rs_masked_fraction",
    "rollout_corr/kl": "sampling_kl",
    "rollout_corr/k3_kl": "sampling_k3_kl",
}


class Policy:
    """The model under training, its optimiser, and the frozen reference when a KL loss asks for one."""

    def __init__(self, config: DictConfig) -> None:
        self.config = config
        sections = config.actor_rollout_ref
        # Tokens per micro-batch; read first, since veRL renames keys of the reference's section.
        self.budgets = {
            "actor": int(sections.rollout.log_prob_max_token_len_per_gpu),
            "ref": int(sections.ref.log_prob_max_token_len_per_gpu),
            "update": int(sections.actor.ppo_max_token_len_per_gpu),
        }
        self.actor = self._worker("actor")
        self.reference = self._worker("ref") if sections.actor.use_kl_loss else None
        self.engine = self.actor.actor.engine
        self.ranks: int = self.engine.get_data_parallel_size()
        self.rank: int = self.engine.get_data_parallel_rank()

    def _worker(self, role: str) -> ActorRolloutRefWorker:
        worker = ActorRolloutRefWorker(config=self.config.actor_rollout_ref, role=role)
        worker.init_model()
        return worker

    @property
    def tokenizer(self) -> Any:
        return self.actor.actor.model_config.tokenizer

    def step(self, batch: Batch, *, seed: int) -> dict[str, float]:
        """Train on ``batch``; returns its metrics. Collective: every rank passes the same arguments."""
        _seed_everything(seed * 1_000_003 + batch.k)
        clock = _Clock()
        layout = arrange(batch, mini_batches=self._mini_batches(batch), ranks=self.ranks)
        mine = [batch.rows[index] if index >= 0 else PADDING for index in layout.places[self.rank]]

        data = _padded(batch)
        bypass = self.config.algorithm.rollout_correction.bypass_mode
        metrics: dict[str, float] = {}
        if bypass:
            data["old_log_probs"] = data["rollout_log_probs"]
        else:
            with clock.measure("old_logprobs"):
                old, entropy = self._forward(self.actor, layout, mine, batch, entropy=True)
            data["old_log_probs"] = old
            metrics |= _gap(data) | {"entropy": _mean(entropy, data["response_mask"])}
        if self.reference is not None:
            with clock.measure("ref_logprobs"):
                data["ref_log_prob"], _ = self._forward(self.reference, layout, mine, batch, entropy=False)
        with clock.measure("advantages"):
            if not bypass:
                metrics |= self._correct(data)
            rollouts = advantage.per_rollout(batch, self.config.algorithm)
            spread = torch.from_numpy(rollouts[[row.rollout for row in batch.rows]])
            data["advantages"] = spread.unsqueeze(-1) * data["response_mask"]
        with clock.measure("update"):
            metrics |= self._update(layout, mine, batch, data)
        return metrics | _counts(batch, layout, rollouts) | clock.metrics()

    def log_probs(self, tokens: Sequence[int]) -> list[float]:
        """``token_log_probs`` of the policy. Collective."""
        return token_log_probs(self.actor.compute_log_prob, tokens)

    def learning_rate(self) -> float:
        return float(self.engine.optimizer.param_groups[0]["lr"])

    def _mini_batches(self, batch: Batch) -> int:
        """veRL's ``ppo_mini_batch_size`` counts prompts, which are groups here."""
        groups = len(np.unique(batch.rollout_group))
        return max(1, round(groups / self.config.actor_rollout_ref.actor.ppo_mini_batch_size))

    def _correct(self, data: dict[str, torch.Tensor]) -> dict[str, float]:
        """Importance weights (and rejections) for the gap between the sampling policy and this one."""
        config = omega_conf_to_dataclass(self.config.algorithm).rollout_correction
        wanted = ("response_mask", "rollout_log_probs", "old_log_probs")
        corrected, metrics = compute_rollout_correction_and_add_to_batch(
            DataProto.from_dict(tensors={name: data[name] for name in wanted}), config
        )
        data["response_mask"] = corrected.batch["response_mask"]
        if "rollout_is_weights" in corrected.batch.keys():  # noqa: SIM118 (a TensorDict)
            data["rollout_is_weights"] = corrected.batch["rollout_is_weights"]
        return {ours: float(metrics[name]) for name, ours in CORRECTION_METRICS.items() if name in metrics}

    def _forward(
        self, worker: ActorRolloutRefWorker, layout: Layout, mine: list[Row], batch: Batch, *, entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logprobs (and entropies) of all response tokens of the batch, padded [rows, responses]."""
        data = _tensordict(mine)
        budget = _budget(self.budgets[worker.role], batch)
        tu.assign_non_tensor(
            data, calculate_entropy=entropy, compute_loss=False, max_token_len_per_gpu=budget
        )
        output = worker.compute_ref_log_prob(data) if worker.role == "ref" else worker.compute_log_prob(data)
        found: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        if output is not None:
            log_probs = _responses(output["log_probs"], mine)
            entropies = _responses(output["entropy"], mine) if entropy else [None] * len(mine)
            places = layout.places[self.rank]
            pairs = zip(log_probs, entropies, strict=True)
            found = {place: pair for place, pair in zip(places, pairs, strict=True) if place >= 0}
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, found)
        rows = {place: pair for part in everyone for place, pair in part.items()}
        # Rollouts with nothing to train have no place in the layout, and no use for a value.
        nothing = (torch.zeros(1), torch.zeros(1))
        ordered = [rows.get(index, nothing) for index in range(len(batch.rows))]
        return _pad([pair[0] for pair in ordered]), _pad([pair[1] for pair in ordered]) if entropy else None

    def _update(
        self, layout: Layout, mine: list[Row], batch: Batch, data: dict[str, torch.Tensor]
    ) -> dict[str, float]:
        actor = self.config.actor_rollout_ref.actor
        columns = ("response_mask", "old_log_probs", "advantages", "rollout_is_weights", "ref_log_prob")
        places = layout.places[self.rank]
        extra = {
            name: _nested([_cell(data[name], place, row) for place, row in zip(places, mine, strict=True)])
            for name in columns
            if name in data
        }
        extra["loss_mask"] = extra["response_mask"]
        td = _tensordict(mine, **extra)
        tu.assign_non_tensor(
            td,
            calculate_entropy=actor.entropy_coeff != 0,
            max_token_len_per_gpu=_budget(self.budgets["update"], batch),
            global_batch_size=batch.rollouts,
            num_mini_batch=layout.mini_batches,
            epochs=actor.ppo_epochs,
            dataloader_kwargs={"shuffle": False},
        )
        rate = self.learning_rate()
        output = self.actor.update_actor(td)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, None if output is None else dict(tu.get(output, "metrics")))
        reported = next(metrics for metrics in everyone if metrics is not None)
        norms = np.atleast_1d(np.asarray(reported["grad_norm"], dtype=np.float64))
        bad = int((~np.isfinite(norms)).sum())
        wanted = {name: reported[name] for name in UPDATE_METRICS if name in reported}
        return {UPDATE_METRICS[name]: float(value) for name, value in reduce_metrics(wanted).items()} | {
            "lr": rate,
            "grad_norm": float(norms[np.isfinite(norms)].mean()) if bad < len(norms) else float("nan"),
            "optimizer_steps": float(len(norms) - bad),
            "nonfinite_gradients": float(bad),
        }


def token_log_probs(infer: Callable[[Any], Any], tokens: Sequence[int]) -> list[float]:
    """log p(token i | tokens before i) at temperature 1, by veRL's ``infer``; the first is 0. Collective."""
    row = Row(
        tokens=np.asarray(tokens, np.int32),
        loss_mask=np.zeros(len(tokens), np.uint8),
        logprobs=np.zeros(len(tokens), np.float32),
        prompt_len=1,
        rollout=0,
        temperature=1.0,
    )
    data = _tensordict([row])
    tu.assign_non_tensor(data, calculate_entropy=False, compute_loss=False, max_token_len_per_gpu=len(tokens))
    output = infer(data)
    found = None if output is None else output["log_probs"].values()[: len(tokens) - 1].float().tolist()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    return [0.0, *next(values for values in everyone if values is not None)]


class _Clock:
    """Seconds per phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.started = time.perf_counter()

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[phase] = time.perf_counter() - started

    def metrics(self) -> dict[str, float]:
        total = time.perf_counter() - self.started
        return {f"seconds/{phase}": seconds for phase, seconds in self.seconds.items()} | {
            "seconds/step": total
        }


def _seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**63)  # CUDA as well


def _nested(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def _pad(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def _tensordict(rows: list[Row], **extra: torch.Tensor) -> Any:
    """The rows in veRL's jagged layout."""
    tokens = [torch.from_numpy(row.tokens.astype(np.int64)) for row in rows]
    mask = [torch.from_numpy(row.loss_mask.astype(np.float32))[row.prompt_len :] for row in rows]
    columns = {
        "prompts": _nested([ids[: row.prompt_len] for ids, row in zip(tokens, rows, strict=True)]),
        "responses": _nested([ids[row.prompt_len :] for ids, row in zip(tokens, rows, strict=True)]),
        "input_ids": _nested(tokens),
        "position_ids": _nested([torch.arange(len(ids)) for ids in tokens]),
        "response_mask": _nested(mask),
        "loss_mask": _nested(mask),
        "temperature": torch.tensor([row.temperature for row in rows], dtype=torch.float32),
    }
    return tu.get_tensordict(columns | extra, {})


def _padded(batch: Batch) -> dict[str, torch.Tensor]:
    """What the engine recorded, on the response tokens of all rows, padded [rows, responses]."""
    mask = [torch.from_numpy(row.loss_mask[row.prompt_len :].astype(np.float32)) for row in batch.rows]
    recorded = [torch.from_numpy(row.logprobs[row.prompt_len :].astype(np.float32)) for row in batch.rows]
    data = {"response_mask": _pad(mask), "rollout_log_probs": _pad(recorded)}
    # Context tokens may carry anything there, and infinity times a zero mask is not zero.
    data["rollout_log_probs"] = torch.where(data["response_mask"] > 0, data["rollout_log_probs"], 0.0)
    return data


def _responses(values: torch.Tensor, rows: list[Row]) -> list[torch.Tensor]:
    """Per row the engine's values of its response tokens: position i speaks of token i + 1."""
    ends = values.offsets()[1:].tolist()
    flat = values.values().float()
    return [
        flat[end - (len(row.tokens) - row.prompt_len) - 1 : end - 1].clone()
        for row, end in zip(rows, ends, strict=True)
    ]


def _cell(padded: torch.Tensor, place: int, row: Row) -> torch.Tensor:
    length = len(row.tokens) - row.prompt_len
    return padded[place, :length] if place >= 0 else torch.zeros(length)


def _budget(configured: int, batch: Batch) -> int:
    """Tokens per micro-batch: as configured, but a row cannot be divided."""
    return max(configured, *(len(row.tokens) for row in batch.rows))


def _mean(values: torch.Tensor | None, mask: torch.Tensor) -> float:
    assert values is not None
    return float((values * mask).sum() / mask.sum())


def _gap(data: dict[str, torch.Tensor]) -> dict[str, float]:
    """How far the engine's logprobs are from the trainer's on the tokens to train."""
    gap = (data["rollout_log_probs"] - data["old_log_probs"]).abs()[data["response_mask"] > 0]
    return {"logprob_gap_mean": float(gap.mean()), "logprob_gap_max": float(gap.max())}


def _counts(batch: Batch, layout: Layout, advantages: np.ndarray) -> dict[str, float]:
    rewards = batch.rollout_reward
    return {
        "tokens": float(sum(len(row.tokens) for row in batch.rows)),
        "tokens_trained": float(sum(row.trained for row in batch.rows)),
        "rows": float(len(batch.rows)),
        "rows_padding": float(layout.padding),
        "rollouts": float(batch.rollouts),
        "groups": float(len(np.unique(batch.rollout_group))),
        "mini_batches": float(layout.mini_batches),
        "reward_mean": float(rewards.mean()),
        "advantage_max": float(np.abs(advantages).max()),
        "version_min": float(batch.min_version),
        "version_max": float(batch.max_version),
    }
