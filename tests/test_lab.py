"""The test lab itself: a scripted engine and a whole server, shown with the harness that ships with it."""

from collections.abc import Iterator

import pytest
from harness_lab import Asked, Call, Lab, Say, harness_lab

pytestmark = pytest.mark.sandbox


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with harness_lab(tmp_path_factory.mktemp("lab")) as made:
        yield made


def write_and_read(asked: Asked) -> Say:
    return (
        Say(calls=[Call("shell", {"command": "printf 'hello\\n' > a.txt"})]),
        Say(calls=[Call("shell", {"command": "cat a.txt x.txt"})]),
        Say(calls=[Call("finish", {"answer": asked.last.strip()})]),
    )[asked.turn]


def test_a_conversation_without_reasoning_is_one_sample(lab: Lab) -> None:
    result = lab.run(
        "react",
        write_and_read,
        instruction="Write a file",
        files={"x.txt": "there\n"},
        expect={"a.txt": "hello\n", "answer.txt": "hello\nthere"},
    )
    assert (result.outcome, result.reward, result.exit_code) == ("completed", 1.0, 0), result.explain()
    assert result.violations == []
    assert result.drift == {"first": 1} and result.merge_ratio == 3.0
    assert [call.mode for call in result.calls] == ["record"] * 3
    assert [request.path for request in result.requests] == ["/v1/chat/completions"] * 3
    assert len(result.requests[2].json["messages"]) == 6
    assert [asked.turn for asked in result.asked] == [0, 1, 2]
    assert result.asked[0].tool_names == ["shell", "finish"] and result.asked[0].last_user == "Write a file"
