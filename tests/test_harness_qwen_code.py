"""Qwen Code from npm, unmodified, in the sandbox and offline, against a scripted model."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness_lab import Asked, Call, Lab, Say
from node_harness import (
    check_append_only,
    check_refused,
    check_solved,
    left_behind,
    spec_of,
    task_of,
    watched_lab,
)
from sample_oracle import minimum

pytestmark = pytest.mark.sandbox
SPEC = spec_of("qwen-code")
OF_ITS_OWN = ("content-length", "x-forge-relay-call", "x-forge-relay-read")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with watched_lab(tmp_path_factory.mktemp("qwen"), SPEC) as made:
        yield made


def shell(command: str, reasoning: str = "") -> Say:
    arguments = {"command": command, "is_background": False}
    return Say(reasoning=reasoning, calls=[Call("run_shell_command", arguments)])


def test_it_solves_a_task_in_one_sample(lab: Lab) -> None:
    def policy(asked: Asked) -> Say:
        return (
            shell("cat word.txt", "What is there?"),
            Say(calls=[Call("write_file", {"file_path": "/workspace/answer.txt", "content": "plum"})]),
            Say("Done."),
        )[asked.turn]

    instruction = '--Copy "word.txt".\nUse {braces}.'
    result = lab.run(
        "qwen-code",
        policy,
        instruction=instruction,
        files={"word.txt": "plum\n"},
        expect={"answer.txt": "plum"},
    )
    check_solved(result, SPEC)
    check_append_only(result.requests)
    assert result.drift == {"first": 1} and result.trained_calls == 3, result.explain()
    first = result.requests[0].json
    assert first["messages"][1]["content"][-1]["text"] == instruction
    assert first["max_tokens"] == 8192
    assert all(call.flags is None for call in result.calls)
    assert not left_behind(result)


def test_sub_agents_beside_it_are_told_apart(lab: Lab) -> None:
    """Two of them run at the same time as their parent, and no header says whose a request is."""

    def policy(asked: Asked) -> Say:
        for word in ("pear", "plum"):
            if f"Write {word}." in task_of(asked):
                return (shell(f"echo {word} > {word}.txt"), Say(f"{word} is written."))[asked.turn]
        if asked.turn == 0:
            calls = [
                Call(
                    "agent",
                    {"description": word, "prompt": f"Write {word}.", "subagent_type": "general-purpose"},
                )
                for word in ("pear", "plum")
            ]
            return Say(calls=calls)
        return Say("Done.")

    expect = {"pear.txt": "pear\n", "plum.txt": "plum\n"}
    result = lab.run("qwen-code", policy, instruction="Have them written.", expect=expect)
    check_solved(result, SPEC)
    # notes that they are done come back to the parent in one call or in two
    assert sorted(len(sample.spans) for sample in result.samples) == [2, 2, len(result.calls) - 4]
    assert minimum(result.askings()).samples == 3, result.explain()
    assert result.drift == {"first": 1, "root": 2}
    headers = [
        {k: v for k, v in request.headers.items() if k not in OF_ITS_OWN} for request in result.requests
    ]
    assert all(header == headers[0] for header in headers)


def test_a_full_window_makes_it_compact(tmp_path: Path) -> None:
    """The usage that it is told makes it ask for a summary before the engine would refuse. It then puts words into the
    model's mouth; those are in no sample's trained part."""

    def policy(asked: Asked) -> Say:
        if "You are the component that summarizes" in asked.last_user:
            return Say("<state_snapshot>A long list was read.</state_snapshot>")
        if "A long list was read." in task_of(asked):
            return Say("Done.")
        return shell(f"seq 1{asked.turn}000 99999 | head -c 6000")

    with watched_lab(tmp_path, SPEC, window=65536) as small:
        result = small.run("qwen-code", policy, instruction="Read it all.", max_completion_tokens=4096)
    check_solved(result, SPEC)
    assert result.drift == {"first": 1, "history_edited": 1}, result.explain()
    assert result.trained_calls == len(result.calls)
    assert any(str(m["content"]).startswith("Got it.") for m in result.asked[-1].messages)


def test_one_refusal_ends_it(lab: Lab) -> None:
    result = lab.run("qwen-code", lambda asked: shell("ls"), instruction="Go on.", max_calls=1)
    check_refused(result, SPEC)
    assert result.kind == "budget_calls"
