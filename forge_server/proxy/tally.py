"""Counts of calls since this process began, kept beside the rows so that nobody has to count rows for them.

Every label is one of a closed set. A call costs a few dictionary look-ups.
"""

from collections import Counter

from forge_server.domain.histogram import CALL_S, Histogram
from forge_server.proxy.ports import Row


class Tally:
    """What ``/metrics`` tells of the proxy."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        """By dialect and end."""
        self.untrainable: Counter[str] = Counter()
        """Answered calls that are not trained whatever becomes of their delivery, by reason."""
        self.fallbacks: Counter[str] = Counter()
        """Calls that were not spliced, by reason."""
        self.spliced = self.repeats = self.unrecorded = 0
        self.prompt_tokens = self.completion_tokens = 0
        self.whole, self.engine, self.held = Histogram(CALL_S), Histogram(CALL_S), Histogram(CALL_S)

    def ended(self, dialect: str, began_at: float, row: Row) -> None:
        """A call has this end row."""
        self.calls[dialect, str(row["end"])] += 1
        self.whole.observe(max(0.0, row["ended_at"] - began_at))
        if row["held_ms"]:
            self.held.observe(row["held_ms"] / 1000.0)
        if (flags := row["flags"]) and (reason := flags.get("fallback")):
            self.fallbacks[reason] += 1
        engine_ms = row.get("engine_ms")
        if engine_ms is None:
            return
        self.engine.observe(engine_ms / 1000.0)
        self.prompt_tokens += row["prompt_len"]
        self.completion_tokens += row["completion_len"]
        if row["mode"] == "splice":
            self.spliced += 1
        if row["untrainable"] is not None:
            self.untrainable[row["untrainable"]] += 1
