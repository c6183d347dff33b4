"""Reads tasks from JSONL: one task a line, for tasks that need no folder of their own.

    {"name": "copy-7", "instruction": "Copy the word in word.txt to answer.txt.",
     "files": {"word.txt": "plum\\n"},
     "verify": {"answer_file": "answer.txt", "equals": "plum"}}

``verify`` takes one of three forms: ``answer_file`` with ``equals`` (white space at line ends and empty
lines at the end do not count; reward 1 or 0), ``script`` (the text of ``tests/test.sh``), or ``files`` with
a ``test.sh`` among them. ``gold`` is a shell script that solves the task; for ``answer_file`` it need not
be given. A file is its text, or ``{"base64": …}`` or ``{"text": …}`` with ``executable``. Unknown keys are
errors.
"""

import base64
import shlex
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Any

import msgspec

from forge_server.domain.errors import TaskError
from forge_server.harness.plan import WORKDIR, TaskFile
from forge_server.tasks.task import LARGEST, SOLVE, TEST, Task, check

_LIMIT = 65536  # bytes of an answer file that are looked at

_COMPARE = """\
#!/bin/bash
# Reward 1 when {shown} equals the expected answer, else 0. White space at line ends and empty lines at the
# end do not count.
plain() {{ head -c {limit} -- "$1" | tr -d '\\000' | sed 's/[[:space:]]*$//'; }}
expected=$(plain "${{FORGE_TESTS:-/tests}}/expected")
reward=0
if [ -f {file} ] && [ "$(plain {file})" = "$expected" ]; then reward=1; fi
echo "$reward" > "${{FORGE_LOGS:-/logs/verifier}}/reward.txt"
"""
_ANSWER = """\
#!/bin/bash
mkdir -p "$(dirname {file})"
cat > {file} <<'FORGE_ANSWER'
{answer}
FORGE_ANSWER
"""


class _Content(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    text: str | None = None
    base64: str | None = None
    executable: bool = False


class _Verify(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    answer_file: str | None = None
    equals: str | None = None
    script: str | None = None
    files: dict[str, str | _Content] | None = None


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    instruction: str
    verify: _Verify
    files: dict[str, str | _Content] = {}
    gold: str | None = None
    split: str | None = None
    workdir: str = WORKDIR
    agent_s: float | None = None
    verify_s: float | None = None
    memory_mb: int | None = None
    min_reward: float = 0.0
    image: str = ""
    metadata: dict[str, Any] = {}  # ours to keep, not to read


def read_lines(lines: Iterable[bytes], where: str) -> list[Task]:
    """The tasks of a JSONL text; empty lines are skipped. Raises TaskError naming the line."""
    tasks = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            given = msgspec.json.decode(line)
        except msgspec.DecodeError as error:
            raise TaskError(f"not JSON ({error})", where=f"{where}:{number}", mend="mend the line") from None
        tasks.append(read_line(given, f"{where}:{number}"))
    return tasks


def read_line(given: Any, where: str, *, known: bool = False) -> Task:
    """The task of one decoded line; ``known`` as for ``check``."""
    try:
        line = msgspec.convert(given, _Line)
    except msgspec.ValidationError as error:
        raise TaskError(str(error), where=where, mend="see `docs/tasks.md` for the keys of a line") from None
    for key in ("agent_s", "verify_s", "memory_mb"):
        value = getattr(line, key)
        if value is not None and not 0 < value <= LARGEST:
            raise TaskError(
                f"{key} is {value:g}", where=where, mend=f"write a number above 0, {LARGEST:,.0f} at most"
            )
    if not abs(line.min_reward) <= LARGEST:
        raise TaskError(
            f"min_reward is {line.min_reward:g}", where=where, mend=f"write a number, {LARGEST:,.0f} at most"
        )
    if not line.workdir.startswith("/"):
        raise TaskError(f"workdir is {line.workdir!r}", where=where, mend="write an absolute path")
    tests, answer = _tests(line.verify, where)
    gold = line.gold if line.gold is not None else answer
    task = Task(
        name=line.name,
        instruction=line.instruction,
        files=_files(line.files, where),
        tests=tests,
        gold=() if gold is None else (_script(SOLVE, gold),),
        definition=given,
        split=line.split,
        workdir=line.workdir,
        agent_s=line.agent_s,
        verify_s=line.verify_s,
        memory_mb=line.memory_mb,
        min_reward=line.min_reward,
        image=line.image,
    )
    return check(task, where, known=known)


def _tests(verify: _Verify, where: str) -> tuple[tuple[TaskFile, ...], str | None]:
    """The verifier's files, and the gold script that follows from them, if one does."""
    forms = [verify.answer_file is not None, verify.script is not None, verify.files is not None]
    if sum(forms) != 1 or forms[0] != (verify.equals is not None):
        raise TaskError(
            "verify needs exactly one form",
            where=where,
            mend="give answer_file with equals, or script, or files with a test.sh",
        )
    if verify.script is not None:
        return (_script(TEST, verify.script),), None
    if verify.files is not None:
        return _files(verify.files, where), None
    assert verify.answer_file is not None and verify.equals is not None
    file = shlex.quote("./" + _inside(verify.answer_file, where))
    script = _COMPARE.format(file=file, shown=verify.answer_file, limit=_LIMIT)
    if "\nFORGE_ANSWER\n" in f"\n{verify.equals}\n" or len(verify.equals.encode()) >= _LIMIT:
        raise TaskError("equals is not an answer", where=where, mend="compare with a script instead")
    expected = TaskFile(path="expected", content=verify.equals.encode())
    return (_script(TEST, script), expected), _ANSWER.format(file=file, answer=verify.equals)


def _script(path: str, text: str) -> TaskFile:
    return TaskFile(path=path, content=text.encode(), mode=0o755)


def _files(given: dict[str, str | _Content], where: str) -> tuple[TaskFile, ...]:
    return tuple(
        TaskFile(
            path=_inside(path, where),
            content=_content(value, f"{where}: {path}"),
            mode=0o755 if isinstance(value, _Content) and value.executable else 0o644,
        )
        for path, value in sorted(given.items())
    )


def _content(value: str | _Content, where: str) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if (value.text is None) == (value.base64 is None):
        raise TaskError("a file needs text or base64", where=where, mend="give exactly one of them")
    if value.text is not None:
        return value.text.encode()
    assert value.base64 is not None
    try:
        return base64.b64decode(value.base64, validate=True)
    except ValueError as error:  # no binascii.Error when a letter is not ASCII
        raise TaskError(f"not base64 ({error})", where=where, mend="encode the file again") from None


def _inside(path: str, where: str) -> str:
    """``path`` made plain; it must lie below the folder it is relative to."""
    plain = PurePosixPath(path)
    if plain.is_absolute() or ".." in plain.parts or not plain.parts or "\x00" in path or "\n" in path:
        raise TaskError(
            f"the path {path!r} leads elsewhere", where=where, mend="give a path below the folder"
        )
    return plain.as_posix()
