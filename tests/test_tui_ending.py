"""How the dashboard ends without its keys: signals, terminals that are gone, a browser's server that is gone.

Real processes on real terminals. It shows a server that does not answer, which needs none.
"""

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_cli_up import FORGE, QUIET, environ
from test_tui_terminal import forge, tmux

LIMIT_S = 180.0
NOWHERE = [*FORGE, "tui", "--url", "http://127.0.0.1:9", "--key", "any"]
SHOWN = b"does not answer"
GONE = 128 + signal.SIGHUP
STEAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""
LOCAL_FLAGS = 3  # of what tcgetattr says


class Terminal:
    """A pseudo-terminal with a program on it; ``controlling``: as a person has it, so that its end is signalled."""

    def __init__(self, words: list[str], folder: Path, *, controlling: bool = True) -> None:
        self.master, self.slave = pty.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        self.modes = termios.tcgetattr(self.slave)
        self.process = subprocess.Popen(
            [sys.executable, "-c", STEAL, *words] if controlling else words,
            stdin=self.slave, stdout=self.slave, stderr=self.slave, cwd=folder, start_new_session=True,
            env=environ() | {"TERM": "xterm-256color"},
        )  # fmt: skip

    def until(self, text: bytes) -> bytes:
        """What was painted until then."""
        return until(self.master, text)

    def hang_up(self) -> None:
        os.close(self.slave)
        os.close(self.master)


def until(fd: int, text: bytes) -> bytes:
    seen, end = b"", time.monotonic() + LIMIT_S
    while text not in seen:
        assert select.select([fd], [], [], max(0.0, end - time.monotonic()))[0], seen[-2000:]
        seen += os.read(fd, 1 << 16)
    return seen


@contextlib.contextmanager
def shown(
    folder: Path, words: list[str] = NOWHERE, text: bytes = SHOWN, *, controlling: bool = True
) -> Iterator[Terminal]:
    terminal = Terminal(words, folder, controlling=controlling)
    try:
        terminal.until(text)
        yield terminal
    finally:
        terminal.process.kill()
        terminal.process.wait(LIMIT_S)
        for fd in (terminal.slave, terminal.master):
            with contextlib.suppress(OSError):
                os.close(fd)


@pytest.mark.parametrize("controlling", [True, False])
def test_it_ends_with_its_terminal(tmp_path: Path, controlling: bool) -> None:
    """A terminal that is not the controlling one sends no signal: its end is only seen."""
    with shown(tmp_path, controlling=controlling) as terminal:
        terminal.hang_up()
        assert terminal.process.wait(LIMIT_S) == GONE


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_and_the_terminal_is_as_before(tmp_path: Path, number: signal.Signals) -> None:
    with shown(tmp_path) as terminal:
        raw = termios.tcgetattr(terminal.slave)
        assert not raw[LOCAL_FLAGS] & termios.ECHO
        terminal.process.send_signal(number)
        left = terminal.until(b"\x1b[?1049l")  # the first screen is back
        assert terminal.process.wait(LIMIT_S) == 128 + number
        assert termios.tcgetattr(terminal.slave) == terminal.modes
        left += terminal.until(b"\x1b[?25h") if b"\x1b[?25h" not in left else b""
        assert b"Traceback" not in left


def test_a_terminal_that_stands_still_does_not_hold_it(tmp_path: Path) -> None:
    """Nobody reads what is painted, as with ctrl+s: it cannot say good-bye, and leaves all the same."""
    with shown(tmp_path) as terminal:
        full = os.open(os.ttyname(terminal.slave), os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(full, bytes(1 << 12))
        os.close(full)
        terminal.process.send_signal(signal.SIGTERM)
        assert terminal.process.wait(LIMIT_S) == 128 + signal.SIGTERM
        assert termios.tcgetattr(terminal.slave) == terminal.modes


def test_it_ends_with_tmux(tmp_path: Path) -> None:
    with tmux(tmp_path) as terminal:
        terminal.command("exec " + forge(*NOWHERE[len(FORGE) :]))
        terminal.until("does not answer")
        pid = terminal.pid()
        watched = os.pidfd_open(pid)
    try:
        assert select.select([watched], [], [], LIMIT_S)[0]
    finally:
        os.close(watched)


@pytest.mark.parametrize("closed", [("stdin",), ("stdout", "stderr"), ("stdin", "stdout", "stderr")])
def test_it_ends_with_the_server_that_shows_it_in_a_browser(tmp_path: Path, closed: tuple[str, ...]) -> None:
    """Which starts it on pipes, and may be killed."""
    process = subprocess.Popen(
        NOWHERE, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path,
        env=environ() | {"TEXTUAL_DRIVER": "textual.drivers.web_driver:WebDriver"},
    )  # fmt: skip
    pipes = {"stdin": process.stdin, "stdout": process.stdout, "stderr": process.stderr}
    try:
        assert process.stdout is not None
        until(process.stdout.fileno(), SHOWN)
        for name in closed:
            pipe = pipes.pop(name)
            assert pipe is not None
            pipe.close()
        assert process.wait(LIMIT_S)
    finally:
        process.kill()
        process.wait(LIMIT_S)
        for pipe in pipes.values():
            assert pipe is not None
            pipe.close()


def test_a_server_that_came_with_it_is_stopped_when_the_terminal_is_gone(tmp_path: Path) -> None:
    (tmp_path / "forge.toml").write_text(QUIET)
    with shown(tmp_path, [*FORGE, "up", "--tui"], b"Nothing has run yet") as terminal:
        pid = int((tmp_path / "forge-data" / "server.lock").read_text())
        server = os.pidfd_open(pid)
        try:
            terminal.hang_up()
            assert terminal.process.wait(LIMIT_S) == GONE
            assert select.select([server], [], [], LIMIT_S)[0]
        finally:
            os.close(server)
    assert not (tmp_path / "forge-data" / "control.url").exists()


ASKS = """
import asyncio, threading
from forge_tui.feed import Asker

async def main():
    ask = Asker()
    task = asyncio.create_task(ask(asked.set))
    await task
    task = asyncio.create_task(ask(threading.Event().wait))
    await asyncio.sleep(0)
    ask.close()
    task.cancel()

asked = threading.Event()
asyncio.run(main())
assert asked.is_set()
"""


def test_leaving_does_not_wait_for_a_server_that_hangs() -> None:
    subprocess.run([sys.executable, "-c", ASKS], check=True, timeout=LIMIT_S)
