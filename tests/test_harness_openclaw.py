"""OpenClaw from npm, unmodified, in the sandbox and offline, against a scripted model. It takes long to start, so all
is looked at in one run."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
from harness_lab import Asked, Call, Lab, Say
from node_harness import check_solved, left_behind, spec_of, watched_lab

pytestmark = pytest.mark.sandbox
SPEC = spec_of("openclaw")
OWN = "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with watched_lab(tmp_path_factory.mktemp("openclaw"), SPEC) as made:
        yield made


def shell(command: str, reasoning: str = "", **more: object) -> Say:
    return Say(reasoning=reasoning, calls=[Call("exec", {"command": command, **more})])


def test_it_solves_a_task_in_one_sample_without_its_note(lab: Lab) -> None:
    """Each request ends in a note that is not kept: that nothing runs in the background. It is written when the turn
    begins, and says so even when something does. It is taken out, and the conversation is one sample."""

    def policy(asked: Asked) -> Say:
        return (
            shell("cat word.txt", "What is there?"),
            shell("cp word.txt answer.txt"),
            shell("sleep 300", background=True),
            Say("Done."),
        )[asked.turn]

    result = lab.run(
        "openclaw",
        policy,
        instruction='Copy "word.txt".\nUse {braces}.',
        files={"word.txt": "plum\n"},
        expect={"answer.txt": "plum\n"},
        max_seconds=300,
    )
    check_solved(result, SPEC)
    asked = [request.json["messages"] for request in result.requests]
    for earlier, later in pairwise(asked):
        assert OWN in earlier[-1]["content"][0]["text"]
        assert later[-1] == earlier[-1] and later[: len(earlier) - 1] == earlier[:-1]
    assert asked[0][1]["content"].partition("] ")[2].startswith('Copy "word.txt".\nUse {braces}.\n')
    assert "still running" in asked[-1][-2]["content"]
    assert all(OWN not in str(one.messages[-1]) for one in result.asked)
    assert result.drift == {"first": 1} and result.trained_calls == 4, result.explain()
    assert result.requests[0].json["max_completion_tokens"] == 8192
    assert asked[1][2]["reasoning_content"].strip() == "What is there?"
    assert not left_behind(result)
