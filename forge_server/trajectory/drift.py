"""The drift report: how well the calls of attempts merged into samples, what broke, and what the breaks cost.

Every break makes the trainer read the shared history once more; with a break at every call the cost grows
with the square of the turns. The report says how far from the ideal the recordings are, and by which
reason.
"""

import msgspec

from forge_server.domain.call import Call
from forge_server.domain.sample import BreakReason
from forge_server.trajectory.attempt import Cut
from forge_server.trajectory.forest import Forest, common_prefix

_VOLATILE = 10  # a break within the first tenth of a prompt that otherwise goes on


class ReasonCost(msgspec.Struct):
    """Samples that began for one reason, and their tokens."""

    samples: int = 0
    tokens: int = 0
    trained_tokens: int = 0


class DriftReport(msgspec.Struct):
    """``new_tokens``: tokens that the calls brought, each counted once. ``faults``: attempts without samples.

    ``volatile_prefixes``: breaks within the first tenth of a prompt whose conversation otherwise went on; a
    harness that writes the time or a nonce there breaks every call (a rule of its spec can strip it).
    ``spliced``: calls that were served token-exact; ``fallbacks``: those that should have been and were not, by
    reason (``domain.states.Fallback``).
    """

    attempts: int = 0
    calls: int = 0
    trained_calls: int = 0
    samples: int = 0
    most_samples: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    new_tokens: int = 0
    clipped_tokens: int = 0
    volatile_prefixes: int = 0
    reasons: dict[BreakReason, ReasonCost] = {}
    untrained: dict[str, int] = {}
    faults: dict[str, int] = {}
    spliced: int = 0
    fallbacks: dict[str, int] = {}

    @property
    def merge_ratio(self) -> float:
        """Trained calls per sample; 1 means that nothing merged."""
        return self.trained_calls / self.samples if self.samples else 0.0

    @property
    def overhead(self) -> float:
        """Tokens in samples per token that the calls brought; 1 when nothing is read twice."""
        return self.tokens / self.new_tokens if self.new_tokens else 0.0

    @property
    def samples_per_attempt(self) -> float:
        whole = self.attempts - sum(self.faults.values())
        return self.samples / whole if whole else 0.0

    def forwarded(self, spliced: bool, fallback: str | None) -> None:
        """Count how one call was served."""
        self.spliced += spliced
        if fallback is not None:
            self.fallbacks[fallback] = self.fallbacks.get(fallback, 0) + 1

    def add(self, cut: Cut) -> None:
        """Count one attempt."""
        self.attempts += 1
        if cut.fault is not None:
            self.faults[cut.fault.value] = self.faults.get(cut.fault.value, 0) + 1
            return
        self.calls += len(cut.calls)
        self.samples += len(cut.samples)
        self.most_samples = max(self.most_samples, len(cut.samples))
        self.clipped_tokens += sum(cut.clipped.values())
        self.new_tokens += _new_tokens(cut.calls)
        for reason in cut.untrained.values():
            self.untrained[reason.value] = self.untrained.get(reason.value, 0) + 1
        by_id = {call.id: call for call in cut.calls}
        for sample in cut.samples:
            owned = [span.call_id for span in sample.spans if span.owned]
            trained = int(sample.loss_mask.sum())
            self.trained_calls += len(owned)
            self.tokens += sample.tokens.size
            self.trained_tokens += trained
            cost = self.reasons.setdefault(sample.break_reason, ReasonCost())
            cost.samples += 1
            cost.tokens += sample.tokens.size
            cost.trained_tokens += trained
            if sample.break_reason is BreakReason.HISTORY_EDITED:
                self.volatile_prefixes += _volatile(by_id[owned[0]], cut.calls)


def _new_tokens(calls: tuple[Call, ...]) -> int:
    """Tokens of the calls that no earlier call held at the same place of the same conversation."""
    forests: dict[str, Forest] = {}
    new = 0
    for call in calls:
        forest = forests.setdefault(call.forest_key, Forest())
        placed = forest.add(call.id, call.prompt, call.completion, call.delivered, call.media)
        new += call.prompt.size - placed.shared + call.completion.size
    return new


def _volatile(call: Call, calls: tuple[Call, ...]) -> bool:
    before = [c for c in calls if c.seq < call.seq and c.forest_key == call.forest_key]
    return bool(before) and _VOLATILE * common_prefix(before[-1].prompt, call.prompt) < call.prompt.size
