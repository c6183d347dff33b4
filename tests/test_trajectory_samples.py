"""Invariants I2, I3 and I11 of the cut, against a naive oracle, and the cases that real harnesses produce."""

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_server.domain.call import Call, VersionSpan
from forge_server.domain.sample import BreakReason, Sample
from forge_server.domain.states import Delivery, Untrainable
from forge_server.trajectory.samples import Cover, cover

NO_LIMIT = 1 << 30
DELIVERIES = st.sampled_from([Delivery.YES, Delivery.YES, Delivery.UNKNOWN, Delivery.NO])
HOW = ["new", "extend", "extend", "cut", "mutate", "again", "twin"]  # how a prompt is made from earlier ones
REASONS = st.sampled_from([None, None, None, Untrainable.CONSTRAINED, Untrainable.SIDE_CALL])


def call(
    seq: int,
    prompt: list[int],
    completion: list[int],
    *,
    delivered: Delivery = Delivery.YES,
    untrainable: Untrainable | None = None,
    versions: list[tuple[int, int, int]] | None = None,
    temperature: float = 1.0,
    forest_key: str = "",
    logprobs: list[float] | None = None,
    finish_reason: str = "stop",
) -> Call:
    """A call whose logprobs and version identify it and each of its tokens."""
    if logprobs is None:
        logprobs = [-(seq + 1) - i / 1000 for i in range(len(completion))]
    if versions is None:
        versions = [(seq, 0, len(completion))]
    return Call(
        id=1000 + seq,
        seq=seq,
        prompt=np.array(prompt, np.int32),
        completion=np.array(completion, np.int32),
        logprobs=np.array(logprobs, np.float32),
        versions=tuple(VersionSpan(*v) for v in versions),
        delivered=delivered,
        untrainable=untrainable,
        temperature=temperature,
        finish_reason=finish_reason,
        forest_key=forest_key,
    )


@st.composite
def attempts(draw: st.DrawFn, most: int = 12) -> list[Call]:
    token = st.integers(0, 2)
    calls: list[Call] = []
    for seq in range(draw(st.integers(1, most))):
        how = draw(st.sampled_from(HOW)) if calls else "new"
        if how == "new":
            prompt = draw(st.lists(token, min_size=1, max_size=6))
        else:
            base = calls[draw(st.integers(0, len(calls) - 1))]
            whole = [*base.prompt.tolist(), *base.completion.tolist()]
            if how == "extend":
                prompt = whole + draw(st.lists(token, max_size=4))
            elif how == "cut":
                prompt = whole[: draw(st.integers(1, len(whole)))] + draw(st.lists(token, max_size=3))
            elif how == "mutate":
                at = draw(st.integers(0, len(whole) - 1))
                prompt = [*whole[:at], (whole[at] + 1) % 3, *whole[at + 1 :]]
            else:
                prompt = base.prompt.tolist()
        answer = base.completion.tolist() if how == "twin" else draw(st.lists(token, max_size=5))
        cut = draw(st.integers(0, len(answer)))
        calls.append(
            call(
                seq,
                prompt,
                answer,
                delivered=draw(DELIVERIES),
                untrainable=draw(REASONS),
                versions=[(seq, 0, cut), (seq + 50, cut, len(answer))],
                temperature=draw(st.sampled_from([1.0, 1.0, 1.0, 0.7])),
                forest_key=draw(st.sampled_from(["", "", "", "other"])),
            )
        )
    return calls


