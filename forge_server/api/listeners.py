"""Listening sockets: bound before anything starts, so that a port in use is an error before any state changes."""

import asyncio
import contextlib
import errno
import socket
from collections.abc import AsyncIterator, Callable, Generator
from pathlib import Path
from typing import Any

import uvicorn

from forge_server.domain.errors import ConfigError

BACKLOG = 4096
KEEP_ALIVE_S = 90
"""Longer than any harness's pool, so that the client and not the server closes an idle connection."""


def bind_tcp(host: str, port: int, what: str) -> socket.socket:
    """A listening TCP socket; port 0 picks a free one. Raises ConfigError naming ``what``."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        sock.close()
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} on {host} is in use",
                where=what,
                mend="stop what listens there or choose another port",
            ) from None
        raise ConfigError(
            f"cannot listen on {host}:{port} ({getattr(error, 'strerror', None) or error})",
            where=what,
            mend="give an address of this machine and a port that this user may open",
        ) from None
    sock.setblocking(False)
    return sock


def bind_unix(path: Path) -> socket.socket:
    """A listening unix socket at ``path``, for this user only; a stale one is replaced."""
    path.unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(str(path))
        path.chmod(0o600)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"cannot listen on the unix socket ({error.strerror or error})",
            where=str(path),
            mend="choose a [server] data_dir with a shorter path",
        ) from None
    sock.setblocking(False)
    return sock


class _Server(uvicorn.Server):
    """Signals are the composition root's business."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


@contextlib.asynccontextmanager
async def serving(
    app: Any,
    sockets: list[socket.socket],
    *,
    ended: Callable[[asyncio.Task[None]], None] | None = None,
    protocol: Any = "httptools",
    grace_s: float = 5.0,
) -> AsyncIterator[None]:
    """Serve the ASGI ``app`` on ``sockets`` for the length of the block; ``protocol`` is uvicorn's ``http``.

    ``ended`` hears when the listener's task is over.
    """
    config = uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        loop="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        date_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(grace_s),
        backlog=BACKLOG,
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=sockets), name="listener")
    try:
        while not server.started and not task.done():  # noqa: ASYNC110 - uvicorn only has a flag
            await asyncio.sleep(0.01)
        if task.done():
            await task
        if ended is not None:
            task.add_done_callback(ended)
        yield
    finally:
        server.should_exit = True
        await asyncio.wait({task}, timeout=grace_s + 5.0)
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=1.0)
        for sock in sockets:
            sock.close()
