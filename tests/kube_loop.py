"""The whole loop's parts for a real cluster of this machine: attempts are pods, with react or a harness from npm, the
trainer is a Job that borrows this machine's veRL and files, the server is a process outside, whose ports outlive it."""

import json
import re
from pathlib import Path
from typing import Any

from kube import images
from kube.cluster import Cluster
from kube_rig import BUSYBOX, RUNNER
from ports import free_port
from whole_loop import Lab

from forge_server import assets
from forge_server.environments import ensure_harness
from forge_server.harness.load import load

HOSTUSR = "localhost/hostusr:1"
NPM = "pi"
"""The one with the shortest prompt: it fits into the window of a tiny model whose tokens are short."""
NPM_IMAGE = f"localhost/forge-{NPM}:1"
SETTINGS = """
[kubernetes]
kubeconfig = "{kubeconfig}"
namespace = "{namespace}"
image = "{image}"
runner_image = "{runner}"
harness_images = {{{npm} = "{npm_image}"}}
trainer_image = "{trainer}"
templates = "templates"
pull_policy = "Never"
cpu = "10m"
memory_mb = 512
volume_path = "{volume}"
"""


def hostusr(folder: Path) -> Path:
    """An image that borrows the machine's programs: they are mounted at ``/usr``."""
    root = folder / "hostusr"
    for name in ("usr", "tmp", "etc", "root"):
        (root / name).mkdir(parents=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    (root / "tmp").chmod(0o1777)
    (root / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    return images.pack(root, HOSTUSR, folder / "hostusr.tar")


def npm_image(folder: Path) -> Path:
    """The image that brings the harness from npm, with its Node."""
    spec = load(assets.folder("harness_specs") / NPM / "spec.yaml")
    assert spec.install is not None
    return images.forge(folder, NPM_IMAGE, ensure_harness(NPM, spec.install))


def trainer_template(folder: Path, environment: Path) -> None:
    """Ours, on this machine's veRL and files instead of an image with veRL and a volume claim."""
    text = (assets.folder("k8s_templates") / "trainer-job.yaml.j2").read_text()
    python = (environment / "bin" / "python").resolve().parents[1]
    shown = ["/usr", *(str(path) for path in (environment, python) if not path.is_relative_to("/usr"))]
    mounts = "".join(
        f"        - {{name: m{number}, mountPath: {json.dumps(path)}, readOnly: true}}\n"
        for number, path in enumerate(shown)
    )
    volumes = "".join(
        f"      - name: m{number}\n        hostPath: {{path: {json.dumps(path)}}}\n"
        for number, path in enumerate(shown)
    )
    path = json.dumps(f"{environment}/bin:/usr/bin:/bin")
    for old, new in (
        (
            "persistentVolumeClaim: {claimName: {{ volume | tojson }}}\n",
            "hostPath: {path: {{ volume_path | tojson }}}\n" + volumes,
        ),
        (
            "        - {name: shm, mountPath: /dev/shm}\n",
            "        - {name: shm, mountPath: /dev/shm}\n" + mounts,
        ),
        ("        env:\n", f"        env:\n        - {{name: PATH, value: {path}}}\n"),
    ):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    folder.mkdir()
    (folder / "trainer-job.yaml.j2").write_text(text)


def move_into(file: Path, cluster: Cluster, namespace: str, trainer: Path) -> None:
    """Change a forge.toml: from now on attempts and trainer are in ``namespace``. The folder above the file's is seen
    by the trainer under the same path; ``trainer`` is veRL's environment."""
    trainer_template(file.parent / "templates", trainer)
    pods, control = free_port(cluster.machine), free_port(cluster.machine)
    address = f'host = "{cluster.machine}"\ncontrol_host = "{cluster.machine}"\n'
    text = re.sub(r"(?m)^port = 0\b.*$", f"port = {pods}", file.read_text())
    text = re.sub(r"(?m)^control_port = 0\b.*$", f"control_port = {control}", text)
    for old, new in (
        ("[server]\n", f"[server]\n{address}"),
        ("[scheduler]\n", '[scheduler]\nbackend = "kubernetes"\n'),
        ("[trainer]\n", '[trainer]\nlauncher = "kubernetes"\n'),
    ):
        assert text.count(old) == 1, text
        text = text.replace(old, new)
    more = SETTINGS.format(
        kubeconfig=cluster.user,
        namespace=namespace,
        image=BUSYBOX,
        runner=RUNNER,
        npm=NPM,
        npm_image=NPM_IMAGE,
        trainer=HOSTUSR,
        volume=file.parent.parent,
    )
    file.write_text(text + more)


class ClusterLab(Lab):
    """The whole loop's lab with its attempts and its trainer in ``namespace`` of the cluster."""

    def __init__(self, folder: Path, model: Path, cluster: Cluster, namespace: str, trainer: Path) -> None:
        super().__init__(folder, model)
        self.cluster, self.namespace = cluster, namespace
        move_into(folder / "forge.toml", cluster, namespace, trainer)

    def objects(self, kind: str) -> list[dict[str, Any]]:
        root = "/apis/batch/v1" if kind == "jobs" else "/api/v1"
        found: list[dict[str, Any]] = self.cluster.get(f"{root}/namespaces/{self.namespace}/{kind}")["items"]
        return found
