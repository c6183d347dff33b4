"""pi from npm, unmodified, in the sandbox and offline, against a scripted model."""

from collections.abc import Iterator

import pytest
from harness_lab import Asked, Call, Lab, Say
from node_harness import check_append_only, check_refused, check_solved, left_behind, spec_of, watched_lab

pytestmark = pytest.mark.sandbox
SPEC = spec_of("pi")
WINDOW = 32768


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with watched_lab(tmp_path_factory.mktemp("pi"), SPEC, window=WINDOW) as made:
        yield made


def bash(command: str, reasoning: str = "") -> Say:
    return Say(reasoning=reasoning, calls=[Call("bash", {"command": command})])


def test_it_solves_a_task_in_one_sample(lab: Lab) -> None:
    def policy(asked: Asked) -> Say:
        return (
            bash("cat word.txt", "What is there?"),
            Say(reasoning="That.", calls=[Call("write", {"path": "answer.txt", "content": "plum"})]),
            Say("Done."),
        )[asked.turn]

    instruction = '@word.txt: copy "it".\nUse {braces}.'
    result = lab.run(
        "pi",
        policy,
        instruction=instruction,
        files={"word.txt": "plum\n"},
        expect={"answer.txt": "plum"},
    )
    check_solved(result, SPEC)
    check_append_only(result.requests)
    assert result.drift == {"first": 1} and result.trained_calls == 3, result.explain()
    first = result.requests[0].json
    assert [message["role"] for message in first["messages"]] == ["system", "user"]
    assert first["messages"][1]["content"] == [{"type": "text", "text": instruction}]
    assert first["max_completion_tokens"] == 8192
    assert result.requests[1].json["messages"][2]["reasoning_content"].strip() == "What is there?"
    assert all(call.flags is None for call in result.calls)
    assert not left_behind(result)


def test_a_full_window_makes_it_compact(lab: Lab) -> None:
    """It does not look at the usage before the engine has refused a prompt. Then it has the history, told as text,
    summed up and goes on from that."""

    def policy(asked: Asked) -> Say:
        if not asked.tools:
            return Say("A long list was read.")
        if "A long list was read." in str(asked.messages):
            return Say("Done.")
        return bash("seq 10000 99999 | head -c 6000")

    result = lab.run("pi", policy, instruction="Read it all.", max_completion_tokens=4096)
    assert (result.outcome, result.exit_code) == ("completed", 0), result.explain()
    refused = [call for call in result.calls if call.status == 400]
    assert [call.error.partition(":")[0] for call in refused] == ["context_length_exceeded"], result.explain()
    assert result.violations == []
    assert result.drift == {"first": 1, "compaction": 1, "history_edited": 1}, result.explain()
    assert result.trained_calls == len(result.calls) - 1


def test_one_refusal_ends_it(lab: Lab) -> None:
    result = lab.run("pi", lambda asked: bash("ls"), instruction="Go on.", max_calls=1)
    check_refused(result, SPEC)
    assert result.kind == "budget_calls"  # though it exits 0
