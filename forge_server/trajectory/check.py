"""The data checker: invariants I1 to I4 over what the database holds of a run (`forge-server check --data
RUN`).

It trusts nothing that the recording path computed: prompts are rebuilt and compared with their digests, and
the samples are compared with the calls token by token, by plain array comparison instead of the forest.
"""

from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np

from forge_server.domain.call import Call, count_fault
from forge_server.domain.outcome import Outcome, counts_for_training
from forge_server.domain.states import AttemptState, CallEnd, Delivery, Untrainable
from forge_server.trajectory.attempt import Cut, Fault, cut
from forge_server.trajectory.codec import CallRow


class CheckedCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call's row as the cut reads it, and the columns that only the check and the drift report read.
    ``fallback``: why it was recorded although it should have been spliced."""

    row: CallRow
    prompt_len: int | None
    completion_len: int | None
    began_at: float
    ended_at: float | None
    spliced: bool = False
    fallback: str | None = None


class StoredSample(msgspec.Struct, frozen=True, kw_only=True):
    """A row of ``samples``."""

    index: int
    length: int
    trained: int
    prompt_len: int
    call_ids: tuple[int, ...]


class CheckedAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt with everything that was recorded of it. ``images``: SHA-256 of those in the database, as their
    bytes have it today."""

    id: str
    state: str
    outcome: str | None
    not_trained: str
    mode: str
    calls: tuple[CheckedCall, ...]
    samples: tuple[StoredSample, ...]
    images: frozenset[str] = frozenset()


class Violation(msgspec.Struct, frozen=True):
    """An invariant that does not hold, where, and how."""

    invariant: str
    attempt_id: str
    call_id: int | None
    what: str


class DataReport(msgspec.Struct):
    """Counts of what was looked at, by name, and every violation."""

    counts: Counter[str] = msgspec.field(default_factory=Counter)
    violations: list[Violation] = []

    def add(self, attempt: CheckedAttempt, max_len: int) -> None:
        """Check one attempt; ``max_len`` is the length limit that the run's samples were cut with."""
        _Check(self, attempt).run(max_len)


