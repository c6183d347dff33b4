"""Recomputes logprobs with transformers, independently of vLLM; runs in the engine's environment.

Reads a JSON list of {"model", "prompt", "completion", "temperature"} from stdin, writes a list of
logprob lists.
"""

import json
import sys

import torch
from transformers import Qwen3ForCausalLM

models: dict[str, Qwen3ForCausalLM] = {}
out = []
for job in json.load(sys.stdin):
    model = models.get(job["model"])
    if model is None:
        model = models[job["model"]] = Qwen3ForCausalLM.from_pretrained(
            job["model"], dtype=torch.float32
        ).eval()
    ids = torch.tensor([job["prompt"] + job["completion"]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(job["prompt"]) - 1 : -1] / job["temperature"]
    picked = logits.log_softmax(-1).gather(-1, torch.tensor(job["completion"])[:, None])[:, 0]
    out.append(picked.tolist())
print(json.dumps(out))
