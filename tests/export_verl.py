"""Reads exported rows as the documentation tells, with the real veRL; runs in the trainer's environment.

python export_verl.py EXAMPLE_FILE... < nothing > JSON, in the folder of the exports
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from verl.protocol import DataProto
from verl.trainer.ppo.ray_trainer import compute_advantage
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

GRPO = {"adv_estimator": "grpo", "norm_adv_by_std_in_grpo": False}


def advantages(data: DataProto) -> list[list[float]]:
    return (data.batch["advantages"] * data.batch["response_mask"]).tolist()


def classic(names: dict) -> dict:
    """The batch as it is, then with veRL's own advantages over one row per rollout."""
    data, ours = names["data"], advantages(names["data"])
    data.batch["token_level_rewards"] = data.batch["rm_scores"]
    first = {name: i for i, name in reversed(list(enumerate(data.non_tensor_batch["rollout_id"])))}
    one = compute_advantage(data.select_idxs(sorted(first.values())), **GRPO)
    return {
        "rows": len(data),
        "ours": ours,
        "one_row_per_rollout": advantages(one),
        "kept": sorted(first.values()),
        "joined": len(DataProto.concat([data, data])),
        "tokens": int(data.batch["attention_mask"].sum()),
        "trained": int(data.batch["response_mask"].sum()),
    }


def v1(names: dict) -> dict:
    """The outputs as the V1 trainer pads them, and its advantages by key."""
    fields = [output.as_dict() for output in names["outputs"].values()]

    def pad(name: str) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence([field[name] for field in fields], batch_first=True)

    keys = list(names["outputs"])
    data = DataProto.from_dict(
        {name: pad(name) for name in ("response_mask", "rm_scores", "rollout_log_probs")},
        {"uid": np.array([key.rsplit("_", 2)[0] for key in keys], dtype=object)},
    )
    data.batch["token_level_rewards"] = data.batch["rm_scores"]
    data = compute_advantage_for_multi_trajectories(data, batch_keys=keys, **GRPO)
    return {
        "keys": keys,
        "advantages": advantages(data),
        "prompts": [field["prompts"].tolist() for field in fields],
    }


def areal(names: dict) -> list:
    return [
        {name: [list(tensor.shape), str(tensor.dtype)] for name, tensor in found.items()}
        for found in names["trajectories"]
    ]


if __name__ == "__main__":
    results = []
    for path, look in zip(sys.argv[1:], (classic, v1, areal), strict=True):
        names: dict = {}
        exec(Path(path).read_text(), names)
        results.append(look(names))
    json.dump(results, sys.stdout)
