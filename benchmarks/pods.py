"""Thousands of pods in flight through a real API server, etcd and scheduler, moved by a kubelet that runs nothing.

    python benchmarks/pods.py [--pods 5000] [--churn 10] [--seconds 60] [--stir 300]

1. fill: the scheduler launches until N runners run
2. churn: a steady number of pods per second ends, some of them as Failed without a word; how well N holds, how long
   a freed slot waits for the next create, how late a clock of 5 ms strikes in the server's loop
3. calm, then stir: pods' conditions change and mean nothing; CPU beyond that of the calm stretch, per watch event
4. list: all pods are read anew, page by page

A stall is the CPU time that the loop's thread used between two strikes of the clock: on a machine with other work its
lateness is mostly the wait for a core, which is printed too. Runners are played; their heartbeats are left out.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))

NODES = 10
FAILED = 0.02
WAIT_S = 900.0
REACH = {"in_flight": 1.0, "event_us": 60.0, "stall_ms": 20.0, "rss_mb": 300.0, "slot_ms": 250.0}


class Child:
    """A process that takes orders."""

    def __init__(self, script: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        guard = threading.Timer(WAIT_S, self._process.kill)
        guard.start()
        try:
            line = self._process.stdout.readline()
        finally:
            guard.cancel()
        if not line:
            raise RuntimeError(f"{self._process.args} ended: {self._process.wait(10)}")
        found: dict[str, Any] = json.loads(line)
        return found

    def tell(self, do: str, **more: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **more}) + "\n")
        self._process.stdin.flush()

    def ask(self, do: str, **more: Any) -> dict[str, Any]:
        self.tell(do, **more)
        return self.answer()

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def figure(what: str, value: float, reach: float) -> bool:
    good = value <= reach
    print(
        f"{what}: {max(0.0, value):.2f}; to reach: {reach:g}: {'reached' if good else 'missed'}", flush=True
    )
    return good


def measure(server: Child, kubelet: Child, options: argparse.Namespace) -> bool:
    good = True
    filled = server.ask("full")
    print(
        f"fill: {options.pods} pods run after {filled['seconds']:.0f} s; memory {filled['memory']}",
        flush=True,
    )

    server.ask("open", clock=True)
    seen = kubelet.ask("churn", per_s=options.churn, failed=FAILED, seconds=options.seconds)
    found = server.ask("look")
    alive = seen["alive"]
    off = [100 * abs(count - options.pods) / options.pods for count in alive]
    print(
        f"churn: {seen['ended']} ended in {seen['seconds']:.0f} s, {seen['died']} of them without a word; pods alive"
        f" {min(alive)} to {max(alive)}, mean {statistics.mean(alive):.1f}; {found['ended']}"
    )
    slots = [1000 * s for s in found["slots"]]
    print(
        f"slot freed to create sent, ms: p50 {percentile(slots, 0.5):.0f}, p90 {percentile(slots, 0.9):.0f},"
        f" p99 {percentile(slots, 0.99):.0f} of {len(slots)}"
    )
    print(f"CPU {100 * found['cpu_s'] / found['seconds']:.0f} % of a core, {found['events']} events")
    stalls(found)
    good &= figure("pods in flight, worst of four looks a second, % off N", max(off), REACH["in_flight"])
    good &= figure("slot freed to create sent, p50, ms", percentile(slots, 0.5), REACH["slot_ms"])
    good &= figure("stall of the loop with churn, ms", 1000 * max(found["own"]), REACH["stall_ms"])
    good &= figure("RSS, MB", found["memory"]["now"], REACH["rss_mb"])

    server.ask("open", clock=False)
    threading.Event().wait(options.seconds / 2)
    calm = server.ask("look")
    rate = calm["cpu_s"] / calm["seconds"]
    print(f"calm: CPU {100 * rate:.1f} % of a core, {calm['events']} events")
    server.ask("open", clock=False)
    kubelet.ask("stir", per_s=options.stir, seconds=options.seconds / 2)
    stirred = server.ask("look")
    spent = stirred["cpu_s"] - rate * stirred["seconds"]
    print(f"stir: {stirred['events']} events, {stirred['events'] / stirred['seconds']:.0f} / s")
    good &= figure("CPU per watch event, us", 1e6 * spent / max(1, stirred["events"]), REACH["event_us"])

    server.ask("open", clock=True)
    listed = server.ask("list")
    found = server.ask("look")
    print(f"list: {listed['pods']} pods in {listed['seconds']:.1f} s; memory {found['memory']}")
    stalls(found)
    good &= figure("stall of the loop by a list, ms", 1000 * max(found["own"]), REACH["stall_ms"])
    return good


def stalls(found: dict[str, Any]) -> None:
    """Latest strikes of the clock, by the wall and by our own CPU."""
    print(
        "  stalls, ms: by the wall "
        + ", ".join(f"{1000 * s:.0f}" for s in found["gaps"][:-6:-1])
        + "; own "
        + ", ".join(f"{1000 * s:.1f}" for s in found["own"][:-6:-1])
        + "; the longest garbage collection {:.1f}, of generation {}, {} objects".format(
            1000 * found["collected"][0], *found["collected"][1:]
        )
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pods", type=int, default=5000)
    parser.add_argument("--churn", type=float, default=10.0, help="pods that end per second")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--stir", type=float, default=300.0, help="changes per second that mean nothing")
    options = parser.parse_args()
    try:
        from kube.cluster import Cluster
        from kube_rig import namespace
    except ImportError as error:
        print(f"not run: {error}")
        return 1
    with tempfile.TemporaryDirectory(prefix="forge-pods-") as folder:
        cluster = Cluster(Path(folder) / "state", nodes=0)
        children: list[Child] = []
        try:
            cluster.up()
            with namespace(cluster) as name:
                path = str(Path(folder) / "runners.sock")
                database = str(Path(folder) / "forge.db")
                server = Child("pods_server.py", database, str(cluster.user), name, str(options.pods), path)
                children.append(server)
                server.answer()
                children.append(Child("pods_kubelet.py", str(cluster.admin), name, str(NODES), path))
                children[1].answer()
                good = measure(*children, options)  # type: ignore[arg-type]
                print(f"load {os.getloadavg()[0]:.1f} at the end")
                for child in reversed(children):
                    child.end()
        finally:
            for child in children:
                child.end()
            cluster.down()
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
