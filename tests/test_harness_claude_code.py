"""Claude Code from npm, unmodified, in the sandbox and offline, against a scripted model; as it is and `--bare`."""

import json
from collections.abc import Iterator

import msgspec
import pytest
import yaml
from harness_lab import Asked, Call, Fault, Lab, Say
from node_harness import check_refused, check_solved, spec_of, task_of, watched_lab

pytestmark = pytest.mark.sandbox
SPEC, BARE = spec_of("claude-code"), spec_of("claude-code-bare")
WINDOW = 64_000
OFF = ("CLAUDE_CODE_ATTRIBUTION_HEADER", "DISABLE_PROMPT_CACHING")
MOVING = msgspec.structs.replace(
    BARE, name="claude-code-moving", env={name: value for name, value in BARE.env.items() if name not in OFF}
)
TASK = {
    "instruction": "Copy it in {capitals}.",
    "files": {"word.txt": "plum"},
    "expect": {"answer.txt": "PLUM"},
}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("claude")
    moving = folder / "specs" / MOVING.name
    moving.mkdir(parents=True)
    (moving / "spec.yaml").write_text(yaml.safe_dump(msgspec.to_builtins(MOVING), sort_keys=False))
    with watched_lab(folder, SPEC, window=WINDOW) as made:
        yield made


def bash(command: str, reasoning: str = "") -> Say:
    return Say(reasoning=reasoning, calls=[Call("Bash", {"command": command})])


def copy_in_capitals(asked: Asked) -> Say:
    return (
        Say(reasoning="What is there?", calls=[Call("Read", {"file_path": "/workspace/word.txt"})]),
        bash("tr a-z A-Z < word.txt > answer.txt", reasoning="Now in capitals."),
        Say("Done.", reasoning="That was it."),
    )[asked.turn]


def test_it_solves_a_task_in_one_sample(lab: Lab) -> None:
    result = lab.run("claude-code", copy_in_capitals, **TASK)
    check_solved(result, SPEC)
    assert result.drift == {"first": 1} and result.trained_calls == 3, result.explain()
    said = [request.json["messages"] for request in result.requests]
    assert said[1][: len(said[0])] == said[0] and said[2][: len(said[1])] == said[1]
    assert [m["role"] for m in said[2]] == ["user", "system", *["assistant", "user"] * 2]
    thought, call = said[1][2]["content"]
    assert thought["thinking"].strip() == "What is there?" and call["input"] == {
        "file_path": "/workspace/word.txt"
    }
    body = result.requests[0].json
    assert (body["max_tokens"], body["thinking"]) == (8192, {"type": "adaptive"})
    assert {"Agent", "Bash", "Edit", "Read", "Skill", "Write"} <= {tool["name"] for tool in body["tools"]}
    assert all("agent" not in call.flags for call in result.calls)


def test_token_exact_forwarding_keeps_it_one_sample(lab: Lab) -> None:
    """Spacing, escapes and token ids that nobody would write so again stay as they were sampled."""

    def policy(asked: Asked) -> Say:
        odd = Call("Bash", '{ "command" :  "tr a-z A-Z < word.txt > answer.txt # \\u00e9" }')
        return (
            Say(
                "\n I look. 🎈\n",
                reasoning=" What\n\nis there? ",
                calls=[bash("ls").calls[0], odd],
                split=True,
            ),
            bash("cat answer.txt", reasoning="Is it?"),
            Say("Done.\n\n"),
        )[asked.turn]

    result = lab.run("claude-code", policy, forwarding="splice", **TASK)
    check_solved(result, SPEC)
    assert [call.mode for call in result.calls] == ["splice"] * 3
    assert result.drift == {"first": 1} and result.trained_calls == 3, result.explain()


def test_sub_agents_are_named(lab: Lab) -> None:
    """One below the other. Which conversation a call belongs to is seen by its prompt, who asks by its headers."""

    def agent(prompt: str) -> Say:
        wanted = {"description": "a copy", "prompt": prompt, "subagent_type": "general-purpose"}
        return Say(calls=[Call("Agent", wanted | {"run_in_background": False})])

    def policy(asked: Asked) -> Say:
        if "Really do it." in task_of(asked):
            return (bash("tr a-z A-Z < word.txt > answer.txt"), Say("It is done."))[asked.turn]
        if "See to it." in task_of(asked):
            return (agent("Really do it."), Say("It was done."))[asked.turn]
        return (agent("See to it."), Say("Done."))[asked.turn]

    result = lab.run("claude-code", policy, **TASK)
    check_solved(result, SPEC)
    names = [(call.flags.get("agent"), call.flags.get("parent_agent")) for call in result.calls]
    assert names == [names[0], names[1], names[2], names[2], names[1], names[0]]
    (nobody, above), (first, under), (second, below) = names[:3]
    assert (nobody, above, under, below) == (None, None, None, first) and second not in (None, first)
    assert [len(sample.spans) for sample in result.samples] == [2, 2, 2], result.explain()


def test_it_compacts_before_the_window_is_full(lab: Lab) -> None:
    """The conversation, the summary, which is asked for before the last tool call of it, and the one that goes on from
    there with that call."""

    def policy(asked: Asked) -> Say:
        if "CRITICAL: Respond with TEXT ONLY" in asked.last_user:
            return Say("<analysis>.</analysis>\n<summary>word.txt was read over and over.</summary>")
        if "word.txt was read over and over" not in asked.prompt:
            return bash(f"cat word.txt; seq 1000 2500 # {asked.turn}")
        return Say("Done.") if "printf" in asked.prompt else bash("printf PLUM > answer.txt")

    result = lab.run("claude-code", policy, **TASK)
    check_solved(result, SPEC)
    assert result.drift == {"first": 1, "fork": 1, "history_edited": 1}, result.explain()
    assert [sum(span.owned for span in sample.spans) for sample in result.samples] == [4, 1, 2]
    assert max(call.prompt_len for call in result.calls) < WINDOW - 8192
    assert result.trained_calls == len(result.calls)


def test_what_moves_in_its_requests_is_no_drift(lab: Lab) -> None:
    """The billing line and cache_control, which the spec switches off, and contents that are a list at first and a
    string later."""
    result = lab.run(MOVING.name, copy_in_capitals, **TASK)
    check_solved(result, MOVING)
    assert result.drift == {"first": 1} and result.trained_calls == 3, result.explain()
    first, _, last = [request.json for request in result.requests]
    assert first["system"][0]["text"].startswith("x-anthropic-billing-header:")
    assert "billing" not in result.asked[0].prompt
    assert "cache_control" in json.dumps(first["messages"]) != json.dumps(last["messages"][:1])
    contents = [request.json["messages"][0]["content"] for request in result.requests]
    assert {type(content) for content in contents} == {list, str}
    assert {tool["name"] for tool in first["tools"]} == {"Bash", "Edit", "Read"}
    assert result.calls[0].prompt_len < 2000


def test_a_failed_request_is_asked_again(lab: Lab) -> None:
    faults = {1: Fault(status=529), 2: Fault(drop=True)}
    result = lab.run("claude-code", copy_in_capitals, door_faults=faults, **TASK)
    assert (result.outcome, result.reward, result.violations) == ("completed", 1.0, []), result.explain()
    assert len(result.requests) == 5 and len(result.calls) == len(result.asked) == 3
    assert result.drift == {"first": 1}, result.explain()


def test_one_refusal_ends_it(lab: Lab) -> None:
    result = lab.run("claude-code", lambda asked: bash("ls"), max_calls=1, **TASK)
    check_refused(result, SPEC)
