"""``forge-server up``"""

import asyncio
import signal

import uvloop

from forge_server import logs
from forge_server import settings as config_tree
from forge_server.app import serve


def up(config: str | None) -> None:
    """Run until SIGINT or SIGTERM; a second one ends at once."""
    settings = config_tree.load(config_tree.find_file(config))
    logs.configure(settings.server.log_level, settings.server.log_format)
    uvloop.run(_until_signal(settings))


async def _until_signal(settings: config_tree.Settings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    main = asyncio.current_task()

    def signalled() -> None:
        if stop.is_set() and main is not None:
            main.cancel()
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, signalled)
    await serve(settings, stop)
