"""Images in the forest, in samples and in stored rows: equal placeholders of different images never merge."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_trajectory_codec import rows_of
from test_trajectory_forest import DELIVERIES, Oracle, ids
from test_trajectory_samples import call

from forge_server.domain.call import Call
from forge_server.domain.media import Media, MediaSpan
from forge_server.domain.sample import BreakReason, Sample
from forge_server.domain.states import Delivery, Untrainable
from forge_server.trajectory import media
from forge_server.trajectory.attempt import Fault, cut
from forge_server.trajectory.batchfile import BatchRollout, write_batch
from forge_server.trajectory.check import CheckedAttempt, CheckedCall, DataReport
from forge_server.trajectory.codec import CorruptRecord, decode_attempt
from forge_server.trajectory.forest import Forest
from forge_server.trajectory.samples import cover

PAD, OPEN, CLOSE = 90, 91, 92
RED, BLUE, GREEN = (f"{n:02x}" * 32 for n in (1, 2, 3))
WINDOW = 4096


def shown(*pieces: int | str) -> tuple[list[int], Media]:
    """Token ids with images in between: three placeholders each, between the tokens that enclose them."""
    tokens: list[int] = []
    spans: list[MediaSpan] = []
    for piece in pieces:
        if isinstance(piece, int):
            tokens.append(piece)
        else:
            spans.append(MediaSpan(piece, len(tokens) + 1, 3))
            tokens += [OPEN, PAD, PAD, PAD, CLOSE]
    return tokens, tuple(spans)


def look(id: int, pieces: tuple[int | str, ...], answer: list[int]) -> Call:
    """A call with this prompt."""
    prompt, spans = shown(*pieces)
    return msgspec.structs.replace(call(id, prompt, answer), media=spans)


# --- where the images are ---


def test_placeholders_are_counted_in_order() -> None:
    prompt, spans = shown(5, RED, 6, 7, BLUE, RED)
    assert media.locate(ids(prompt), PAD, [RED, BLUE, RED]) == spans
    assert media.locate(ids(prompt), PAD, []) == ()


@pytest.mark.parametrize("images", [[RED], [RED, BLUE, RED, RED]])
def test_another_number_of_runs_than_images_tells_nothing(images: list[str]) -> None:
    prompt, _ = shown(5, RED, 6, BLUE, RED)
    assert media.locate(ids(prompt), PAD, images) is None


def test_without_a_known_placeholder_nothing_is_told() -> None:
    assert media.locate(ids([1, PAD, 2]), None, [RED]) is None


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.integers(0, 2), st.sampled_from([RED, BLUE])), max_size=12))
def test_what_is_located_is_what_was_put_there(pieces: list[int | str]) -> None:
    prompt, spans = shown(*pieces)
    images = [piece for piece in pieces if isinstance(piece, str)]
    found = media.locate(ids(prompt), PAD, images)
    assert found == spans
    assert media.sound(spans, len(prompt))
    for shared in range(len(prompt) + 1):
        assert media.inherited(spans, shared) + media.unpack(media.pack(spans, shared)) == spans


# --- the forest ---


Piece = int | str
Spec = tuple[tuple[Piece, ...], list[int], Delivery]


@st.composite
def conversations(draw: st.DrawFn, most: int = 12) -> list[Spec]:
    """Calls over two tokens and two images; new prompts are built from earlier ones, so that prefixes collide."""
    piece = st.one_of(st.integers(0, 1), st.sampled_from([RED, BLUE]))
    calls: list[Spec] = []
    for _ in range(draw(st.integers(1, most))):
        how = draw(st.sampled_from(["new", "extend", "extend", "swap", "again"])) if calls else "new"
        if how == "new":
            pieces = tuple(draw(st.lists(piece, min_size=1, max_size=4)))
        else:
            before, answer, _ = calls[draw(st.integers(0, len(calls) - 1))]
            pieces = before
            if how == "extend":
                pieces = (*before, *answer, *draw(st.lists(piece, max_size=3)))
            elif how == "swap":  # another screenshot in the same place
                other = {RED: BLUE, BLUE: RED}
                pieces = tuple(other[p] if isinstance(p, str) else p for p in before)
        completion = draw(st.lists(st.integers(0, 1), max_size=3))
        calls.append((pieces, completion, draw(DELIVERIES)))
    return calls


@settings(max_examples=300, deadline=None)
@given(conversations())
def test_case_23_the_forest_places_images_where_the_oracle_does(calls: list[Spec]) -> None:
    """The oracle compares sequences in which each image's placeholders are numbers of their own."""
    numbers = {RED: 1000, BLUE: 2000}
    forest, oracle = Forest(), Oracle()
    for i, (pieces, completion, delivered) in enumerate(calls):
        prompt, spans = shown(*pieces)
        apart = list(prompt)
        for span in spans:
            apart[span.offset : span.end] = [numbers[span.sha256]] * span.length
        placed = forest.add(i, ids(prompt), ids(completion), delivered, spans)
        expected = oracle.add(apart, completion, delivered)
        assert placed.parent == expected["parent"]
        assert placed.shared == expected["shared"]
        assert set(placed.confirmed) == expected["confirmed"]
        assert placed.twin == expected["twin"]
        assert forest.tokens(i).tolist() == prompt + completion


