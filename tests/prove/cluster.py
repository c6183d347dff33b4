"""The demo on a real Kubernetes cluster: every attempt a pod, the trainer a Job; does the policy get better there too?

    python -m tests.prove.cluster [--seed 1] [--versions 12] [--folder FOLDER]

The cluster is brought up on this machine and taken down again. The warm start is made as the demo makes it; then the
server moves its attempts and its trainer into the cluster. Held-out reward must rise by 0.2, else exit status 1.
An hour or so, on two cores: each of some 2,000 attempts is a pod.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from msgspec.structs import replace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kube import images
from kube.cluster import Cluster
from kube_loop import hostusr, move_into
from kube_rig import namespace, runner_image

from forge_server import environments
from forge_server.demo import run as demo
from forge_server.demo import summary
from forge_server.demo.folder import Folder
from forge_server.demo.recipe import RECIPE
from forge_server.demo.screen import Screen

GAIN = 0.2
IN_FLIGHT = 6


def prove(root: Path, seed: int, versions: int) -> summary.Gain | None:
    """The demo of ``seed`` in the new folder ``root/demo``; the gain on held-out tasks."""
    engine, trainer = environments.ensure("engine"), environments.ensure("trainer")
    recipe = replace(
        RECIPE, learning=replace(RECIPE.learning, versions=versions, in_flight=IN_FLIGHT), heldout_rollouts=1
    )
    folder, screen = Folder(root / "demo"), Screen()
    folder.write_settings(recipe)
    demo.build_model(folder, trainer, recipe, seed, screen)
    demo.gather_traces(folder, engine, recipe, seed, screen)
    demo.warm_start(folder, trainer, recipe, seed, screen)
    cluster = Cluster(root / "cluster", nodes=2)
    (root / "images").mkdir()
    try:
        made = [make(root / "images") for make in (images.pause, images.busybox, runner_image, hostusr)]
        cluster.up(made)
        screen.say("cluster", f"two nodes, {cluster.server}")
        with namespace(cluster, jobs=True) as name:
            move_into(folder.settings, cluster, name, trainer)
            folder.add_run(demo.run_table(recipe, seed))
            figures, rollouts = demo.train(folder, screen)
    finally:
        cluster.down()
    folder.cli("check", "--data", demo.RUN, "--json")
    print("\n".join(summary.plot(summary.curve(figures))))
    print(f"{sum(r.attempts for r in rollouts)} pods for {len(rollouts)} rollouts")
    return summary.gain_of(rollouts, 0, versions)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--versions", type=int, default=RECIPE.learning.versions)
    parser.add_argument("--folder", type=Path, help="work here (default: a new temporary folder)")
    options = parser.parse_args()
    root = options.folder or Path(tempfile.mkdtemp(prefix="forge-cluster-"))
    root.mkdir(parents=True, exist_ok=True)
    print(f"working in {root}", flush=True)
    gain = prove(root, options.seed, options.versions)
    if gain is None:
        print("no held-out task was measured under both versions")
        return 1
    print(
        f"held-out reward {gain.before:.3f} -> {gain.after:.3f}, gain {gain.gain:+.3f} "
        f"[{gain.low:+.3f}, {gain.high:+.3f}] on {gain.tasks} tasks; needed: {GAIN}"
    )
    return 0 if gain.gain >= GAIN else 1


if __name__ == "__main__":
    raise SystemExit(main())
