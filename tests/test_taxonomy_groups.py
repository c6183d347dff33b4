"""Taxonomy of groups: which rollouts a batch is made of, and what the trainer makes of them (I5, I11). The numbers are
those of the list of cases (``test_taxonomy_index.py``).

The rollouts are cut from calls, selected and written by the server's code, and judged by veRL's estimators in the
trainer's environment.
"""

import numpy as np
import pytest
from test_trainer_batch import Judge, judge  # noqa: F401
from test_trajectory_samples import NO_LIMIT, SYSTEM, call, grow

from forge_server.domain.batches import Drop, EndedRollout, Selection, select
from forge_server.domain.outcome import Outcome
from forge_server.domain.sample import BreakReason
from forge_server.trajectory.batchfile import BatchRollout, write_batch
from forge_server.trajectory.samples import Cover, cover

DR_GRPO = "grpo algorithm.norm_adv_by_std_in_grpo=false"


def conversation(turns: int) -> Cover:
    return cover([call(i, p, c) for i, (p, c) in enumerate(grow(turns, SYSTEM))], NO_LIMIT)


def broken(turns: int) -> Cover:
    """As many turns, none of which continues another: the nonce in the system prompt changes."""
    grown = grow(turns, SYSTEM)
    return cover([call(i, [*p[:3], 9000 + i, *p[4:]], c) for i, (p, c) in enumerate(grown)], NO_LIMIT)


def compacted() -> Cover:
    turns = grow(8, SYSTEM)
    calls = [call(i, p, c) for i, (p, c) in enumerate(turns)]
    summary = list(range(7000, 7030))
    calls.append(call(8, [*turns[-1][0], *turns[-1][1], 60, 61, 62], summary))
    for i, (p, c) in enumerate(grow(3, [*SYSTEM, 70, *summary[:-1], 71], base=20_000)):
        calls.append(call(9 + i, p, c))
    return cover(calls, NO_LIMIT)


Group = list[tuple[Outcome, float, Cover]]


def selected(**groups: Group) -> Selection:
    return select(
        {
            name: [
                EndedRollout(
                    id=f"{name}{n}",
                    group_id=name,
                    outcome=outcome,
                    reward=reward,
                    trained_tokens=sum(int(s.loss_mask.sum()) for s in found.samples),
                    clipped_tokens=sum(found.clipped.values()),
                )
                for n, (outcome, reward, found) in enumerate(group)
            ]
            for name, group in groups.items()
        }
    )


def body(**groups: Group) -> bytes:
    """The batch of the groups with a signal."""
    cuts = {f"{name}{n}": found for name, group in groups.items() for n, (_, _, found) in enumerate(group)}
    kept = [rollout for group in selected(**groups).groups.values() for rollout in group]
    return write_batch(
        "ru-test", 1, [BatchRollout(r.id, r.group_id, r.reward or 0.0, cuts[r.id].samples) for r in kept], 0
    )


DONE, FAILED, INFRA = Outcome.COMPLETED, Outcome.POLICY_FAILURE, Outcome.INFRA_FAILURE


@pytest.mark.verl
def test_cases_6_28_29_and_30_advantages_are_the_rollouts(judge: Judge) -> None:  # noqa: F811
    """6: both samples of a compacted rollout have its one advantage. 28: [1, 0, infra, infra] is +-0.5 on two. 29: a
    rollout of twelve samples weighs what one of a single sample with as many tokens does. 30: a rollout all of
    whose tokens lie beyond the limit has no row and stays in the baseline."""
    whole = conversation(12)
    too_long = cover([call(0, list(range(70)), [1, 2])], 65)
    assert too_long.samples == () and too_long.clipped == {1000: 2}
    cases: dict[str, tuple[Group, list[float]]] = {
        "6": ([(DONE, 1.0, compacted()), (DONE, 0.0, whole)], [0.5, -0.5]),
        "28": (
            [(DONE, 1.0, whole), (FAILED, 0.0, whole), (INFRA, 0.0, whole), (INFRA, 1.0, whole)],
            [0.5, -0.5],
        ),
        "29": ([(DONE, 1.0, broken(12)), (DONE, 0.0, whole)], [0.5, -0.5]),
        "30": ([(DONE, 1.0, whole), (DONE, 0.0, whole), (FAILED, 0.0, too_long)], [2 / 3, -1 / 3, -1 / 3]),
    }
    answers = judge([body(g=group) for group, _ in cases.values()], (DR_GRPO,))
    for (name, (_, expected)), answer in zip(cases.items(), answers, strict=True):
        assert isinstance(answer, dict), (name, answer)
        assert answer[DR_GRPO] == pytest.approx(expected, abs=1e-6), name


