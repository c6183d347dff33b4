"""Brings a cluster up and down, and breaks it on purpose.

Everything runs in process, mount and network namespaces of its own, so that one kill ends every process, container
and mount. A pair of virtual interfaces joins the cluster to this machine: pods and nodes see the machine at
``machine`` and nothing beyond it; the machine sees the API server at its address. Services of this machine that
listen on loopback alone are out of the pods' reach.
"""

import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kube import configs
from kube.binaries import PATH, binaries

_CGROUPS = Path("/sys/fs/cgroup")
_CONTROLLERS = ("cpu", "cpuacct", "cpuset", "memory", "pids", "devices", "freezer", "blkio", "systemd")


class Cluster:
    """One cluster in the folder ``state``, which must not exist. ``nodes`` of 0: no kubelet, pods stay pending.

    ``admin`` and ``user`` are kubeconfig files; ``user`` is the plain user ``forge`` without any right.
    """

    def __init__(self, state: Path, *, nodes: int = 1, api: Sequence[str] = ()) -> None:
        self.state = state.resolve()
        self.nodes = [f"node{number + 1}" for number in range(nodes)]
        self._api = api
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def admin(self) -> Path:
        return self.state / "admin.kubeconfig"

    @property
    def user(self) -> Path:
        return self.state / "forge.kubeconfig"

    def up(self, images: Sequence[Path] = (), limit_s: float = 400.0) -> None:
        """Return when the API server answers, every node is ready for pods and ``images`` are loaded."""
        programs = binaries()
        self.state.mkdir(parents=True)
        number = _free_number()
        self.machine, address = f"10.250.{number}.2", f"10.250.{number}.1"
        subnet = f"10.244.{number}.0/24"
        ports = _free_ports(5 + len(self.nodes))
        self.server = f"https://{address}:{ports[2]}"
        configs.certificates(self.state / "pki", address)
        configs.access(self.state, self.server, self.nodes)
        configs.pod_network(self.state, subnet)
        for node, port in zip(self.nodes, ports[5:], strict=True):
            self._cgroups(node)
            configs.kubelet(self.state / f"{node}.yaml", self.state, f"/{self._cgroup}/{node}", port)
            configs.containerd(self.state, node)
        commands = configs.commands(self.state, programs, address, ports, self.nodes, self._api)
        hosts = f"127.0.0.1 localhost {' '.join(self.nodes)}\n"
        plan = {"commands": commands, "address": address, "gateway": self.machine, "hosts": hosts}
        (self.state / "plan.json").write_text(json.dumps(plan))
        self._start(number, address, subnet)
        self.until("the API server", lambda: self.get("/readyz", raw=True) == "ok", limit_s)
        if self.nodes:
            self.until(
                "containerd", lambda: all((self.state / f"{n}.sock").exists() for n in self.nodes), 180
            )
            for image in images:
                self.load(image)
            self.until_ready(limit_s)
        self.until("accounts", lambda: self.get("/api/v1/namespaces/default/serviceaccounts/default"), 180)

    def down(self) -> None:
        """End everything; the folder is removed."""
        if self._process is not None:
            os.kill(self._first, signal.SIGKILL)  # the first of its namespace: the kernel ends the rest
            self._process.wait(30)
            subprocess.run(["ip", "link", "del", self._link], capture_output=True)
        for controller in (*_CONTROLLERS, "unified"):
            _remove_cgroup(_CGROUPS / controller / self._cgroup)
        shutil.rmtree(self.state, ignore_errors=True)

    def until_ready(self, limit_s: float = 300.0) -> None:
        """Wait until every node takes pods."""
        self.until("the nodes", self._schedulable, limit_s)

    def load(self, image: Path, nodes: Sequence[str] = ()) -> None:
        """Bring an image archive to some nodes, or to every one."""
        for node in nodes or self.nodes:
            command = [
                "ctr",
                "-a",
                str(self.state / f"{node}.sock"),
                "-n",
                "k8s.io",
                "images",
                "import",
                str(image),
            ]

            def done(command: list[str] = command) -> bool:
                return subprocess.run(command, capture_output=True, env=_environ()).returncode == 0

            self.until(f"image {image.name}", done, 180)

    def kill(self, component: str, *, hold: bool = False) -> None:
        """SIGKILL ``etcd``, ``apiserver``, ``manager``, ``scheduler``, ``kubelet-nodeN`` or ``containerd-nodeN``;
        it is started again after a second, or with ``hold`` when it is released."""
        if hold:
            (self.state / f"hold.{component}").touch()
        self.signal(component, signal.SIGKILL)

    def release(self, component: str) -> None:
        (self.state / f"hold.{component}").unlink()

    def signal(self, component: str, number: int) -> None:
        """SIGSTOP makes a component half-dead: its connections stay open and silent."""
        pid = json.loads((self.state / "pids.json").read_text())[component]
        self.inside("kill", f"-{int(number)}", str(pid))

    def kill_containers(self, node: str) -> None:
        """SIGKILL everything that runs in the node's pods."""
        for folder, _, _ in os.walk(_CGROUPS / "pids" / self._cgroup / node):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                for pid in Path(folder, "cgroup.procs").read_text().split():
                    os.kill(int(pid), signal.SIGKILL)

    def inside(self, *command: str) -> str:
        """Run a command in the cluster's namespaces: it is on the node."""
        words = ["nsenter", "-t", str(self._first), "-p", "-m", "-n", "--", *command]
        done = subprocess.run(words, capture_output=True, text=True, env=_environ(), timeout=60)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def get(self, path: str, *, raw: bool = False) -> Any:
        return self.call("GET", path, raw=raw)

    def call(self, method: str, path: str, body: object = None, *, raw: bool = False) -> Any:
        """Ask the API server as administrator. Raises urllib.error.HTTPError for 4xx and 5xx."""
        config = json.loads(self.admin.read_text())
        headers = {"Authorization": "Bearer " + config["users"][0]["user"]["token"]}
        headers["Content-Type"] = "application/merge-patch+json" if method == "PATCH" else "application/json"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.server + path, data, headers, method=method)
        context = ssl.create_default_context(cafile=str(self.state / "pki" / "ca.crt"))
        with urllib.request.urlopen(request, timeout=10, context=context) as answer:
            text = answer.read().decode()
        return text if raw else json.loads(text)

    def _start(self, number: int, address: str, subnet: str) -> None:
        first = [sys.executable, str(Path(__file__).with_name("first.py")), str(self.state)]
        spaces = [
            "unshare",
            "-m",
            "-p",
            "-n",
            "-f",
            "--kill-child",
            "--mount-proc",
            "--propagation",
            "private",
        ]
        with (self.state / "first.log").open("ab") as log:
            self._process = subprocess.Popen(
                [*spaces, *first],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=_environ(),
            )
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        self.until("the namespaces", lambda: children.read_text().strip() != "", 30)
        self._first = int(children.read_text())
        own = os.readlink("/proc/self/ns/net")
        self.until("the network", lambda: os.readlink(f"/proc/{self._first}/ns/net") != own, 30)
        self._link = f"forge-k{number}"
        peer = ["peer", "name", "node0", "netns", str(self._first)]
        for words in (
            ["link", "add", self._link, "type", "veth", *peer],
            ["addr", "add", f"{self.machine}/30", "dev", self._link],
            ["link", "set", self._link, "up"],
            ["route", "add", subnet, "via", address],
        ):
            subprocess.run(["ip", *words], check=True, env=_environ())

    @property
    def _cgroup(self) -> str:
        """Of this cluster alone: kubelets remove the groups of pods that they do not know."""
        return f"forge-kube-{hashlib.sha256(str(self.state).encode()).hexdigest()[:12]}"

    def _cgroups(self, node: str) -> None:
        for controller in _CONTROLLERS:
            if not (_CGROUPS / controller).is_dir():
                continue
            for folder in (_CGROUPS / controller / self._cgroup, _CGROUPS / controller / self._cgroup / node):
                folder.mkdir(exist_ok=True)
                if controller == "cpuset":
                    for name in ("cpuset.cpus", "cpuset.mems"):
                        (folder / name).write_text((_CGROUPS / controller / name).read_text())

    def _schedulable(self) -> bool:
        nodes = self.get("/api/v1/nodes")["items"]
        return len(nodes) == len(self.nodes) and all(
            not node["spec"].get("taints")
            and any(c["type"] == "Ready" and c["status"] == "True" for c in node["status"]["conditions"])
            for node in nodes
        )

    def until(self, what: str, holds: Callable[[], object], limit_s: float = 180.0) -> None:
        """Wait until ``holds`` is true and raises no OSError."""
        until = time.monotonic() + limit_s
        last: Exception | None = None
        while time.monotonic() < until:
            try:
                if holds():
                    return
            except OSError as error:
                last = error
            if self._process is not None and self._process.poll() is not None:
                raise RuntimeError((self.state / "first.log").read_text()[-2000:])
            time.sleep(0.1)
        raise TimeoutError(f"{what} did not come within {limit_s:g} s ({last}); logs are in {self.state}")


def _environ() -> dict[str, str]:
    return {**os.environ, "PATH": f"{os.environ['PATH']}:{PATH}"}


def _free_number() -> int:
    """A number for addresses that no route of this machine uses."""
    routes = subprocess.run(
        ["ip", "route"], capture_output=True, text=True, env=_environ(), check=True
    ).stdout
    links = subprocess.run(
        ["ip", "-o", "link"], capture_output=True, text=True, env=_environ(), check=True
    ).stdout
    for number in range(1, 250):
        if f"10.250.{number}." not in routes and f"forge-k{number}@" not in links:
            return number
    raise RuntimeError("every address range is taken")


def _free_ports(count: int) -> list[int]:
    """Nobody else listens in the cluster's network; no connection begins at one of these before it is listened on."""
    return random.sample(range(20_000, 30_000), count)


def _remove_cgroup(top: Path) -> None:
    for _ in range(50):
        if not top.is_dir():
            return
        for folder in sorted((p for p in top.rglob("*") if p.is_dir()), key=lambda p: -len(p.parts)):
            try:
                folder.rmdir()
            except OSError:
                break
        try:
            top.rmdir()
        except OSError:
            time.sleep(0.1)
