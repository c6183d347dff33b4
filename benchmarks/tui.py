"""What the dashboard costs: 10,000 rollouts and 200 events a second, watched in a terminal of 160 x 50.

    python benchmarks/tui.py [--seconds 20] [--keys 60]

The server, in which all that happens, is one process; the dashboard is ``forge-server tui`` on a terminal of its own.
CPU is what the processes used. A key's time is from its byte to the first paint that shows it. What one dashboard
costs the server is too little to be seen beside what happens there. So what dashboards ask for is asked many times
over, and what the server uses beyond what the same number of events costs in the windows before and after is divided:
the stream and the list of rollouts are asked for as by 20 dashboards; the overview and the run's cost, which are
computed once for all, six and twelve times as often as one asks for them. To reach: 25 % of a core, 150 ms at the
95th percentile, 2 % of a core.
"""

import argparse
import contextlib
import fcntl
import itertools
import os
import pty
import select
import signal
import sqlite3
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from pathlib import Path
from typing import NamedTuple

from forge_server.client.http import ForgeClient

TICK = os.sysconf("SC_CLK_TCK")
HERE = Path(__file__).resolve().parent
REACH_CPU, REACH_KEY_MS, REACH_SERVER = 25.0, 150.0, 2.0
SETTLE_S, KEY_S = 6.0, 5.0
RUN = "ru-bench0000000000"
STREAMS, OVERVIEWS, COSTS = 20, 6, 12
LIST_S, OVERVIEW_S, COST_S = 2.0, 2.0, 60.0  # how often a dashboard asks


