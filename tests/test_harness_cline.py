"""Cline's command line from npm, unmodified, in the sandbox and offline, against a scripted model."""

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

pytestmark = pytest.mark.sandbox
SPEC = spec_of("cline")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with watched_lab(tmp_path_factory.mktemp("cline"), SPEC) as made:
        yield made


def run(*commands: str, reasoning: str = "") -> Say:
    return Say(reasoning=reasoning, calls=[Call("run_commands", {"commands": list(commands)})])


def read(path: str) -> Say:
    return Say(calls=[Call("read_files", {"files": [{"path": f"/workspace/{path}"}]})])


def test_it_solves_a_task_in_one_sample(lab: Lab) -> None:
    """A file that is read again and again stays in the history as it was. Nothing is left running."""

    def policy(asked: Asked) -> Say:
        # beyond 64 KiB it would rewrite what is old; the same call five times in a row it takes for a loop
        often = Say(calls=[call for path in 3 * ("word.txt", "more.txt") for call in read(path).calls])
        copy = run("cp word.txt answer.txt", reasoning="What is there?")
        return (often, often, copy, Say("Done."))[asked.turn]

    word = "plum and much more\n" * 2000
    instruction = '--Copy "word.txt".\nUse {braces}.'
    files = {"word.txt": word, "more.txt": word}
    result = lab.run("cline", policy, instruction=instruction, files=files, expect={"answer.txt": word})
    check_solved(result, SPEC)
    check_append_only(result.requests)
    assert result.drift == {"first": 1} and result.trained_calls == 4, result.explain()
    assert result.requests[0].json["messages"][1]["content"] == instruction
    assert not left_behind(result)


def test_a_sub_agent_is_another_conversation(lab: Lab) -> None:
    def policy(asked: Asked) -> Say:
        if "Copy word.txt for me." in task_of(asked):
            return (run("cp word.txt answer.txt"), Say("It is copied."))[asked.turn]
        spawn = {"systemPrompt": "You copy files.", "task": "Copy word.txt for me."}
        return (Say(calls=[Call("spawn_agent", spawn)]), Say("Done."))[asked.turn]

    result = lab.run(
        "cline", policy, instruction="Copy it.", files={"word.txt": "plum"}, expect={"answer.txt": "plum"}
    )
    check_solved(result, SPEC)
    assert sorted(len(sample.spans) for sample in result.samples) == [2, 2], result.explain()


def test_a_full_window_makes_it_compact(tmp_path: Path) -> None:
    """The usage that it is told makes it ask for a summary before the engine would refuse."""

    def policy(asked: Asked) -> Say:
        if not asked.tools:
            return Say("A long list was read.")
        if "A long list was read." in task_of(asked):
            return Say("Done.")
        return run(f"seq 1{asked.turn}000 99999 | head -c 6000")

    with watched_lab(tmp_path, SPEC, window=32768) as small:
        result = small.run("cline", policy, instruction="Read it all.", max_completion_tokens=4096)
    check_solved(result, SPEC)
    assert result.drift == {"first": 1, "compaction": 1, "history_edited": 1}, result.explain()
    assert result.trained_calls == len(result.calls)


def test_one_refusal_ends_it(lab: Lab) -> None:
    result = lab.run("cline", lambda asked: run("ls"), instruction="Go on.", max_calls=1)
    check_refused(result, SPEC)
    assert result.kind == "budget_calls"
