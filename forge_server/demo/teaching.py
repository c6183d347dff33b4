"""Collects the teacher's traces: the scripted teacher behind the proxy, the real harness loop in front of
it.

Each trace is a rollout that its harness registered itself: its calls are recorded, scored and cut like any
other's. The loop runs in this process, since the teacher's only command is to read a file of the task.
"""

import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from forge_server.client.http import ForgeClient
from forge_server.client.rollout import rollout
from forge_server.demo.staged.teacher import reply
from forge_server.demo.tasks import Lookup
from forge_server.harness.react import ANSWER_FILE, SYSTEM, react_loop

MODEL = "forge"


def read_only_shell(files: dict[str, str]) -> Callable[[str], str]:
    """A shell that knows ``cat`` and the files of one task."""

    def run(command: str) -> str:
        path = command.removeprefix("cat ")
        return files.get(path, f"cat: {path}: No such file or directory\n\n[status 1]")

    return run


def collect(
    client: ForgeClient, tasks: Sequence[Lookup], threads: int, progress: Callable[[int], None]
) -> float:
    """One trace per task, ``threads`` at a time; the share of right answers. ``progress`` is told the
    count.
    """
    right = 0
    with ThreadPoolExecutor(threads) as pool, tempfile.TemporaryDirectory() as scratch:

        def one(task: Lookup) -> bool:
            workdir = Path(scratch) / task.name
            workdir.mkdir()
            with rollout(client, task=task.name, harness="react") as attempt:
                keys = attempt.registration
                shell = read_only_shell(task.files)
                react_loop(keys.base_url, keys.agent_key, MODEL, task.instruction, str(workdir), shell=shell)
                answer = (workdir / ANSWER_FILE).read_text()
                attempt.reward(float(answer == task.answer))
            return answer == task.answer

        for count, passed in enumerate(pool.map(one, tasks), 1):
            right += passed
            progress(count)
    return right / len(tasks)


def conversation(task: Lookup, seed: int) -> list[dict[str, Any]]:
    """What a trace of ``task`` looks like, without any server: the tokenizer is fitted to such
    conversations.
    """
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": task.instruction},
        reply([{"role": "user", "content": task.instruction}], seed, hasty_share=0.5),
    ]
    if messages[-1]["tool_calls"][0]["function"]["name"] == "shell":
        found = {"role": "tool", "content": task.answer}
        messages += [found, reply([found], seed, hasty_share=0.5)]
    return messages
