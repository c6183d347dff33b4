"""``forge-server up``"""

import asyncio
import gc
import os
import signal
import sys
import threading
from types import FrameType

import uvloop

from forge_server import environments, logs
from forge_server import settings as config_tree
from forge_server.app import serve

EXIT_S = 10.0
"""How long work in threads (an installation that ends, a database that does not answer) may delay the exit."""


def up(config: str | None) -> None:
    """Run until SIGINT or SIGTERM; a second one ends at once, as SIGKILL would: the next start settles that."""
    settings = config_tree.load(config_tree.find_file(config))
    logs.configure(settings.server.log_level, settings.server.log_format)
    if settings.engine.kind == "managed":
        signal.signal(signal.SIGTERM, _interrupted)
        environments.ensure("engine")
    collect_less_garbage()
    uvloop.run(_until_signal(settings))


def collect_less_garbage() -> None:
    """What has been imported lives as long as the process: the collector need not walk it. And a call leaves
    hundreds of objects but hardly a cycle: with Python's thresholds the collector took 7 % of the proxy's
    CPU, and its full rounds held up every call."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 50)


def _interrupted(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)


async def _until_signal(settings: config_tree.Settings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def signalled(number: int) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, signalled, number)
    try:
        await serve(settings, stop)
    finally:
        environments.give_up()
        last = threading.Timer(EXIT_S, os._exit, (0 if stop.is_set() else 1,))
        last.daemon = True
        last.start()
