"""Clocks: deadlines are moments of the server's clock, and time in which nothing could happen is not charged.

Invariant I12 (the part about clocks): a held interval or a downtime moves every deadline that was running by
exactly the part of it that lies after the deadline's clock started, overlaps counted once.
"""

from collections.abc import Iterable

import msgspec


class Interval(msgspec.Struct, frozen=True):
    """``[begin, end)`` in unix seconds."""

    begin: float
    end: float


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same moments as disjoint intervals in order; empty ones vanish."""
    out: list[Interval] = []
    for item in sorted((i for i in intervals if i.end > i.begin), key=lambda i: i.begin):
        if out and item.begin <= out[-1].end:
            out[-1] = Interval(out[-1].begin, max(out[-1].end, item.end))
        else:
            out.append(item)
    return out


def beyond(interval: Interval, others: Iterable[Interval]) -> list[Interval]:
    """The parts of ``interval`` that none of ``others`` covers, in order."""
    out, begin = [], interval.begin
    for other in union(others):
        if other.begin > begin:
            out.append(Interval(begin, min(other.begin, interval.end)))
        begin = max(begin, other.end)
    return [part for part in [*out, Interval(begin, interval.end)] if part.end > part.begin]


def uncharged(started: float, intervals: Iterable[Interval]) -> float:
    """Seconds of ``intervals`` after ``started``, overlaps counted once."""
    return sum(i.end - max(i.begin, started) for i in union(intervals) if i.end > started)


def backoff(failures: int, *, base: float = 2.0, limit: float = 60.0) -> float:
    """Seconds to wait before the attempt that follows failure number ``failures`` (from 1)."""
    return float(min(limit, base * 2 ** max(0, min(failures, 30) - 1)))
