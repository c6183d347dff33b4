"""Makes a tiny Qwen2-VL with random weights; runs in the engine's environment with torchvision within reach.

    python tiny_vision.py FOLDER

Its tokenizer is the tiny Qwen3's with the tokens of vision added.
"""

import json
import sys
from pathlib import Path

import torch
from tiny_model import tokenizer
from tokenizers import AddedToken
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
# what it writes for turn n is a prefix of what it writes for turn n + 1
TEMPLATE = """\
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}\
{% if part.type in ('image', 'image_url') %}<|vision_start|><|image_pad|><|vision_end|>\
{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
PREPROCESSOR = {
    "min_pixels": 3136,
    "max_pixels": 200704,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48, 0.45, 0.40],
    "image_std": [0.26, 0.26, 0.27],
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2VLProcessor",
}


def make(folder: Path) -> None:
    """Write the model in Hugging Face format."""
    tok = tokenizer()
    tok.add_special_tokens(
        {"additional_special_tokens": [AddedToken(token, special=True) for token in SPECIAL]}
    )
    tok.chat_template = TEMPLATE
    tok.save_pretrained(folder)
    start, end, image, video = tok.convert_tokens_to_ids(list(SPECIAL))
    config = Qwen2VLConfig(
        text_config={
            "vocab_size": (len(tok) + 63) // 64 * 64,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": False,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1000000.0,
                "mrope_section": [4, 6, 6],
            },
            "bos_token_id": None,
            "eos_token_id": tok.eos_token_id,
        },
        vision_config={
            "depth": 2,
            "embed_dim": 64,
            "hidden_size": 128,
            "num_heads": 2,
            "mlp_ratio": 2,
            "in_channels": 3,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        vision_start_token_id=start,
        vision_end_token_id=end,
        image_token_id=image,
        video_token_id=video,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    Qwen2VLForConditionalGeneration(config).float().save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))


if __name__ == "__main__":
    make(Path(sys.argv[1]))
