"""A TCP proxy before an API server: cuts connections, or leaves them open and silent."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

from kube.cluster import Cluster


class Cutter:
    """Made by ``cutter``; ``kubeconfig`` leads through it."""

    def __init__(self, cluster: Cluster, kubeconfig: Path) -> None:
        there = urlsplit(cluster.server)
        self._host, self._port = there.hostname, there.port
        self.kubeconfig = kubeconfig
        self._open: set[asyncio.Task[None]] = set()
        self._gates: list[asyncio.Event] = []

    def cut(self) -> None:
        """Every connection ends now."""
        for task in self._open:
            task.cancel()

    def silence(self) -> None:
        """What is open now stays open, and nothing comes through it any more."""
        for gate in self._gates:
            gate.clear()
        self._gates.clear()

    async def cut_every(self, seconds: float) -> None:
        while True:
            await asyncio.sleep(seconds)
            self.cut()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        gate = asyncio.Event()
        gate.set()
        self._gates.append(gate)
        try:
            up, to = await asyncio.open_connection(self._host, self._port)
            try:
                async with asyncio.TaskGroup() as both:
                    both.create_task(_pass(reader, to, gate))
                    both.create_task(_pass(up, writer, gate))
            finally:
                to.close()
        except (OSError, asyncio.CancelledError, ExceptionGroup):
            pass
        finally:
            writer.transport.abort()
            self._open.discard(task)


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gate: asyncio.Event) -> None:
    while data := await reader.read(65536):
        await gate.wait()
        writer.write(data)
        await writer.drain()
    raise ConnectionResetError  # one side has closed: so does the other


@contextlib.asynccontextmanager
async def cutter(cluster: Cluster, folder: Path) -> AsyncIterator[Cutter]:
    """The API server's certificate is valid for loopback, too."""
    made = Cutter(cluster, folder / "through.kubeconfig")
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    config = json.loads(cluster.user.read_text())
    config["clusters"][0]["cluster"]["server"] = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    made.kubeconfig.write_text(json.dumps(config))
    try:
        yield made
    finally:
        server.close()
        made.cut()
