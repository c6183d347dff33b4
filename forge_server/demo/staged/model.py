"""Builds the demo's untrained policy: a byte-level BPE tokenizer, a chat template and a small random Qwen3.

The BPE is trained on the demo's own conversations and may merge across words, so that all scaffolding
(system prompt, tool call JSON) is a handful of tokens, while every digit stays a token of its own.
Embeddings are untied, because the CPU engine keeps a packed copy of a tied output layer through a weight
swap; head_dim is the smallest it supports.

    python -m forge_server.demo.staged.model SPEC.json OUT_FOLDER
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SPECIAL = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
TAGS = ("<tool_call>", "</tool_call>")  # plain text to the tool parser, hence not special
TEMPLATE = Path(__file__).with_name("chat_template.jinja")


def corpus(conversations: list[list[dict[str, Any]]], tools: list[dict[str, Any]]) -> list[str]:
    """What lies between the special tokens of the rendered ``conversations``."""
    renderer = _wrap(Tokenizer(models.BPE()))
    between = re.compile("|".join(re.escape(text) for text in (*SPECIAL, *TAGS)))
    texts = (renderer.apply_chat_template(c, tools=tools, tokenize=False) for c in conversations)
    return [piece for text in texts for piece in between.split(text) if piece]


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A tokenizer of at most ``vocab_size`` entries, fitted to ``texts``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size - len(SPECIAL) - len(TAGS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False) for text in TAGS])
    return _wrap(tokenizer)


def _wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = TEMPLATE.read_text()
    return wrapped


def build(spec: dict[str, Any], out: Path) -> dict[str, int]:
    """Write the model folder ``out``; returns how many parameters and tokens it has. ``spec``: the fields of
    ``recipe.Model``, ``seed``, and the ``conversations`` and ``tools`` that the tokenizer is fitted to."""
    tokenizer = train_tokenizer(corpus(spec["conversations"], spec["tools"]), spec["vocab_size"])
    tokenizer.save_pretrained(out)
    torch.manual_seed(spec["seed"])
    config = Qwen3Config(
        vocab_size=spec["vocab_size"],
        hidden_size=spec["hidden_size"],
        intermediate_size=spec["intermediate_size"],
        num_hidden_layers=spec["layers"],
        num_attention_heads=spec["heads"],
        num_key_value_heads=spec["heads"],
        head_dim=spec["head_dim"],
        max_position_embeddings=spec["window"],
        rope_parameters={"rope_type": "default", "rope_theta": spec["rope_theta"]},
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config).float()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(out)
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "tokens": len(tokenizer),
    }


if __name__ == "__main__":
    print(json.dumps(build(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))))
