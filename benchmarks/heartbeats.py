"""Heartbeats of thousands of runners: what they cost the server, how long an answer takes, and who is taken for lost.

    python benchmarks/heartbeats.py [--runners 5000] [--seconds 90] [--silent 10]

The server is a whole one, in a process of its own, with the default settings. Each runner is a connection that is kept:
it starts its attempt, tells that its harness runs, and then asks every so many seconds as its plan says, through the
routes that pods use. What is played is only what a runner does meanwhile. ``silent`` of them say nothing any more once
the stretch begins: they, and no others, must have been taken for lost at its end.
"""

import argparse
import asyncio
import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvloop

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from idle import cpu_s, rss_mb  # noqa: E402
from pods import Child, figure, percentile  # noqa: E402

STARTS = 64
"""Runners that start at the same time."""

PATIENCE_S = 120.0
REACH_PERCENT, REACH_P50_MS, REACH_P95_MS = 50.0, 100.0, 500.0  # the last is a tenth of the period


class Runner(asyncio.Protocol):
    """One runner: one request at a time over one connection, which is dialled again when it is gone."""

    def __init__(self, host: str, port: int, attempt: str, join: str) -> None:
        self._host, self._port, self._attempt, self._join = host, port, attempt, join
        self._key = ""
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._got = b""
        self.dialled = 0
        self.refused: list[str] = []
        self.every = 0.0
        self.waits: list[float] = []

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(exc or ConnectionResetError("closed"))

    def data_received(self, data: bytes) -> None:
        self._got += data
        head, end, body = self._got.partition(b"\r\n\r\n")
        if not end:
            return
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0])
        if len(body) >= length and self._answer is not None and not self._answer.done():
            self._got = b""
            self._answer.set_result((int(head.split(None, 2)[1]), body))

    async def post(self, route: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """The answer; None when it was refused. A connection that is gone is dialled again."""
        data = json.dumps(body).encode()
        lines = [
            f"POST /a/{self._attempt}/{route} HTTP/1.1",
            "Host: forge",
            f"Content-Length: {len(data)}",
            "Content-Type: application/json",
        ]
        if self._key:
            lines.append(f"Authorization: Bearer {self._key}")
        request = "\r\n".join(lines).encode() + b"\r\n\r\n" + data
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    if self._transport is None:
                        self._transport, _ = await loop.create_connection(
                            lambda: self, self._host, self._port
                        )
                        self.dialled += 1
                    self._got, self._answer = b"", loop.create_future()
                    self._transport.write(request)
                    status, answer = await self._answer
                    break
                except OSError:
                    await asyncio.sleep(0.1)
        if status != 200:
            self.refused.append(f"{status} {answer.decode()}")
            return None
        found: dict[str, Any] = json.loads(answer)
        return found

    async def start(self) -> None:
        told = await self.post("start", {"token": self._join, "nonce": os.urandom(16).hex()})
        assert told is not None, self.refused
        self._key, self.every = told["runner_key"], told["plan"]["heartbeat_s"]
        assert await self.post("events", {"events": [{"kind": "harness_started"}]}) is not None, self.refused

    async def live(self) -> None:
        """As the runner does: the pause begins with the answer. Until it is told to stop, or cancelled."""
        while True:
            await asyncio.sleep(self.every)
            began = time.perf_counter()
            told = await self.post("heartbeat", {"phase": "running"})
            self.waits.append(time.perf_counter() - began)
            if told is None or told["action"] == "stop":
                return

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


async def measure(server: Child, options: argparse.Namespace) -> bool:
    hello = await asyncio.to_thread(server.answer)
    pid, address = hello["pid"], urlsplit(hello["url"])
    runners = [Runner(address.hostname or "", address.port or 0, *pair) for pair in hello["attempts"]]
    slots = asyncio.Semaphore(STARTS)

    async def life(runner: Runner) -> None:
        try:
            async with slots:
                await runner.start()
        finally:
            started.release()
        await runner.live()

    started = asyncio.Semaphore(0)
    began = time.perf_counter()
    lives = [asyncio.create_task(life(runner)) for runner in runners]
    for _ in runners:
        await started.acquire()
    for one in lives:
        if one.done():
            one.result()
    print(
        f"start: {len(runners)} runners in {time.perf_counter() - began:.0f} s, with their first heartbeats"
    )

    for silent in lives[: options.silent]:
        silent.cancel()
    speaking = runners[options.silent :]
    await asyncio.sleep(runners[0].every)  # starts came in waves; heartbeats spread
    for runner in speaking:
        runner.waits.clear()
    began, used = time.perf_counter(), cpu_s(pid)
    await asyncio.sleep(options.seconds)
    took, used = time.perf_counter() - began, cpu_s(pid) - used
    waits = [1000 * wait for runner in speaking for wait in runner.waits]
    states = await asyncio.to_thread(server.ask, "look")
    refused = sum(bool(runner.refused) for runner in speaking)
    again = sum(runner.dialled - 1 for runner in runners)
    print(
        f"heartbeats: {len(waits)} in {took:.0f} s, {len(waits) / took:.0f} / s,"
        f" {1e6 * used / len(waits):.0f} us of CPU each; {again} connections made again; attempts: {states}"
    )
    print(
        f"answer, ms: p50 {percentile(waits, 0.5):.1f}, p95 {percentile(waits, 0.95):.1f},"
        f" p99 {percentile(waits, 0.99):.1f}, most {max(waits):.0f}; RSS {rss_mb(pid):.0f} MB;"
        f" load {os.getloadavg()[0]:.1f}"
    )
    for one, runner in zip(lives, runners, strict=True):
        one.cancel()
        runner.close()
    lost = states.get("ended runner_lost", 0)
    due = options.silent if options.seconds > hello["lost_s"] + 10 else 0
    good = figure("CPU for heartbeats, % of a core", 100 * used / took, REACH_PERCENT)
    good &= figure("answer to a heartbeat, p50, ms", percentile(waits, 0.5), REACH_P50_MS)
    good &= figure("answer to a heartbeat, p95, ms", percentile(waits, 0.95), REACH_P95_MS)
    good &= figure("runners that spoke and were given up", refused + max(0, lost - options.silent), 0)
    return good & figure("runners that fell silent and were not found out", due - lost if due else 0, 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runners", type=int, default=5000)
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--silent", type=int, default=10)
    options = parser.parse_args()
    wanted = options.runners + 500
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))
    with tempfile.TemporaryDirectory(prefix="forge-heartbeats-") as folder:
        server = Child("heartbeats_server.py", folder, str(options.runners))
        try:
            good = uvloop.run(measure(server, options))
        finally:
            server.end()
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
