"""The table of faults, each against a real cluster of two nodes: what became of the attempts, and how long it took.

    python -m tests.prove.kubernetes_faults [--only WORDS]

Every fault brings its own server and namespace; after each, every rollout has ended once, no pod is left within a
minute, and no infra failure has a reward. Exit status 1 when one of them does not end as it must. Half an hour.
"""

import argparse
import asyncio
import logging
import sys
import tempfile
import time
import traceback
from pathlib import Path

import structlog
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kube import images
from kube.cluster import Cluster
from kube_faults import APART, LONG, WHOLE, Fault
from kube_rig import runner_image

LIMIT_S = 600.0


async def one(fault: Fault, cluster: Cluster, folder: Path) -> tuple[bool, str]:
    """Whether it ended as it must, and what came of it."""
    try:
        async with asyncio.timeout(LIMIT_S):
            return True, await fault(cluster, folder)
    except Exception as error:
        traceback.print_exc()
        return False, f"{type(error).__name__}: {error}"[:300]


def prove(root: Path, only: list[str]) -> tuple[Table, bool]:
    table = Table("fault", "ok", "attempts came to", "seconds", title="Faults of a real cluster")
    well = True
    cluster = Cluster(root / "cluster", nodes=2)
    try:
        cluster.up([images.pause(root), images.busybox(root), runner_image(root)])
        for number, (name, fault) in enumerate({**APART, **WHOLE, **LONG}.items()):
            if not any(words in name for words in only):
                continue
            began = time.monotonic()
            (root / str(number)).mkdir()
            ok, told = asyncio.run(one(fault, cluster, root / str(number)))
            well &= ok
            seconds = f"{time.monotonic() - began:.0f}"
            table.add_row(name, "yes" if ok else "NO", told, seconds)
            print(f"{name}: {'ok' if ok else 'FAILED'}: {told} ({seconds} s)", flush=True)
    finally:
        cluster.down()
    return table, well


def main() -> int:
    logging.disable(logging.WARNING)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=[""], help="faults whose name has these words")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="forge-faults-") as folder:
        table, well = prove(Path(folder), given.only)
    Console(width=120).print(table)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
