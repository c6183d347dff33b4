"""Logprobs of token rows by transformers alone; runs in the trainer's environment.

python trainer_score.py MODEL_FOLDER < ROWS_JSON > LOGPROBS_JSON
"""

import json
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

if __name__ == "__main__":
    AutoTokenizer.from_pretrained(sys.argv[1])  # an export is of no use to the engine without its tokenizer
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
    scores = []
    for row in json.load(sys.stdin):
        ids = torch.tensor([row["tokens"]])
        with torch.no_grad():
            logits = model(ids).logits[0, :-1] / row["temperature"]
        picked = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        scores.append([0.0, *picked.tolist()])
    json.dump(scores, sys.stdout)
