"""Runs the benchmarks, each in a process of its own, and prints one table of what was measured and the limits.

    python -m benchmarks [NAME...] [--quick]

Every benchmark prints its own details and, for each figure, one line ``WHAT: VALUE; to reach: LIMIT: VERDICT``.
Exit status: 0 when every limit was reached, else 1.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent


class Benchmark(NamedTuple):
    """``script`` and its arguments; ``quick`` are those of a short run, ``programs`` what it needs."""

    script: str
    arguments: tuple[str, ...] = ()
    quick: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()


BENCHMARKS = {
    "proxy": Benchmark(
        "proxy.py",
        ("--peers", "--latency"),
        ("--seconds", "1", "--repeat", "1", "--concurrency", "32"),
        ("gcc", "wrk"),
    ),
    "splice": Benchmark("splice.py", quick=("--repeat", "1", "--sessions", "8")),
    "forest": Benchmark("forest.py", quick=("--repeat", "1")),
    "session": Benchmark("session_size.py"),
    "acks": Benchmark("acks.py", quick=("--seconds", "2")),
    "pods": Benchmark(
        "pods.py",
        quick=("--pods", "200", "--seconds", "20", "--churn", "5"),
        programs=("etcd", "openssl", "ip"),
    ),
    "heartbeats": Benchmark("heartbeats.py", quick=("--runners", "500", "--seconds", "10")),
    "idle": Benchmark("idle.py", quick=("--seconds", "5")),
    "tui": Benchmark("tui.py", quick=("--seconds", "5", "--rounds", "1")),
}

_FIGURE = re.compile(r"^(?P<what>.+): (?P<value>[\d.,]+); to reach: (?P<limit>[\d.,]+): (?P<verdict>.+)$")


class Figure(NamedTuple):
    benchmark: str
    what: str
    value: str
    limit: str
    verdict: str


def figures(name: str, output: str) -> list[Figure]:
    """The figures in what a benchmark printed."""
    found = (_FIGURE.match(line) for line in output.splitlines())
    return [Figure(name, m["what"], m["value"], m["limit"], m["verdict"]) for m in found if m]


def run(name: str, quick: bool) -> list[Figure]:
    """Run one benchmark, its output shown as it comes; a failure is a figure too."""
    plan = BENCHMARKS[name]
    print(f"\n== {name}", flush=True)
    missing = [program for program in plan.programs if shutil.which(program) is None]
    if missing:
        verdict = f"not run: {', '.join(missing)} not installed"
        print(verdict, flush=True)
        return [Figure(name, "-", "-", "-", verdict)]
    command = [sys.executable, str(HERE / plan.script), *(plan.quick if quick else plan.arguments)]
    lines = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    found = figures(name, "".join(lines))
    return found or [Figure(name, "-", "-", "-", f"failed: exit status {process.returncode}")]


def table(found: Sequence[Figure]) -> str:
    rows = [("benchmark", "figure", "measured", "limit", ""), *found]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        f"{row[0]:{widths[0]}}  {row[1]:{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]:>{widths[3]}}  {row[4]}"
        for row in rows
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}; default: all")
    parser.add_argument("--quick", action="store_true", help="short runs: a look, not a measurement")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in BENCHMARKS]:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(BENCHMARKS)}")
    found = [figure for name in options.names or BENCHMARKS for figure in run(name, options.quick)]
    load = os.getloadavg()[0]
    print(f"\n{table(found)}\n\n{os.cpu_count()} cores, load {load:.1f} at the end")
    return 0 if all(figure.verdict == "reached" for figure in found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
