"""The files and command lines of a cluster's components.

Ground facts of version 1.20 on a machine with cgroup v1 and no right to raise limits: controller manager, scheduler
and kubelets start once the API server is ready (its first roles must exist); ``--use-service-account-credentials``
is needed, else the taint of a new node stays; containerd must not touch OOM scores.
"""

import base64
import json
import secrets
import subprocess
from collections.abc import Sequence
from pathlib import Path

Command = tuple[str, list[str]]

_GATES = "TTLAfterFinished=true"


def certificates(folder: Path, address: str) -> None:
    """An authority, the API server's and its kubelet client's certificates, the service accounts' key."""
    folder.mkdir(parents=True)

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    fresh = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    signed = ["-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "30"]
    openssl("req", "-x509", *fresh, "-days", "30", "-subj", "/CN=test", "-keyout", "ca.key", "-out", "ca.crt")
    names = f"IP:127.0.0.1,IP:10.96.0.1,IP:{address},DNS:localhost,DNS:kubernetes.default.svc"
    subjects = {
        "api": ("/CN=kube-apiserver", f"subjectAltName={names}\nextendedKeyUsage=serverAuth\n"),
        "kubelet": ("/O=system:masters/CN=kubelet-client", "extendedKeyUsage=clientAuth\n"),
    }
    for name, (subject, extensions) in subjects.items():
        (folder / f"{name}.ext").write_text(extensions)
        openssl("req", *fresh, "-subj", subject, "-keyout", f"{name}.key", "-out", f"{name}.csr")
        openssl(
            "x509", "-req", "-in", f"{name}.csr", *signed, "-extfile", f"{name}.ext", "-out", f"{name}.crt"
        )
    openssl("genrsa", "-out", "sa.key", "2048")


def kubeconfig(file: Path, server: str, authority: Path, token: str) -> None:
    data = base64.b64encode(authority.read_bytes()).decode()
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [{"name": "test", "cluster": {"server": server, "certificate-authority-data": data}}],
        "users": [{"name": "user", "user": {"token": token}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "user"}}],
    }
    file.write_text(json.dumps(content))
    file.chmod(0o600)


def access(state: Path, server: str, nodes: Sequence[str]) -> None:
    """A token and a kubeconfig for every component, the administrator and the plain user ``forge``."""
    groups = {"admin": "system:masters"} | dict.fromkeys(nodes, "system:nodes")
    users = {
        "admin": "admin",
        "forge": "forge",
        "manager": "system:kube-controller-manager",
        "scheduler": "system:kube-scheduler",
    } | {node: f"system:node:{node}" for node in nodes}
    lines = []
    for number, (name, user) in enumerate(users.items()):
        token = secrets.token_hex(16)
        lines.append(f'{token},{user},{number},"{groups.get(name, "")}"')
        kubeconfig(state / f"{name}.kubeconfig", server, state / "pki" / "ca.crt", token)
    tokens = state / "tokens.csv"
    tokens.write_text("\n".join(lines) + "\n")
    tokens.chmod(0o600)


def kubelet(file: Path, state: Path, cgroup: str, port: int) -> None:
    authentication = {
        "anonymous": {"enabled": False},
        "webhook": {"enabled": True},
        "x509": {"clientCAFile": f"{state}/pki/ca.crt"},
    }
    little = {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"}
    content = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": authentication,
        "authorization": {"mode": "Webhook"},
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": cgroup,
        "failSwapOn": False,
        "makeIPTablesUtilChains": False,
        "address": "127.0.0.1",
        "port": port,
        "healthzPort": 0,
        "readOnlyPort": 0,
        "oomScoreAdj": 0,
        "enforceNodeAllocatable": ["pods"],
        "evictionHard": {**little, "nodefs.inodesFree": "1%"},
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "maxPods": 110,
        "registryPullQPS": 0,
        "eventRecordQPS": 0,
        "kubeAPIQPS": 200,
        "kubeAPIBurst": 400,
        "nodeStatusUpdateFrequency": "4s",
        "nodeStatusReportFrequency": "30s",
    }
    file.write_text(json.dumps(content))


_CONTAINERD = """version = 2
root = "{state}/{node}/containerd"
state = "/run/containerd/{node}"
oom_score = 0
disabled_plugins = [{unused}]
[grpc]
  address = "{state}/{node}.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "localhost/pause:1"
  disable_apparmor = true
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
      SystemdCgroup = false
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{state}/cni"
"""


def containerd(state: Path, node: str) -> None:
    names = ("devmapper", "btrfs", "zfs", "aufs")
    unused = ",".join(f'"io.containerd.snapshotter.v1.{name}"' for name in names)
    text = _CONTAINERD.format(state=state, node=node, unused=unused)
    (state / f"{node}.toml").write_text(text)


