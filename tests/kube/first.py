"""The first process in a cluster's own process, mount and network namespaces: starts its components and starts those
again that die, unless a file ``hold.NAME`` says otherwise. When it ends, everything in the namespaces ends.

    python first.py STATE
"""

import json
import os
import signal
import ssl
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

EARLY = ("etcd", "apiserver", "containerd")
# the kubelet insists on these; it is shown what it wants, the machine is left alone
KERNEL = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}


def run(*words: str) -> None:
    subprocess.run(words, check=True)


def mounts(state: Path, hosts: str) -> None:
    for folder in ("/run/containerd", "/var/log/pods", "/var/log/containers", "/var/lib/cni"):
        own = state / "own" / folder.strip("/").replace("/", "-")
        own.mkdir(parents=True)
        Path(folder).mkdir(parents=True, exist_ok=True)
        run("mount", "--bind", str(own), folder)
    run("mount", "--bind", str(state), str(state))
    for folder in (str(state), "/run/containerd"):  # the nodes' components have mounts of their own besides
        run("mount", "--make-rshared", folder)
    file = state / "hosts"
    file.write_text(hosts)
    run("mount", "--bind", str(file), "/etc/hosts")
    for name, value in KERNEL.items():
        file = state / "own" / name.replace("/", "-")
        file.write_text(value + "\n")
        run("mount", "--bind", str(file), f"/proc/sys/{name}")


def network(address: str, gateway: str) -> None:
    """The other end of ``node0`` is on the machine, which puts this end here."""
    until = time.monotonic() + 30
    while (
        not Path("/sys/class/net/node0").exists()
        and subprocess.run(["ip", "link", "show", "node0"], capture_output=True).returncode
    ):
        if time.monotonic() > until:
            raise TimeoutError("node0 was not brought")
        time.sleep(0.02)
    run("ip", "link", "set", "lo", "up")
    run("ip", "addr", "add", f"{address}/30", "dev", "node0")
    run("ip", "link", "set", "node0", "up")
    run("ip", "route", "add", "default", "via", gateway)
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")


def ready(state: Path) -> bool:
    config = json.loads((state / "admin.kubeconfig").read_text())
    server = config["clusters"][0]["cluster"]["server"]
    request = urllib.request.Request(f"{server}/readyz")
    request.add_header("Authorization", "Bearer " + config["users"][0]["user"]["token"])
    context = ssl.create_default_context(cafile=str(state / "pki" / "ca.crt"))
    try:
        with urllib.request.urlopen(request, timeout=3, context=context) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


class Components:
    """Processes by name; those that died and when they are started again."""

    def __init__(self, state: Path, commands: list[tuple[str, list[str]]]) -> None:
        self.state = state
        self.commands = dict(commands)
        self.pids: dict[int, str] = {}
        self.due: dict[str, float] = {}

    def start(self, name: str) -> None:
        environ = {**os.environ, "GOMAXPROCS": "2", "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
        with (self.state / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                self.commands[name], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environ
            )
        self.pids[process.pid] = name
        self._tell()

    def reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            name = self.pids.pop(pid, None)
            if name is not None:
                self.due[name] = time.monotonic() + 1
                with (self.state / "exits.log").open("a") as file:
                    file.write(f"{time.time():.1f} {name} {status}\n")
                self._tell()

    def start_again(self) -> None:
        for name, at in list(self.due.items()):
            if time.monotonic() >= at and not (self.state / f"hold.{name}").exists():
                del self.due[name]
                self.start(name)

    def _tell(self) -> None:
        fresh = self.state / "pids.new"
        fresh.write_text(json.dumps({name: pid for pid, name in self.pids.items()}))
        fresh.rename(self.state / "pids.json")


def main(state: Path) -> None:
    plan = json.loads((state / "plan.json").read_text())
    stop: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.append(1))
    mounts(state, plan["hosts"])
    network(plan["address"], plan["gateway"])
    components = Components(state, plan["commands"])
    late = []
    for name, _ in plan["commands"]:
        if name.startswith(EARLY):
            components.start(name)
        else:
            late.append(name)
    while not stop:
        if late and ready(state):
            for name in late:
                components.start(name)
            late = []
        components.reap()
        components.start_again()
        time.sleep(0.05)
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