def oracle_delivered(calls: list[Call]) -> set[int]:
    """Calls known to be delivered at the end, by comparing everything with everything."""
    state = {c.id: c.delivered for c in calls}
    lists = {c.id: (c.prompt.tolist(), c.prompt.tolist() + c.completion.tolist()) for c in calls}
    part = [
        c
        for c in calls
        if c.completion.size and c.delivered is not Delivery.NO and c.untrainable is not Untrainable.SIDE_CALL
    ]
    for j, later in enumerate(part):
        prompt = lists[later.id][0]
        earlier = [c for c in part[:j] if c.forest_key == later.forest_key]
        inside = [c for c in earlier if prompt[: len(lists[c.id][1])] == lists[c.id][1]]
        accepted: list[Call] = []
        inside.sort(key=lambda c: (-len(lists[c.id][1]), state[c.id] is not Delivery.YES, -c.seq))
        for c in inside:
            whole = lists[c.id][1]
            if state[c.id] is not Delivery.YES:
                seen = any(e.seq < c.seq and lists[e.id][0][: len(whole)] == whole for e in earlier)
                if seen or any(k.prompt.size <= c.prompt.size for k in accepted):
                    continue
                state[c.id] = Delivery.YES
            accepted.append(c)
    return {id for id, known in state.items() if known is Delivery.YES}


def oracle_trained(calls: list[Call]) -> set[int]:
    """Calls that must be trained: delivered, trainable, not empty, and of identical twins the latest."""
    delivered = oracle_delivered(calls)
    latest: dict[tuple[object, ...], int] = {}
    for c in calls:
        if c.id in delivered and c.untrainable is None and c.completion.size:
            latest[(c.forest_key, tuple(c.prompt.tolist()), tuple(c.completion.tolist()))] = c.id
    return set(latest.values())


def owners(result: Cover) -> dict[int, list[Sample]]:
    out: dict[int, list[Sample]] = {}
    for sample in result.samples:
        for span in sample.spans:
            if span.owned:
                out.setdefault(span.call_id, []).append(sample)
    return out


@settings(max_examples=300, deadline=None)
@given(attempts())
def test_i3_every_delivered_trainable_token_is_trained_in_exactly_one_sample(calls: list[Call]) -> None:
    result = cover(calls, NO_LIMIT)
    trained = oracle_trained(calls)
    owned = owners(result)
    assert set(owned) == trained
    assert all(len(samples) == 1 for samples in owned.values())
    assert set(result.untrained) == {c.id for c in calls} - trained
    assert sum(int(s.loss_mask.sum()) for s in result.samples) == sum(
        c.completion.size for c in calls if c.id in trained
    )


@settings(max_examples=300, deadline=None)
@given(attempts())
def test_i3_a_sample_holds_exactly_what_the_engine_saw(calls: list[Call]) -> None:
    by_id = {c.id: c for c in calls}
    result = cover(calls, NO_LIMIT)
    for index, sample in enumerate(result.samples):
        assert sample.index == index
        context = np.ones(sample.tokens.size, bool)
        for span in sample.spans:
            c = by_id[span.call_id]
            assert span.prompt_end == c.prompt.size
            assert span.end == c.prompt.size + c.completion.size
            assert np.array_equal(sample.tokens[: span.prompt_end], c.prompt)
            assert np.array_equal(sample.tokens[span.prompt_end : span.end], c.completion)
            if span.owned:
                here = slice(span.prompt_end, span.end)
                context[here] = False
                assert sample.loss_mask[here].all()
                assert np.array_equal(sample.logprobs[here], c.logprobs)
                cut = c.versions[0].end
                assert (sample.versions[here][:cut] == c.seq).all()
                assert (sample.versions[here][cut:] == c.seq + 50).all()
        assert not sample.loss_mask[context].any()
        assert (sample.logprobs[context] == 0).all() and (sample.versions[context] == -1).all()
        assert sample.loss_mask[-1] == 1  # nothing is carried that trains nothing
        assert sample.prompt_len == int(sample.loss_mask.argmax())
        assert len({span.temperature for span in sample.spans if span.owned}) == 1


