"""Identifiers.

Entity ids are short text, sortable by creation time, lower case and free of ``_``: they serve as Kubernetes
names and labels, as URL path parts and as veRL uids (which may not contain ``_``).
Call ids are 63-bit integers, sortable by creation time.
"""

import itertools
import os
import threading
import time

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford base 32
_EPOCH_MS = 1_704_067_200_000  # 2024-01-01T00:00:00Z


def _base32(value: int, width: int) -> str:
    out = []
    for _ in range(width):
        out.append(_ALPHABET[value & 31])
        value >>= 5
    return "".join(reversed(out))


def new_id(prefix: str) -> str:
    """``PREFIX-`` + 9 characters of milliseconds + 8 random ones (40 bits), for example ``at-0e7k2m9qx4d8s1h0a``."""
    ms = int(time.time() * 1000) - _EPOCH_MS
    return f"{prefix}-{_base32(ms, 9)}{_base32(int.from_bytes(os.urandom(5), 'big'), 8)}"


def first_id(prefix: str, at: float) -> str:
    """Sorts before every id with the prefix that is made from ``at`` (Unix seconds) on."""
    return f"{prefix}-{_base32(max(0, int(at * 1000) - _EPOCH_MS), 9)}"


def first_call_id(at: float) -> int:
    """The least call id that may be made from ``at`` (Unix seconds) on."""
    return max(0, int(at * 1000) - _EPOCH_MS) << 22


class CallIds:
    """Allocates call ids: 41 bits of milliseconds, 10 bits that tell processes apart, 12 bits of counter."""

    def __init__(self, process: int | None = None) -> None:
        node = (int.from_bytes(os.urandom(2), "big") if process is None else process) & 0x3FF
        self._node = node << 12
        self._counter = itertools.count()
        self._last = 0
        self._lock = threading.Lock()

    def next(self) -> int:
        """The next id; strictly increasing within the process, whatever the clock does."""
        with self._lock:
            ms = int(time.time() * 1000) - _EPOCH_MS
            candidate = (ms << 22) | self._node
            if candidate <= self._last:
                candidate = self._last + 1
            self._last = candidate
            return candidate
