"""What a model's ``config.json`` says about senses other than text."""

from pathlib import Path
from typing import Any

import msgspec

_SENSES = ("vision_config", "audio_config", "thinker_config")
_PLACEHOLDERS = ("image_token_id", "image_token_index")


class ModelFacts(msgspec.Struct, frozen=True):
    """``sense``: the key that makes the model multimodal, empty for text alone. ``placeholder``: the id that stands
    in a prompt for a piece of an image.
    """

    sense: str = ""
    placeholder: int | None = None


def facts_of(folder: Path) -> ModelFacts:
    """Of a folder in Hugging Face format, or one that holds it as ``huggingface``. What cannot be read says
    nothing: the engine tells what is wrong with it."""
    for file in (folder / "config.json", folder / "huggingface" / "config.json"):
        try:
            config: dict[str, Any] = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
        except (OSError, msgspec.MsgspecError):
            continue
        ids = [config[name] for name in _PLACEHOLDERS if type(config.get(name)) is int]
        return ModelFacts(next((name for name in _SENSES if name in config), ""), ids[0] if ids else None)
    return ModelFacts()
