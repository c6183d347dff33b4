"""What is read from a model's config.json: whether it has other senses, and what stands for an image."""

from pathlib import Path

import pytest

from forge_server.engine.model_facts import ModelFacts, facts_of

TEXT = ModelFacts()


@pytest.mark.parametrize(
    ("config", "facts"),
    [
        ("{}", TEXT),
        ('{"vision_config": {}, "image_token_id": 151655}', ModelFacts("vision_config", 151655)),
        ('{"vision_config": {}, "image_token_index": 32000}', ModelFacts("vision_config", 32000)),
        ('{"audio_config": {}, "image_token_id": null}', ModelFacts("audio_config")),
        ('{"image_token_id": true}', TEXT),
        ("[]", TEXT),
        ("not JSON", TEXT),
    ],
)
@pytest.mark.parametrize("place", ["", "huggingface"])
def test_facts_of_a_config(tmp_path: Path, config: str, facts: ModelFacts, place: str) -> None:
    (tmp_path / place).mkdir(exist_ok=True)
    (tmp_path / place / "config.json").write_text(config)
    assert facts_of(tmp_path) == facts


def test_a_folder_without_a_model_says_nothing(tmp_path: Path) -> None:
    assert facts_of(tmp_path) == facts_of(tmp_path / "missing") == TEXT
