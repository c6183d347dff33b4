"""``forge-server tui`` and ``up --tui``: the dashboard, always a process of its own beside the server's."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from forge_server import settings as config_tree
from forge_server.domain.errors import ConfigError, ForgeError
from forge_server.services import data_folder

LOG = "server.log"
START_S = 1200.0
"""Longest start: the first one may install an engine."""
STOP_S = 60.0
TAIL = 15


class ServerFailed(ForgeError):
    """The server that was started for the dashboard has ended by itself."""

    type = "server-failed"


def watch(
    url: str | None, key: str | None, light: bool = False, abandon: Callable[[], None] = lambda: None
) -> None:
    """Raises ConfigError; SystemExit when the dashboard failed or had to end."""
    from forge_tui.app import main

    terminal = sys.stdin.isatty() and sys.stderr.isatty()  # Textual paints on stderr
    if not terminal and "TEXTUAL_DRIVER" not in os.environ:  # which a browser brings (textual-serve)
        raise ForgeError("the dashboard needs a terminal", mend="`forge-server run show RUN` prints instead")
    main(url, key, light=light, abandon=abandon)


def up(config: str | None) -> None:
    """Start the server, show the dashboard, stop the server when that is left. Raises ServerFailed."""
    file = config_tree.find_file(config)
    settings = config_tree.load(file)
    data_folder.make(settings.data_dir)
    if (owner := data_folder.holder(settings.data_dir)) is not None:
        raise ConfigError(
            f"a forge-server (process {owner}) runs here already",
            where=str(settings.data_dir),
            mend="`forge-server tui` watches it",
        )
    log = settings.data_dir / LOG
    with _server(config, log) as process:
        url = _address(process, settings.data_dir, log)
        key = settings.security.admin_key or (settings.data_dir / "admin.key").read_text().strip()
        watch(url, key, abandon=process.terminate)
        code = process.poll()
    if code:
        raise ServerFailed(f"it ended with {code}", where=str(log), mend=_tail(log))


@contextmanager
def _server(config: str | None, log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """``forge-server up`` with its log in a file; stopped at the end of the block, whatever ends it."""

    def ended(number: int, _: FrameType | None) -> None:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, ended)
    signal.signal(signal.SIGHUP, ended)
    command = [sys.executable, "-m", "forge_server.cli", "up", *(["-c", config] if config else [])]
    with log.open("ab") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            with suppress(OSError):  # the terminal may be gone
                print("stopping the server; ctrl+c ends it at once", file=sys.stderr)
            try:
                process.wait(STOP_S)
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                process.kill()
                process.wait()


def _address(process: "subprocess.Popen[bytes]", folder: Path, log: Path) -> str:
    """Where it listens, once it does. Raises ServerFailed."""
    file = folder / data_folder.ADDRESS
    print(f"the server starts (log: {log})", file=sys.stderr)
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        if file.exists() and data_folder.holder(folder) == str(process.pid):
            return file.read_text().strip()
        time.sleep(0.1)
    raise ServerFailed("it did not start", where=str(log), mend=_tail(log))


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return os.linesep.join(["its last words:", *lines[-TAIL:]])
