"""Kimi CLI from PyPI, unmodified, in the sandbox and offline, against a scripted model."""

from collections.abc import Iterator

import pytest
from harness_lab import Asked, Call, Lab, Say
from python_harness import check_append_only, check_refused, check_solved, spec_lab, spec_of

pytestmark = pytest.mark.sandbox
SPEC = spec_of("kimi")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with spec_lab(tmp_path_factory.mktemp("kimi"), SPEC) as made:
        yield made


def test_it_solves_a_task_in_one_sample(lab: Lab) -> None:
    def policy(asked: Asked) -> Say:
        return (
            Say(reasoning="What is there?", calls=[Call("Shell", {"command": "ls"})]),
            Say(reasoning="Which one?", calls=[Call("Grep", {"pattern": "plum", "output_mode": "content"})]),
            Say(reasoning="That one.", calls=[Call("WriteFile", {"path": "answer.txt", "content": "plum"})]),
            Say("Done."),
        )[asked.turn]

    files = {"a.txt": "pear\n", "b.txt": "plum\n"}
    result = lab.run("kimi", policy, instruction="Find it.", files=files, expect={"answer.txt": "plum"})
    check_solved(result, SPEC)
    check_append_only(result)
    assert result.drift == {"first": 1} and result.trained_calls == 4, result.explain()
    assert "b.txt" in result.asked[2].last and "plum" in result.asked[2].last  # its own ripgrep
    first = result.requests[0].json
    assert (first["max_tokens"], first["thinking"]) == (8192, {"type": "enabled"})
    assert result.requests[1].json["messages"][2]["reasoning_content"].strip() == "What is there?"
    assert result.calls[0].flags["dropped"] == ["prompt_cache_key", "reasoning_effort", "thinking"]


def test_a_sub_agent_is_another_conversation(lab: Lab) -> None:
    """Its requests do not say whose they are: it is told apart by its prompt."""

    def policy(asked: Asked) -> Say:
        if "Agent" not in asked.tool_names:  # the sub-agent has no sub-agents
            return (
                Say(calls=[Call("Shell", {"command": "cat word.txt"})]),
                Say("The word in the file is plum, and there is nothing else in it that would matter. " * 5),
            )[asked.turn]
        return (
            Say(calls=[Call("Agent", {"description": "read a word", "prompt": "Read word.txt."})]),
            Say(calls=[Call("Shell", {"command": "cp word.txt answer.txt"})]),
            Say("Done."),
        )[asked.turn]

    result = lab.run(
        "kimi", policy, instruction="Copy it.", files={"word.txt": "plum"}, expect={"answer.txt": "plum"}
    )
    check_solved(result, SPEC)
    assert len(result.calls) == 5
    assert sorted(len(sample.spans) for sample in result.samples) == [2, 3], result.explain()
    assert all("agent" not in (call.flags or {}) for call in result.calls)


def test_it_compacts_before_the_engine_refuses(tmp_path_factory: pytest.TempPathFactory) -> None:
    def policy(asked: Asked) -> Say:
        if not asked.tools:
            return Say("Nothing is copied yet. What is left: copy word.txt to answer.txt.")
        if "cp word.txt" in asked.prompt:
            return Say("Done.")
        if "What is left" in asked.prompt:
            return Say(calls=[Call("Shell", {"command": "cp word.txt answer.txt"})])
        return Say(calls=[Call("Shell", {"command": "seq 1500" if asked.turn == 0 else "ls"})])

    with spec_lab(tmp_path_factory.mktemp("small"), SPEC, window=20_000) as lab:
        result = lab.run(
            "kimi",
            policy,
            instruction="Copy it.",
            files={"word.txt": "plum"},
            expect={"answer.txt": "plum"},
            max_completion_tokens=2000,
        )
    check_solved(result, SPEC)
    assert {status for request in result.requests for status in request.status} == {200}
    summaries = [asked for asked in result.asked if not asked.tools]
    assert summaries and "compacts conversation context" in summaries[0].system
    # what it wrote down for itself is its own work: trained as a conversation of one turn
    assert result.trained_calls == len(result.calls), result.explain()
    assert result.samples[1].spans[0].end < result.samples[0].spans[0].end


def test_one_refusal_ends_it(lab: Lab) -> None:
    result = lab.run(
        "kimi", lambda asked: Say(calls=[Call("Shell", {"command": "ls"})]), instruction="Go on.", max_calls=1
    )
    check_refused(result, SPEC)
