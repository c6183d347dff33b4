"""What a server costs that has nothing to do: CPU and memory of ``forge-server up``, and the time of ``--help``.

    python benchmarks/idle.py [--seconds 20]

The server has no engine and no run; its clocks, liveness beats and reconciling go on. DESIGN §12: at most
1 % of a core and 150 MB resident; ``--help`` within 0.3 s (the quickest of ten, since others on the machine
only ever add).
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TICK = os.sysconf("SC_CLK_TCK")
FORGE = (sys.executable, "-m", "forge_server.cli")
SETTINGS = '[server]\nport = 0\ncontrol_port = 0\n[local]\nmin_sandbox = "none"\n'
REACH_PERCENT, REACH_MB, REACH_HELP_S = 1.0, 150.0, 0.3
SETTLE_S = 5.0
START_S = 60.0


def cpu_s(pid: int) -> float:
    """User and system seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def rss_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"process {pid} has ended")


def idle(seconds: float) -> tuple[float, float]:
    """Percent of a core, and megabytes, of a server that idles for ``seconds``."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith("FORGE_")}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "forge.toml").write_text(SETTINGS)
        log = Path(folder) / "server.log"
        with log.open("wb") as output:
            server = subprocess.Popen(
                [*FORGE, "up"], cwd=folder, env=environ, stdout=output, stderr=subprocess.STDOUT
            )
        try:
            limit = time.monotonic() + START_S
            while not (Path(folder) / "forge-data" / "control.url").exists():
                if server.poll() is not None or time.monotonic() > limit:
                    raise RuntimeError(f"the server did not start:\n{log.read_text()[-2000:]}")
                time.sleep(0.1)
            time.sleep(SETTLE_S)
            began, used = time.monotonic(), cpu_s(server.pid)
            time.sleep(seconds)
            used, took = cpu_s(server.pid) - used, time.monotonic() - began
            return 100 * used / took, rss_mb(server.pid)
        finally:
            server.send_signal(signal.SIGTERM)
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def help_s(times: int = 10) -> float:
    """Seconds of ``forge-server --help``, the quickest of some."""
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        subprocess.run([*FORGE, "--help"], check=True, stdout=subprocess.DEVNULL)
        taken.append(time.perf_counter() - began)
    return min(taken)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    percent, megabytes = idle(options.seconds)
    missed = 0
    for what, value, reach in (
        ("idle CPU, % of a core", percent, REACH_PERCENT),
        ("idle RSS, MB", megabytes, REACH_MB),
        ("forge-server --help, s", help_s(), REACH_HELP_S),
    ):
        print(f"{what}: {value:.2f}; to reach: {reach:g}: {'reached' if value <= reach else 'missed'}")
        missed += value > reach
    return missed


if __name__ == "__main__":
    raise SystemExit(main())
