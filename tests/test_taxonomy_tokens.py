"""Taxonomy on tokens: what real harnesses make of a history, and the samples that are right for it. The numbers are
those of the list of cases (``test_taxonomy_index.py``).
"""

from test_trajectory_samples import NO_LIMIT, SYSTEM, call, grow, same

from forge_server.domain.sample import BreakReason
from forge_server.domain.states import Delivery, Untrainable
from forge_server.trajectory.samples import Cover, cover


def reasons(result: Cover) -> list[BreakReason]:
    return [s.break_reason for s in result.samples]


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
