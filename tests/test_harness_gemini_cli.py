"""Gemini CLI from npm, unmodified, in the sandbox and offline, against a scripted model."""

from collections.abc import Iterator

import pytest
from harness_lab import Asked, Call, Lab, Result, Say
from node_harness import check_refused, check_solved, spec_of, watched_lab

pytestmark = pytest.mark.sandbox
SPEC = spec_of("gemini-cli")
TASK = {
    "instruction": "Copy it {in} capitals.",
    "files": {"word.txt": "plum"},
    "expect": {"answer.txt": "PLUM"},
}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with watched_lab(tmp_path_factory.mktemp("gemini"), SPEC) as made:
        yield made


def shell(command: str, reasoning: str = "") -> Say:
    return Say(reasoning=reasoning, calls=[Call("run_shell_command", {"command": command})])


def contents(result: Result) -> list[list[dict]]:
    return [request.json["contents"] for request in result.requests]


def test_it_solves_a_task_in_one_sample(lab: Lab) -> None:
    """It sends no thoughts back, but their signature, by which they are known again."""

    def policy(asked: Asked) -> Say:
        return (
            Say(reasoning="What is there?", calls=[Call("read_file", {"file_path": "word.txt"})]),
            shell("tr a-z A-Z < word.txt > answer.txt", reasoning="Now in capitals."),
            Say("Done.", reasoning="That was it."),
        )[asked.turn]

    result = lab.run("gemini-cli", policy, **TASK)
    check_solved(result, SPEC)
    assert result.drift == {"first": 1} and result.trained_calls == 3, result.explain()
    for before, after in zip(contents(result), contents(result)[1:], strict=False):
        assert after[: len(before)] == before
    (called,) = contents(result)[1][-2]["parts"]
    assert called["functionCall"]["args"] == {"file_path": "word.txt"} and called["thoughtSignature"]
    assert "What is there?" not in str(contents(result)) and "What is there?" in result.asked[2].prompt
    assert result.calls[0].flags == {"overridden": {"top_p": 0.95, "top_k": 64}}


def test_token_exact_forwarding_keeps_it_one_sample(lab: Lab) -> None:
    """Spacing, escapes and token ids that nobody would write so again stay as they were sampled."""

    def policy(asked: Asked) -> Say:
        odd = Call("run_shell_command", '{ "command" :  "tr a-z A-Z < word.txt > answer.txt # \\u00e9" }')
        return (
            Say(
                "\n I look. 🎈\n",
                reasoning=" What\n\nis there? ",
                calls=[shell("ls").calls[0], odd],
                split=True,
            ),
            shell("cat answer.txt", reasoning="Is it?"),
            Say("Done.\n\n"),
        )[asked.turn]

    result = lab.run("gemini-cli", policy, forwarding="splice", **TASK)
    check_solved(result, SPEC)
    assert [call.mode for call in result.calls] == ["splice"] * 3
    assert result.drift == {"first": 1} and result.trained_calls == 3, result.explain()


def test_a_sub_agent_is_another_conversation(lab: Lab) -> None:
    """Its requests do not say whose they are: it is told apart by its prompt."""

    def policy(asked: Asked) -> Say:
        if "complete_task" in asked.tool_names:  # every sub-agent ends by this tool
            return (
                shell("tr a-z A-Z < word.txt > answer.txt"),
                Say(calls=[Call("complete_task", {"result": {"response": "It is written."}})]),
            )[asked.turn]
        invoked = {"agent_name": "generalist", "prompt": "Write word.txt in capitals to answer.txt."}
        return (Say(calls=[Call("invoke_agent", invoked)]), Say("Done."))[asked.turn]

    result = lab.run("gemini-cli", policy, **TASK)
    check_solved(result, SPEC)
    assert [len(sample.spans) for sample in result.samples] == [2, 2], result.explain()
    assert all("agent" not in (call.flags or {}) for call in result.calls)


def test_one_refusal_ends_it(lab: Lab) -> None:
    result = lab.run("gemini-cli", lambda asked: shell("ls"), max_calls=1, **TASK)
    check_refused(result, SPEC)
