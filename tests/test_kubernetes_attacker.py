"""A pod whose agent attacks what is around it: the whole server and a real cluster, only the model is scripted.

What enforced each: docs/kubernetes.md, "What an agent can try". No NetworkPolicy is enforced in this cluster; what an
attempt must not reach is on loopback of another machine here, or asks for a key.
"""

import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from harness_lab import Lab, Result, Say, harness_lab
from kube.cluster import Cluster
from kube_rig import BUSYBOX, RUNNER, namespace

from forge_server.harness.spec import Spec
from forge_server.runner.confine import processes_of
from forge_server.scheduler.kubernetes.backend import user_of
from forge_server.settings import HarnessSettings, KubernetesSettings, SchedulerSettings, ServerSettings

pytestmark = pytest.mark.kubernetes

HOLES = ("LEAK", "REACHED", "WROTE", "KILLED", "GOT")
DISK_MB = 100


@pytest.fixture(scope="module")
def lab(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("attacker")
    spec = Spec(
        name="attacker",
        summary="",
        api="chat",
        argv=("{python}", "-I", "-S", "{home}/attack.py", "{instruction}"),
        env={"BASE": "{base_url}", "KEY": "{agent_key}"},
    )
    place = folder / "specs" / "attacker"
    place.mkdir(parents=True)
    told = msgspec.to_builtins(spec) | {"files": [{"path": "attack.py", "source": "attack.py"}]}
    (place / "spec.yaml").write_text(yaml.safe_dump(told))
    (place / "attack.py").write_text(Path(__file__).with_name("attack_pod.py").read_text())
    with namespace(cluster) as name:
        kubernetes = KubernetesSettings(
            kubeconfig=str(cluster.user),
            namespace=name,
            image=BUSYBOX,
            runner_image=RUNNER,
            pull_policy="Never",
            cpu="10m",
            memory_mb=160,
            disk_mb=DISK_MB,
        )
        with harness_lab(
            folder,
            server=ServerSettings(host=cluster.machine, port=0, control_port=0, data_dir="data"),
            scheduler=SchedulerSettings(
                backend="kubernetes", heartbeat_s=0.5, grace_s=0.5, heartbeat_lost_s=8.0
            ),
            harness=HarnessSettings(paths=(str(place.parent),)),
            kubernetes=kubernetes,
        ) as made:
            yield made


def attack(lab: Lab, name: str, *, max_seconds: float = 60.0, **given: Any) -> Result:
    """Let it try. It has made a call before, so that everything is the policy's doing; nothing of it is left."""
    result = lab.run(
        "attacker",
        lambda asked: Say("hello"),
        instruction=json.dumps({"attack": name, **given}),
        expect={"answer.txt": "plum"},
        max_seconds=max_seconds,
    )
    assert result.outcome in ("completed", "policy_failure"), result.explain()
    assert not [line for line in result.log.splitlines() if line.startswith(HOLES)], result.log
    assert result.reward in (0.0, None), result.explain()
    for attempt in lab.client.rollout(result.rollout_id).attempts:
        eventually_none(user_of(attempt.id))
    return result


def eventually_none(uid: int) -> None:
    """No process is left: the cluster ends those of a pod that has not ended by itself."""
    until = time.monotonic() + 120
    while found := processes_of(uid):
        assert time.monotonic() < until, found
        time.sleep(0.05)


def test_it_reaches_nothing_but_inference_with_its_own_key(lab: Lab, cluster: Cluster) -> None:
    server = lab.server.listening
    with socket.socket() as database:
        database.bind(("127.0.0.1", 0))
        database.listen()
        engine = int(lab.engine.url.rsplit(":", 1)[1])
        control = int(server.control_url.rsplit(":", 1)[1])
        ports = {"engine": engine, "control": control, "database": database.getsockname()[1]}
        hidden = {
            f"{name} at {host}": (host, port)
            for name, port in ports.items()
            for host in (cluster.machine, "127.0.0.1")
        }
        result = attack(lab, "doors", server=server.pod_url, other="at-0123456789abcdef", hidden=hidden)
    lines = result.log.splitlines()
    assert lines[0] == "model 200" and result.outcome == "completed", result.explain()
    assert sum(line.startswith("closed") for line in lines) == len(hidden), result.log
    assert sum(line.startswith("refused") for line in lines) == 19, result.log


def test_its_key_ends_with_its_attempt(lab: Lab) -> None:
    result = attack(lab, "leave")
    assert (result.outcome, result.kind, result.exit_code) == ("policy_failure", "harness_exit", 3)
    request = next(r for r in result.requests if r.method == "POST")
    (attempt,) = lab.client.rollout(result.rollout_id).attempts
    again = urllib.request.Request(
        f"{lab.server.listening.pod_url}/a/{attempt.id}{request.path}",
        request.body,
        {"authorization": request.headers["authorization"]},
    )
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(again, timeout=120)
    assert caught.value.code == 409


def test_it_reads_no_secret_and_writes_only_what_is_its_own(lab: Lab) -> None:
    result = attack(lab, "secrets")
    assert result.outcome == "completed", result.explain()
    assert "closed /forge-join/token" in result.log, result.log
    assert "CapEff:\\t0000000000000000" in result.log and "NoNewPrivs:\\t1" in result.log, result.log
    assert result.log.count("refused") == 5, result.log


def test_what_it_leaves_running_is_dead_before_the_verifier(lab: Lab) -> None:
    result = attack(lab, "linger")
    assert result.outcome == "completed" and result.reward == 0.0, result.explain()
    assert "answer.txt differs" in result.logs["verifier"], result.logs


def test_what_it_plants_is_gone_before_the_verifier(lab: Lab) -> None:
    result = attack(lab, "plant")
    assert result.outcome == "completed" and result.reward == 0.0, result.explain()


@pytest.mark.parametrize(
    ("name", "kinds", "seconds", "given"),
    [
        ("kill", {"harness_exit"}, 60, {}),
        ("memory", {"oom_agent"}, 60, {}),
        ("processes", {"ok"}, 60, {}),
        ("ports", {"agent_timeout", "runner_lost"}, 12, {}),
        ("disk", {"runner_lost"}, 300, {"mb": DISK_MB + 60}),
    ],
)
def test_its_failure_stays_its_own(
    lab: Lab, name: str, kinds: set[str], seconds: float, given: dict[str, Any]
) -> None:
    result = attack(lab, name, max_seconds=seconds, **given)
    assert result.kind in kinds, result.explain()
