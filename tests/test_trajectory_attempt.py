"""Attempts (I4), the drift report, and the data checker: each kind of damage to a recording is found."""

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from test_trajectory_codec import make_row, rows_of
from test_trajectory_samples import SYSTEM, attempts, call, grow

from forge_server.domain.call import Call
from forge_server.domain.sample import BreakReason
from forge_server.domain.states import Delivery, Untrainable
from forge_server.trajectory import codec
from forge_server.trajectory.attempt import Fault, cut
from forge_server.trajectory.check import CheckedAttempt, CheckedCall, DataReport, StoredSample
from forge_server.trajectory.codec import CallRow
from forge_server.trajectory.drift import DriftReport
from forge_server.trajectory.forest import Forest

NO_LIMIT = 1 << 30


def good() -> list[Call]:
    return [call(i, p, c) for i, (p, c) in enumerate(grow(4, SYSTEM))]


def change(rows: list[CallRow], index: int, **fields: object) -> list[CallRow]:
    return [msgspec.structs.replace(r, **fields) if i == index else r for i, r in enumerate(rows)]


# ---- attempts ----------------------------------------------------------------------------------------------


def test_i4_a_whole_recording_is_cut() -> None:
    found = cut(rows_of(good()), NO_LIMIT)
    assert (found.fault, len(found.samples), found.trained_tokens, found.tokens) == (None, 1, 80, 150)


@pytest.mark.parametrize("delivered", [Delivery.YES, Delivery.UNKNOWN])
def test_i4_an_answer_that_was_not_recorded_whole_faults_the_attempt(delivered: Delivery) -> None:
    for fields in ({"untrainable": "count_mismatch"}, {"data": None, "prompt_digest": None}):
        rows = change(rows_of(good()), 3, delivered=delivered.value, **fields)
        found = cut(rows, NO_LIMIT)
        assert (found.fault, found.samples) == (Fault.RECORD_INCOMPLETE, ())
        assert str(rows[3].id) in found.detail


@pytest.mark.parametrize(
    "fields",
    [
        {"delivered": "no", "untrainable": "count_mismatch"},
        {"label": "title", "untrainable": "count_mismatch"},
        {"end": "upstream_error", "untrainable": "not_ok", "delivered": "no", "data": None},
        {"end": "server_lost", "untrainable": "not_ok", "delivered": "no", "data": None},
        {"untrainable": "duplicate", "data": None},
    ],
)
def test_i4_a_call_that_could_not_have_mattered_faults_nothing(fields: dict[str, object]) -> None:
    found = cut(change(rows_of(good()), 3, **fields), NO_LIMIT)
    assert found.fault is None and found.trained_tokens == 60


@pytest.mark.parametrize(
    ("fields", "limit", "versions"),
    [
        ({}, NO_LIMIT, {0, 1, 2, 3}),
        ({}, 60, {0, 1, 2, 3}),  # only the first call lies within it
        ({}, 10, {0, 1, 2, 3}),  # none does
        ({"untrainable": "constrained"}, NO_LIMIT, {0, 1, 2, 3}),
        ({"delivered": "unknown"}, NO_LIMIT, {0, 1, 2, 3}),
        ({"delivered": "no"}, NO_LIMIT, {0, 1, 2}),
        ({"label": "title", "untrainable": "side_call"}, NO_LIMIT, {0, 1, 2}),
    ],
)
def test_a_reward_is_of_every_version_that_took_part(
    fields: dict[str, object], limit: int, versions: set[int]
) -> None:
    """Each call is of another version."""
    assert cut(change(rows_of(good()), 3, **fields), limit).versions == versions


def test_both_versions_of_a_call_that_a_weight_update_split_took_part() -> None:
    calls = good()
    calls[3] = call(3, *grow(4, SYSTEM)[3], versions=[(3, 0, 5), (7, 5, 20)])
    assert cut(rows_of(calls), 60).versions == {0, 1, 2, 3, 7}


