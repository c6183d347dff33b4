"""The demo on a real Kubernetes cluster: every attempt a pod, one group in 32 with a harness from npm, the trainer a
Job; does the policy get better there too?

    python -m tests.prove.cluster [--seed 1] [--versions 12] [--folder FOLDER]

The cluster is brought up on this machine and taken down again. The warm start is made as the demo makes it; then the
server moves its attempts and its trainer into the cluster. Held-out reward with ``react``, whose ways the warm start
has taught, must rise by 0.2. With the harness from npm, whose prompt this policy has never seen, no rollout may be lost
or without a call, and some must be completed. Else exit status 1.
An hour or so, on two cores: each of some 2,000 attempts is a pod.
"""

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kube import images
from kube.cluster import Cluster
from kube_loop import NPM, hostusr, move_into, npm_image
from kube_rig import namespace, runner_image

from forge_server import environments
from forge_server.client.schemas import RolloutView
from forge_server.demo import run as demo
from forge_server.demo import summary
from forge_server.demo.folder import Folder
from forge_server.demo.recipe import RECIPE
from forge_server.demo.screen import Screen

GAIN = 0.2
IN_FLIGHT = 6
MIXTURE = {"react": 31, NPM: 1}


class Proof(NamedTuple):
    """The gain of ``react`` on held-out tasks, and what is wrong with rollouts of the harness from npm."""

    gain: summary.Gain | None
    wrong: list[str]


def foreign(rollouts: Sequence[RolloutView]) -> list[str]:
    """What is wrong with rollouts of the harness from npm, which no policy of the demo can do much with."""
    own = [rollout for rollout in rollouts if rollout.harness == NPM]
    print(f"{NPM}: " + ", ".join(f"{n} {kind}" for kind, n in Counter(r.kind for r in own).most_common()))
    lost = [f"{r.id}: {r.outcome}, {r.kind}" for r in own if r.outcome not in ("completed", "policy_failure")]
    silent = [f"{r.id}: no call" for r in own if r.calls == 0]
    done = any(rollout.outcome == "completed" for rollout in own)
    return [*lost, *silent, *([] if done else [f"no rollout of {NPM} was completed"])]


def prove(root: Path, seed: int, versions: int) -> Proof:
    """The demo of ``seed`` in the new folder ``root/demo``."""
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
        made = [
            make(root / "images") for make in (images.pause, images.busybox, runner_image, hostusr, npm_image)
        ]
        cluster.up(made)
        screen.say("cluster", f"two nodes, {cluster.server}")
        with namespace(cluster, jobs=True) as name:
            move_into(folder.settings, cluster, name, trainer)
            folder.add_run(demo.run_table(recipe, seed) | {"harness": "", "harnesses": MIXTURE})
            figures, rollouts = demo.train(folder, screen)
    finally:
        cluster.down()
    folder.cli("check", "--data", demo.RUN, "--json")
    print("\n".join(summary.plot(summary.curve(figures))))
    print(f"{sum(r.attempts for r in rollouts)} pods for {len(rollouts)} rollouts")
    taught = [rollout for rollout in rollouts if rollout.harness != NPM]
    return Proof(summary.gain_of(taught, 0, versions), foreign(rollouts))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--versions", type=int, default=RECIPE.learning.versions)
    parser.add_argument("--folder", type=Path, help="work here (default: a new temporary folder)")
    options = parser.parse_args()
    root = options.folder or Path(tempfile.mkdtemp(prefix="forge-cluster-"))
    root.mkdir(parents=True, exist_ok=True)
    print(f"working in {root}", flush=True)
    gain, wrong = prove(root, options.seed, options.versions)
    print("\n".join(wrong))
    if gain is None:
        print("no held-out task was measured under both versions")
        return 1
    print(
        f"held-out reward {gain.before:.3f} -> {gain.after:.3f}, gain {gain.gain:+.3f} "
        f"[{gain.low:+.3f}, {gain.high:+.3f}] on {gain.tasks} tasks; needed: {GAIN}"
    )
    return 0 if gain.gain >= GAIN and not wrong else 1


if __name__ == "__main__":
    raise SystemExit(main())
