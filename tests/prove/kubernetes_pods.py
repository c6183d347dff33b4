"""Two hundred real pods, thirty at a time, from their row to their end; how long each part of their start takes.

    python -m tests.prove.kubernetes_pods [--pods 200] [--in-flight 30] [--nodes 2]

Every attempt is a real pod in an image that has busybox and nothing else; the harness is react, the model a script. A
watch of its own notes when a pod was first seen to have a node and to run. All must end well, no pod may be left.
"""

import argparse
import asyncio
import contextlib
import itertools
import logging
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from kube import images
from kube.cluster import Cluster
from kube_rig import KubeRig, kube_rig, runner_image
from scheduler_rig import solve

from forge_server.scheduler.kubernetes.client import Pods
from forge_server.scheduler.kubernetes.manifests import DOMAIN

GROUP = 10
MEMORY_MB = 256
STEPS = ("row", "created", "node", "runs", "joined", "harness")
"""Of an attempt's start: its row is written; the API server has the pod; the pod has a node; the runner's container
runs; the runner has its plan; the harness is started."""
SHARES = (50, 90, 99, 100)


class Moments:
    """When each attempt came to each step, by this machine's clock."""

    def __init__(self) -> None:
        self.at: dict[str, dict[str, float]] = {}

    def note(self, attempt_id: str, step: str, at: float) -> None:
        self.at.setdefault(attempt_id, {}).setdefault(step, at)

    async def watch(self, kube: KubeRig) -> None:
        pods = await Pods.connect(str(kube.cluster.admin), "", kube.namespace)
        try:
            version = ""
            while True:
                version = version or (await pods.page(DOMAIN_ALL)).metadata.resource_version
                async with contextlib.aclosing(pods.watch(DOMAIN_ALL, version, 300.0, 300.0)) as batches:
                    async for seen in batches:
                        for one in seen:
                            version = one.pod.metadata.resource_version
                            name, now = one.pod.metadata.name, time.time()
                            if one.type == "ADDED":
                                self.note(name, "created", now)
                            if one.pod.spec.node_name:
                                self.note(name, "node", now)
                            if any(c.state.running is not None for c in one.pod.status.container_statuses):
                                self.note(name, "runs", now)
        finally:
            await pods.close()

    def events(self, kube: KubeRig) -> None:
        names = {"attempt_queued": "row", "attempt_starting": "joined", "attempt_running": "harness"}
        for row in kube.it.rows:
            if row.kind in names and row.attempt_id is not None:
                self.note(row.attempt_id, names[row.kind], row.at)


DOMAIN_ALL = f"app.kubernetes.io/managed-by={DOMAIN}"


def table(moments: Moments) -> str:
    """Percentiles of each step's time since the one before, and of the whole."""
    whole = [m for m in moments.at.values() if all(step in m for step in STEPS)]
    pairs = [*itertools.pairwise(STEPS), (STEPS[0], STEPS[-1])]
    lines = [f"{'seconds':22}" + "".join(f"{f'p{share}' if share < 100 else 'most':>8}" for share in SHARES)]
    for before, after in pairs:
        took = [m[after] - m[before] for m in whole]
        cells = "".join(f"{value:8.2f}" for value in np.percentile(took, SHARES))
        lines.append(f"{f'{before} -> {after}':22}{cells}")
    return "\n".join([*lines, f"of {len(whole)} attempts"])


async def prove(cluster: Cluster, folder: Path, count: int, in_flight: int) -> bool:
    began = time.monotonic()
    moments, most = Moments(), 0
    small = {"memory_mb": MEMORY_MB}
    async with kube_rig(cluster, folder, in_flight=in_flight, startup_s=300.0, plan=small) as kube:
        it = kube.it
        it.model = solve
        watching = asyncio.create_task(moments.watch(kube))
        for _ in range(count // GROUP):
            await it.group(n=GROUP)
        while len(it.of("rollout_ended")) < count:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(it.changed.wait(), 10.0)
            it.changed.clear()
            most = max(most, len(it.scheduler.live))
            if time.monotonic() - began > 60.0 + 30.0 * count:
                raise TimeoutError(f"{len(it.of('rollout_ended'))} of {count} have ended")
        ended = Counter(f"{row.data['outcome']}/{row.data['kind']}" for row in it.of("rollout_ended"))
        rewards = Counter(row.data["reward"] for row in it.of("rollout_ended"))
        seconds = time.monotonic() - began
        attempts = len(it.of("attempt_queued"))
        lost = Counter(row.data["kind"] for row in it.of("attempt_ended", outcome="infra_failure"))
        await kube.until_pods(lambda pods: pods == [], within=90.0)
        moments.events(kube)
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
    print(
        f"{count} rollouts in {seconds:.0f} s, {most} in flight at most: {dict(ended)}, rewards {dict(rewards)}"
    )
    print(f"{attempts} attempts, lost {dict(lost)}; no pod is left")
    print(table(moments))
    return ended == {"completed/ok": count} and rewards == {1.0: count} and most <= in_flight


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pods", type=int, default=200)
    parser.add_argument("--in-flight", type=int, default=30)
    parser.add_argument("--nodes", type=int, default=2)
    options = parser.parse_args()
    logging.disable(logging.INFO)
    with tempfile.TemporaryDirectory(prefix="forge-pods-") as name:
        folder = Path(name)
        cluster = Cluster(folder / "cluster", nodes=options.nodes)
        for part in ("images", "rig"):
            (folder / part).mkdir()
        try:
            cluster.up([make(folder / "images") for make in (images.pause, images.busybox, runner_image)])
            good = asyncio.run(prove(cluster, folder / "rig", options.pods, options.in_flight))
        finally:
            cluster.down()
    print(f"load {os.getloadavg()[0]:.1f} at the end")
    print("all ended well" if good else "NOT all ended well")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
