"""Every template, rendered: as the golden files have it, and without a field that Kubernetes does not know.

Run as a program it writes the golden files anew: ``PYTHONPATH=tests python -m test_kubernetes_templates``.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes.aio import client as models
from pydantic import BaseModel

from forge_server.controller.launcher import TrainerJob
from forge_server.domain.errors import ConfigError
from forge_server.scheduler.kubernetes.client import Pods
from forge_server.services import cluster, deployment
from forge_server.settings import Settings, load

GOLDEN = Path(__file__).parent / "golden" / "kubernetes"
IMAGE = "registry.example/forge-server:1"
OUTSIDE = {
    "FORGE_KUBERNETES__KUBECONFIG": "kubeconfig",
    "FORGE_KUBERNETES__POD_URL": "http://192.0.2.7:8400",
    "FORGE_TRAINER__LAUNCHER": "local",
    "FORGE_ENGINE__URL": "http://127.0.0.1:8000",
}
"""The server beside the cluster: less is rendered, and less allowed."""


def settings(environ: dict[str, str] | None = None) -> Settings:
    return load(GOLDEN / "forge.toml", environ or {})


def rendered() -> dict[str, str]:
    """File name -> content of everything that templates give."""
    here = settings()
    found = deployment.render(here, GOLDEN / "forge.toml", IMAGE, "forge-keys")
    outside = deployment.render(settings(OUTSIDE), GOLDEN / "forge.toml", IMAGE, "")
    found |= {f"outside-{name}": text for name, text in outside.items() if found[name] != text}
    found["attempt.yaml"] = deployment.dump([asyncio.run(_attempt(here))])
    found["attempt-image-volume.yaml"] = deployment.dump([asyncio.run(_attempt(here, image_volumes=True))])
    job = TrainerJob(
        run_id="ru-1",
        url="http://forge-server:8401/x",
        key="k",
        folder=Path("/var/lib/forge/data/trainer/ru-1"),
    )
    found["trainer-job.yaml"] = deployment.dump(cluster.trainer(here, "in-1")(job, "trainer-ru-1"))
    one = settings(
        {"FORGE_TRAINER__NODES": "1", "FORGE_TRAINER__DEVICE": "cpu", "FORGE_TRAINER__THREADS": "4"}
    )
    found["trainer-job-cpu.yaml"] = deployment.dump(cluster.trainer(one, "in-1")(job, "trainer-ru-1"))
    return found


async def _attempt(here: Settings, *, image_volumes: bool = False) -> dict[str, Any]:
    class Nothing(Pods):
        def __init__(self) -> None:
            self.namespace = "forge"

    made = await cluster.backend(here, Nothing(), "in-1", "http://192.0.2.7:8400")
    return made.manifest(cluster.specimen("at-1"), image_volumes=image_volumes)


def test_templates_give_what_the_golden_files_have() -> None:
    found = rendered()
    kept = {file.name: file.read_text() for file in GOLDEN.glob("*.yaml")}
    assert found.keys() == kept.keys()
    for name, text in found.items():
        assert text == kept[name], f"{name}: run this module as a program if that is meant"


KINDS: dict[str, type[BaseModel]] = {
    "ConfigMap": models.V1ConfigMap,
    "DaemonSet": models.V1DaemonSet,
    "Deployment": models.V1Deployment,
    "Job": models.V1Job,
    "NetworkPolicy": models.V1NetworkPolicy,
    "PersistentVolumeClaim": models.V1PersistentVolumeClaim,
    "Pod": models.V1Pod,
    "Role": models.V1Role,
    "RoleBinding": models.V1RoleBinding,
    "Secret": models.V1Secret,
    "Service": models.V1Service,
    "ServiceAccount": models.V1ServiceAccount,
    "StatefulSet": models.V1StatefulSet,
}


def documents() -> list[Any]:
    return [
        pytest.param(document, id=f"{file.name}-{document['kind']}-{document['metadata']['name']}")
        for file in sorted(GOLDEN.glob("*.yaml"))
        if "kustomization" not in file.name
        for document in yaml.safe_load_all(file.read_text())
    ]


@pytest.mark.parametrize("document", documents())
def test_kubernetes_knows_every_field(document: dict[str, Any]) -> None:
    """Unknown fields are dropped in silence, by the models and by API servers: they must come back."""
    read = KINDS[document["kind"]].model_validate(document)
    assert _without_empty(read.model_dump(by_alias=True, exclude_none=True)) == _without_empty(document)


def _without_empty(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_empty(each) for key, each in value.items() if each not in (None, [], {})}
    if isinstance(value, list):
        return [_without_empty(each) for each in value]
    return value


def test_attempts_get_no_token_no_names_and_no_more_rights_than_they_need() -> None:
    (pod,) = yaml.safe_load_all((GOLDEN / "attempt.yaml").read_text())
    spec = pod["spec"]
    assert spec["automountServiceAccountToken"] is False and spec["enableServiceLinks"] is False
    assert spec["dnsPolicy"] == "None" and spec["restartPolicy"] == "Never"
    (runner,) = spec["containers"]
    assert runner["resources"]["requests"]["memory"] == runner["resources"]["limits"]["memory"]
    assert "cpu" not in runner["resources"]["limits"]
    assert runner["securityContext"]["capabilities"] == {
        "drop": ["ALL"],
        "add": ["SETUID", "SETGID", "KILL", "CHOWN", "DAC_OVERRIDE"],
    }
    assert (spec["runtimeClassName"], spec["nodeSelector"]) == ("gvisor", {"pool": "agents"})


def test_the_labels_of_a_trainer_are_not_those_of_an_attempt() -> None:
    """The backend clears away what has its instance's label and no row."""
    for document in yaml.safe_load_all((GOLDEN / "trainer-job.yaml").read_text()):
        assert "forge-server/instance" not in str(document) and "forge-server/attempt" not in str(document)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"FORGE_KUBERNETES__NAMESPACE": ""}, "no namespace"),
        ({"FORGE_SCHEDULER__BACKEND": "local"}, "attempts are not to run in a cluster"),
        ({"FORGE_SERVER__DATA_DIR": "data", "FORGE_TRAINER__LAUNCHER": "local"}, "not on the volume"),
        ({"FORGE_ENGINE__MODEL": "/models/qwen"}, "not on the volume"),
        ({"FORGE_ENGINE__KIND": "managed"}, "has no engine"),
        ({"FORGE_STORE__URL": "postgresql+psycopg://u:p@h/db"}, "readable in a ConfigMap"),
        ({"FORGE_SECURITY__ADMIN_KEY": "k"}, "readable in a ConfigMap"),
        ({"FORGE_KUBERNETES__TEMPLATES": "nowhere"}, "no such folder"),
        (OUTSIDE | {"FORGE_KUBERNETES__POD_URL": "http://forge:8400"}, "needs an address"),
    ],
)
def test_what_cannot_hold_in_a_cluster_is_refused(changes: dict[str, str], what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        deployment.render(settings(changes), GOLDEN / "forge.toml", IMAGE, "")
    assert what in caught.value.what and caught.value.mend


def test_templates_of_ones_own_go_along(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "pod.yaml.j2").write_text("kind: Pod\n")
    file = tmp_path / "forge.toml"
    file.write_text((GOLDEN / "forge.toml").read_text() + 'templates = "mine"\n')
    server = list(yaml.safe_load_all(deployment.render(load(file, {}), file, IMAGE, "")["server.yaml"]))
    kept = next(d for d in server if d["metadata"]["name"] == "forge-server-templates")
    assert kept["data"] == {"pod.yaml.j2": "kind: Pod\n"}
    mounts = server[-1]["spec"]["template"]["spec"]["containers"][0]["volumeMounts"]
    assert {"name": "templates", "mountPath": "/etc/forge/mine"} in mounts


if __name__ == "__main__":
    for old in GOLDEN.glob("*.yaml"):
        old.unlink()
    for name, text in rendered().items():
        (GOLDEN / name).write_text(text)
