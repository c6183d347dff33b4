"""The three images of the Dockerfile, built with buildah and used: the server runs in a real cluster, as `forge-server
render` writes it, with the images of the runner and of a harness for its attempts.

    python -m tests.prove.dockerfile

One rollout with react and one with a harness from npm must solve a task in an image that has musl and busybox alone.
What is changed in the rendered files: the API server's and the pod's own address instead of Services, which need a
proxy that the cluster has not, and no volume claim. Exit status 1 when anything is not as it should be. A quarter of an
hour; wants buildah and mmdebstrap.
"""

import json
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import yaml
from harness_lab import verifier
from kube import images
from kube.buildah import Buildah, buildah
from kube.cluster import Cluster
from kube_rig import apply
from scripted_engine import Asked, Call, Say, ScriptedEngine

from forge_server.client.http import ForgeClient
from forge_server.client.schemas import RolloutView, TaskCreate
from forge_server.services import deployment
from forge_server.settings import load

ROOT = Path(__file__).resolve().parents[2]
HARNESS = "gemini-cli"
IMAGES = {name: f"localhost/built-{name}:1" for name in ("server", "runner", "harness")}
SHELLS = {"react": "shell", HARNESS: "run_shell_command"}
NAMESPACE, KEYS, ADMIN_KEY = "built", "keys", "of-this-proof-alone"
TOML = f"""
[server]
data_dir = "/var/lib/forge/data"
[engine]
kind = "attach"
url = "{{engine}}"
max_model_len = {{window}}
[scheduler]
backend = "kubernetes"
[kubernetes]
namespace = "{NAMESPACE}"
pod_url = "http://forge-server:8400"
runner_image = "{IMAGES["runner"]}"
image = "localhost/musl:1"
harness_images = {{{{{HARNESS} = "{IMAGES["harness"]}"}}}}
pull_policy = "Never"
cpu = "10m"
memory_mb = 1024
"""
SCRIPTED = "engine logprobs are of the sampling distribution"
"""The one check that a scripted engine must fail: it samples nothing."""
PATIENCE_S = 300.0


def build(builder: Buildah) -> None:
    """Every image, and what the server says in one."""
    builder.bases()
    for target, name in IMAGES.items():
        began = time.monotonic()
        builder.build(ROOT, target, name, {"HARNESS": HARNESS} if target == "harness" else {})
        print(f"{target} built in {time.monotonic() - began:.0f} s", flush=True)
    print(builder.sizes())
    print(builder.run(IMAGES["server"], "forge-server", "--version").strip())
    print(builder.run(IMAGES["server"], "id").strip(), flush=True)


def deploy(cluster: Cluster, engine: ScriptedEngine, folder: Path) -> dict[str, Any]:
    """The server's pod, once it is ready."""
    file = folder / "forge.toml"
    file.write_text(TOML.format(engine=engine.url, window=engine.window))
    found = deployment.render(load(file, {}), file, IMAGES["server"], KEYS)
    cluster.call("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    secret = {"metadata": {"name": KEYS}, "stringData": {"FORGE_SECURITY__ADMIN_KEY": ADMIN_KEY}}
    apply(cluster, NAMESPACE, {"apiVersion": "v1", "kind": "Secret", **secret})
    for name in ("rbac.yaml", "network-policy.yaml", "server.yaml"):
        for document in yaml.safe_load_all(found[name]):
            if document["kind"] == "StatefulSet":
                adapt(document["spec"]["template"]["spec"], cluster)
            apply(cluster, NAMESPACE, document)
    pod: dict[str, Any] = {}
    path = f"/api/v1/namespaces/{NAMESPACE}/pods/forge-server-0"

    def ready() -> bool:
        pod.update(cluster.get(path))
        conditions = pod["status"].get("conditions", [])
        return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)

    try:
        cluster.until("the server", ready, PATIENCE_S)
    except Exception:
        print(pod.get("status"), cluster.get(f"{path}/log", raw=True)[-3000:])
        raise
    return pod