@settings(max_examples=300, deadline=None)
@given(attempts(), st.integers(1, 20))
def test_i3_a_length_limit_removes_a_suffix_and_nothing_else(calls: list[Call], limit: int) -> None:
    whole, short = cover(calls, NO_LIMIT), cover(calls, limit)
    assert whole.untrained == short.untrained
    lost = {s.spans[-1].call_id: s for s in whole.samples}
    for sample in short.samples:
        assert 0 < sample.tokens.size <= limit
        owned = {span.call_id for span in sample.spans if span.owned}
        (full,) = [s for s in lost.values() if owned <= {x.call_id for x in s.spans if x.owned}]
        n = sample.tokens.size
        assert np.array_equal(sample.tokens, full.tokens[:n])
        assert np.array_equal(sample.loss_mask, full.loss_mask[:n])
        assert np.array_equal(sample.logprobs, full.logprobs[:n])
        assert np.array_equal(sample.versions, full.versions[:n])
        assert sample.truncated == bool(full.loss_mask[n:].any())
        assert sample.loss_mask.any()
    kept = sum(int(s.loss_mask.sum()) for s in short.samples)
    assert kept + sum(short.clipped.values()) == sum(int(s.loss_mask.sum()) for s in whole.samples)


@settings(max_examples=300, deadline=None)
@given(attempts())
def test_i11_how_a_rollout_is_cut_changes_no_token_mean_gradient(calls: list[Call]) -> None:
    """A bigram softmax policy: the samples' summed policy gradient is that of the calls taken one by one."""
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((3, 3))
    chances = np.exp(weights) / np.exp(weights).sum(1, keepdims=True)

    def gradient(tokens: list[int], mask: list[int]) -> np.ndarray:
        out = np.zeros((3, 3))
        for i in range(1, len(tokens)):
            if mask[i]:
                out[tokens[i - 1]] -= chances[tokens[i - 1]]
                out[tokens[i - 1], tokens[i]] += 1
        return out

    result = cover(calls, NO_LIMIT)
    merged, apart = np.zeros((3, 3)), np.zeros((3, 3))
    for s in result.samples:
        merged += gradient(s.tokens.tolist(), s.loss_mask.tolist())
    for c in calls:
        if c.id not in result.untrained:
            p, a = c.prompt.tolist(), c.completion.tolist()
            apart += gradient(p + a, [0] * len(p) + [1] * len(a))
    assert np.allclose(merged, apart)


def same(a: Sample, b: Sample) -> bool:
    return msgspec.json.encode(a.spans) == msgspec.json.encode(b.spans) and all(
        np.array_equal(getattr(a, name), getattr(b, name))
        for name in ("tokens", "loss_mask", "logprobs", "versions")
    )


@settings(max_examples=300, deadline=None)
@given(attempts(), attempts(most=3), st.data())
def test_i3_side_calls_and_undelivered_calls_change_no_sample(
    calls: list[Call], extra: list[Call], data: st.DataObject
) -> None:
    before = cover(calls, NO_LIMIT)
    mixed = list(calls)
    for i, c in enumerate(extra):
        aside = data.draw(st.booleans())
        mixed.insert(
            data.draw(st.integers(0, len(mixed))),
            msgspec.structs.replace(
                c,
                id=5000 + i,
                untrainable=Untrainable.SIDE_CALL if aside else None,
                delivered=c.delivered if aside else Delivery.NO,
            ),
        )
    after = cover([msgspec.structs.replace(c, seq=i) for i, c in enumerate(mixed)], NO_LIMIT)
    assert len(before.samples) == len(after.samples)
    assert all(same(a, b) for a, b in zip(before.samples, after.samples, strict=True))


@settings(max_examples=300, deadline=None)
@given(attempts(), st.randoms())
def test_the_order_in_which_rows_are_read_does_not_matter(calls: list[Call], random: object) -> None:
    shuffled = list(calls)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    before, after = cover(calls, NO_LIMIT), cover(shuffled, NO_LIMIT)
    assert before.untrained == after.untrained
    assert all(same(a, b) for a, b in zip(before.samples, after.samples, strict=True))