def pod_network(state: Path, subnet: str) -> None:
    """Pods are on a bridge and reach the world by its gateway, without masquerading."""
    folder = state / "cni"
    folder.mkdir()
    ranges = [[{"subnet": subnet}]]
    bridge = {
        "type": "bridge",
        "bridge": "pods0",
        "isGateway": True,
        "isDefaultGateway": True,
        "ipMasq": False,
        "ipam": {"type": "host-local", "ranges": ranges, "dataDir": f"{state}/addresses"},
    }
    content = {"cniVersion": "0.4.0", "name": "pods", "plugins": [bridge]}
    (folder / "10-pods.conflist").write_text(json.dumps(content))


def commands(
    state: Path, programs: Path, address: str, ports: Sequence[int], nodes: Sequence[str], api: Sequence[str]
) -> list[Command]:
    """Every component's command, those that need nothing first."""
    etcd, peer, secure, manager, scheduler, *_ = ports
    store = f"http://127.0.0.1:{etcd}"
    pki = state / "pki"
    as_client = lambda name: [  # noqa: E731
        *("--kubeconfig", f"{state}/{name}.kubeconfig"),
        *("--authentication-kubeconfig", f"{state}/{name}.kubeconfig"),
        *("--authorization-kubeconfig", f"{state}/{name}.kubeconfig"),
        *("--bind-address", "127.0.0.1", "--port", "0", "--leader-elect=false"),
        *("--kube-api-qps", "200", "--kube-api-burst", "400"),
    ]
    found: list[Command] = [
        (
            "etcd",
            [
                *("etcd", "--data-dir", f"{state}/etcd"),
                *("--listen-client-urls", store, "--advertise-client-urls", store),
                *("--listen-peer-urls", f"http://127.0.0.1:{peer}"),
                *("--initial-advertise-peer-urls", f"http://127.0.0.1:{peer}"),
                *("--initial-cluster", f"default=http://127.0.0.1:{peer}"),
            ],
        ),
        (
            "apiserver",
            [
                *(f"{programs}/kube-apiserver", "--etcd-servers", store),
                *("--bind-address", "0.0.0.0", "--advertise-address", address, "--secure-port", str(secure)),
                *("--tls-cert-file", f"{pki}/api.crt", "--tls-private-key-file", f"{pki}/api.key"),
                *("--client-ca-file", f"{pki}/ca.crt", "--endpoint-reconciler-type", "none"),
                *("--kubelet-client-certificate", f"{pki}/kubelet.crt"),
                *("--kubelet-client-key", f"{pki}/kubelet.key"),
                *("--kubelet-preferred-address-types", "Hostname"),
                *("--token-auth-file", f"{state}/tokens.csv", "--authorization-mode", "Node,RBAC"),
                *("--allow-privileged=true", "--service-cluster-ip-range", "10.96.0.0/16"),
                *("--service-account-issuer", "https://kubernetes.default.svc"),
                *("--service-account-key-file", f"{pki}/sa.key"),
                *("--service-account-signing-key-file", f"{pki}/sa.key"),
                *("--enable-admission-plugins", "NodeRestriction,ResourceQuota,Priority"),
                *("--feature-gates", _GATES, "--profiling=false"),
                *api,
            ],
        ),
        *(
            (f"containerd-{node}", _with_own_logs(state, node, ["containerd", "-c", f"{state}/{node}.toml"]))
            for node in nodes
        ),
        (
            "manager",
            [
                *(
                    f"{programs}/kube-controller-manager",
                    *as_client("manager"),
                    "--secure-port",
                    str(manager),
                ),
                *("--service-account-private-key-file", f"{pki}/sa.key", "--root-ca-file", f"{pki}/ca.crt"),
                *("--use-service-account-credentials=true", "--feature-gates", _GATES),
                *("--node-monitor-grace-period", "20s", "--pod-eviction-timeout", "5s"),
            ],
        ),
        (
            "scheduler",
            [f"{programs}/kube-scheduler", *as_client("scheduler"), "--secure-port", str(scheduler)],
        ),
    ]
    for node in nodes:
        argv = [
            *(f"{programs}/kubelet", "--config", f"{state}/{node}.yaml"),
            *("--kubeconfig", f"{state}/{node}.kubeconfig", "--container-runtime", "remote"),
            *("--container-runtime-endpoint", f"unix://{state}/{node}.sock"),
            *("--root-dir", f"{state}/{node}/kubelet", "--cert-dir", f"{state}/{node}/pki"),
            *("--hostname-override", node, "--node-ip", address),
        ]
        found.append((f"kubelet-{node}", _with_own_logs(state, node, argv)))
    return found


def _with_own_logs(state: Path, node: str, argv: list[str]) -> list[str]:
    """In a mount namespace where ``/var/log/pods`` is the node's own: every minute a kubelet removes the logs of pods
    that it does not know. Other mounts go on being shared."""
    script = 'mkdir -p "$1" && mount --bind "$1" /var/log/pods && shift && exec "$@"'
    logs = f"{state}/own/logs-{node}"
    return ["unshare", "-m", "--propagation", "unchanged", "sh", "-c", script, "sh", logs, *argv]
