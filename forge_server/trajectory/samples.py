"""Calls into samples: a path cover of the call forest.

Every leaf of the forest of trainable calls gives one sample: the leaf's prompt and completion, which
contain those of all its ancestors as exact prefixes. Each trainable, delivered call is *owned* by the first
sample on whose path it lies, and trained there only; in every other sample it is context.

By construction (invariant I3): ``sample.tokens[:len(prompt)] == prompt`` for every call a sample owns;
context is never trained; a call that is not known to be delivered is neither trained nor continued. A
length limit removes a suffix, never a prefix, so that every token kept is conditioned on exactly what the
engine saw. Calls that were not delivered, are empty or are side calls take no part at all, so their
presence changes no sample.
"""

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from forge_server.domain.call import Call, count_fault
from forge_server.domain.sample import BreakReason, CallSpan, Sample
from forge_server.domain.states import Delivery, Untrainable
from forge_server.trajectory import breaks
from forge_server.trajectory.forest import Forest, Placement, PlacementKind

_OF_DELIVERY = (Untrainable.NOT_DELIVERED, Untrainable.DELIVERY_UNKNOWN)


class Cover(msgspec.Struct, frozen=True):
    """What calls were cut into.

    ``untrained``: why each call that no sample owns is not trained. ``clipped``: completion tokens of a
    call that lie beyond the length limit. ``confirmed``: calls whose delivery was unknown and that later
    prompts showed delivered.
    """

    samples: tuple[Sample, ...]
    untrained: dict[int, Untrainable]
    clipped: dict[int, int]
    confirmed: tuple[int, ...]


def cover(calls: Iterable[Call], max_len: int) -> Cover:
    """Cut one attempt's calls into samples of at most ``max_len`` tokens, by their last trained call."""
    return _Cutter(sorted(calls, key=lambda call: call.seq), max_len).cover()


def takes_part(call: Call) -> bool:
    """Whether the harness may have gone on from the call's answer, and not beside its work; trained or not."""
    return (
        call.completion.size > 0
        and call.delivered is not Delivery.NO
        and call.untrainable is not Untrainable.SIDE_CALL
    )


