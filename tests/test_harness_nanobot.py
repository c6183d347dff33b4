"""nanobot from PyPI, unmodified, in the sandbox and offline, against a scripted model."""

import threading
from collections.abc import Iterator

import pytest
from harness_lab import Asked, Call, Lab, Say
from python_harness import (
    check_append_only,
    check_refused,
    check_solved,
    spec_lab,
    spec_of,
)

pytestmark = pytest.mark.sandbox
SPEC = spec_of("nanobot")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with spec_lab(tmp_path_factory.mktemp("nanobot"), SPEC) as made:
        yield made


def test_it_solves_a_task_in_one_sample(lab: Lab) -> None:
    def policy(asked: Asked) -> Say:
        return (
            Say(calls=[Call("exec", {"command": "cat word.txt"})]),
            Say(calls=[Call("write_file", {"path": "answer.txt", "content": "plum"})]),
            Say("Done."),
        )[asked.turn]

    files = {"word.txt": "plum\n"}
    result = lab.run("nanobot", policy, instruction="Copy it.", files=files, expect={"answer.txt": "plum"})
    check_solved(result, SPEC)
    check_append_only(result)
    assert result.drift == {"first": 1} and result.trained_calls == 3, result.explain()
    assert "plum" in result.asked[1].last
    assert {request.headers["x-session-affinity"] for request in result.requests} != {""}
    # its own temperature does not reach the engine
    assert result.requests[0].json["temperature"] == 0.1
    assert result.calls[0].flags["overridden"] == {"temperature": 0.1}


def test_what_it_trims_is_told(lab: Lab) -> None:
    """Text comes back without the blank lines around it: another sample, by the chat template or so it seems."""

    def policy(asked: Asked) -> Say:
        return (
            Say("\n\nI look.\n\n", calls=[Call("exec", {"command": "cat word.txt"})]),
            Say(calls=[Call("exec", {"command": "cp word.txt answer.txt"})]),
            Say("Done."),
        )[asked.turn]

    result = lab.run(
        "nanobot", policy, instruction="Copy it.", files={"word.txt": "plum"}, expect={"answer.txt": "plum"}
    )
    check_solved(result, SPEC)
    sent = result.requests[1].json["messages"][2]
    assert sent["content"] == "I look." and len(result.samples) == 2, result.explain()


def test_a_sub_agent_is_another_conversation(lab: Lab) -> None:
    """It runs beside the main one, whose prompt it does not share; its requests do not say whose they are."""
    answered = threading.Event()

    def policy(asked: Asked) -> Say:
        if "spawn" not in asked.tool_names:  # a sub-agent has no sub-agents
            if asked.turn == 0:
                return Say(calls=[Call("exec", {"command": "cp word.txt answer.txt"})])
            answered.set()
            return Say("It is copied.")
        if asked.turn == 0:
            return Say(calls=[Call("spawn", {"task": "Copy word.txt to answer.txt.", "label": "copy"})])
        assert answered.wait(60)
        return Say(calls=[Call("exec", {"command": "cat answer.txt"})]) if asked.turn < 3 else Say("Done.")

    result = lab.run(
        "nanobot", policy, instruction="Copy it.", files={"word.txt": "plum"}, expect={"answer.txt": "plum"}
    )
    assert (result.outcome, result.reward, result.violations) == ("completed", 1.0, []), result.explain()
    assert len(result.calls) == 6
    affinities = {request.headers["x-session-affinity"] for request in result.requests}
    assert len(affinities) == 1  # nothing else tells them apart
    assert sorted(len(sample.spans) for sample in result.samples) == [2, 4], result.explain()
    assert result.drift == {"first": 1, "root": 1}


def test_one_refusal_ends_it(lab: Lab) -> None:
    result = lab.run(
        "nanobot",
        lambda asked: Say(calls=[Call("exec", {"command": "ls"})]),
        instruction="Go on.",
        max_calls=1,
    )
    check_refused(result, SPEC)
