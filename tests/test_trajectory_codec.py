"""Call blobs: round trips, what damage looks like, and rebuilding whole attempts (I2)."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_server.domain.call import Call, VersionSpan
from forge_server.domain.states import Delivery, Untrainable
from forge_server.trajectory import codec, media
from forge_server.trajectory.codec import CallRow, CorruptRecord
from forge_server.trajectory.forest import Forest, Placement

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=20)


def make_row(call: Call, placement: Placement) -> CallRow:
    """The row that the recording path would store."""
    return CallRow(
        id=call.id,
        seq=call.seq,
        end="ok",
        delivered=call.delivered.value,
        untrainable=call.untrainable.value if call.untrainable else None,
        label=call.label,
        forest_key=call.forest_key,
        storage_parent_id=placement.storage_parent,
        prefix_len=placement.shared,
        finish_reason=call.finish_reason,
        temperature=call.temperature,
        data=codec.encode(call.prompt, placement.shared, call.completion, call.logprobs, call.versions),
        prompt_digest=codec.digest(call.prompt),
        media=media.pack(call.media, placement.shared),
    )


def rows_of(calls: list[Call], order: list[int] | None = None) -> list[CallRow]:
    """Rows of calls that ended in ``order`` (indices), one forest per key, as in the proxy."""
    forests: dict[str, Forest] = {}
    rows = {}
    for i in order or range(len(calls)):
        call = calls[i]
        forest = forests.setdefault(call.forest_key, Forest())
        placed = forest.add(call.id, call.prompt, call.completion, call.delivered, call.media)
        rows[i] = make_row(call, placed)
    return [rows[i] for i in range(len(calls))]


def make_call(seq: int, prompt: list[int], completion: list[int]) -> Call:
    return Call(
        id=100 + seq,
        seq=seq,
        prompt=np.array(prompt, np.int32),
        completion=np.array(completion, np.int32),
        logprobs=-np.arange(1, len(completion) + 1, dtype=np.float32),
        versions=(VersionSpan(seq, 0, len(completion)),),
        delivered=Delivery.YES,
        untrainable=None,
        temperature=0.7,
        finish_reason="stop",
    )


@given(st.lists(st.tuples(st.integers(0, 20), TOKENS), max_size=8))
def test_digests_of_a_session_are_those_of_its_prompts(turns: list[tuple[int, list[int]]]) -> None:
    digests, prompt = codec.PromptDigests(), np.empty(0, np.int32)
    for kept, further in turns:  # prompts grow, branch off, repeat and shrink
        prompt = np.concatenate([prompt[:kept], np.array(further, np.int32)])
        assert digests.of(prompt) == codec.digest(prompt)


@given(TOKENS, TOKENS, st.lists(st.floats(width=32, allow_nan=True), max_size=20), st.data())
def test_a_blob_gives_back_what_went_in(
    prompt: list[int], completion: list[int], logprobs: list[float], data: st.DataObject
) -> None:
    shared = data.draw(st.integers(0, len(prompt)))
    spans = (VersionSpan(3, 0, 4), VersionSpan(4, 4, 9))
    p, c, lp = np.array(prompt, np.int32), np.array(completion, np.int32), np.array(logprobs, np.float32)
    tokens = codec.decode(1, codec.encode(p, shared, c, lp, spans))
    assert np.array_equal(tokens.prompt_delta, p[shared:])
    assert np.array_equal(tokens.completion, c)
    assert tokens.logprobs.tobytes() == lp.tobytes()
    assert tokens.versions == spans


def test_missing_logprobs_come_back_empty() -> None:
    p = np.array([1], np.int32)
    assert codec.decode(1, codec.encode(p, 0, p, None, ())).logprobs.size == 0


@settings(max_examples=300)
@given(st.data())
def test_damage_is_found_and_named(data: st.DataObject) -> None:
    p = np.arange(50, dtype=np.int32)
    blob = bytearray(codec.encode(p, 0, p, -np.ones(50, np.float32), (VersionSpan(0, 0, 50),)))
    at = data.draw(st.integers(0, len(blob) - 1))
    if data.draw(st.booleans()):
        blob = blob[:at]
    else:
        blob[at] ^= data.draw(st.integers(1, 255))
    try:
        tokens = codec.decode(7, bytes(blob))
    except CorruptRecord as error:
        assert error.call_id == 7 and "call 7" in str(error)
    else:  # a bit of the frame header that carries no meaning
        assert np.array_equal(tokens.prompt_delta, p) and np.array_equal(tokens.completion, p)


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[Call], list[int]]:
    """Calls over two tokens, and an order in which they ended: each after those its prompt is made of."""
    calls: list[Call] = []
    made_of: dict[int, int] = {}
    for seq in range(draw(st.integers(1, 10))):
        prompt = draw(st.lists(st.integers(0, 1), min_size=1, max_size=5))
        if calls and draw(st.booleans()):
            made_of[seq] = draw(st.integers(0, seq - 1))
            base = calls[made_of[seq]]
            whole = base.prompt.tolist() + base.completion.tolist()
            prompt = whole[: draw(st.integers(1, len(whole)))] + prompt
        calls.append(make_call(seq, prompt, draw(st.lists(st.integers(0, 1), max_size=5))))
    order: list[int] = []
    left = list(range(len(calls)))
    while left:
        ready = [i for i in left if made_of.get(i) is None or made_of[i] in order]
        order.append(draw(st.sampled_from(ready)))
        left.remove(order[-1])
    return calls, order


@settings(max_examples=300, deadline=None)
@given(histories())
def test_i2_an_attempt_is_rebuilt_exactly_whatever_order_its_calls_ended_in(
    history: tuple[list[Call], list[int]],
) -> None:
    calls, order = history
    rebuilt = codec.decode_attempt(reversed(rows_of(calls, order)))
    assert [c.seq for c in rebuilt] == [c.seq for c in calls]
    for before, after in zip(calls, rebuilt, strict=True):
        assert np.array_equal(before.prompt, after.prompt)
        assert np.array_equal(before.completion, after.completion)
        assert np.array_equal(before.logprobs, after.logprobs)
        assert (before.id, before.versions, before.delivered, before.temperature, before.finish_reason) == (
            after.id,
            after.versions,
            after.delivered,
            after.temperature,
            after.finish_reason,
        )


def test_a_child_admitted_before_its_storage_parent_is_rebuilt() -> None:
    calls = [make_call(0, [1, 2, 3], [4]), make_call(1, [1, 2, 3, 9], [5])]
    rows = rows_of(calls, order=[1, 0])
    assert rows[0].storage_parent_id == 101
    assert [c.prompt.tolist() for c in codec.decode_attempt(rows)] == [[1, 2, 3], [1, 2, 3, 9]]


def test_calls_without_tokens_are_left_out() -> None:
    row = msgspec.structs.replace(rows_of([make_call(0, [1], [2])])[0], data=None, prompt_digest=None)
    assert codec.decode_attempt([row]) == []


def test_only_the_delta_is_stored() -> None:
    rng = np.random.default_rng(0)
    forest, prompt, stored = Forest(), rng.integers(0, 150_000, 8000, dtype=np.int32), 0
    for i in range(100):
        answer = rng.integers(0, 150_000, 250, dtype=np.int32)
        placed = forest.add(i, prompt, answer, Delivery.YES)
        blob = codec.encode(
            prompt, placed.shared, answer, -np.ones(250, np.float32), (VersionSpan(0, 0, 250),)
        )
        stored += len(blob)
        prompt = np.concatenate((prompt, answer, rng.integers(0, 150_000, 670, dtype=np.int32)))
    assert stored < 4 * 100_000  # and 5.4 million prompt tokens were seen


DAMAGE = {
    "digest": lambda rows: msgspec.structs.replace(rows[1], prompt_digest=b"x" * 16),
    "shorter": lambda rows: msgspec.structs.replace(rows[1], prefix_len=99),
    "missing": lambda rows: msgspec.structs.replace(rows[1], storage_parent_id=5),
    "circle": lambda rows: msgspec.structs.replace(rows[1], storage_parent_id=101),
    "format": lambda rows: msgspec.structs.replace(rows[1], data=b"\x09" + (rows[1].data or b"")[1:]),
    "maybe": lambda rows: msgspec.structs.replace(rows[1], delivered="maybe"),
}


@pytest.mark.parametrize("words", DAMAGE)
def test_what_cannot_be_rebuilt_says_why(words: str) -> None:
    rows = rows_of([make_call(0, [1, 2], [3]), make_call(1, [1, 2, 3, 4], [5])])
    rows[1] = DAMAGE[words](rows)
    with pytest.raises(CorruptRecord, match=words) as caught:
        codec.decode_attempt(rows)
    assert caught.value.call_id == 101


def test_stored_reasons_come_back() -> None:
    call = msgspec.structs.replace(
        make_call(0, [1], [2]), untrainable=Untrainable.CONSTRAINED, delivered=Delivery.UNKNOWN
    )
    (back,) = codec.decode_attempt(rows_of([call]))
    assert (back.untrainable, back.delivered) == (Untrainable.CONSTRAINED, Delivery.UNKNOWN)