def test_what_has_nothing_to_train_is_of_no_version() -> None:
    rows = [msgspec.structs.replace(row, untrainable="unknown_version") for row in rows_of(good())]
    assert cut(rows, NO_LIMIT).versions == frozenset()


def test_i4_what_cannot_be_read_back_faults_the_attempt() -> None:
    found = cut(change(rows_of(good()), 2, prompt_digest=b"?" * 16), NO_LIMIT)
    assert (found.fault, found.samples) == (Fault.CORRUPT_RECORD, ())
    assert "1002" in found.detail


# ---- drift -------------------------------------------------------------------------------------------------


def report(*conversations: list[Call]) -> DriftReport:
    out = DriftReport()
    for calls in conversations:
        out.add(cut(rows_of(calls), NO_LIMIT))
    return out


def test_a_growing_conversation_has_no_overhead() -> None:
    out = report(good(), good())
    assert (out.attempts, out.calls, out.samples, out.merge_ratio, out.overhead) == (2, 8, 2, 4.0, 1.0)
    assert out.reasons[BreakReason.FIRST].samples == 2 and out.samples_per_attempt == 1.0


def test_a_break_at_every_call_costs_half_the_turns() -> None:
    calls, prompt = [], list(range(1000))
    for t in range(20):
        calls.append(call(t, prompt, [*range(5000 + 100 * t, 5040 + 100 * t), 7, 8, 9]))
        prompt = [*prompt, 7, 8, 9, *range(100_000 + 1000 * t, 101_000 + 1000 * t)]
    out = report(calls)
    assert (out.samples, out.merge_ratio, out.most_samples) == (20, 1.0, 20)
    assert 8 < out.overhead < 12
    assert out.reasons[BreakReason.REASONING_STRIPPED].samples == 19
    assert out.reasons[BreakReason.REASONING_STRIPPED].trained_tokens == 19 * 43


def test_case_5_a_volatile_prefix_is_reported() -> None:
    calls = [call(i, [*p[:3], 9000 + i, *p[4:]], c) for i, (p, c) in enumerate(grow(3, SYSTEM))]
    assert report(calls).volatile_prefixes == 2
    assert report(good()).volatile_prefixes == 0


def test_faults_are_counted_apart() -> None:
    out = report(good())
    out.add(cut(change(rows_of(good()), 2, prompt_digest=b"?" * 16), NO_LIMIT))
    assert (out.attempts, out.faults, out.samples_per_attempt) == (2, {"corrupt_record": 1}, 1.0)


# ---- the data checker --------------------------------------------------------------------------------------


def recorded(calls: list[Call], *, samples: bool = True) -> CheckedAttempt:
    rows = rows_of(calls)
    stored = cut(rows, NO_LIMIT).samples if samples else ()
    return CheckedAttempt(
        id="at-1",
        state="ended",
        outcome="completed",
        not_trained="",
        mode="train",
        calls=tuple(
            CheckedCall(
                row=row,
                prompt_len=c.prompt.size,
                completion_len=c.completion.size,
                began_at=10.0 + c.seq,
                ended_at=10.5 + c.seq,
            )
            for row, c in zip(rows, calls, strict=True)
        ),
        samples=tuple(
            StoredSample(
                index=s.index,
                length=s.tokens.size,
                trained=int(s.loss_mask.sum()),
                prompt_len=s.prompt_len,
                call_ids=tuple(x.call_id for x in s.spans if x.owned),
            )
            for s in stored
        ),
    )


def check(attempt: CheckedAttempt) -> DataReport:
    out = DataReport()
    out.add(attempt, NO_LIMIT)
    return out


@settings(max_examples=300, deadline=None)
@given(attempts())
def test_the_checker_finds_nothing_wrong_with_what_was_recorded_right(calls: list[Call]) -> None:
    out = check(recorded(calls))
    assert out.violations == []
    assert out.counts["calls"] == len(calls)


