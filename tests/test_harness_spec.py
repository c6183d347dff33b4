"""Specs: a mistake names file, line and mend. Rules: what is taken out and what is labelled."""

import json

import pytest
from runner_support import plan_limits

from forge_server import assets
from forge_server.commands import harnesses
from forge_server.domain.errors import NotFound, SpecError
from forge_server.harness.load import load_all, parse
from forge_server.harness.plan import TaskFile, TaskInput, build_plan
from forge_server.harness.rules import Rules

GOOD = """\
name: h
summary: a harness
api: chat
argv: [run, "{instruction}"]
env: {BASE: "{base_url}"}
install: {pip: [h==1]}
files:
  - path: .config/h.json
    content: '{"key": "{agent_key}", "x": {}}'
side_calls:
  - {label: title, system: "^You are a title generator", tools: none}
  - {label: judge, user: verdict}
normalise:
  remove: [{role: system, pattern: "^x-billing: .*\\n"}]
  drop_keys: [cache_control]
  join_text: true
limits: {pids: 9}
sub_agents: {header: x-agent-id, parent_header: x-parent-id}
ends: {ok: [0, 3], note: three means that it gave up}
append_only: false
known_limits: [A clock in the system prompt changes with every call.]
"""


def test_a_good_spec():
    spec = parse(GOOD, where="x")
    assert spec.argv == ("run", "{instruction}") and spec.install.pip == ("h==1",)
    assert spec.limits.pids == 9 and spec.files[0].mode == "0644"


@pytest.mark.parametrize(
    ("change", "line", "says"),
    [
        (("summary:", "sumary:"), 2, "unknown key 'sumary'; did you mean 'summary'?"),
        (("argv: [", "args: ["), 4, "unknown key 'args'; did you mean 'argv'?"),
        (("  - path: ", "  - pth: "), 8, "unknown key 'pth'; did you mean 'path'?"),
        (("drop_keys", "dropkeys"), 15, "unknown key 'dropkeys'; did you mean 'drop_keys'?"),
        (("{label: judge, user", "{label: judge, usr"), 12, "unknown key 'usr'; did you mean 'user'?"),
        (("{pip: [h==1]}", "{pipp: [h==1]}"), 6, "did you mean 'pip'?"),
        (("{pids: 9}", "{quantum: 9}"), 17, "known keys: pids, memory_mb"),
        (("{pids: 9}", "{pids: many}"), 17, "limits.pids: expected `int`"),
        (("api: chat", "api: chats"), 3, "api: invalid enum value 'chats'"),
        (("{base_url}", "{base_ur}"), 1, "unknown placeholder {base_ur}"),
        (("^You are a", "^You (are a"), 11, "not a regular expression"),
        (("name: h", "name: H h"), 1, "not made of lower case letters"),
        (("api: chat", "api: chat\napi: chat"), 4, "key 'api' is given twice"),
        (("argv: [run", "argv: [run,, "), 4, "not YAML"),
        (("{header: x-agent-id", "{headr: x-agent-id"), 18, "did you mean 'header'?"),
        (
            ("{header: x-agent-id", "{header: X-Agent-Id"),
            18,
            "header 'X-Agent-Id' is not written in lower case",
        ),
        (("{ok: [0, 3]", "{ok: [zero]"), 19, "ends.ok.0: expected `int`"),
        (("known_limits: [A", "looks_up: [A"), 1, "say in known_limits what changes"),
        (("api: chat", "api: chat\nwindow_margin: -1"), 1, "window_margin is below 0"),
        (("path: .config/h.json", "path: ../h.json"), 8, "leads out of the home folder"),
        (('argv: [run, "{instruction}"]', "argv: []"), 1, "argv is empty"),
        (("summary: a harness\n", ""), 1, "missing required field `summary`"),
    ],
)
def test_a_mistake_is_found(change, line, says):
    assert change[0] in GOOD
    with pytest.raises(SpecError) as error:
        parse(GOOD.replace(*change, 1), where="h/spec.yaml")
    assert says in str(error.value)
    assert str(error.value).startswith(f"h/spec.yaml:{line}: "), str(error.value)


@pytest.mark.parametrize("text", ["", "- a", "x", "\x00"])
def test_what_is_no_mapping(text):
    with pytest.raises(SpecError):
        parse(text, where="x")


def test_folders(tmp_path):
    (tmp_path / "h").mkdir()
    (tmp_path / "h" / "spec.yaml").write_text(GOOD.replace("content: '{", "source: c.json # '{"))
    with pytest.raises(SpecError, match=r"c\.json"):
        load_all([tmp_path])
    (tmp_path / "h" / "c.json").write_text("{}")
    assert load_all([tmp_path])["h"].files[0].content == "{}"
    (tmp_path / "h").rename(tmp_path / "other")
    with pytest.raises(SpecError, match="give both the same name"):
        load_all([tmp_path])
    with pytest.raises(NotFound):
        load_all([tmp_path / "no"])


def test_what_ships_is_good():
    specs = load_all([assets.folder("harness_specs")])
    assert {"react", "mini-swe-agent"} <= specs.keys()
    assert specs["mini-swe-agent"].install.pip == ("mini-swe-agent==2.4.6",)


