"""Images in pods: task images without glibc, Python or a bash, into which the runner and a real harness are brought.

The image of tasks has busybox and musl, and a program that needs musl. Nothing in it helps a harness, and nothing of
the harness may get in the way of the image's own programs.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness_lab import Asked, Call, Lab, Say, harness_lab
from kube import images
from kube.cluster import Cluster
from kube_rig import RUNNER, namespace

from forge_server import assets
from forge_server.environments import ensure_harness
from forge_server.harness.load import load
from forge_server.settings import KubernetesSettings, SchedulerSettings, ServerSettings

pytestmark = pytest.mark.kubernetes

MUSL = "localhost/musl:1"
NPM, PIP = "gemini-cli", "smolagents"
TASK = {"files": {"word.txt": "plum"}, "expect": {"answer.txt": "PLUM"}}
ONE_NODE = {"kubernetes.io/hostname": "node1"}


@pytest.fixture(scope="module")
def lab(cluster: Cluster) -> Iterator[Lab]:
    """A server whose attempts are pods on one node, where the images of two harnesses are."""
    brought = {name: f"localhost/forge-{name}:1" for name in (NPM, PIP)}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        cluster.load(images.musl(folder), ["node1"])
        for name, image in brought.items():
            spec = load(assets.folder("harness_specs") / name / "spec.yaml")
            assert spec.install is not None
            archive = images.forge(folder, image, ensure_harness(name, spec.install))
            cluster.load(archive, ["node1"])
            archive.unlink()
        with namespace(cluster) as name:
            kubernetes = KubernetesSettings(
                kubeconfig=str(cluster.user),
                namespace=name,
                image=MUSL,
                runner_image=RUNNER,
                harness_images=brought,
                pull_policy="Never",
                cpu="10m",
                memory_mb=1024,
                node_selector=ONE_NODE,
            )
            with harness_lab(
                folder,
                server=ServerSettings(host=cluster.machine, port=0, control_port=0, data_dir="data"),
                scheduler=SchedulerSettings(backend="kubernetes", heartbeat_s=2.0, grace_s=2.0),
                kubernetes=kubernetes,
            ) as made:
                yield made


def test_react_in_an_image_with_musl(lab: Lab) -> None:
    def policy(asked: Asked) -> Say:
        command = {"command": "capitals < word.txt > answer.txt; python3 --version; bash --version; id"}
        return (Say(calls=[Call("shell", command)]), Say("Done."))[asked.turn]

    result = lab.run("react", policy, instruction="Write the word in capitals.", **TASK)
    assert (result.outcome, result.reward) == ("completed", 1.0), result.explain()
    said = result.asked[1].last
    assert "Python 3" in said and "GNU bash" in said and "(agent)" in said, said


def test_a_harness_from_npm(lab: Lab) -> None:
    """Its shell is a bash, which the image has not, and runs the image's own programs."""

    def policy(asked: Asked) -> Say:
        command = {
            "command": "capitals < word.txt > answer.txt && ldd /bin/capitals; echo ${BASH_VERSION:-none}"
        }
        return (
            Say(calls=[Call("read_file", {"file_path": "word.txt"})]),
            Say(calls=[Call("run_shell_command", command)]),
            Say("Done."),
        )[asked.turn]

    result = lab.run(NPM, policy, instruction="Write the word in capitals.", **TASK)
    assert (result.outcome, result.reward) == ("completed", 1.0), result.explain()
    assert result.violations == [] and result.drift == {"first": 1}, result.explain()


def test_a_harness_from_pypi(lab: Lab) -> None:
    def policy(asked: Asked) -> Say:
        text = (
            "print(bash(command='capitals < word.txt > answer.txt; cat answer.txt'))",
            "final_answer('PLUM')",
        )[asked.turn]
        return Say(f"Thought: So it is.\n<code>\n{text}\n</code>")

    result = lab.run(PIP, policy, instruction="Write the word in capitals.", **TASK)
    assert (result.outcome, result.reward) == ("completed", 1.0), result.explain()
    assert result.violations == [] and result.drift == {"first": 1}, result.explain()