class _Check:
    def __init__(self, report: DataReport, attempt: CheckedAttempt) -> None:
        self.report, self.attempt = report, attempt
        self.ended = attempt.state == AttemptState.ENDED

    def wrong(self, invariant: str, what: str, call_id: int | None = None) -> None:
        self.report.violations.append(Violation(invariant, self.attempt.id, call_id, what))

    def count(self, name: str, by: int = 1) -> None:
        self.report.counts[name] += by

    def run(self, max_len: int) -> None:
        self.count("attempts")
        self.count(f"attempts.{self.attempt.outcome or self.attempt.state}")
        self.ends()
        found = cut([call.row for call in self.attempt.calls], max_len)
        by_id = {call.id: call for call in found.calls}
        if found.fault is Fault.CORRUPT_RECORD:
            self.wrong("I2", found.detail)
        for checked in self.attempt.calls:
            if checked.row.id in by_id:
                self.recorded(checked, by_id[checked.row.id])
        self.samples(found, by_id)
        self.stored(found)

    def ends(self) -> None:
        """I1: every call of an ended attempt has exactly one end, and the numbering has no hole."""
        for checked in self.attempt.calls:
            row = checked.row
            self.count("calls")
            self.count(f"calls.{row.end or 'in_flight'}")
            self.count(f"delivered.{row.delivered}")
            if row.end is None:
                if self.ended:
                    self.wrong("I1", "the attempt ended, the call has no end", row.id)
                continue
            if row.end not in set(CallEnd):
                self.wrong("I1", f"unknown end {row.end!r}", row.id)
            if checked.ended_at is None or checked.ended_at < checked.began_at:
                self.wrong("I1", "the end has no time, or one before the beginning", row.id)
            if row.end != CallEnd.OK and row.delivered == Delivery.YES:
                self.wrong("I1", f"an answer was delivered of a call that ended {row.end}", row.id)
            if row.end != CallEnd.OK and row.untrainable is None:
                self.wrong("I3", f"trainable, but ended {row.end}", row.id)

    def recorded(self, checked: CheckedCall, call: Call) -> None:
        """I2: ids, usage and logprobs of a trainable call agree."""
        self.count("tokens.completion", call.completion.size)
        if checked.prompt_len != call.prompt.size and call.untrainable is not Untrainable.COUNT_MISMATCH:
            self.wrong("I2", f"{call.prompt.size} prompt ids, usage says {checked.prompt_len}", call.id)
        for span in call.media:
            self.count("images")
            if span.sha256 not in self.attempt.images:
                self.wrong("I2", f"image {span.sha256} is not stored, or is another one by now", call.id)
            if np.unique(call.prompt[span.offset : span.end]).size != 1:
                self.wrong("I2", f"tokens {span.offset} to {span.end} are not one image's", call.id)
        if call.untrainable is not None:
            return
        fault = count_fault(call.completion, call.logprobs, checked.completion_len or 0)
        if fault is not None and fault is not Untrainable.EMPTY:
            counts = (call.completion.size, call.logprobs.size, checked.completion_len)
            self.wrong("I2", f"{fault} (ids, logprobs, usage: {counts}), but trainable", call.id)

    def samples(self, found: Cut, by_id: dict[int, Call]) -> None:
        """I3: samples hold what the engine saw, and train every delivered trainable token exactly once."""
        times: Counter[int] = Counter()
        for sample in found.samples:
            self.count("samples")
            self.count(f"breaks.{sample.break_reason}")
            self.count("tokens.samples", sample.tokens.size)
            self.count("tokens.trained", int(sample.loss_mask.sum()))
            trained = np.zeros(sample.tokens.size, bool)
            for span in sample.spans:
                if not span.owned:
                    continue
                call = by_id[span.call_id]
                times[call.id] += 1
                trained[span.prompt_end : span.end] = True
                kept = span.end - span.prompt_end
                if not (
                    span.prompt_end == call.prompt.size
                    and np.array_equal(sample.tokens[: span.prompt_end], call.prompt)
                    and np.array_equal(sample.tokens[span.prompt_end : span.end], call.completion[:kept])
                    and np.array_equal(sample.logprobs[span.prompt_end : span.end], call.logprobs[:kept])
                    and tuple(seen for seen in sample.media if seen.offset < span.prompt_end) == call.media
                ):
                    self.wrong("I3", f"sample {sample.index} does not hold what the engine saw", call.id)
                if call.delivered is Delivery.NO:
                    self.wrong("I3", "trained, but not delivered", call.id)
            if not np.array_equal(trained, sample.loss_mask == 1):
                self.wrong("I3", f"sample {sample.index} trains other tokens than those of its calls")
        for call in found.calls:
            wanted = found.fault is None and call.id not in found.untrained
            reached = found.clipped.get(call.id, 0) < call.completion.size
            if times[call.id] != int(wanted and reached):
                self.wrong("I3", f"trained in {times[call.id]} samples", call.id)
        for reason in found.untrained.values():
            self.count(f"untrained.{reason}")

    def stored(self, found: Cut) -> None:
        """I4: what was made into stored samples is valid, whole, and equal to what the calls give today."""
        attempt = self.attempt
        if found.fault is not None:
            self.count(f"faults.{found.fault}")
        if attempt.not_trained:
            self.count(f"not_trained.{attempt.not_trained}")
        self._hole()
        if not attempt.samples:
            return
        self.count("attempts.in_batches")
        if attempt.not_trained or found.fault is not None:
            self.wrong("I4", f"has samples, but is not to be trained: {attempt.not_trained or found.fault}")
        if attempt.mode != "train" or not _valid(attempt.outcome):
            self.wrong("I5", f"has samples, but is a {attempt.mode} attempt that ended {attempt.outcome}")
        now = [
            StoredSample(
                index=sample.index,
                length=sample.tokens.size,
                trained=int(sample.loss_mask.sum()),
                prompt_len=sample.prompt_len,
                call_ids=tuple(span.call_id for span in sample.spans if span.owned),
            )
            for sample in found.samples
        ]
        if now != list(attempt.samples):
            self.wrong("I3", "its calls give other samples than those that were stored")

    def _hole(self) -> None:
        if not self.ended or not _valid(self.attempt.outcome) or self.attempt.not_trained:
            return
        numbers: Sequence[int] = sorted(call.row.seq for call in self.attempt.calls)
        if numbers != list(range(len(numbers))):
            self.wrong("I4", "a call is missing, and the attempt does not say that it is not trained")


def _valid(outcome: str | None) -> bool:
    return outcome is not None and counts_for_training(Outcome(outcome))