class _Cutter:
    """The working state of one ``cover``."""

    def __init__(self, calls: Sequence[Call], max_len: int) -> None:
        self.all, self.max_len = calls, max_len
        self.calls = [call for call in calls if takes_part(call)]
        self.by_id = {call.id: call for call in self.calls}
        self.forests: dict[str, Forest] = {}
        self.placed: dict[int, Placement] = {}
        self.confirmed: list[int] = []
        for call in self.calls:
            forest = self.forests.setdefault(call.forest_key, Forest())
            placement = forest.add(call.id, call.prompt, call.completion, call.delivered, call.media)
            self.placed[call.id] = placement
            self.confirmed += placement.confirmed
        self.untrained = self._reasons()
        self.clipped: dict[int, int] = {}

    def cover(self) -> Cover:
        samples: list[Sample] = []
        used: set[int] = set()
        owned: set[int] = set()
        for leaf in self._leaves():
            chain = self._chain(leaf.id)
            fresh = [c for c in chain if c.id not in self.untrained and c.id not in owned]
            owned.update(call.id for call in fresh)
            reason = self._break_reason(chain, fresh[0], used)
            for temperature in dict.fromkeys(call.temperature for call in fresh):
                mine = [call for call in fresh if call.temperature == temperature]
                sample = self._sample(chain, mine, len(samples), reason)
                if sample is not None:
                    samples.append(sample)
                reason = BreakReason.OTHER  # a row of a batch has one temperature
            used.update(call.id for call in chain)
        samples.sort(key=lambda sample: max(self.by_id[s.call_id].seq for s in sample.spans if s.owned))
        return Cover(
            samples=tuple(msgspec.structs.replace(sample, index=i) for i, sample in enumerate(samples)),
            untrained=self.untrained,
            clipped=self.clipped,
            confirmed=tuple(self.confirmed),
        )

    # ---- which calls -------------------------------------------------------------------------------------

    def _reasons(self) -> dict[int, Untrainable]:
        reasons = {call.id: reason for call in self.all if (reason := self._reason(call)) is not None}
        latest: dict[int, int] = {}  # first of identical twins -> the latest of them that may be trained
        first: dict[int, int] = {}
        for call in self.calls:
            twin = self.placed[call.id].twin
            first[call.id] = call.id if twin is None else first[twin]
            if call.id in reasons:
                continue
            older = latest.get(first[call.id])
            if older is not None:
                reasons[older] = Untrainable.DUPLICATE
            latest[first[call.id]] = call.id
        return reasons

    def _reason(self, call: Call) -> Untrainable | None:
        if call.untrainable is not None and call.untrainable not in _OF_DELIVERY:
            return call.untrainable
        if call.delivered is Delivery.NO:
            return Untrainable.NOT_DELIVERED
        if call.prompt.size == 0:
            return Untrainable.EMPTY  # a first token that follows nothing has no probability to train
        fault = count_fault(call.completion, call.logprobs, call.completion.size)
        if fault is not None:
            return fault
        if not call.temperature > 0:
            return Untrainable.FOREIGN_SAMPLING  # greedy choices have no gradient
        if self.forests[call.forest_key].delivery(call.id) is not Delivery.YES:
            return Untrainable.DELIVERY_UNKNOWN
        expected = 0
        for span in call.versions:
            if span.start != expected:
                break
            expected = span.end
        return None if expected == call.completion.size else Untrainable.MIXED_VERSIONS

    def _leaves(self) -> list[Call]:
        """Trainable calls that no other trainable call continues, directly or through untrained ones."""
        continued: set[int] = set()
        for call in self.calls:
            if call.id in self.untrained:
                continue
            at = self.placed[call.id].parent
            while at is not None and at not in continued:
                continued.add(at)
                at = self.placed[at].parent
        return [c for c in self.calls if c.id not in self.untrained and c.id not in continued]

    def _chain(self, id: int) -> list[Call]:
        chain = []
        at: int | None = id
        while at is not None:
            chain.append(self.by_id[at])
            at = self.placed[at].parent
        return chain[::-1]

    # ---- one sample --------------------------------------------------------------------------------------

    def _sample(self, chain: list[Call], mine: list[Call], index: int, reason: BreakReason) -> Sample | None:
        for call in mine:
            beyond = call.prompt.size + call.completion.size - self.max_len
            if beyond > 0:
                self.clipped[call.id] = min(beyond, call.completion.size)
        kept = [call for call in mine if call.prompt.size < self.max_len]
        if not kept:
            return None
        last = kept[-1]
        tokens = np.concatenate((last.prompt, last.completion))[: self.max_len]
        mask = np.zeros(tokens.size, np.uint8)
        logprobs = np.zeros(tokens.size, np.float32)
        versions = np.full(tokens.size, -1, np.int32)
        spans = []
        ours = {call.id for call in kept}
        for call in (call for call in chain if call.prompt.size <= last.prompt.size):
            begin = call.prompt.size
            end = min(begin + call.completion.size, tokens.size)
            spans.append(
                CallSpan(
                    call_id=call.id,
                    prompt_end=begin,
                    end=end,
                    owned=call.id in ours,
                    version=min((span.version for span in call.versions), default=-1),
                    temperature=call.temperature,
                    finish_reason=call.finish_reason,
                )
            )
            if call.id in ours:
                mask[begin:end] = 1
                logprobs[begin:end] = call.logprobs[: end - begin]
                for span in call.versions:
                    versions[begin + span.start : min(begin + span.end, end)] = span.version
        return Sample(
            index=index,
            tokens=tokens,
            loss_mask=mask,
            logprobs=logprobs,
            versions=versions,
            prompt_len=kept[0].prompt.size,
            spans=tuple(spans),
            break_reason=reason,
            forest_key=last.forest_key,
            truncated=any(call.id in self.clipped for call in mine),
            media=last.media,
        )

    def _break_reason(self, chain: list[Call], first: Call, used: set[int]) -> BreakReason:
        if self.placed[first.id].kind is PlacementKind.RETRY:
            return BreakReason.RETRY
        if any(call.id in used for call in chain):
            return BreakReason.FORK
        root = chain[0]
        if root is self.calls[0]:
            return BreakReason.FIRST
        placement = self.placed[root.id]
        if placement.kind is PlacementKind.FIRST:
            return BreakReason.MODEL
        if self._continues_undelivered(root):
            return BreakReason.UNDELIVERED_PARENT
        shared = placement.shared
        source = self._completion_at(placement.storage_parent, shared)
        if source is not None:
            at = shared - source.prompt.size
            reason = breaks.in_completion(source.completion, at, root.prompt[shared:])
            if reason is not None:
                return reason
        earlier = [c for c in self.calls if c.forest_key == root.forest_key and c.seq < root.seq]
        before = [self.by_id[placement.storage_parent]] if placement.storage_parent is not None else []
        return breaks.in_context(root.prompt, shared, [*before, earlier[-1]], self._alive(earlier, root))

    def _continues_undelivered(self, root: Call) -> bool:
        for call in self.all:
            if call.seq >= root.seq or call.forest_key != root.forest_key or call.completion.size == 0:
                continue
            if self.untrained.get(call.id) not in _OF_DELIVERY:
                continue
            end = call.prompt.size + call.completion.size
            if (
                end <= root.prompt.size
                and np.array_equal(root.prompt[call.prompt.size : end], call.completion)
                and np.array_equal(root.prompt[: call.prompt.size], call.prompt)
            ):
                return True
        return False

    def _completion_at(self, id: int | None, position: int) -> Call | None:
        """The call whose completion held ``position`` of the sequence of call ``id``, if any did."""
        while id is not None:
            call, placement = self.by_id[id], self.placed[id]
            if position >= call.prompt.size:
                return call
            if position >= placement.shared:
                return None
            id = placement.storage_parent
        return None

    def _alive(self, earlier: list[Call], root: Call) -> bool:
        before = {call.id for call in earlier}
        return any(self.placed[c.id].parent in before for c in self.calls if c.seq > root.seq)
