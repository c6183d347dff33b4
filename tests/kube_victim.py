"""A server to be killed: launches argv[5] endless attempts in namespace argv[3] of the cluster in folder argv[2], over
the database in folder argv[1], with the pod-facing listener at port argv[4]; says when half of them are up."""

import asyncio
import json
import sys
from pathlib import Path

from kube.cluster import Cluster
from kube_faults import Work
from kube_rig import kube_rig


async def main() -> None:
    folder, state, name, port, n = (
        Path(sys.argv[1]),
        Path(sys.argv[2]),
        sys.argv[3],
        sys.argv[4],
        int(sys.argv[5]),
    )
    cluster = Cluster(state)
    cluster.machine = json.loads((state / "plan.json").read_text())["gateway"]
    async with kube_rig(cluster, folder, within=name, port=int(port), in_flight=n) as kube:
        kube.it.model = Work()
        await kube.it.group(n=n, max_attempts=1)
        await kube.it.until(lambda: len(kube.it.of("attempt_running")) >= n // 2, 90)
        print("up", flush=True)
        await asyncio.Event().wait()


asyncio.run(main())
