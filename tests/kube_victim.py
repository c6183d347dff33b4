"""A server to be killed: FOLDER STATE NAMESPACE PORT N UP NAP.

Launches N endless attempts, which nap for NAP seconds at a time, in the namespace of the cluster in the folder STATE,
over the database in FOLDER, with the pod-facing listener at PORT; says when UP of them are up.
"""

import asyncio
import json
import sys
from pathlib import Path

from kube.cluster import Cluster
from kube_faults import Work
from kube_rig import kube_rig


async def main(folder: Path, state: Path, name: str, port: int, n: int, up: int, nap_s: float) -> None:
    cluster = Cluster(state)
    cluster.machine = json.loads((state / "plan.json").read_text())["gateway"]
    async with kube_rig(cluster, folder, within=name, port=port, in_flight=n) as kube:
        kube.it.model = Work(nap_s)
        await kube.it.group(n=n, max_attempts=1)
        await kube.it.until(lambda: len(kube.it.of("attempt_running")) >= up, 180)
        print("up", flush=True)
        await asyncio.Event().wait()


folder, state, name, port, n, up, nap_s = sys.argv[1:]
asyncio.run(main(Path(folder), Path(state), name, int(port), int(n), int(up), float(nap_s)))
