"""What `forge-server render` writes, and what `forge-server check` says, on a real cluster.

Kubernetes 1.20, without a network plugin that enforces policies: that the check fails here is its test. What it says
where they are enforced is tried with rules of routing in their place.
"""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kube.cluster import Cluster
from kube_rig import BUSYBOX, RUNNER, namespace
from ports import free_port
from test_kubernetes_templates import GOLDEN

pytestmark = pytest.mark.kubernetes

PLURALS = {"NetworkPolicy": "networkpolicies"}
LATER = {"Job": ("completionMode",), "Pod": (".image.reference", ".image.pullPolicy")}
"""Fields that 1.20 does not know, and drops; a server of ours asks before it counts on the image volumes."""

TOML = """
[server]
host = "{host}"
port = 0
[scheduler]
backend = "kubernetes"
[kubernetes]
kubeconfig = "{kubeconfig}"
namespace = "{namespace}"
image = "{image}"
runner_image = "{runner}"
pull_policy = "Never"
cpu = "10m"
"""


def test_a_real_cluster_takes_every_rendered_document(cluster: Cluster) -> None:
    """Created, but for good only in the cluster's mind (``dryRun``); nothing that was said is lost on the way."""
    with namespace(cluster) as name:
        seen = set()
        for file in sorted(GOLDEN.glob("*.yaml")):
            for document in yaml.safe_load_all(file.read_text()):
                if document["kind"] == "Kustomization":
                    continue
                document["metadata"]["namespace"] = name
                document["metadata"]["name"] += "-dry"
                kept = _rehearse(cluster, name, document)
                lost = [path for path in _paths(document) if path not in set(_paths(kept))]
                later = LATER.get(document["kind"], ())
                assert [path for path in lost if not path.endswith(later)] == [], file.name
                seen.add(document["kind"])
        assert len(seen) >= 12


def _rehearse(cluster: Cluster, namespace: str, document: dict[str, Any]) -> dict[str, Any]:
    if document["kind"] == "Pod":  # admission wants to see them; the templates name them, clusters bring them
        for missing in ("runtimeClassName", "priorityClassName"):
            document["spec"].pop(missing, None)
    version = document["apiVersion"]
    root = "/api/v1" if version == "v1" else f"/apis/{version}"
    plural = PLURALS.get(document["kind"], document["kind"].lower() + "s")
    found: dict[str, Any] = cluster.call(
        "POST", f"{root}/namespaces/{namespace}/{plural}?dryRun=All", document
    )
    return found