def cpu_s(pid: int) -> float:
    """User and system seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


class Terminal:
    """The dashboard on a pseudo-terminal, whose output is read as a terminal would."""

    def __init__(self, url: str, key: str) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 160, 0, 0))
        environ = os.environ | {"TERM": "xterm-256color", "COLORTERM": "truecolor", "FORGE_KEY": key}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "forge_server.cli", "tui", "--url", url],
            stdin=slave, stdout=slave, stderr=slave, env=environ, start_new_session=True,
        )  # fmt: skip
        os.close(slave)
        self.written = 0

    def read(self, timeout_s: float) -> bytes:
        if not select.select([self.master], [], [], timeout_s)[0]:
            return b""
        try:
            found = os.read(self.master, 1 << 16)
        except OSError:  # the dashboard has left
            return b""
        self.written += len(found)
        return found

    def watch(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.read(left)

    def press(self, key: bytes, until: bytes) -> float:
        """Milliseconds until what is painted contains ``until``."""
        while self.read(0.0):
            pass
        began, seen = time.monotonic(), b""
        os.write(self.master, key)
        while until not in seen:
            if time.monotonic() - began > KEY_S:
                raise RuntimeError(f"{key!r} was not answered")
            seen += self.read(KEY_S)
        return 1000 * (time.monotonic() - began)

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        while self.process.poll() is None:
            self.read(0.1)
        os.close(self.master)


class Server:
    """The process in which things happen, and how many of them."""

    def __init__(self, pid: int, folder: Path) -> None:
        self.pid = pid
        self._database = folder / "forge-data" / "forge.db"

    def events(self) -> int:
        with contextlib.closing(sqlite3.connect(f"file:{self._database}?mode=ro", uri=True)) as connection:
            return int(connection.execute("SELECT max(id) FROM events").fetchone()[0])


class Window(NamedTuple):
    """Percent of a core that the server and the dashboard used, and events per second."""

    server: float
    dashboard: float
    events: float


def window(server: Server, terminal: Terminal | None, seconds: float) -> Window:
    pids = [server.pid, *([terminal.process.pid] if terminal else [])]
    began, used, events = time.monotonic(), [cpu_s(pid) for pid in pids], server.events()
    if terminal:
        terminal.watch(seconds)
    else:
        time.sleep(seconds)
    took = time.monotonic() - began
    shares = [100 * (cpu_s(pid) - before) / took for pid, before in zip(pids, used, strict=True)]
    return Window(shares[0], shares[1] if terminal else 0.0, (server.events() - events) / took)


def ask(kind: str, url: str, key: str) -> None:
    """In a process of its own, until it is ended: what dashboards ask for, ``kind`` of it."""
    with ForgeClient(url, key) as client:
        if kind == "streams":
            for _ in range(STREAMS):
                threading.Thread(target=follow, args=(client,), daemon=True).start()
        print("asking", flush=True)
        began = time.monotonic()
        for n in itertools.count(1):
            if kind == "streams":
                client.rollout_page(limit=200, run="bench", sort="created", order="desc")
                pause = LIST_S / STREAMS
            elif kind == "overviews":
                # each spelling has an answer of its own, which is a second old when it is asked for again
                client.overview((None, "bench", RUN)[n % 3])
                pause = OVERVIEW_S / OVERVIEWS
            else:  # ten seconds old
                client.cost(("bench", RUN)[n % 2])
                pause = COST_S / COSTS
            time.sleep(max(0.0, began + n * pause - time.monotonic()))


def follow(client: ForgeClient) -> None:
    with client.events(every=0.25) as stream:
        for _ in stream:
            pass


def asked(server: Server, kind: str, url: str, key: str, seconds: float) -> Window:
    process = subprocess.Popen(
        [sys.executable, __file__, "--ask", kind, url, key], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(2.0)
        return window(server, None, seconds)
    finally:
        process.terminate()
        process.wait(10)


def figure(what: str, value: float, limit: float) -> None:
    print(
        f"{what}: {value:.2f}; to reach: {limit:g}: {'reached' if value <= limit else 'MISSED'}", flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ask", nargs=3, metavar=("KIND", "URL", "KEY"), help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--keys", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rollouts", type=int, default=10_000)
    parser.add_argument("--events", type=float, default=200.0)
    a = parser.parse_args()
    if a.ask:
        ask(*a.ask)
        return
    with tempfile.TemporaryDirectory() as folder:
        server = subprocess.Popen(
            [sys.executable, str(HERE / "tui_server.py"), folder, "--rollouts", str(a.rollouts), "--events",
             str(a.events)],
            stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL, cwd=folder,
        )  # fmt: skip
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            while not line.startswith("http"):
                line = server.stdout.readline()
            url, key = line.split()
            measure(Server(server.pid, Path(folder)), url, key, a)
        finally:
            server.terminate()
            server.wait(30)


def measure(server: Server, url: str, key: str, a: argparse.Namespace) -> None:
    time.sleep(SETTLE_S)
    cpu: dict[str, list[float]] = {"overview": [], "rollouts": []}
    costs: dict[str, list[float]] = {"streams": [], "overviews": [], "costs": []}
    keys: list[float] = []
    first, since = server.events(), time.monotonic()
    for _ in range(a.rounds):
        for screen, found in cpu.items():
            found.append(watched(screen, server, Terminal(url, key), a, keys))
        before = window(server, None, a.seconds)
        for kind, share in (("streams", STREAMS), ("overviews", OVERVIEWS), ("costs", COSTS)):
            meanwhile = asked(server, kind, url, key, a.seconds)
            after = window(server, None, a.seconds)
            alone = (before.server + after.server) / (before.events + after.events) * meanwhile.events
            costs[kind].append((meanwhile.server - alone) / share)
            print(
                f"{share} x {kind}: server {meanwhile.server:.1f} % instead of {alone:.1f} %, "
                f"{meanwhile.events:.0f} events/s",
                flush=True,
            )
            before = after
    rate = (server.events() - first) / (time.monotonic() - since)
    keys.sort()
    print(f"{rate:.0f} events/s; keys: p50 {statistics.median(keys):.0f} ms, most {keys[-1]:.0f} ms; load "
          f"{os.getloadavg()[0]:.1f}")  # fmt: skip
    for name, found in cpu.items():
        figure(f"dashboard on {name}, percent of a core", statistics.median(found), REACH_CPU)
    figure("key press to paint p95, ms", keys[int(len(keys) * 0.95)], REACH_KEY_MS)
    one = sum(max(0.0, statistics.median(found)) for found in costs.values())
    figure("server, percent of a core for one dashboard", one, REACH_SERVER)


def watched(
    screen: str, server: Server, terminal: Terminal, a: argparse.Namespace, keys: list[float]
) -> float:
    """Percent of a core that the dashboard uses on ``screen``; and how quick its keys are."""
    try:
        terminal.watch(SETTLE_S)
        if screen == "rollouts":
            terminal.press(b"2", b"sorted by")
            terminal.watch(2.0)
        used = window(server, terminal, a.seconds).dashboard
        print(f"dashboard on {screen} {used:.1f} %, {terminal.written / 1024:.0f} KiB painted", flush=True)
        if screen == "rollouts":
            for i in range(a.keys):
                keys.append(terminal.press(b"j" if i % 30 < 20 else b"k", "▌".encode()))
                terminal.watch(0.05)
            for name, word in ((b"7", b"showing"), (b"1", b"Reward"), (b"2", b"sorted by")):
                keys.append(terminal.press(name, word))
                terminal.watch(0.5)
        return used
    finally:
        terminal.close()


if __name__ == "__main__":
    main()
