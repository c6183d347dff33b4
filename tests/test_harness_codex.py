"""Codex CLI from npm, unmodified, in the sandbox and offline, against a scripted model."""

import json
from collections.abc import Iterator

import pytest
from harness_lab import Asked, Call, Fault, Lab, Result, Say
from node_harness import check_refused, check_solved, spec_of, watched_lab

pytestmark = pytest.mark.sandbox
SPEC = spec_of("codex")
WINDOW = 30_000


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with watched_lab(tmp_path_factory.mktemp("codex"), SPEC, window=WINDOW) as made:
        yield made


def shell(command: str, reasoning: str = "") -> Say:
    return Say(reasoning=reasoning, calls=[Call("exec_command", {"cmd": command})])


def copy_in_capitals(asked: Asked) -> Say:
    return (
        shell("cat word.txt; id -un", reasoning="What is there?"),
        shell("tr a-z A-Z < word.txt > answer.txt", reasoning="Now in capitals."),
        Say("Done.", reasoning="That was it."),
    )[asked.turn]


TASK = {
    "instruction": "Copy it --in {capitals}.",
    "files": {"word.txt": "plum"},
    "expect": {"answer.txt": "PLUM"},
}


def inputs(result: Result) -> list[list[dict]]:
    return [request.json["input"] for request in result.requests]


def test_it_solves_a_task_in_one_sample(lab: Lab) -> None:
    result = lab.run("codex", copy_in_capitals, **TASK)
    check_solved(result, SPEC)
    assert result.drift == {"first": 1} and result.trained_calls == 3, result.explain()
    for before, after in zip(inputs(result), inputs(result)[1:], strict=False):
        assert after[: len(before)] == before
    thought, call, output = inputs(result)[1][-3:]
    assert thought["content"] == [{"type": "reasoning_text", "text": "\nWhat is there?\n"}]
    assert json.loads(call["arguments"]) == {"cmd": "cat word.txt; id -un"}
    assert "plum" in output["output"] and "agent" in output["output"]
    body = result.requests[0].json
    assert {t["name"] for t in body["tools"]} == {"exec_command", "write_stdin", "view_image"}
    assert not {"max_output_tokens", "temperature", "instructions"} & body.keys()
    thread = result.requests[0].headers["thread-id"]
    assert [call.flags["agent"] for call in result.calls] == [thread] * 3
    # its instructions come as a developer's, which Qwen3's template would leave out without a word
    assert [item["role"] for item in inputs(result)[0]] == ["developer", "developer", "user", "user"]
    assert [m["role"] for m in result.asked[0].messages] == ["system", "user", "user"]
    assert "Codex CLI" in result.asked[0].system and "Approval policy" in result.asked[0].system
    assert result.asked[0].last_user == TASK["instruction"]


def test_token_exact_forwarding_keeps_it_one_sample(lab: Lab) -> None:
    """Spacing, escapes and token ids that nobody would write so again stay as they were sampled."""

    def policy(asked: Asked) -> Say:
        odd = Call("exec_command", '{ "cmd" :  "tr a-z A-Z < word.txt > answer.txt # \\u00e9" }')
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

    result = lab.run("codex", policy, forwarding="splice", **TASK)
    check_solved(result, SPEC)
    assert [call.mode for call in result.calls] == ["splice"] * 3
    assert result.drift == {"first": 1} and result.trained_calls == 3, result.explain()


def test_it_compacts_before_the_window_is_full(lab: Lab) -> None:
    """The conversation, the summary of it, which is asked for without tools, and the one that goes on from there."""

    def policy(asked: Asked) -> Say:
        if "CONTEXT CHECKPOINT COMPACTION" in asked.last_user:
            return Say("word.txt holds the word plum.")
        if "holds the word plum" in asked.last_user:
            return (shell("printf PLUM > answer.txt"), Say("Done."))[asked.turn]
        return (shell("cat word.txt; seq 1000 3400"), shell("ls"))[asked.turn]

    result = lab.run("codex", policy, **TASK)
    check_solved(result, SPEC)
    assert [len(request.json["tools"]) for request in result.requests] == [3, 3, 0, 3, 3]
    windows = [request.headers["x-codex-window-id"].rpartition(":")[2] for request in result.requests]
    assert windows == ["0", "0", "0", "1", "1"]
    prompts = [call.prompt_len for call in result.calls]
    assert prompts[1] > WINDOW - SPEC.window_margin - 8192 and prompts[3] < prompts[1] / 2
    assert [len(sample.spans) for sample in result.samples] == [2, 1, 2], result.explain()
    assert result.trained_calls == 5
    assert len({call.flags["agent"] for call in result.calls}) == 1


def test_a_sub_agent_is_a_thread_of_its_own(lab: Lab) -> None:
    """Its tools are in a namespace, which the model sees as part of their names."""

    def policy(asked: Asked) -> Say:
        if asked.messages[-1]["role"] == "user" and "subagent_notification" in asked.last_user:
            return Say("Done.")
        if any(m["content"] == "Write it for me." for m in asked.messages):
            return (shell("tr a-z A-Z < word.txt > answer.txt"), Say("I wrote it."))[asked.turn]
        if asked.turn == 0:
            return Say(calls=[Call("multi_agent_v1__spawn_agent", {"message": "Write it for me."})])
        if asked.turn == 1:
            return Say(
                calls=[Call("multi_agent_v1__wait_agent", {"targets": [json.loads(asked.last)["agent_id"]]})]
            )
        return Say("Done.")

    result = lab.run("codex-agents", policy, **TASK)
    assert (result.outcome, result.reward, result.exit_code) == ("completed", 1.0, 0), result.explain()
    assert result.violations == []
    main = result.calls[0].flags["agent"]
    theirs = [call.flags for call in result.calls if call.flags["agent"] != main]
    assert len(theirs) == 2 and {flags["parent_agent"] for flags in theirs} == {main}
    assert sorted(len(sample.spans) for sample in result.samples) == [2, len(result.calls) - 2], (
        result.explain()
    )
    spawned = next(i for i in inputs(result)[-1] if i.get("name") == "spawn_agent")
    assert spawned["namespace"] == "multi_agent_v1"


def test_a_failed_request_is_asked_again(lab: Lab) -> None:
    faults = {1: Fault(status=500), 2: Fault(drop=True), 3: Fault(status=429, retry_after=0)}
    result = lab.run("codex", copy_in_capitals, door_faults=faults, **TASK)
    assert (result.outcome, result.reward, result.violations) == ("completed", 1.0, []), result.explain()
    assert len(result.requests) == 6 and len(result.calls) == len(result.asked) == 3
    assert result.drift == {"first": 1}, result.explain()


def test_one_refusal_ends_it(lab: Lab) -> None:
    result = lab.run("codex", lambda asked: shell("ls"), max_calls=1, **TASK)
    check_refused(result, SPEC)