def _paths(value: Any, path: str = "") -> Iterator[str]:
    """Where a document says something; a Secret's texts come back in base64."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _paths(each, f"{path}.{'data' if key == 'stringData' else key}")
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from _paths(each, f"{path}[{number}]")
    elif value not in (None, "", False):
        yield path


def check(folder: Path, *words: str) -> dict[str, tuple[bool, str]]:
    command = [sys.executable, "-m", "forge_server.cli", "check", "--json", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280, check=False)
    assert done.stdout, done.stderr
    return {line["name"]: (line["ok"], line["detail"]) for line in json.loads(done.stdout)}


def settings(cluster: Cluster, folder: Path, namespace: str, more: str = "") -> Path:
    text = TOML.format(
        host=cluster.machine, kubeconfig=cluster.user, namespace=namespace, image=BUSYBOX, runner=RUNNER
    )
    (folder / "forge.toml").write_text(text + more)
    return folder


def test_rights_and_admission_are_told(cluster: Cluster, tmp_path: Path) -> None:
    with namespace(cluster) as name:
        found = check(settings(cluster, tmp_path, name))
        assert found["cluster"][0] and "v1.20" in found["cluster"][1] and name in found["cluster"][1]
        assert found["rights"] == (
            True,
            "create pods, delete pods, get pods, get pods/log, list pods, watch pods",
        )
        assert found["admission"][0] and found["template"][0]
        assert "--probe" in found["network"][1]
        assert "sandbox" not in found

        (tmp_path / "trainer").mkdir()
        more = f'trainer_image = "x"\nvolume_path = "{tmp_path}"\n[trainer]\nlauncher = "kubernetes"\n'
        more = f'control_url = "http://{cluster.machine}:1"\n{more}'
        ok, told = check(settings(cluster, tmp_path, name, more))["rights"]
        assert not ok
        assert told.startswith(
            "not allowed: create jobs, create secrets, delete jobs, delete secrets, get jobs; apply rbac.yaml"
        )

        quota = {"metadata": {"name": "q"}, "spec": {"hard": {"pods": "0"}}}
        path = f"/api/v1/namespaces/{name}/resourcequotas"
        cluster.call("POST", path, quota)
        cluster.until("the quota counts", lambda: cluster.get(f"{path}/q").get("status", {}).get("used"))
        found = check(settings(cluster, tmp_path, name))
        assert found["admission"][0] and "quota" in found["admission"][1]

    found = check(settings(cluster, tmp_path, "default"))
    assert not found["rights"][0] and "create pods" in found["rights"][1]
    assert not found["admission"][0] and "forbidden" in found["admission"][1]


def test_an_api_server_that_is_away_is_told(cluster: Cluster, tmp_path: Path) -> None:
    folder = settings(cluster, tmp_path, "default")
    config = json.loads(cluster.user.read_text())
    config["clusters"][0]["cluster"]["server"] = f"https://{cluster.machine}:1"
    (tmp_path / "kubeconfig").write_text(json.dumps(config))
    text = (folder / "forge.toml").read_text().replace(str(cluster.user), "kubeconfig")
    (folder / "forge.toml").write_text(text)
    ok, told = check(folder)["cluster"]
    assert not ok and "does not answer" in told


def test_a_probe_tells_that_policies_are_not_enforced_here(cluster: Cluster, tmp_path: Path) -> None:
    with namespace(cluster) as name:
        port = free_port(cluster.machine)
        folder = settings(cluster, tmp_path, name)
        file = folder / "forge.toml"
        file.write_text(file.read_text().replace("port = 0", f"port = {port}"))
        found = check(folder, "--probe")
        assert found.get("network: server", (False,))[0], found
        ok, told = found["network: egress"]
        assert not ok
        assert "NetworkPolicy is not enforced here" in told
        assert "the API server" in told and "an open port of the machine" in told

        with walled(cluster, port):
            found = check(folder, "--probe")
        assert found.get("network: server", (False,))[0], found
        ok, told = found["network: egress"]
        assert ok, found
        assert "did not reach an open port of the machine" in told and "the API server" in told
        assert cluster.get(f"/api/v1/namespaces/{name}/pods")["items"] == []

        more = 'pod_url = "http://192.0.2.1:8400"\n'
        found = check(settings(cluster, tmp_path, name, more), "--probe")
        assert "network: server" in found, found
        assert not found["network: server"][0] and "mend pod_url" in found["network: server"][1]


@contextlib.contextmanager
def walled(cluster: Cluster, port: int) -> Iterator[None]:
    """Of this machine pods reach one port, of the API server's none: what policies would do, by rules of routing."""
    number = cluster.machine.split(".")[2]
    pods, api = f"10.244.{number}.0/24", f"10.250.{number}.1"
    rules = [
        [
            "pref",
            "10",
            "from",
            pods,
            "to",
            cluster.machine,
            "ipproto",
            "tcp",
            "dport",
            str(port),
            "lookup",
            "main",
        ],
        ["pref", "20", "from", pods, "blackhole"],
        ["pref", "30", "from", api, "to", pods, "blackhole"],
    ]
    for rule in rules:
        cluster.inside("ip", "rule", "add", *rule)
    try:
        yield
    finally:
        for rule in rules:
            cluster.inside("ip", "rule", "del", *rule)