# ---- what real harnesses do ------------------------------------------------------------------------------

SYSTEM = list(range(100, 140))


def reasons(result: Cover) -> list[BreakReason]:
    return [s.break_reason for s in result.samples]


def grow(turns: int, start: list[int], base: int = 1000) -> list[tuple[list[int], list[int]]]:
    """An append-only conversation: (prompt, completion) of each turn."""
    out, prompt = [], list(start)
    for t in range(turns):
        answer = list(range(base + 100 * t, base + 100 * t + 20))
        out.append((prompt, answer))
        prompt = prompt + answer + list(range(base + 100 * t + 50, base + 100 * t + 60))
    return out


def test_case_1_appended_turns_are_one_sample() -> None:
    result = cover([call(i, p, c) for i, (p, c) in enumerate(grow(3, SYSTEM))], NO_LIMIT)
    (sample,) = result.samples
    assert [s.owned for s in sample.spans] == [True, True, True]
    assert int(sample.loss_mask.sum()) == 60
    assert reasons(result) == [BreakReason.FIRST]


def test_case_2_another_split_of_the_same_text_is_a_break_by_template() -> None:
    answer = list(range(1000, 1020))
    drifted = [*answer[:7], 5000, 5001, *answer[8:]]
    result = cover(
        [call(0, SYSTEM, answer), call(1, [*SYSTEM, *drifted, 1, 2, 3], [9, 10])],
        NO_LIMIT,
    )
    assert reasons(result) == [BreakReason.FIRST, BreakReason.TEMPLATE]
    assert result.samples[1].loss_mask.tolist() == [0] * (40 + 21 + 3) + [1, 1]


def test_case_3_stripped_reasoning_breaks_at_every_turn() -> None:
    calls, prompt = [], list(SYSTEM)
    for t in range(5):
        thought, said = list(range(1000 + 100 * t, 1030 + 100 * t)), [2000 + t, 2100 + t, 7]
        calls.append(call(t, prompt, thought + said))
        prompt = [*prompt, *said, 3000 + t, 3001 + t]
    result = cover(calls, NO_LIMIT)
    assert reasons(result) == [BreakReason.FIRST] + [BreakReason.REASONING_STRIPPED] * 4
    assert sum(int(s.loss_mask.sum()) for s in result.samples) == 5 * 33


def test_case_4_reordered_arguments_are_a_break_by_template() -> None:
    answer = list(range(1000, 1020))
    swapped = [*answer[:5], *answer[9:13], *answer[5:9], *answer[13:]]
    result = cover([call(0, SYSTEM, answer), call(1, [*SYSTEM, *swapped, 1], [9])], NO_LIMIT)
    assert reasons(result) == [BreakReason.FIRST, BreakReason.TEMPLATE]


def test_case_5_a_nonce_in_the_system_prompt_is_an_edited_history() -> None:
    turns = grow(3, SYSTEM)
    calls = [call(i, [*p[:3], 9000 + i, *p[4:]], c) for i, (p, c) in enumerate(turns)]
    assert reasons(cover(calls, NO_LIMIT)) == [BreakReason.FIRST] + [BreakReason.HISTORY_EDITED] * 2


def test_cases_6_and_7_compaction_is_a_new_sample_and_the_summary_is_trained() -> None:
    turns = grow(8, SYSTEM)
    calls = [call(i, p, c) for i, (p, c) in enumerate(turns)]
    summary = list(range(7000, 7030))
    asked = [*turns[-1][0], *turns[-1][1], 60, 61, 62]
    calls.append(call(8, asked, summary))
    for i, (p, c) in enumerate(grow(3, [*SYSTEM, 70, *summary[:-1], 71], base=20_000)):
        calls.append(call(9 + i, p, c))
    result = cover(calls, NO_LIMIT)
    assert reasons(result) == [BreakReason.FIRST, BreakReason.COMPACTION]
    assert result.samples[0].spans[-1].call_id == 1008 and result.samples[0].spans[-1].owned