def test_case_23_same_placeholders_of_another_screenshot_do_not_merge() -> None:
    red, blue = shown(5, RED, 6), shown(5, BLUE, 6)
    forest = Forest()
    forest.add(0, ids(red[0]), ids([7]), Delivery.YES, red[1])
    placed = forest.add(1, ids([*blue[0], 7, 8]), ids([9]), Delivery.YES, blue[1])
    assert placed.parent is None and placed.shared == 2
    assert forest.add(2, ids([*red[0], 7, 8]), ids([9]), Delivery.YES, red[1]).parent == 0


def test_placeholders_of_several_kinds_keep_their_ids() -> None:
    """Some models end each row of an image with an id of its own."""
    prompt, spans = ids([1, PAD, PAD, 93, PAD, PAD, 93, 2]), (MediaSpan(RED, 1, 6),)
    forest = Forest()
    forest.add(0, prompt, ids([3]), Delivery.YES, spans)
    assert forest.tokens(0).tolist() == [*prompt.tolist(), 3]


# --- samples ---


def test_a_conversation_with_a_growing_number_of_images_is_one_sample() -> None:
    first = look(0, (1, RED, 2), [3, 4])
    second = look(1, (1, RED, 2, 3, 4, BLUE, 5), [6])
    (sample,) = cover([first, second], WINDOW).samples
    assert sample.media == second.media
    assert [span.owned for span in sample.spans] == [True, True]


def test_case_24_a_window_of_screenshots_makes_a_sample_of_each_call() -> None:
    calls = [look(i, (1, image, 2), [3]) for i, image in enumerate([RED, BLUE, GREEN])]
    found = cover(calls, WINDOW)
    assert [sample.media for sample in found.samples] == [c.media for c in calls]
    assert [sample.tokens.tolist() for sample in found.samples] == [shown(1, RED, 2)[0] + [3]] * 3
    assert found.samples[1].break_reason is not BreakReason.RETRY


def test_equal_calls_before_different_images_are_no_duplicates() -> None:
    found = cover([look(0, (1, RED), [3]), look(1, (1, BLUE), [3]), look(2, (1, RED), [3])], WINDOW)
    assert found.untrained == {1000: Untrainable.DUPLICATE}


# --- rows ---


CALLS = [
    look(0, (1, RED, 2), [3, 4]),
    look(1, (1, RED, 2, 3, 4, BLUE, 5), [6]),
    look(2, (1, BLUE, 2), [3]),
    look(3, (1, RED, 2, 3, 4, BLUE, 5, 6, 7), [8]),
]


def test_rows_give_the_images_back() -> None:
    rows = rows_of(CALLS)
    assert [row.media is not None for row in rows] == [True, True, True, False]
    assert [c.media for c in decode_attempt(rows)] == [c.media for c in CALLS]
    assert cut(rows, WINDOW).fault is None


@pytest.mark.parametrize(
    "damage",
    [b"", b"\x09\0\0\0", media.pack((MediaSpan(RED, 0, 999),), 0), media.pack((MediaSpan(RED, 1, 0),), 0)],
)
def test_damaged_lists_of_images_fault_the_attempt(damage: bytes) -> None:
    rows = rows_of(CALLS)
    rows[0] = msgspec.structs.replace(rows[0], media=damage)
    with pytest.raises(CorruptRecord):
        decode_attempt(rows)
    assert cut(rows, WINDOW).fault is Fault.CORRUPT_RECORD


def test_a_batch_takes_no_images() -> None:
    samples = cut(rows_of(CALLS), WINDOW).samples
    with pytest.raises(ValueError, match="no images"):
        write_batch("ru", 1, [BatchRollout("ro", "gr", 1.0, samples)], 0)


def checked(images: frozenset[str]) -> DataReport:
    report = DataReport()
    attempt = CheckedAttempt(
        id="at",
        state="ended",
        outcome="completed",
        not_trained="",
        mode="record",
        calls=tuple(
            CheckedCall(
                row=row,
                prompt_len=c.prompt.size,
                completion_len=c.completion.size,
                began_at=1.0,
                ended_at=2.0,
            )
            for row, c in zip(rows_of(CALLS), CALLS, strict=True)
        ),
        samples=(),
        images=images,
    )
    report.add(attempt, WINDOW)
    return report


def test_the_check_misses_images_that_are_gone() -> None:
    whole = checked(frozenset({RED, BLUE}))
    assert whole.violations == [] and whole.counts["images"] == 6
    found = checked(frozenset({RED}))
    assert {v.call_id for v in found.violations} == {1001, 1002, 1003}
    assert all(v.invariant == "I2" and BLUE in v.what for v in found.violations)


def test_a_sample_knows_only_the_images_before_its_end() -> None:
    long = look(0, (1, RED), list(range(1, 60)))
    sample: Sample
    (sample,) = cover([long], 10).samples
    assert sample.tokens.size == 10 and sample.truncated and sample.media == long.media
    assert np.array_equal(sample.tokens[:6], long.prompt)