def test_a_users_spec_comes_before_ours(tmp_path):
    (tmp_path / "react").mkdir()
    (tmp_path / "react" / "spec.yaml").write_text(GOOD.replace("name: h", "name: react"))
    assert load_all([assets.folder("harness_specs"), tmp_path])["react"].summary == "a harness"


def test_side_calls_are_labelled():
    rules = Rules(parse(GOOD, where="x"))
    title = [{"role": "system", "content": "You are a title generator."}, {"role": "user", "content": "hi"}]
    tools = [{"type": "function"}]
    assert rules.label(title, []) == "title"
    assert rules.label(title, tools) == ""
    assert (
        rules.label([{"role": "user", "content": [{"type": "text", "text": "the verdict"}]}], tools)
        == "judge"
    )
    assert (
        rules.label([{"role": "user", "content": "verdict"}, {"role": "user", "content": "go on"}], []) == ""
    )


def test_what_moves_is_taken_out():
    rules = Rules(parse(GOOD, where="x"))
    mark = {"cache_control": {"type": "ephemeral"}}
    given = [
        {
            "role": "system",
            "content": [{"type": "text", "text": "x-billing: 7\n"}, {"type": "text", "text": "Be."}],
        },
        {"role": "user", "content": [{"type": "text", "text": "x-billing: 7\nhi", **mark}], **mark},
        {
            "role": "user",
            "content": [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {}}],
        },
        {"role": "assistant", "content": None, "tool_calls": []},
    ]
    kept = repr(given)
    assert rules.normalise(given) == [
        {"role": "system", "content": "Be."},
        {"role": "user", "content": "x-billing: 7\nhi"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {}}],
        },
        {"role": "assistant", "content": None, "tool_calls": []},
    ]
    assert repr(given) == kept


def test_a_message_that_is_all_injected_goes_as_a_whole():
    rules = Rules(parse(GOOD.replace("role: system", "role: user"), where="x"))
    note = {"role": "user", "content": [{"type": "text", "text": "x-billing: 7\n"}]}
    said = {"role": "user", "content": "do it"}
    result = {"role": "tool", "tool_call_id": "c", "content": ""}
    mixed = {"role": "user", "content": "x-billing: 7\nmore"}
    kept = rules.normalise([said, result, mixed, note, {"role": "user", "content": ""}])
    assert kept == [said, result, {"role": "user", "content": "more"}, {"role": "user", "content": ""}]
    assert kept[0] is said and kept[1] is result  # what no rule changes keeps its bytes


def test_an_agent_is_named_by_its_headers():
    rules = Rules(parse(GOOD, where="x"))
    assert rules.agent({b"x-agent-id": b"a" * 200, b"x-parent-id": b"p", b"x-other": b"o"}) == {
        "agent": "a" * 100,
        "parent_agent": "p",
    }
    assert rules.agent({b"x-agent-id": b""}) == rules.agent({}) == {}


def test_the_schema_is_that_of_the_spec(capsys):
    harnesses.schema()
    schema = json.loads(capsys.readouterr().out)
    spec = schema["$defs"][schema["$ref"].rpartition("/")[2]]
    assert {"sub_agents", "known_limits", "argv"} <= spec["properties"].keys()
    assert spec["additionalProperties"] is False and set(spec["required"]) == {
        "name",
        "summary",
        "api",
        "argv",
    }


def test_without_rules_nothing_is_touched():
    rules = Rules(load_all([assets.folder("harness_specs")])["react"])
    messages = [{"role": "user", "content": "x"}]
    assert rules.normalise(messages) is messages
    assert rules.label(messages, []) == ""
    assert rules.agent({b"x-agent-id": b"a"}) == {} and not rules.looks_inside


def test_a_plan_tells_the_window():
    text = GOOD.replace('"key":', '"window": {window}, "key":').replace(
        '"{base_url}"', '"{output} of {window}, {prompt}"'
    )
    spec = parse(text.replace("api: chat", "api: chat\nwindow_margin: 96"), where="x")
    limits = plan_limits(heartbeat_s=5, output=1500)
    plan = build_plan(spec, TaskInput(instruction="the {window}"), limits)
    assert plan.files[0].content.startswith('{"window": 4000, "key": "{agent_key}"')
    assert plan.env == {"BASE": "1500 of 4000, 2500"} and plan.instruction == "the {window}"


def test_a_plan_takes_the_shorter_time_and_the_tasks_size():
    spec = parse(GOOD, where="x")
    limits = plan_limits(heartbeat_s=5)
    task = TaskInput(
        instruction="i {home}", files=(TaskFile(path="a", content=b"\x00"),), agent_s=90, verify_s=99
    )
    plan = build_plan(spec, task, limits)
    assert (plan.agent_s, plan.verify_s, plan.limits.pids, plan.limits.memory_mb) == (60, 99, 9, 256)
    assert plan.instruction == "i {home}" and plan.task_files[0].content_b64 == "AA=="
    assert build_plan(spec, TaskInput(instruction="", agent_s=5, memory_mb=7), limits).agent_s == 5