def test_case_8_interleaved_agents_are_a_sample_each() -> None:
    agents = [
        grow(12, [*SYSTEM, *range(400 + 100 * a, 460 + 100 * a)], base=10_000 * (a + 1)) for a in range(9)
    ]
    calls = [call(t * 9 + a, *agents[a][t]) for t in range(12) for a in range(9)]
    result = cover(calls, NO_LIMIT)
    assert reasons(result) == [BreakReason.FIRST] + [BreakReason.ROOT] * 8
    assert all(len(s.spans) == 12 for s in result.samples)


def test_case_9_a_fork_at_a_call_trains_the_shared_calls_once() -> None:
    turns = grow(3, SYSTEM)
    after = [*turns[2][0], *turns[2][1]]
    calls = [call(i, p, c) for i, (p, c) in enumerate(turns)]
    calls += [call(3, [*after, 1], [11, 12]), call(4, [*after, 2], [13, 14])]
    result = cover(calls, NO_LIMIT)
    assert reasons(result) == [BreakReason.FIRST, BreakReason.FORK]
    assert [s.owned for s in result.samples[1].spans] == [False, False, False, True]


def test_case_10_a_fork_inside_a_message_splits_at_the_token() -> None:
    result = cover([call(0, [*SYSTEM, 1, 2, 3, 4], [5, 6]), call(1, [*SYSTEM, 1, 2, 8, 9], [5, 6])], NO_LIMIT)
    assert reasons(result) == [BreakReason.FIRST, BreakReason.HISTORY_EDITED]
    assert [int(s.loss_mask.sum()) for s in result.samples] == [2, 2]


def test_case_11_a_transport_retry_leaves_one_trained_call() -> None:
    result = cover(
        [
            call(0, SYSTEM, [1, 2], delivered=Delivery.NO),
            call(1, SYSTEM, [3, 4]),
            call(2, [*SYSTEM, 3, 4, 5], [6]),
        ],
        NO_LIMIT,
    )
    assert reasons(result) == [BreakReason.FIRST]
    assert result.untrained == {1000: Untrainable.NOT_DELIVERED}


def test_case_12_an_answer_that_the_harness_rejected_is_trained() -> None:
    result = cover(
        [call(0, SYSTEM, [1, 2]), call(1, SYSTEM, [3, 4]), call(2, [*SYSTEM, 3, 4, 5], [6])], NO_LIMIT
    )
    assert reasons(result) == [BreakReason.FIRST, BreakReason.RETRY]
    assert result.untrained == {}


def test_case_13_of_retries_of_the_last_call_the_unknown_is_not_trained() -> None:
    both = [call(0, SYSTEM, [1, 2]), call(1, SYSTEM, [3, 4])]
    assert cover(both, NO_LIMIT).untrained == {}
    one = [call(0, SYSTEM, [1, 2], delivered=Delivery.UNKNOWN), call(1, SYSTEM, [3, 4])]
    result = cover(one, NO_LIMIT)
    assert result.untrained == {1000: Untrainable.DELIVERY_UNKNOWN}
    assert len(result.samples) == 1


def test_case_14_of_identical_calls_one_is_trained() -> None:
    result = cover(
        [call(0, SYSTEM, [1, 2]), call(1, SYSTEM, [1, 2]), call(2, [*SYSTEM, 1, 2, 5], [6])], NO_LIMIT
    )
    assert result.untrained == {1000: Untrainable.DUPLICATE}
    (sample,) = result.samples
    assert [s.call_id for s in sample.spans if s.owned] == [1001, 1002]


