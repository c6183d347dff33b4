"""OpenCode from npm, unmodified, in the sandbox and offline, against a scripted model."""

from collections.abc import Iterator

import pytest
from harness_lab import Asked, Call, Lab, Say
from node_harness import check_append_only, check_solved, left_behind, spec_of, watched_lab

pytestmark = pytest.mark.sandbox
SPEC = spec_of("opencode")
WINDOW = 40960


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with watched_lab(tmp_path_factory.mktemp("opencode"), SPEC, window=WINDOW) as made:
        yield made


def bash(command: str, reasoning: str = "") -> Say:
    return Say(reasoning=reasoning, calls=[Call("bash", {"command": command, "description": "look"})])


def test_it_solves_a_task_in_one_sample(lab: Lab) -> None:
    """Its title is a side call: recorded, and trained in no sample."""

    def policy(asked: Asked) -> Say:
        if not asked.tools:
            return Say("A file of words")
        return (
            bash("cat word.txt", "What is there?"),
            Say(calls=[Call("write", {"filePath": "/workspace/answer.txt", "content": "plum"})]),
            Say("Done."),
        )[asked.turn]

    result = lab.run(
        "opencode",
        policy,
        instruction='Copy "word.txt".\nUse {braces}.',
        files={"word.txt": "plum\n"},
        expect={"answer.txt": "plum"},
    )
    check_solved(result, SPEC)
    assert [call.label for call in result.calls].count("title") == 1
    assert {c.label: c.untrainable for c in result.calls} == {"title": "side_call", "": None}
    main = [request for request in result.requests if request.json.get("tools")]
    assert len(main) == 3 and main[0].json["messages"][1]["content"] == 'Copy "word.txt".\nUse {braces}.'
    check_append_only(main)
    assert result.drift == {"first": 1} and result.trained_calls == 3, result.explain()
    assert main[0].json["max_tokens"] == 8192
    assert not left_behind(result)


def test_a_sub_agent_is_named(lab: Lab) -> None:
    def policy(asked: Asked) -> Say:
        if not asked.tools:
            return Say("A file of words")
        if "task" not in asked.tool_names:  # the sub-agent has no sub-agents
            return (bash("cp word.txt answer.txt; getent hosts example.com"), Say("It is copied."))[
                asked.turn
            ]
        task = {"description": "copy", "prompt": "Copy word.txt.", "subagent_type": "general"}
        return (Say(calls=[Call("task", task)]), Say("Done."))[asked.turn]

    result = lab.run(
        "opencode", policy, instruction="Copy it.", files={"word.txt": "plum"}, expect={"answer.txt": "plum"}
    )
    assert (result.reward, result.violations) == (1.0, []), result.explain()
    assert result.looked_up == ("example.com",)  # by the sub-agent, none by OpenCode
    named = [(c.flags["agent"], c.flags.get("parent_agent")) for c in result.calls if not c.label]
    parent, child = named[0][0], named[1][0]
    assert named == [(parent, None), (child, parent), (child, parent), (parent, None)] and parent != child
    assert sorted(len(sample.spans) for sample in result.samples) == [2, 2], result.explain()


def test_a_full_window_makes_it_compact(lab: Lab) -> None:
    """The usage that it is told makes it ask for a summary before the engine would refuse."""

    def policy(asked: Asked) -> Say:
        if not asked.tools:
            return Say("A long list was read." if "summar" in asked.system else "A title")
        if any(m["content"] == "A long list was read." for m in asked.messages):
            return Say("Done.")
        return bash("seq 10000 99999 | head -c 6000")

    result = lab.run("opencode", policy, instruction="Read it all.", max_completion_tokens=4096)
    assert (result.outcome, result.exit_code) == ("completed", 0), result.explain()
    assert result.violations == [] and all(request.status == [200] for request in result.requests)
    assert result.drift == {"first": 1, "compaction": 1, "history_edited": 1}, result.explain()
    assert result.trained_calls == len(result.calls) - 1  # all but the title, the summary too
    turns = [m["content"] for m in result.asked[-1].messages if m["role"] == "assistant"]
    assert turns[0] == "A long list was read."  # behind it are the latest turns, as they were


def test_one_refusal_ends_it(lab: Lab) -> None:
    """The title may come before, beside or after the call that is refused."""

    def policy(asked: Asked) -> Say:
        return bash("ls") if asked.tools else Say("A title")

    result = lab.run("opencode", policy, instruction="Go on.", max_calls=2)
    assert result.exit_code in SPEC.ends.refused and result.kind == "budget_calls", result.explain()
    assert sorted(request.status[0] for request in result.requests) == [200, 200, 400], result.explain()
    assert result.violations == [] and len(result.asked) == 2
