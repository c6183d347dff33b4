"""Makes tiny Qwen3 checkpoints (untied, float32) with their manifests; runs in the engine's environment.

    python tiny_model.py FOLDER SEED...      writes FOLDER/step_SEED/{huggingface/, manifest.json} each

Same tokenizer for all. The weights are spread widely (std 0.25): seeds differ clearly and temperatures show.
"""

import hashlib
import json
import sys
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

# ChatML with hermes tool calls; what it writes for turn n is a prefix of what it writes for turn n + 1.
TEMPLATE = """\
{%- if tools %}<|im_start|>tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content or '' }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>\
{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
CORPUS = [
    "the quick brown fox jumps over the lazy dog while the agent reads files and writes patches",
    '{"name": "shell", "arguments": {"command": "ls -la"}}',
    "system user assistant tool message content function call error",
]


def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of about 300 tokens, trained here."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe.train_from_iterator(CORPUS * 4, trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet))
    bpe.add_special_tokens(
        [AddedToken(t, special=True) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    )
    bpe.add_tokens([AddedToken(t, special=False) for t in ("<tool_call>", "</tool_call>")])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=16384
    )
    fast.chat_template = TEMPLATE
    return fast


def make(folder: Path, seed: int) -> None:
    """Write checkpoint ``folder`` with random weights of ``seed`` and its manifest."""
    weights = folder / "huggingface"
    tok = tokenizer()
    tok.save_pretrained(weights)
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=(len(tok) + 63) // 64 * 64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # vLLM's CPU attention needs at least 32
        max_position_embeddings=16384,
        tie_word_embeddings=False,  # a tied head stays old after a reload on CPU
        initializer_range=0.25,
        eos_token_id=tok.eos_token_id,
        pad_token_id=tok.pad_token_id,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config).float().eval()
    model.save_pretrained(weights)
    ids = tok("the agent reads files and writes patches to the lazy fox")["input_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].float()
    picked = logits.log_softmax(-1)[:-1].gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
    header = weights.joinpath("model.safetensors").read_bytes()
    size = int.from_bytes(header[:8], "little")
    tensors = {
        name: {"shape": t["shape"], "dtype": t["dtype"]}
        for name, t in json.loads(header[8 : 8 + size]).items()
        if name != "__metadata__"
    }
    files = {
        f"huggingface/{f.name}": {
            "sha256": hashlib.sha256(f.read_bytes()).hexdigest(),
            "size": f.stat().st_size,
        }
        for f in sorted(weights.iterdir())
    }
    manifest = {
        "schema": 1,
        "step": seed,
        "run": "ru-test",
        "world_size": 1,
        "files": files,
        "tensors": tensors,
        "probe": {"token_ids": ids, "logprobs": [0.0, *picked.tolist()]},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))


if __name__ == "__main__":
    for seed in sys.argv[2:]:
        make(Path(sys.argv[1]) / f"step_{int(seed):05d}", int(seed))
