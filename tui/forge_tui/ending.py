"""How the dashboard ends when nobody at its keys asked for it: by a signal, or because its terminal is gone.

Both ask it to leave, as ``q`` does, so that a terminal that is still there is as it was before. Textual sees neither: a
signal would end the process with the terminal in raw mode, and its input thread reads the end of a terminal that is
gone again and again. Invariant: the process is gone ``GRACE_S`` after either, whatever its loop and its terminal do.
(Shown in a browser, Textual hears SIGTERM itself, and the terminal is the pipes to the server that shows it.)
"""

import contextlib
import os
import select
import signal
import termios
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

GRACE_S = 2.0
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_GONE = select.POLLHUP | select.POLLERR
_PLAIN = (
    b"\x1b[?1000l\x1b[?1003l\x1b[?1006l\x1b[?1015l\x1b[?1016l\x1b[?2004l\x1b[?2048l\x1b[?1004l\x1b[?7h"
    b"\x1b[<u\x1b[?1049l\x1b[?25h"
)
"""Ends what Textual switches on: mouse, paste, sizes, focus, keys, the other screen; shows the cursor."""


def terminal() -> tuple[int, int]:
    """What is read and what is painted on: the terminal, or the pipes of the one that serves it to a browser."""
    return (0, 1) if "TEXTUAL_DRIVER" in os.environ else (0, 2)


@contextlib.contextmanager
def watched(leave: Callable[[int], None], abandon: Callable[[], None]) -> Iterator[None]:
    """Within, ``leave`` is called with an exit code, in a thread, once it is time; ``abandon`` before the process is
    ended because the block did not."""
    ears, mouth = os.pipe()
    left = threading.Event()

    def hear(number: int, _: FrameType | None) -> None:
        os.write(mouth, bytes((number,)))

    ends = terminal()
    before = {number: signal.signal(number, hear) for number in _SIGNALS}
    thread = threading.Thread(
        target=_watch, args=(ends, _modes(ends[0]), ears, left, leave, abandon), name="ending", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        left.set()
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(mouth)
        thread.join()
        os.close(ears)


def _watch(
    ends: Sequence[int],
    modes: list[object] | None,
    ears: int,
    left: threading.Event,
    leave: Callable[[int], None],
    abandon: Callable[[], None],
) -> None:
    code = _end(ends, ears)
    if left.is_set():
        return
    leave(code)
    if not left.wait(GRACE_S):
        abandon()
        _restore(ends, modes)
        os._exit(code)


def _end(ends: Sequence[int], ears: int) -> int:
    """Wait for a signal, for the terminal's end, or for the end of the block; the exit code, as a shell names it."""
    poll = select.poll()
    for fd in ends:
        poll.register(fd, 0)
    poll.register(ears, select.POLLIN)
    while True:
        for fd, mask in poll.poll():
            if fd == ears:
                said = os.read(ears, 1)
                return 128 + said[0] if said else 0
            if mask & _GONE:
                return 128 + signal.SIGHUP
            poll.unregister(fd)  # none that can be watched here


def _modes(fd: int) -> list[object] | None:
    try:
        return termios.tcgetattr(fd)
    except termios.error:  # no terminal
        return None


def _restore(ends: Sequence[int], modes: list[object] | None) -> None:
    if modes is None:
        return
    with contextlib.suppress(OSError, termios.error):
        termios.tcsetattr(ends[0], termios.TCSANOW, modes)  # type: ignore[arg-type]
        termios.tcflush(ends[1], termios.TCOFLUSH)  # what a terminal that stands still has not taken
        if select.select([], [ends[1]], [], 0)[1]:
            os.write(ends[1], _PLAIN)
