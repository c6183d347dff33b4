"""What the tests of the harnesses on Node and Bun share beside ``python_harness``: a lab in which the log says what the
harness left running when it ended, and conversations by themselves.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import msgspec
from harness_lab import Asked, Lab, Request, Result
from python_harness import check_refused, check_solved, spec_lab, spec_of

from forge_server.harness.spec import FileSpec, Spec

RUN = """\
"$@"
status=$?
echo
echo "LEFT BEHIND: $(ps -e -o comm= | grep -vxE 'bwrap|sh|ps|grep|tr' | tr '\\n' ' ')"
exit $status
"""


@contextmanager
def watched_lab(folder: Path, spec: Spec, *, window: int = 131_072) -> Iterator[Lab]:
    """A lab for ``spec``; ``left_behind`` tells what its runs left."""
    files = (*spec.files, FileSpec(path=".watch/run.sh", content=RUN))
    argv = ("sh", "{home}/.watch/run.sh", *spec.argv)
    with spec_lab(folder, msgspec.structs.replace(spec, argv=argv, files=files), window=window) as lab:
        yield lab


def left_behind(result: Result) -> list[str]:
    """Programs that still ran when the harness had ended, and died with the sandbox."""
    return result.log.rpartition("LEFT BEHIND: ")[2].split("\n")[0].split()


def check_append_only(requests: Sequence[Request]) -> None:
    """Each request of one conversation extends the one before, as the harness sent it."""
    for earlier, later in pairwise(requests):
        before = earlier.json["messages"]
        assert later.json["messages"][: len(before)] == before
        assert later.json.get("tools") == earlier.json.get("tools")


def task_of(asked: Asked) -> str:
    """What the (sub-)agent that asks was told to do."""
    return next(str(message["content"]) for message in asked.messages if message["role"] == "user")


__all__ = [
    "check_append_only",
    "check_refused",
    "check_solved",
    "left_behind",
    "spec_of",
    "task_of",
    "watched_lab",
]
