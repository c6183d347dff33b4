"""The server in the cluster, as `forge-server render` writes it: its own account, a read-only root, a user of its own.

The image borrows this machine's Python and this checkout, and there is neither DNS nor a proxy for Services here: what
is changed in the rendered documents is that and nothing else.
"""

import json
import sys
import sysconfig
import time
import urllib.error
import urllib.request
import uuid
from pathlib import Path
from typing import Any

import pytest
import yaml
from kube.cluster import Cluster
from kube_loop import HOSTUSR, hostusr
from kube_rig import RUNNER, apply

from forge_server.services import deployment
from forge_server.settings import load

pytestmark = pytest.mark.kubernetes

ROOT = Path(__file__).resolve().parents[1]
TOML = """
[server]
data_dir = "/var/lib/forge/data"
[scheduler]
backend = "kubernetes"
[kubernetes]
namespace = "{namespace}"
pod_url = "http://192.0.2.1:8400"
runner_image = "{runner}"
pull_policy = "Never"
"""


def test_a_server_in_the_cluster_sees_its_pods_by_its_own_account(cluster: Cluster, tmp_path: Path) -> None:
    namespace = f"inside-{uuid.uuid4().hex[:8]}"
    cluster.load(hostusr(tmp_path))
    file = tmp_path / "forge.toml"
    file.write_text(TOML.format(namespace=namespace, runner=RUNNER))
    found = deployment.render(load(file, {}), file, HOSTUSR, "")
    cluster.call("POST", "/api/v1/namespaces", {"metadata": {"name": namespace}})
    try:
        for name in ("rbac.yaml", "network-policy.yaml", "prepull.yaml", "server.yaml"):
            for document in yaml.safe_load_all(found[name]):
                if document["kind"] == "StatefulSet":
                    _borrow(document["spec"]["template"]["spec"], cluster)
                if document["kind"] == "DaemonSet":
                    for each in ("initContainers", "containers"):
                        for container in document["spec"]["template"]["spec"][each]:
                            container["imagePullPolicy"] = "Never"
                apply(cluster, namespace, document)
        pod = _until(cluster, namespace, "forge-server-0")
        url = f"http://{pod['status']['podIP']}:8401/readyz"
        _wait(lambda: _readyz(url)["cluster"][0], "the pods are listed")  # it lives before they are
        told = _readyz(url)
        assert told["cluster"] == (True, "pods are seen and can be made")
        assert told["database"][0]
        daemons = f"/apis/apps/v1/namespaces/{namespace}/daemonsets/forge-server-prepull"
        _wait(
            lambda: cluster.get(daemons)["status"].get("numberReady") == len(cluster.nodes), "images pulled"
        )
    finally:
        cluster.call("DELETE", f"/api/v1/namespaces/{namespace}")


def _borrow(spec: dict[str, Any], cluster: Cluster) -> None:
    """Programs of this machine, no volume claim, and the API server by its address."""
    (container,) = spec["containers"]
    packages = sysconfig.get_paths()["purelib"]
    folders = ["/usr", sys.base_prefix, packages, *(str(ROOT / n) for n in ("forge_server", "migrations"))]
    folders += [str(ROOT / name) for name in ("harness_specs", "k8s_templates", "tui")]
    for number, folder in enumerate(dict.fromkeys(folders)):
        if folder == "/usr" or not folder.startswith("/usr/"):
            container["volumeMounts"].append({"name": f"m{number}", "mountPath": folder, "readOnly": True})
            spec["volumes"].append({"name": f"m{number}", "hostPath": {"path": folder}})
    container["imagePullPolicy"] = "Never"
    container["command"] = [f"{sys.base_prefix}/bin/python3", "-m", "forge_server.cli"]
    host, _, port = cluster.server.removeprefix("https://").partition(":")
    container["env"] += [
        {"name": "PYTHONPATH", "value": f"{ROOT}:{packages}"},
        {"name": "KUBERNETES_SERVICE_HOST", "value": host},
        {"name": "KUBERNETES_SERVICE_PORT", "value": port},
    ]
    container["resources"] = {}
    for volume in spec["volumes"]:
        if volume.pop("persistentVolumeClaim", None):
            volume["emptyDir"] = {}


def _until(cluster: Cluster, namespace: str, name: str) -> dict[str, Any]:
    """The pod, once it is ready."""
    found: dict[str, Any] = {}

    def ready() -> bool:
        items = cluster.get(f"/api/v1/namespaces/{namespace}/pods")["items"]
        found.update(next((pod for pod in items if pod["metadata"]["name"] == name), {}))
        conditions = found.get("status", {}).get("conditions", [])
        return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)

    def logs() -> str:
        try:
            return str(cluster.get(f"/api/v1/namespaces/{namespace}/pods/{name}/log", raw=True))[-3000:]
        except urllib.error.HTTPError as error:
            return str(error)

    _wait(ready, "the server is ready", lambda: json.dumps(found.get("status"))[:2000] + logs())
    return found


def _wait(holds: Any, what: str, why: Any = str) -> None:
    until = time.monotonic() + 400
    while not holds():
        assert time.monotonic() < until, f"{what}: {why()}"
        time.sleep(0.2)


def _readyz(url: str) -> dict[str, tuple[bool, str]]:
    try:
        with urllib.request.urlopen(url, timeout=100) as answer:
            body = json.load(answer)
    except urllib.error.HTTPError as error:  # the engine is not configured
        body = json.load(error)
    return {check["name"]: (check["ok"], check["detail"]) for check in body["checks"]}