def test_case_15_siblings_share_tokens_but_not_ownership() -> None:
    calls = [call(i, SYSTEM, [50, 60 + i, 70]) for i in range(4)]
    calls.append(call(4, [*SYSTEM, 50, 62, 70, 1], [2]))
    result = cover(calls, NO_LIMIT)
    assert sum(int(s.loss_mask.sum()) for s in result.samples) == 4 * 3 + 1
    assert [[s.call_id for s in x.spans] for x in result.samples] == [[1000], [1001], [1003], [1002, 1004]]


def test_case_16_an_empty_answer_and_its_retry_are_no_chain() -> None:
    result = cover([call(0, SYSTEM, []), call(1, SYSTEM, [1])], NO_LIMIT)
    assert [[s.call_id for s in x.spans] for x in result.samples] == [[1001]]
    assert result.untrained == {1000: Untrainable.EMPTY}


def test_case_17_a_stream_that_broke_off_is_context_if_anything() -> None:
    result = cover(
        [
            call(0, SYSTEM, [1, 2, 3, 4], delivered=Delivery.NO, untrainable=Untrainable.NOT_OK),
            call(1, [*SYSTEM, 1, 2, 9], [5]),
        ],
        NO_LIMIT,
    )
    (sample,) = result.samples
    assert sample.loss_mask.tolist() == [0] * 43 + [1]
    assert result.untrained == {1000: Untrainable.NOT_OK}


def test_case_18_a_close_that_the_template_adds_is_context() -> None:
    result = cover(
        [call(0, SYSTEM, [1, 2, 3], finish_reason="length"), call(1, [*SYSTEM, 1, 2, 3, 7, 8], [9])], NO_LIMIT
    )
    (sample,) = result.samples
    assert sample.loss_mask[40:].tolist() == [1, 1, 1, 0, 0, 1]
    assert sample.spans[0].finish_reason == "length"


def test_cases_19_and_21_prefill_and_foreign_answers_are_context() -> None:
    prefill, foreign = [31, 32], [41, 42, 43]
    result = cover([call(0, [*SYSTEM, *foreign, 8, *prefill], [1, 2])], NO_LIMIT)
    assert result.samples[0].loss_mask.tolist() == [0] * 46 + [1, 1]


def test_case_20_an_edited_answer_is_context() -> None:
    answer = list(range(1000, 1060))
    result = cover([call(0, SYSTEM, answer), call(1, [*SYSTEM, *answer[:10], 5, 6, 7], [9])], NO_LIMIT)
    assert reasons(result) == [BreakReason.FIRST, BreakReason.HISTORY_EDITED]
    assert result.samples[1].loss_mask.tolist() == [0] * 53 + [1]


def test_case_22_a_title_call_gives_no_sample_and_changes_none() -> None:
    turns = [call(i + 1, p, c) for i, (p, c) in enumerate(grow(3, SYSTEM))]
    title = call(0, SYSTEM, [1, 2, 3], untrainable=Untrainable.SIDE_CALL)
    (alone,), (beside,) = cover(turns, NO_LIMIT).samples, cover([title, *turns], NO_LIMIT).samples
    assert same(alone, beside) and beside.break_reason is BreakReason.FIRST


def test_case_25_weight_updates_break_nothing() -> None:
    turns = grow(5, SYSTEM)
    versions = [[(1, 0, 20)], [(1, 0, 20)], [(1, 0, 20)], [(2, 0, 20)], [(2, 0, 8), (3, 8, 20)]]
    calls = [call(i, p, c, versions=v) for i, ((p, c), v) in enumerate(zip(turns, versions, strict=True))]
    (sample,) = cover(calls, NO_LIMIT).samples
    assert sorted(set(sample.versions.tolist())) == [-1, 1, 2, 3]
    assert (sample.min_version, sample.max_version) == (1, 3)


def test_i9_version_spans_that_leave_a_token_out_make_a_call_untrainable() -> None:
    result = cover([call(0, SYSTEM, [1, 2, 3], versions=[(1, 0, 1), (2, 2, 3)])], NO_LIMIT)
    assert result.untrained == {1000: Untrainable.MIXED_VERSIONS}


