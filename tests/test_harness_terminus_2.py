"""Harbor's Terminus 2, unmodified but outside of Harbor's containers, in the sandbox and offline, against a scripted
model."""

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from harness_lab import Asked, Lab, Say
from python_harness import check_append_only, check_solved, spec_lab, spec_of

pytestmark = pytest.mark.sandbox
SPEC = spec_of("terminus-2")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with spec_lab(tmp_path_factory.mktemp("terminus"), SPEC, patience_s=1.0) as made:
        yield made


def typed(*lines: str, done: bool = False) -> str:
    commands: list[dict[str, Any]] = [{"keystrokes": f"{line}\n", "duration": 0.3} for line in lines]
    said = {"analysis": "It goes on.", "plan": "So.", "commands": commands, "task_complete": done}
    return json.dumps(said)


def test_it_solves_a_task(lab: Lab) -> None:
    """In one sample as long as it does not think. Its thoughts are sent back, but all that the terminal shows is the
    user's, and before a user's message Qwen3's template takes them out."""

    def policy(asked: Asked) -> Say:
        return (
            Say(typed("cat word.txt")),
            Say(typed("cp word.txt answer.txt")),
            Say(typed(done=True), reasoning="That is all."),
            Say(typed(done=True)),
        )[asked.turn]

    result = lab.run(
        "terminus-2",
        policy,
        instruction="Copy it.",
        files={"word.txt": "plum"},
        expect={"answer.txt": "plum"},
    )
    check_solved(result, SPEC)
    check_append_only(result)
    assert [len(sample.spans) for sample in result.samples] == [3, 3], (
        result.explain()
    )  # the last: two again, one new
    assert result.drift == {"first": 1, "fork": 1} and result.trained_calls == 4
    assert result.requests[3].json["messages"][5]["reasoning_content"].strip() == "That is all."
    assert "plum" in result.asked[1].last
    assert set(result.requests[0].json) == {"model", "messages"}


def test_a_summary_starts_a_new_conversation(tmp_path_factory: pytest.TempPathFactory) -> None:
    """With little room left it hands over to itself: a summary, questions about that, answers, and on with those."""
    files = [
        msgspec.structs.replace(
            file, content=file.content.replace("interleaved", "collect_rollout_details=True, interleaved")
        )
        for file in SPEC.files
    ]
    env = {**SPEC.env, "FORGE_WINDOW": "5000", "FORGE_OUTPUT": "1000"}
    small = msgspec.structs.replace(SPEC, env=env, files=tuple(files))
    before = iter([typed("seq 2000"), typed("ls")])
    after = iter([typed("cp word.txt answer.txt"), typed(done=True), typed(done=True)])

    def policy(asked: Asked) -> Say:
        if "You are about to hand off your work" in asked.last:
            return Say("Nothing is copied yet.")
        if "You are picking up work from a previous AI agent" in asked.last:
            return Say("1. What is to be copied?")
        if "The next agent has a few questions for you" in asked.last:
            return Say("word.txt to answer.txt.")
        return Say(next(after if "word.txt to answer.txt." in asked.prompt else before))

    with spec_lab(tmp_path_factory.mktemp("small"), small) as lab:
        result = lab.run(
            "terminus-2",
            policy,
            instruction="Copy it.",
            files={"word.txt": "plum"},
            expect={"answer.txt": "plum"},
        )
    check_solved(result, SPEC)
    assert len(result.calls) == 8
    # asked for the token ids, as Harbor does who trains: not needed here, and no harm
    assert all(r.json["logprobs"] and r.json["return_token_ids"] for r in result.requests)
    assert [call.flags["dropped"] for call in result.calls] == [["logprobs", "return_token_ids"]] * 8
    # the work up to the answers; the questions, asked by somebody who knows nothing; the work after them
    assert sorted(len(sample.spans) for sample in result.samples) == [1, 3, 4], result.explain()


def test_a_refusal_is_retried_until_it_is_stopped(lab: Lab) -> None:
    """Nine times it would ask, with pauses; the runner stops it."""
    result = lab.run("terminus-2", lambda asked: Say(typed("ls")), instruction="Go on.", max_calls=1)
    assert result.exit_code in SPEC.ends.refused, result.explain()
    assert result.requests[0].status == [200] and {s for r in result.requests[1:] for s in r.status} == {400}
    assert result.violations == [] and len(result.asked) == 1
