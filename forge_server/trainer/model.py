"""Which models this trainer can train truly; what it cannot is refused before a token is spent.

Batches carry token ids only, so a model that was shown pictures would be trained on a prompt it never saw.
"""

import json
import sys
from pathlib import Path
from typing import Any

from forge_server.trainer.errors import TrainerError

_SENSES = ("vision_config", "audio_config", "thinker_config")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def check(path: str) -> None:
    """Look at ``path/config.json``. Raises TrainerError for a multimodal model; warns for routed experts."""
    file = Path(path) / "config.json"
    if not file.is_file():
        raise TrainerError(f"{path} is not the folder of a model: it has no config.json")
    config: dict[str, Any] = json.loads(file.read_text())
    senses = [name for name in _SENSES if name in config]
    if senses:
        raise TrainerError(
            f"{path} is a multimodal model ({senses[0]}): batches carry no media, so it can be recorded and "
            "exported, but not trained"
        )
    if any(config.get(name) for name in _EXPERTS):
        print(
            f"Warning: {path} routes tokens to experts; engine and trainer may route differently, and routes "
            "are not replayed. Watch logprob_gap_mean and is_effective_sample_size.",
            file=sys.stderr,
            flush=True,
        )
