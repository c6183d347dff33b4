"""What the demo prints while it runs: one line per event, stamped with the time since the start.

On a terminal a line that is still counting is rewritten in place; elsewhere only finished lines are printed.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Screen:
    """Also keeps how long each phase took: ``phases``, name -> seconds, in order."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._start = clock, clock()
        self._live = sys.stdout.isatty()
        self._counting = False
        self.phases: dict[str, float] = {}

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._start

    def say(self, what: str, text: str) -> None:
        """A finished line."""
        self._clear()
        print(self._line(what, text), flush=True)

    def count(self, what: str, text: str) -> None:
        """A line that the next one replaces."""
        if self._live:
            self._clear()
            print(self._line(what, text), end="", flush=True)
            self._counting = True

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = self._clock()
        try:
            yield
        finally:
            self.phases[name] = self.phases.get(name, 0.0) + self._clock() - began

    def _line(self, what: str, text: str) -> str:
        minutes, seconds = divmod(int(self.elapsed_s), 60)
        return f"[{minutes:2d}:{seconds:02d}] {what:<11} {text}"

    def _clear(self) -> None:
        if self._counting:
            print("\r\x1b[2K", end="")
            self._counting = False