def test_case_26_i2_a_count_that_does_not_match_is_not_trained() -> None:
    result = cover([call(0, SYSTEM, [1, 2, 3], logprobs=[-1.0])], NO_LIMIT)
    assert result.untrained == {1000: Untrainable.COUNT_MISMATCH}


def test_case_27_i2_bad_logprobs_are_not_trained() -> None:
    for bad in (float("nan"), float("-inf"), -9999.0, 1.0):
        result = cover([call(0, SYSTEM, [1, 2], logprobs=[-1.0, bad])], NO_LIMIT)
        assert result.untrained == {1000: Untrainable.BAD_LOGPROBS}


def test_case_30_a_prompt_beyond_the_limit_gives_no_sample() -> None:
    turns = grow(3, SYSTEM)
    result = cover([call(i, p, c) for i, (p, c) in enumerate(turns)], 65)
    (sample,) = result.samples
    assert sample.truncated and sample.tokens.size == 60 and result.clipped == {1001: 20, 1002: 20}
    nothing = cover([call(0, list(range(70)), [1])], 65)
    assert nothing.samples == () and nothing.clipped == {1000: 1}


def test_case_32_what_nobody_is_known_to_have_got_is_not_trained() -> None:
    turns = grow(3, SYSTEM)
    calls = [call(i, p, c, delivered=Delivery.UNKNOWN) for i, (p, c) in enumerate(turns)]
    result = cover(calls, NO_LIMIT)  # as after a crash between the tokens and the delivery
    assert result.confirmed == (1000, 1001)  # later prompts show the first two
    assert result.untrained == {1002: Untrainable.DELIVERY_UNKNOWN}


def test_what_a_trainer_would_refuse_is_not_trained() -> None:
    assert cover([call(0, [], [1, 2])], NO_LIMIT).untrained == {1000: Untrainable.EMPTY}
    greedy = cover([call(0, SYSTEM, [1, 2], temperature=0.0)], NO_LIMIT)
    assert greedy.untrained == {1000: Untrainable.FOREIGN_SAMPLING}


def test_case_34_a_constrained_call_is_context() -> None:
    result = cover(
        [
            call(0, SYSTEM, [1, 2], untrainable=Untrainable.CONSTRAINED),
            call(1, [*SYSTEM, 1, 2, 3], [4]),
        ],
        NO_LIMIT,
    )
    (sample,) = result.samples
    assert [s.owned for s in sample.spans] == [False, True]
    assert sample.loss_mask.tolist() == [0] * 43 + [1]
    assert sample.break_reason is BreakReason.FIRST


def test_case_35_another_model_is_another_forest() -> None:
    result = cover(
        [call(0, SYSTEM, [1, 2], forest_key="a"), call(1, [*SYSTEM, 1, 2, 3], [4], forest_key="b")], NO_LIMIT
    )
    assert reasons(result) == [BreakReason.FIRST, BreakReason.MODEL]


def test_a_prompt_that_goes_on_from_an_undelivered_answer_says_so() -> None:
    result = cover(
        [
            call(0, SYSTEM, [1, 2]),
            call(1, [*SYSTEM, 9], [5, 6], delivered=Delivery.NO),
            call(2, [*SYSTEM, 9, 5, 6, 7], [8]),
        ],
        NO_LIMIT,
    )
    assert reasons(result) == [BreakReason.FIRST, BreakReason.UNDELIVERED_PARENT]


def test_a_stored_doubt_about_delivery_ends_when_a_prompt_shows_it() -> None:
    result = cover(
        [
            call(0, SYSTEM, [1, 2], delivered=Delivery.UNKNOWN, untrainable=Untrainable.DELIVERY_UNKNOWN),
            call(1, [*SYSTEM, 1, 2, 3], [4]),
        ],
        NO_LIMIT,
    )
    assert result.untrained == {} and result.confirmed == (1000,)