def test_case_6_the_samples_of_a_compacted_rollout_are_one_rollouts() -> None:
    found = compacted()
    assert [s.break_reason for s in found.samples] == [BreakReason.FIRST, BreakReason.COMPACTION]
    written = _arrays(body(g=[(DONE, 1.0, found), (DONE, 0.0, conversation(2))]))
    assert written["rollout"].tolist() == [0, 0, 1]
    assert written["rollout_group"].tolist() == [0, 0]


def test_case_28_infra_failures_are_not_there() -> None:
    one = conversation(1)
    group: Group = [(DONE, 1.0, one), (INFRA, 0.0, one), (INFRA, 0.0, one), (INFRA, 0.0, one)]
    chosen = selected(alone=group, mixed=[(DONE, 1.0, one), (FAILED, 0.0, one), *group[1:3]])
    assert chosen.dropped == {"alone": Drop.TOO_FEW_VALID}
    assert [r.id for r in chosen.groups["mixed"]] == ["mixed0", "mixed1"]


def test_case_29_equal_rewards_are_dropped_and_counted_and_samples_do_not_weigh() -> None:
    one = conversation(12)
    chosen = selected(equal=[(DONE, 1.0, one), (DONE, 1.0, one)])
    assert (chosen.groups, chosen.dropped) == ({}, {"equal": Drop.EQUAL_REWARDS})
    pieces = broken(12)
    assert (len(pieces.samples), len(one.samples)) == (12, 1)
    written = _arrays(body(g=[(DONE, 1.0, pieces), (DONE, 0.0, one)]))
    rows = np.split(written["loss_mask"], written["row_offsets"][1:-1])
    weight = [0, 0]  # the loss is a mean over trained tokens
    for rollout, mask in zip(written["rollout"].tolist(), rows, strict=True):
        weight[rollout] += int(mask.sum())
    assert weight[0] == weight[1] == 12 * 20


def test_case_30_what_lies_beyond_the_limit_moves_no_baseline_and_no_token() -> None:
    calls = [call(i, p, c) for i, (p, c) in enumerate(grow(40, SYSTEM))]
    (whole,), (cut,) = cover(calls, NO_LIMIT).samples, cover(calls, 975).samples
    assert whole.tokens.size == 1230 and cut.tokens.size == 975 and cut.truncated
    for name in ("tokens", "loss_mask", "logprobs", "versions"):
        assert np.array_equal(getattr(cut, name), getattr(whole, name)[:975])
    nothing = cover([call(0, list(range(70)), [1])], 65)
    one = conversation(1)
    kept = selected(g=[(DONE, 1.0, one), (DONE, 0.0, one), (DONE, 0.0, nothing)]).groups["g"]
    assert len(kept) == 3
    alone = selected(g=[(DONE, 1.0, nothing), (DONE, 0.0, nothing)])
    assert alone.dropped == {"g": Drop.TOO_FEW_VALID}  # a batch needs a token to train


def _arrays(written: bytes) -> dict[str, np.ndarray]:
    from safetensors.numpy import load

    return dict(load(written))