def edit(index: int, **fields: object) -> Callable[[CheckedAttempt], CheckedAttempt]:
    """Change a call: fields of its row, or of what is checked beside it."""

    def apply(attempt: CheckedAttempt) -> CheckedAttempt:
        own = {k: v for k, v in fields.items() if k in CheckedCall.__struct_fields__}
        row = {k: v for k, v in fields.items() if k not in own}
        target = attempt.calls[index]
        changed = msgspec.structs.replace(target, row=msgspec.structs.replace(target.row, **row), **own)
        calls = (*attempt.calls[:index], changed, *attempt.calls[index + 1 :])
        return msgspec.structs.replace(attempt, calls=calls)

    return apply


def whole(**fields: object) -> Callable[[CheckedAttempt], CheckedAttempt]:
    return lambda attempt: msgspec.structs.replace(attempt, **fields)


def swapped_tokens(attempt: CheckedAttempt) -> CheckedAttempt:
    """A completion that is not what was sampled: its digest covers prompts, so the next prompt betrays it."""
    c = good()[1]
    other = msgspec.structs.replace(c, completion=np.array([*c.completion[:-1], 5], np.int32))
    placed = Forest().add(c.id, c.prompt, c.completion, Delivery.YES)
    data = make_row(other, placed).data
    return edit(1, data=data, storage_parent_id=None, prefix_len=0)(attempt)


DAMAGE: dict[str, tuple[str, Callable[[CheckedAttempt], CheckedAttempt]]] = {
    "an ended attempt with an open call": ("I1", edit(1, end=None)),
    "an end that does not exist": ("I1", edit(1, end="vanished")),
    "an end before the beginning": ("I1", edit(1, ended_at=1.0)),
    "a failed call that was delivered": ("I1", edit(3, end="upstream_error", untrainable="not_ok")),
    "a failed call that is trainable": ("I3", edit(3, end="upstream_error", delivered="no")),
    "usage that disagrees with the ids": ("I2", edit(2, completion_len=19)),
    "a prompt of another length": ("I2", edit(2, prompt_len=19)),
    "a digest that does not match": ("I2", edit(2, prompt_digest=b"?" * 16)),
    "tokens that were exchanged": ("I2", swapped_tokens),
    "a logprob above zero": (
        "I2",
        edit(
            3,
            data=codec.encode(
                good()[3].prompt, 120, good()[3].completion, np.ones(20, np.float32), good()[3].versions
            ),
        ),
    ),
    "a delivery that was taken back": ("I3", edit(3, delivered="no")),
    "samples of a faulty recording": ("I4", edit(3, untrainable="count_mismatch")),
    "samples of an attempt that is not trained": ("I4", whole(not_trained="call_missing")),
    "samples of an infra failure": ("I5", whole(outcome="infra_failure")),
    "samples of an evaluation": ("I5", whole(mode="eval")),
    "a hole in the numbering": (
        "I4",
        lambda attempt: whole(calls=attempt.calls[:2] + attempt.calls[3:])(attempt),
    ),
    "samples that were lost": (
        "I3",
        lambda attempt: whole(samples=(msgspec.structs.replace(attempt.samples[0], trained=79),))(attempt),
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_the_checker_finds(damage: str) -> None:
    invariant, apply = DAMAGE[damage]
    found = check(apply(recorded(good()))).violations
    assert invariant in {v.invariant for v in found}, found


def test_the_checker_counts() -> None:
    calls = [*good(), call(4, SYSTEM, [1], untrainable=Untrainable.CONSTRAINED)]
    counts = check(recorded(calls)).counts
    assert counts["attempts"] == counts["attempts.completed"] == counts["samples"] == 1
    assert (counts["calls.ok"], counts["untrained.constrained"], counts["tokens.trained"]) == (5, 1, 80)
