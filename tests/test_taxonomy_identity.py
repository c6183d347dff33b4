"""Taxonomy, case 36: ids of one policy are of one tokenizer and one chat template. Another one is refused before
anything is served with it, and exports say whose their ids are (``test_export.py``)."""

import json
from pathlib import Path
from typing import Any

import pytest

from forge_server.domain.errors import ConfigError
from forge_server.export.identity import check_same, of_model


def model(
    folder: Path, *, template: str = "{{ messages }}", vocab: dict[str, int] | None = None, **more: Any
) -> Path:
    folder.mkdir(parents=True)
    tokenizer = {
        "model": {"type": "BPE", "vocab": vocab or {"a": 0, "b": 1}, "merges": []},
        "added_tokens": [{"id": 2, "content": "<|im_end|>", "special": True}],
        **more,
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "chat_template.jinja").write_text(template)
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


def test_case_36_another_template_or_tokenizer_does_not_go_on_with_a_policy(tmp_path: Path) -> None:
    first = model(tmp_path / "first")
    check_same(first, first)
    check_same(
        model(tmp_path / "saved", padding={"strategy": "BatchLongest"}), first
    )  # the same, saved again
    check_same(model(tmp_path / "step" / "huggingface").parent, first)
    check_same(first, tmp_path / "gone")
    with pytest.raises(ConfigError, match="chat template"):
        check_same(model(tmp_path / "template", template="{{ messages }}!"), first)
    with pytest.raises(ConfigError, match="tokenizer"):
        check_same(model(tmp_path / "tokenizer", vocab={"a": 1, "b": 0}), first)


def test_case_36_exports_tell_templates_and_tokenizers_apart(tmp_path: Path) -> None:
    first, other = model(tmp_path / "a"), model(tmp_path / "b", template="other")
    assert of_model(first).tokenizer_sha == of_model(other).tokenizer_sha
    assert of_model(first).template_sha != of_model(other).template_sha
