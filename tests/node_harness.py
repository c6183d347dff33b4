"""Harnesses on Node and Bun in the lab, under watch: their specs as they are, but that the log says at the end whether
anybody was looked up. In a network of its own a sandbox has no name server, so that every look-up is datagrams to a
port where nobody listens, and the kernel counts those for each network.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import yaml
from harness_lab import Asked, Lab, Request, Result, harness_lab
from python_harness import check_refused, check_solved, looked_up, spec_of

from forge_server.harness.spec import FileSpec, Spec
from forge_server.settings import HarnessSettings, SchedulerSettings

RUN = """\
"$@"
status=$?
sent=$(awk '/^Udp:/ { for (i = 1; i <= NF; i++) if ($i == "OutDatagrams") at = i; last = $at } END { print last }' \\
    /proc/net/snmp)
echo
if [ "$sent" = 0 ]; then echo "LOOKED UP:"; else echo "LOOKED UP: somebody"; fi
echo "LEFT BEHIND: $(ps -e -o comm= | grep -vxE 'bwrap|sh|ps|grep|tr' | tr '\\n' ' ')"
exit $status
"""


def watch(spec: Spec) -> Spec:
    """The same harness, its datagrams counted."""
    return msgspec.structs.replace(
        spec,
        argv=("sh", "{home}/.watch/run.sh", *spec.argv),
        files=(*spec.files, FileSpec(path=".watch/run.sh", content=RUN)),
    )


@contextmanager
def watched_lab(folder: Path, spec: Spec, **more: Any) -> Iterator[Lab]:
    """A lab in which ``spec`` is watched, whatever specs ship. Heartbeats are so rare that a harness whose attempt has
    ended has the time to end by itself."""
    place = folder / "specs" / spec.name
    place.mkdir(parents=True)
    (place / "spec.yaml").write_text(yaml.safe_dump(msgspec.to_builtins(watch(spec)), sort_keys=False))
    seldom = SchedulerSettings(heartbeat_s=30.0, grace_s=30.0)
    paths = HarnessSettings(paths=(str(place.parent),))
    with harness_lab(folder, harness=paths, scheduler=seldom, **more) as lab:
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
    "looked_up",
    "spec_of",
    "task_of",
    "watched_lab",
]
