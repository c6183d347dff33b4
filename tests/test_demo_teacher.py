"""The scripted teacher: it can do every task, and is hasty in the share it was told."""

import json
from typing import Any

import pytest

from forge_server.demo.staged.teacher import reply
from forge_server.demo.tasks import draw
from forge_server.demo.teaching import conversation, read_only_shell
from forge_server.harness.react import SYSTEM


def call_of(message: dict[str, Any]) -> tuple[str, dict[str, str]]:
    function = message["tool_calls"][0]["function"]
    return function["name"], json.loads(function["arguments"])


def test_a_careful_teacher_solves_every_task() -> None:
    for task in draw("teach", 100, 1):
        asked = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task.instruction}]
        tool, arguments = call_of(reply(asked, 5, 0.0))
        assert tool == "shell"
        seen = read_only_shell(task.files)(arguments["command"])
        answer = reply([*asked, reply(asked, 5, 0.0), {"role": "tool", "content": seen}], 6, 1.0)
        assert call_of(answer) == ("finish", {"answer": task.answer})


def test_a_hasty_teacher_guesses_without_looking() -> None:
    asked = [{"role": "user", "content": "Which number is in box/07?"}]
    guesses = {call_of(reply(asked, seed, 1.0))[1]["answer"] for seed in range(500)}
    assert {call_of(reply(asked, seed, 1.0))[0] for seed in range(500)} == {"finish"}
    assert len(guesses) > 300
    assert all(len(guess) == 3 and guess.isdigit() for guess in guesses)


def test_the_seed_decides_and_the_share_holds() -> None:
    asked = [{"role": "user", "content": "Which number is in box/07?"}]
    assert reply(asked, 3, 0.6) == reply(asked, 3, 0.6)
    hasty = sum(call_of(reply(asked, seed, 0.6))[0] == "finish" for seed in range(2000))
    assert 0.56 < hasty / 2000 < 0.64


def test_it_refuses_what_it_cannot_know() -> None:
    with pytest.raises(ValueError, match="does not know"):
        reply([{"role": "user", "content": "Sing."}], 1, 0.0)


def test_the_shell_of_the_teacher_answers_like_cat() -> None:
    shell = read_only_shell({"box/07": "123"})
    assert shell("cat box/07") == "123"
    assert shell("cat box/08") == "cat: box/08: No such file or directory\n\n[status 1]"


def test_conversations_show_both_ways() -> None:
    lengths = {len(conversation(task, index)) for index, task in enumerate(draw("teach", 30, 1))}
    assert lengths == {3, 5}
