"""A server with the Kubernetes backend whose cluster is wrong or away: told at once, or waited for."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from forge_server.app import running
from forge_server.domain.errors import ConfigError, SpecError
from forge_server.services import cluster
from forge_server.settings import load

TOML = """
[server]
port = 0
control_port = 0
[scheduler]
backend = "kubernetes"
[kubernetes]
kubeconfig = "kubeconfig"
pod_url = "http://192.0.2.1:8400"
runner_image = "localhost/runner:1"
"""


def kubeconfig(**changes: Any) -> str:
    plain = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "a",
        "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:1"}}],
        "users": [{"name": "u", "user": {"token": "x"}}],
        "contexts": [{"name": "a", "context": {"cluster": "c", "user": "u", "namespace": "n"}}],
    }
    return json.dumps(plain | changes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "kubeconfig").write_text(kubeconfig())
    (tmp_path / "forge.toml").write_text(TOML)
    return tmp_path


async def test_an_api_server_that_is_away_is_waited_for_and_told(folder: Path) -> None:
    async with running(load(folder / "forge.toml", {})) as server:
        async with httpx.AsyncClient(base_url=server.listening.control_url, timeout=120) as client:
            told = (await client.get("/readyz")).json()
        line = next(check for check in told["checks"] if check["name"] == "cluster")
        assert not told["ready"] and not line["ok"]
        assert "127.0.0.1:1" in line["detail"] or "not listed" in line["detail"]


@pytest.mark.parametrize(
    "content",
    [
        None,
        "",
        "a: b: c: [",
        "[1]",
        "\x00",
        kubeconfig(clusters=[]),
        kubeconfig(clusters=[{"name": "c", "cluster": {"server": "x"}}]),
        kubeconfig(users=[]),
        kubeconfig(**{"current-context": "other"}),
        kubeconfig(
            clusters=[{"name": "c", "cluster": {"certificate-authority-data": "!!", "server": "https://x"}}]
        ),
        kubeconfig(
            clusters=[{"name": "c", "cluster": {"certificate-authority": "/no", "server": "https://x"}}]
        ),
    ],
)
async def test_a_wrong_kubeconfig_is_told_by_its_name(folder: Path, content: str | None) -> None:
    file = folder / "kubeconfig"
    file.unlink() if content is None else file.write_text(content)
    with pytest.raises(ConfigError, match="no cluster can be reached") as caught:
        async with running(load(folder / "forge.toml", {})):
            pass
    assert caught.value.where == str(file) and "kubeconfig" in caught.value.mend


async def test_a_wrong_template_is_told_at_the_start(folder: Path) -> None:
    (folder / "mine").mkdir()
    (folder / "mine" / "pod.yaml.j2").write_text("kind: Pod\nspec: {{ imagee }}\n")
    (folder / "forge.toml").write_text(TOML + 'templates = "mine"\n')
    with pytest.raises(ConfigError, match="'imagee' is undefined") as caught:
        async with running(load(folder / "forge.toml", {})):
            pass
    assert caught.value.where.endswith("mine/pod.yaml.j2")


async def test_a_harness_that_no_image_brings_is_refused(folder: Path) -> None:
    run = '\n[[run]]\nname = "r"\ntaskset = "t"\nkind = "record"\nharness = "mini-swe-agent"\n'
    (folder / "forge.toml").write_text(TOML + run)
    with pytest.raises(SpecError, match="no image brings the harness 'mini-swe-agent'"):
        async with running(load(folder / "forge.toml", {})):
            pass
    images = 'harness_images = {mini-swe-agent = "localhost/mini:1"}\n'
    (folder / "forge.toml").write_text(TOML + images + run)
    async with running(load(folder / "forge.toml", {})) as server:
        assert server.pods is not None


async def test_pods_are_told_an_address() -> None:
    assert await cluster.by_address("http://localhost:8400") in (
        "http://127.0.0.1:8400",
        "http://[::1]:8400",
    )
    assert await cluster.by_address("http://10.1.2.3:80") == "http://10.1.2.3:80"
    assert await cluster.by_address("http://[fd00::1]:80") == "http://[fd00::1]:80"
    with pytest.raises(ConfigError, match=r"the name nowhere\.invalid has no address"):
        await cluster.by_address("http://nowhere.invalid:1")


def test_a_local_server_does_not_load_the_client() -> None:
    code = "import sys, forge_server.app; sys.exit('kubernetes' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "forge_server.cli", *words]
    return subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def test_render_writes_what_kubectl_applies(folder: Path) -> None:
    (folder / "forge.toml").write_text(TOML + 'namespace = "forge"\n')
    done = command(folder, "render", "deploy")
    assert done.returncode == 0 and done.stdout.endswith("next: kubectl apply -k deploy\n"), done.stderr
    listed = yaml.safe_load((folder / "deploy" / "kustomization.yaml").read_text())["resources"]
    assert listed == ["network-policy.yaml", "prepull.yaml", "rbac.yaml"]
    for name in listed:
        for document in yaml.safe_load_all((folder / "deploy" / name).read_text()):
            assert document["metadata"]["namespace"] == "forge"


def test_what_has_no_cluster_is_not_probed(folder: Path) -> None:
    (folder / "forge.toml").write_text("[server]\nport = 0\ncontrol_port = 0\n")
    done = command(folder, "check", "--probe")
    assert done.returncode == 2 and "there is no cluster to probe" in done.stderr
    done = command(folder, "render", "deploy")
    assert done.returncode == 2 and "not to run in a cluster" in done.stderr
