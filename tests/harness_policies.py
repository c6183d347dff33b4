"""What a model must say so that a harness does something: each one's own names for a shell, for writing a file, for
being done. And a standard task, said in any of them."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from scripted_engine import Asked, Call, Policy, Say

WORKDIR = "/workspace"


@dataclass(frozen=True)
class Hand:
    """The tools of one harness. ``shell``: tool and the key of the command (``many``: it takes a list of them).
    ``write``: tool and the keys of path and content; None: through the shell. ``done``: tool and key of the last
    word; None: an answer without a tool call. ``edit``: tool and the keys of path, old and new text."""

    shell: tuple[str, str]
    write: tuple[str, str, str] | None = None
    edit: tuple[str, str, str, str] | None = None
    done: tuple[str, str] | None = None
    many: bool = False


HANDS = {
    "react": Hand(("shell", "command"), done=("finish", "answer")),
    "mini-swe-agent": Hand(("bash", "command")),
    "codex": Hand(("exec_command", "cmd")),
    "claude-code": Hand(
        ("Bash", "command"),
        ("Write", "file_path", "content"),
        ("Edit", "file_path", "old_string", "new_string"),
    ),
    "claude-code-bare": Hand(("Bash", "command")),
    "opencode": Hand(
        ("bash", "command"), ("write", "filePath", "content"), ("edit", "filePath", "oldString", "newString")
    ),
    "openclaw": Hand(("exec", "command"), ("write", "path", "content")),
    "qwen-code": Hand(
        ("run_shell_command", "command"),
        ("write_file", "file_path", "content"),
        ("edit", "file_path", "old_string", "new_string"),
    ),
    "gemini-cli": Hand(
        ("run_shell_command", "command"),
        ("write_file", "file_path", "content"),
        ("replace", "file_path", "old_string", "new_string"),
    ),
    "pi": Hand(("bash", "command"), ("write", "path", "content")),
    "kimi": Hand(("Shell", "command"), ("WriteFile", "path", "content")),
    "cline": Hand(("run_commands", "commands"), ("editor", "path", "new_text"), many=True),
    "nanobot": Hand(
        ("exec", "command"),
        ("write_file", "path", "content"),
        ("edit_file", "path", "old_text", "new_text"),
    ),
    "openhands-sdk": Hand(("terminal", "command"), done=("finish", "message")),
    "smolagents": Hand(("bash", "command"), done=("final_answer", "answer")),
}
"""By the name of the spec. Harnesses that take their orders as text have a function in ``TEXT`` instead."""


def _terminus(command: str | None, text: str) -> str:
    keys = [] if command is None else [{"keystrokes": f"{command}\n", "duration": 0.5}]
    said = {"analysis": text or "a", "plan": "p", "commands": keys, "task_complete": command is None}
    return json.dumps(said)


def _smolagents(command: str | None, text: str) -> str:
    code = f"final_answer({text!r})" if command is None else f"print(bash(command={command!r}))"
    return f"Thought: {text or 'go on'}\n<code>\n{code}\n</code>"


TEXT: dict[str, Callable[[str | None, str], str]] = {"terminus-2": _terminus, "smolagents": _smolagents}


def find(asked: Asked, name: str) -> str:
    """The tool called ``name`` as the model knows it: a namespace may stand before it."""
    names = asked.tool_names
    if name in names:
        return name
    ends = [known for known in names if known.endswith((f"__{name}", f".{name}", f"_{name}"))]
    assert ends, f"there is no tool {name} among {names}"
    return ends[0]


def shell(harness: str, asked: Asked, command: str, text: str = "", reasoning: str = "", **more: Any) -> Say:
    """Run a command."""
    hand = HANDS.get(harness)
    if hand is None or (harness in TEXT and hand.shell[0] not in asked.tool_names):
        return Say(TEXT[harness](command, text), reasoning=reasoning)
    name, key = hand.shell
    value: Any = [command] if hand.many else command
    return Say(text, reasoning, [Call(find(asked, name), {key: value, **more})])


def write(harness: str, asked: Asked, path: str, content: str, text: str = "", reasoning: str = "") -> Say:
    """Make a file: with the tool for it, or through the shell."""
    hand = HANDS.get(harness)
    if hand is None or hand.write is None:
        quoted = "'" + content.replace("'", "'\\''") + "'"
        return shell(harness, asked, f"printf %s {quoted} > {WORKDIR}/{path}", text, reasoning)
    name, place, what = hand.write
    arguments = {place: f"{WORKDIR}/{path}", what: content}
    return Say(text, reasoning, [Call(find(asked, name), arguments)])


def done(harness: str, asked: Asked, text: str = "Done.", reasoning: str = "") -> Say:
    """The last word."""
    hand = HANDS.get(harness)
    if harness == "mini-swe-agent":
        return shell(harness, asked, "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT", text, reasoning)
    if hand is None or (harness in TEXT and hand.shell[0] not in asked.tool_names):
        return Say(TEXT[harness](None, text), reasoning=reasoning)
    if hand.done is None:
        return Say(text, reasoning)
    return Say("", reasoning, [Call(find(asked, hand.done[0]), {hand.done[1]: text})])


def takes_tools(harness: str) -> bool:
    """Whether a request of this harness without tools is something beside the conversation."""
    return harness not in TEXT


Step = Callable[[Asked], Say]


def script(harness: str, steps: Sequence[Step]) -> Policy:
    """One step after the other, by how often the model has answered in the conversation; the last one is repeated.
    A request without tools (a title, a summary) gets a few words."""

    def policy(asked: Asked) -> Say:
        if takes_tools(harness) and not asked.tools:
            return Say("Notes on a file")
        return steps[min(asked.turn, len(steps) - 1)](asked)

    return policy


def rough(policy: Policy) -> Policy:
    """The same as a sampled model says it: a few words and a blank line first, JSON without spaces and with escapes,
    now and then tokens that no tokenizer would choose. Whoever renders that again gets other ids."""

    def rougher(asked: Asked) -> Say:
        say = policy(asked)
        calls = [
            Call(call.name, json.dumps(call.arguments, separators=(",", ":")))
            if isinstance(call.arguments, dict)
            else call
            for call in say.calls
        ]
        text = f"{say.text or 'Grüße, so it goes on.'}\n\n" if calls else say.text
        return replace(say, text=text, calls=calls, split=asked.turn % 2 == 1)

    return rougher


def standard(harness: str, *, reasoning: bool = False) -> Policy:
    """Write notes.txt, look at it, change it, copy it, say so. ``STANDARD`` is what must be there afterwards."""

    def why(text: str) -> str:
        return text if reasoning else ""

    return script(
        harness,
        [
            lambda a: write(harness, a, "notes.txt", "one\ntwo\n", reasoning=why("First the file.")),
            lambda a: shell(harness, a, "cat notes.txt", reasoning=why("Is it there?")),
            lambda a: shell(
                harness, a, "sed -i s/two/three/ notes.txt && cat notes.txt", reasoning=why("Now the change.")
            ),
            lambda a: shell(harness, a, "cp notes.txt copy.txt; wc -l copy.txt", reasoning=why("A copy.")),
            lambda a: done(harness, a, "Both files are written.", reasoning=why("That is all.")),
        ],
    )


INSTRUCTION = "Write notes.txt with the lines one and two, read it, make two three, copy it to copy.txt."
STANDARD = {"notes.txt": "one\nthree\n", "copy.txt": "one\nthree\n"}
