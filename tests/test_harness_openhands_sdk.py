"""The OpenHands SDK from PyPI, unmodified, in the sandbox and offline, against a scripted model."""

from collections.abc import Iterator

import pytest
from harness_lab import Asked, Call, Lab, Say
from python_harness import check_append_only, check_refused, check_solved, spec_lab, spec_of

pytestmark = pytest.mark.sandbox
SPEC = spec_of("openhands-sdk")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with spec_lab(tmp_path_factory.mktemp("openhands"), SPEC) as made:
        yield made


def test_it_solves_a_task_in_one_sample(lab: Lab) -> None:
    def policy(asked: Asked) -> Say:
        create = {"command": "create", "path": "/workspace/answer.txt", "file_text": "plum"}
        return (
            Say(
                reasoning="Look.",
                calls=[Call("terminal", {"command": "cat word.txt"})],
            ),
            Say(reasoning="Plum.", calls=[Call("file_editor", create)]),
            Say(calls=[Call("terminal", {"command": "cat answer.txt"})]),
            Say(reasoning="Good.", calls=[Call("finish", {"message": "Done."})]),
        )[asked.turn]

    result = lab.run(
        "openhands-sdk",
        policy,
        instruction="Copy it.",
        files={"word.txt": "plum"},
        expect={"answer.txt": "plum"},
    )
    check_solved(result, SPEC)
    check_append_only(result)
    assert result.drift == {"first": 1} and result.trained_calls == 4, result.explain()
    assert "plum" in result.asked[1].last and "plum" in result.asked[3].last
    first = result.requests[0].json
    assert (first["max_tokens"] if "max_tokens" in first else first["max_completion_tokens"]) == 8192
    assert result.requests[1].json["messages"][2]["reasoning_content"].strip() == "Look."


def test_one_refusal_ends_it(lab: Lab) -> None:
    result = lab.run(
        "openhands-sdk",
        lambda asked: Say(calls=[Call("terminal", {"command": "ls"})]),
        instruction="Go on.",
        max_calls=1,
    )
    check_refused(result, SPEC)