def adapt(spec: dict[str, Any], cluster: Cluster) -> None:
    (container,) = spec["containers"]
    host, _, port = cluster.server.removeprefix("https://").partition(":")
    container["env"] += [
        {"name": "KUBERNETES_SERVICE_HOST", "value": host},
        {"name": "KUBERNETES_SERVICE_PORT", "value": port},
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "FORGE_KUBERNETES__POD_URL", "value": "http://$(POD_IP):8400"},
    ]
    container["resources"] = {}
    for volume in spec["volumes"]:
        if volume.pop("persistentVolumeClaim", None):
            volume["emptyDir"] = {}


def checked(cluster: Cluster, pod: dict[str, Any]) -> list[str]:
    """What is wrong says `forge-server check` in the server's container, as with `kubectl exec`."""
    container = pod["status"]["containerStatuses"][0]["containerID"].removeprefix("containerd://")
    words = ["ctr", "-a", str(cluster.state / f"{pod['spec']['nodeName']}.sock"), "-n", "k8s.io"]
    script = "forge-server check --json || true"
    told = cluster.inside(*words, "tasks", "exec", "--exec-id", "proof", container, "sh", "-c", script)
    lines = json.loads(told)
    for line in lines:
        print(f"{'ok  ' if line['ok'] else 'FAIL'} {line['name']}: {line['detail']}", flush=True)
    return [line["name"] for line in lines if not line["ok"]]


def solve(harness: str) -> Any:
    def policy(asked: Asked) -> Say:
        return (
            Say(calls=[Call(SHELLS[harness], {"command": "capitals < word.txt > answer.txt"})]),
            Say("Done."),
        )[min(asked.turn, 1)]

    return policy


def rollout(client: ForgeClient, harness: str) -> RolloutView:
    """One, to its end."""
    task = {
        "name": harness,
        "instruction": "Write the word of word.txt in capitals into answer.txt.",
        "files": {"word.txt": "plum"},
        "verify": {"script": verifier({"answer.txt": "PLUM"})},
    }
    client.create_tasks(TaskCreate(taskset="built", tasks=[task]))
    sizes = {"steps": 1, "groups": 1, "n": 1, "max_attempts": 1, "max_seconds": 120, "max_calls": 20}
    limits = {"max_tokens": 10_000_000, "max_completion_tokens": 8192}
    asked = {"name": harness, "kind": "record", "taskset": "built", "tasks": [harness], "harness": harness}
    run = client.create_run({**asked, **sizes, **limits})
    until = time.monotonic() + PATIENCE_S
    while client.run(run.id).ended_at is None:
        if time.monotonic() > until:
            raise TimeoutError(f"{harness}: {list(client.rollouts(run=run.id))}")
        time.sleep(0.5)
    (found,) = client.rollouts(run=run.id)
    if found.reward != 1.0:
        print("\n".join(f"{log.stream}: {log.text[-3000:]}" for log in client.logs(found.id)))
    return found


def use(builder: Buildah, folder: Path) -> bool:
    archives = [builder.export(name) for name in IMAGES.values()]
    cluster, engine = Cluster(folder / "cluster"), ScriptedEngine()
    (folder / "images").mkdir()
    try:
        cluster.up([make(folder / "images") for make in (images.pause, images.musl)] + archives)
        with engine.serving(cluster.machine):
            pod = deploy(cluster, engine, folder)
            control = f"http://{pod['status']['podIP']}:8401"
            for path in ("/healthz", "/readyz"):
                with urllib.request.urlopen(control + path, timeout=30) as answer:
                    print(path, answer.status, answer.read().decode())
            failed = checked(cluster, pod)
            ended = []
            with ForgeClient(control, ADMIN_KEY) as client:
                for harness in SHELLS:
                    engine.policy = solve(harness)
                    ended.append(rollout(client, harness))
                    print(
                        f"{harness}: {ended[-1].outcome}, reward {ended[-1].reward}, {ended[-1].calls} calls"
                    )
    finally:
        cluster.down()
    return failed == [SCRIPTED] and all((r.outcome, r.reward) == ("completed", 1.0) for r in ended)


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="forge-dockerfile-") as name:
        folder = Path(name)
        try:
            with buildah(folder / "buildah") as builder:
                build(builder)
                good = use(builder, folder)
        except RuntimeError as error:
            print(error)
            return 1
    print("all as it should be" if good else "NOT all as it should be")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
