"""From the rows of one attempt to its samples, or to the reason why it gives none (invariant I4).

The lifecycle has judged the call log already (a call without an end, a hole in the numbering). What is judged
here needs the tokens: whether what the harness may have got was recorded whole, and can be read back.
"""

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from forge_server.domain.call import Call
from forge_server.domain.sample import Sample
from forge_server.domain.states import CallEnd, Delivery, Untrainable
from forge_server.trajectory.codec import CallRow, CorruptRecord, decode_attempt
from forge_server.trajectory.samples import cover, takes_part


class Fault(StrEnum):
    """Why an attempt's recording may not be trained."""

    RECORD_INCOMPLETE = "record_incomplete"  # an answer that the harness may have got was not recorded whole
    CORRUPT_RECORD = "corrupt_record"  # stored tokens cannot be read back


class Cut(msgspec.Struct, frozen=True, kw_only=True):
    """What one attempt was cut into; with a ``fault`` there are no samples.

    ``untrained``: why each call that no sample trains is not trained. ``clipped``: completion tokens of a
    call beyond the length limit. ``calls``: all of the attempt's calls with tokens, in order.
    """

    samples: tuple[Sample, ...] = ()
    calls: tuple[Call, ...] = ()
    untrained: dict[int, Untrainable] = {}
    clipped: dict[int, int] = {}
    fault: Fault | None = None
    detail: str = ""

    @property
    def tokens(self) -> int:
        return sum(int(sample.tokens.size) for sample in self.samples)

    @property
    def trained_tokens(self) -> int:
        return sum(int(sample.loss_mask.sum()) for sample in self.samples)

    @property
    def versions(self) -> frozenset[int]:
        """The policy versions that the reward is of: those that answered any call that took part, trained or not.

        None when there is nothing to train, be it beyond the length limit. An engine that serves what is no version of
        the policy makes only such attempts: others are not to be drawn for them for ever.
        """
        if not self.samples and not self.clipped:
            return frozenset()
        return frozenset(span.version for call in self.calls if takes_part(call) for span in call.versions)


def cut(rows: Sequence[CallRow], max_len: int) -> Cut:
    """Rebuild and cut the calls of one attempt into samples of at most ``max_len`` tokens. Never raises."""
    try:
        calls = tuple(decode_attempt(rows))
    except CorruptRecord as error:
        return Cut(fault=Fault.CORRUPT_RECORD, detail=str(error))
    incomplete = next((row for row in rows if not _recorded(row)), None)
    if incomplete is not None:
        detail = f"call {incomplete.id}: its tokens were not recorded whole"
        return Cut(calls=calls, fault=Fault.RECORD_INCOMPLETE, detail=detail)
    found = cover(calls, max_len)
    return Cut(samples=found.samples, calls=calls, untrained=found.untrained, clipped=found.clipped)


def _recorded(row: CallRow) -> bool:
    """Whether the call was recorded whole, or could not have mattered.

    What was not answered or not delivered moved nothing; neither did a side call. A replay has no tokens of
    its own: it is marked a duplicate of the call whose answer it repeated.
    """
    if row.end != CallEnd.OK or row.delivered == Delivery.NO or row.label:
        return True
    if row.untrainable == Untrainable.COUNT_MISMATCH:
        return False
    return row.data is not None or row.untrainable == Untrainable.DUPLICATE
