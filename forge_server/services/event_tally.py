"""Counts of committed events since this process began: what attempts, rollouts, batches and policies came to.

Subscribed to the lifecycle. Labels are outcomes, kinds, backends, modes: closed sets, never ids.
"""

from collections import Counter
from typing import Any

from forge_server.domain.events import EventRow
from forge_server.domain.histogram import CALL_S, Histogram
from forge_server.evaluation.stats import PASS_REWARD

KEPT = 200_000
"""Attempts whose launch is remembered at most: far more than are ever in flight."""


class EventTally:
    def __init__(self) -> None:
        self.events: Counter[str] = Counter()
        """By kind; only those that ``SHOWN`` of ``services.metrics`` asks for are told."""
        self.attempts: Counter[tuple[str, str, str]] = Counter()
        """Ended, by backend, outcome and kind."""
        self.rollouts: Counter[tuple[str, str]] = Counter()
        """Ended, by mode and outcome."""
        self.passed: Counter[str] = Counter()
        """Ended with a reward that passes, by mode."""
        self.start_up: dict[str, Histogram] = {}
        """From launch to the harness's start, by backend."""
        self.holds: dict[str, Histogram] = {}
        """Holds of calls that are over, by reason."""
        self._backends: dict[str, str] = {}
        self._launched: dict[str, float] = {}

    def __call__(self, row: EventRow) -> None:
        self.events[row.kind] += 1
        if row.attempt_id is not None:
            self._attempt(row, row.attempt_id)
        elif row.kind == "rollout_ended":
            self._rollout(row.data)
        elif row.kind == "hold_ended":
            _of(self.holds, row.data["reason"]).observe(row.data["seconds"])

    def _attempt(self, row: EventRow, attempt_id: str) -> None:
        if row.kind == "attempt_queued" and len(self._backends) < KEPT:
            self._backends[attempt_id] = row.data["backend"]
        elif row.kind == "attempt_launching" and attempt_id in self._backends:
            self._launched[attempt_id] = row.at
        elif row.kind == "attempt_running":
            launched = self._launched.pop(attempt_id, None)
            if launched is not None:
                _of(self.start_up, self._backends[attempt_id]).observe(max(0.0, row.at - launched))
        elif row.kind == "attempt_ended":
            self._launched.pop(attempt_id, None)
            self._backends.pop(attempt_id, None)
            data = row.data
            self.attempts[data["backend"], data["outcome"], data["kind"]] += 1

    def _rollout(self, data: dict[str, Any]) -> None:
        self.rollouts[data["mode"], data["outcome"]] += 1
        if data["reward"] is not None and data["reward"] >= PASS_REWARD:
            self.passed[data["mode"]] += 1


def _of(histograms: dict[str, Histogram], label: str) -> Histogram:
    return histograms.setdefault(label, Histogram(CALL_S))
