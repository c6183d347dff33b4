"""What chat templates do to the history of a conversation: the real Qwen3 template, one that keeps everything, and
templates that cannot be played through.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from qwen3 import assets

from forge_server.export.identity import Identity, chat_template, of_model
from forge_server.trajectory.prefixes import (
    EACH_CALL,
    EACH_TURN,
    KEEP_REASONING,
    SPLICE,
    ChatTemplate,
    Finding,
    findings,
)

KEEPS = """{% for m in messages %}<{{ m.role }}>
{%- if m.role == "assistant" %}{% generation %}{% if m.reasoning %}[{{ m.reasoning }}]{% endif %}{{ m.content }}
{%- for c in m.tool_calls or [] %}{{ "\\n" + c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}<end>
{%- endgeneration %}
{%- else %}{{ m.content }}<end>{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""


def by_case(template: ChatTemplate) -> dict[str, Finding]:
    found = {each.case: each for each in findings(template)}
    assert len(found) == 12
    assert all(bool(f.cost and f.mend) == (f.extends is False) for f in found.values())
    assert all(bool(f.why) == (f.extends is None) for f in found.values())
    return found


def test_qwen3_strips_reasoning_and_writes_calls_its_own_way() -> None:
    """The cases of `tokens.md`, measured there with token ids, come out the same."""
    template = chat_template(assets())
    assert template is not None
    found = by_case(template)
    assert {case for case, f in found.items() if f.extends} == {
        "a tool result follows, reasoning is sent back",
        "text stands before a call",
    }
    assert all(f.extends is not None for f in found.values())
    assert {case for case, f in found.items() if f.mend == KEEP_REASONING} == {
        "a tool result follows, reasoning is not sent back",
        "a user message follows an answer with reasoning",
        "a reminder follows a tool result, as a user message",
    }
    dropped = found["a tool result follows, reasoning is not sent back"]
    assert dropped.cost == EACH_CALL
    assert dropped.written.partition("\n")[2].startswith("<think>\nI should")
    assert dropped.rendered.partition("\n")[2].startswith("<tool_call>\n")
    assert found["a user message follows an answer with reasoning"].cost == EACH_TURN
    compact = found["arguments are written without spaces"]
    assert compact.mend == SPLICE
    assert '{"cmd":"ls' in compact.written and '{"cmd": "ls' in compact.rendered


def test_a_template_that_keeps_prefixes_breaks_only_where_the_text_is_another() -> None:
    found = by_case(ChatTemplate(KEEPS))
    broken = {case for case, f in found.items() if f.extends is False}
    assert broken == {
        "a tool result follows, reasoning is not sent back",
        "text and a blank line stand before a call",
        "arguments are written without spaces",
        "arguments are written with \\u escapes",
        "arguments are sent back in another order",
    }
    assert found["a reminder follows a tool result, as a user message"].extends
    assert found["reasoning ends in a blank"].extends


def test_a_prompt_that_opens_what_the_history_leaves_out_breaks_every_call() -> None:
    opens = KEEPS.replace(
        "{% if add_generation_prompt %}<assistant>", "{% if add_generation_prompt %}<assistant>["
    )
    found = by_case(ChatTemplate(opens))
    dropped = found["a tool result follows an answer without reasoning"]
    assert dropped.extends is False and dropped.mend == KEEP_REASONING
    assert dropped.written.endswith("istant>[")
    assert found["a tool result follows, reasoning is sent back"].extends


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}", "no system"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% for i in range(10 ** 12) %}x{% endfor %}", "Range too big"),
        (
            "{% for m in messages %}{{ m.content }}{{ m.tool_calls[0].no.thing }}{% endfor %}",
            "no attribute 'tool_calls'",
        ),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "renders no tool calls"),
    ],
)
def test_a_template_that_refuses_is_told_apart_from_one_that_breaks(text: str, why: str) -> None:
    found = by_case(ChatTemplate(text))["a tool result follows an answer without reasoning"]
    assert found.extends is None and why in found.why


def test_messages_in_parts_are_tried_where_text_is_refused() -> None:
    parts = KEEPS.replace("m.content }}", "m.content[0].text }}")
    assert by_case(ChatTemplate(parts))["a tool result follows an answer without reasoning"].extends


def test_what_is_no_template_is_an_error() -> None:
    with pytest.raises(ValueError, match="not valid Jinja"):
        findings(ChatTemplate("{% if %}"))


def test_the_template_is_found_where_hugging_face_folders_have_it(tmp_path: Path) -> None:
    assert chat_template(tmp_path) is None and of_model(tmp_path) == Identity()
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": "one"}
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(config))
    assert chat_template(tmp_path) == ChatTemplate("one", {"bos_token": "<s>", "eos_token": "</s>"})
    inside = of_model(tmp_path).template_sha
    named = [{"name": "default", "template": "two"}, {"name": "tool_use", "template": "three"}]
    file.write_text(json.dumps(config | {"chat_template": named}))
    assert chat_template(tmp_path) == ChatTemplate("three", {"bos_token": "<s>", "eos_token": "</s>"})
    (tmp_path / "chat_template.jinja").write_text("one")
    found = chat_template(tmp_path)
    assert found is not None and found.text == "one"
    assert of_model(tmp_path).template_sha == inside  # the same template, wherever it stands
    file.write_text("{")
    assert chat_template(tmp_path) == ChatTemplate("one")


def test_check_tells_what_the_template_of_the_model_costs(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "chat_template.jinja").write_text(KEEPS)
    (tmp_path / "forge.toml").write_text(
        '[server]\nport = 0\ncontrol_port = 0\n[engine]\nkind = "attach"\nmodel = "model"\nurl = "http://127.0.0.1:9"\n'
    )

    def check(*options: str) -> str:
        line = [sys.executable, "-m", "forge_server.cli", "check", *options]
        wide = {**os.environ, "COLUMNS": "160"}
        done = subprocess.run(line, cwd=tmp_path, env=wide, capture_output=True, text=True, timeout=120)
        assert done.returncode == 1, done.stderr  # there is no engine
        return done.stdout

    checks = {each["name"]: each for each in json.loads(check("--json"))}
    assert checks["chat template"]["ok"]
    assert "5 of 12" in checks["chat template"]["detail"]
    assert checks["chat template: text stands before a call"]["detail"] == "extends"
    detail = checks["chat template: arguments are written without spaces"]["detail"]
    assert detail.startswith("breaks: ") and detail.endswith("kept by splice")
    table = check()
    assert "arguments are written without spaces" in table and "kept by" in table
    (model / "chat_template.jinja").write_text("{% if %}")
    assert "FAIL chat template: the chat template is not valid Jinja" in check()
