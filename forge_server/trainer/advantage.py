"""One advantage per rollout, over the rollouts of its group, by veRL's estimators (I11).

veRL's estimators see rows; fed with rows they would count a rollout that was cut in three three times. So
they are shown exactly one row per rollout here: as long as the rollout's trained tokens (some estimators
weigh by length), with the reward on the last of them. What they say is read back once per rollout and
broadcast by the caller.
"""

import numpy as np
import torch
from omegaconf import DictConfig
from verl.protocol import DataProto
from verl.trainer.ppo.ray_trainer import compute_advantage
from verl.utils.config import omega_conf_to_dataclass

from forge_server.trainer.batch import Batch

# These look at rewards and groups only, so a row of one token tells them all.
LENGTH_BLIND = ("grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "gpg")


def per_rollout(batch: Batch, config: DictConfig) -> np.ndarray:
    """Advantage of each rollout, float32 [rollouts]; ``config`` is veRL's ``algorithm`` section."""
    estimator = config.adv_estimator
    lengths = [1] * batch.rollouts if estimator in LENGTH_BLIND else batch.trained_per_rollout()
    mask = torch.zeros(batch.rollouts, max(lengths))
    rewards = torch.zeros_like(mask)
    for rollout, length in enumerate(lengths):
        mask[rollout, :length] = 1.0
        rewards[rollout, max(length - 1, 0)] = float(batch.rollout_reward[rollout])
    data = DataProto.from_dict(
        tensors={"token_level_rewards": rewards, "response_mask": mask},
        non_tensors={"uid": batch.rollout_group.astype(str).astype(object)},
    )
    data = compute_advantage(
        data,
        adv_estimator=estimator,
        norm_adv_by_std_in_grpo=config.norm_adv_by_std_in_grpo,
        config=omega_conf_to_dataclass(config),
    )
    advantages: np.ndarray = data.batch["advantages"][:, 0].numpy().astype(np.float32)
    return advantages
