"""The pure rules: what is selected, drawn, measured; which way a policy version may go."""

from collections import Counter
from math import isclose

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_trajectory_codec import rows_of
from test_trajectory_samples import SYSTEM, call, grow

from forge_server.controller.measure import ended_rollouts, step_figures
from forge_server.domain import policy
from forge_server.domain.batches import Drop, EndedRollout, Move, Selection, foreign, next_move, select
from forge_server.domain.cohort import Group, Member
from forge_server.domain.draw import draw_harness, draw_tasks
from forge_server.domain.errors import Conflict
from forge_server.domain.outcome import Outcome
from forge_server.domain.policy import Version
from forge_server.domain.run import RunEval, RunSettings, first_change
from forge_server.domain.states import PolicyState, Untrainable
from forge_server.evaluation.stats import mean_interval, pass_at_k, round_figures
from forge_server.trajectory.attempt import cut

INVALID = [Outcome.INFRA_FAILURE, Outcome.TASK_FAILURE, Outcome.CANCELLED]

rewards = st.sampled_from([0.0, 0.5, 1.0])
rollouts = st.builds(
    EndedRollout,
    id=st.uuids().map(str),
    group_id=st.just("g"),
    outcome=st.sampled_from(list(Outcome)),
    reward=st.one_of(st.none(), rewards, st.just(float("nan"))),
    not_trained=st.sampled_from(["", "call_missing"]),
    trained_tokens=st.integers(0, 3),
    versions=st.frozensets(st.integers(0, 3), min_size=1),
)
cohorts = st.dictionaries(st.sampled_from("abcdef"), st.lists(rollouts, max_size=6), max_size=6)


@given(cohorts)
def test_i5_infra_failures_never_reach_a_batch(cohort: dict[str, list[EndedRollout]]) -> None:
    for kept in select(cohort).groups.values():
        assert all(r.outcome in (Outcome.COMPLETED, Outcome.POLICY_FAILURE) for r in kept)
        assert all(r.reward is not None and r.reward == r.reward for r in kept)


@given(cohorts, st.sampled_from(INVALID))
def test_i5_infra_failures_change_nothing_for_the_others(
    cohort: dict[str, list[EndedRollout]], outcome: Outcome
) -> None:
    noise = EndedRollout(
        id="x", group_id="g", outcome=outcome, reward=1.0, trained_tokens=9, versions=frozenset({-9})
    )
    with_noise = {group: [*members, noise] for group, members in cohort.items()}
    usable = frozenset({1, 2, 3})
    assert select(with_noise, usable) == select(cohort, usable)


@given(cohorts)
def test_i5_policy_failures_of_a_trained_group_are_all_in_it(cohort: dict[str, list[EndedRollout]]) -> None:
    for group, kept in select(cohort).groups.items():
        assert set(kept) == {r for r in cohort[group] if r.valid and not r.not_trained and r.trained_tokens}


@given(cohorts)
def test_i11_every_trained_group_has_a_baseline_and_a_signal(cohort: dict[str, list[EndedRollout]]) -> None:
    selection = select(cohort)
    assert selection.groups.keys() | selection.dropped.keys() == cohort.keys()
    assert not selection.groups.keys() & selection.dropped.keys()
    for kept in selection.groups.values():
        assert len(kept) >= 2
        mean = sum(r.reward or 0.0 for r in kept) / len(kept)
        advantages = [(r.reward or 0.0) - mean for r in kept]
        assert any(advantages) and isclose(sum(advantages), 0, abs_tol=1e-9)


def test_why_groups_are_dropped() -> None:
    def rollout(reward: float, **changes: object) -> EndedRollout:
        base = {"id": "r", "group_id": "g", "outcome": Outcome.COMPLETED, "trained_tokens": 1}
        return EndedRollout(**{**base, "reward": reward, **changes})  # type: ignore[arg-type]

    cohort = {
        "one": [rollout(1.0), rollout(0.0, not_trained="call_missing")],
        "equal": [rollout(1.0), rollout(1.0), rollout(0.0, trained_tokens=0)],
        "old": [rollout(1.0, versions=frozenset({3})), rollout(0.0, versions=frozenset({1, 2}))],
        "another's": [rollout(1.0, versions=frozenset({2})), rollout(0.0, versions=frozenset({4}))],
        "another's, beyond the limit": [
            rollout(1.0, versions=frozenset({2})),
            rollout(0.0, versions=frozenset({4}), trained_tokens=0, clipped_tokens=3),
        ],
        "good": [rollout(1.0, versions=frozenset({2})), rollout(0.0, versions=frozenset({2, 3}))],
    }
    selection = select(cohort, usable=frozenset({2, 3}))
    assert selection.dropped == {
        "one": Drop.TOO_FEW_VALID,
        "equal": Drop.EQUAL_REWARDS,
        "old": Drop.STALE,
        "another's": Drop.STALE,
        "another's, beyond the limit": Drop.STALE,
    }
    assert list(selection.groups) == ["good"]
    others = [rollout(0.0, versions=frozenset({4})), rollout(0.0, versions=frozenset({2}))]
    assert foreign(others, frozenset({2, 3})) and not foreign(others, frozenset({2, 4}))
    lost = [rollout(0.0, versions=frozenset({4}), outcome=Outcome.INFRA_FAILURE)]
    assert not foreign(lost, frozenset({2}))


def test_the_share_of_mixed_groups_is_of_those_whose_rewards_were_judged() -> None:
    names = ["kept", "old", "equal", "lost"]
    groups = [Group(id=name, step=1, round=0, task_id="ta", members=()) for name in names]
    dropped = {"old": Drop.STALE, "equal": Drop.EQUAL_REWARDS, "lost": Drop.TOO_FEW_VALID}
    selection = Selection(groups={"kept": ()}, dropped=dropped)
    figures = step_figures(groups, {name: [] for name in names}, selection, {}, lambda version: 0)
    assert figures["groups/mixed_share"] == pytest.approx(2 / 3)
    assert figures["groups/dropped_stale"] == figures["groups/dropped_too_few_valid"] == 1


def test_staleness_is_that_of_the_trained_tokens() -> None:
    """An older version has answered a call that is not trained."""
    calls = [call(i, p, c) for i, (p, c) in enumerate(grow(2, SYSTEM))]
    calls[0] = msgspec.structs.replace(calls[0], untrainable=Untrainable.CONSTRAINED)
    made = {"ended": True, "outcome": "completed", "kind": "ok", "attempts": 1, "not_trained": ""}
    members = tuple(
        Member(id=f"r{n}", reward=float(n), attempt_id=f"a{n}", created_at=0.0, ended_at=1.0, **made)  # type: ignore[arg-type]
        for n in range(2)
    )
    group = Group(id="g", step=1, round=0, task_id="ta", members=members)
    cuts = {f"a{n}": cut(rows_of(calls), 1 << 30) for n in range(2)}
    rollouts = {"g": ended_rollouts(group, cuts)}
    assert {r.versions for r in rollouts["g"]} == {frozenset({0, 1})}
    figures = step_figures([group], rollouts, select(rollouts), cuts, lambda version: 1 - version)
    assert figures["staleness/max"] == figures["staleness/mean"] == 0


def test_what_follows_a_complete_cohort() -> None:
    assert next_move(8, 8, 1, 3) is Move.ASSEMBLE
    assert next_move(7, 8, 1, 3) is Move.DRAW
    assert next_move(7, 8, 3, 3) is Move.ASSEMBLE
    assert next_move(0, 8, 3, 3) is Move.NO_SIGNAL


@given(st.integers(1, 9), st.integers(0, 5), st.lists(st.integers(1, 12), min_size=1, max_size=8))
def test_drawing_is_epochs_of_shuffles(tasks: int, seed: int, counts: list[int]) -> None:
    names = [f"t{n}" for n in range(tasks)]
    drawn: Counter[str] = Counter()
    for count in counts:
        picked = draw_tasks(names, drawn, seed, count)
        assert picked == draw_tasks(list(reversed(names)), drawn, seed, count)
        drawn.update(picked)
        assert len(set(picked)) == min(count, tasks)  # no task twice in a step unless there are too few
        assert max(drawn[n] for n in names) - min(drawn[n] for n in names) <= 1


def test_another_seed_draws_in_another_order() -> None:
    names = [f"t{n}" for n in range(20)]
    assert draw_tasks(names, {}, 0, 20) != draw_tasks(names, {}, 1, 20)
    epochs = draw_tasks(names, {}, 0, 40)
    assert epochs[:20] != epochs[20:] and set(epochs[:20]) == set(epochs[20:])


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=4), st.integers(1, 6), st.integers(1, 120))
def test_a_mixture_is_kept_to_by_the_run_and_for_each_task(
    weights: list[float], tasks: int, groups: int
) -> None:
    total = sum(weights)
    mixture = [(f"h{n}", weight / total) for n, weight in enumerate(weights)]
    used: Counter[str] = Counter()
    of_task = [Counter[str]() for _ in range(tasks)]
    for number in range(groups):
        task = of_task[number % tasks]  # in the same order again and again: no task may get one harness only
        harness = draw_harness(mixture, used, task)
        used[harness] += 1
        task[harness] += 1
    for counted in (used, *of_task):
        assert all(abs(counted[name] - share * counted.total()) <= 2.5 for name, share in mixture)


def _version(number: int, state: PolicyState, step: int | None = None, run: str | None = "ru") -> Version:
    return Version(name="p", version=number, state=state, path="/", step=step, run_id=run)


def test_versions_take_no_other_steps() -> None:
    for state in PolicyState:
        for to in PolicyState:
            if to in policy.POLICY_STEPS[state]:
                policy.check_step(_version(1, state), to)
            else:
                with pytest.raises(Conflict):
                    policy.check_step(_version(1, state), to)


def test_a_replay_of_the_newest_step_takes_its_place_and_one_of_an_older_does_not() -> None:
    base = _version(0, PolicyState.RETIRED, run=None)
    first, second = _version(1, PolicyState.RETIRED, 1), _version(2, PolicyState.LIVE, 2)
    again = _version(3, PolicyState.EXPORTED, 1)
    assert policy.head([base], "ru", 0) == base
    assert policy.head([base, first, second, again], "ru", 0) == second
    newest = _version(4, PolicyState.EXPORTED, 2)
    assert policy.head([base, first, second, again, newest], "ru", 0) == newest
    refused = _version(4, PolicyState.REJECTED, 2)
    assert policy.head([base, first, second, refused], "ru", 0) == second
    assert policy.next_version(v.version for v in (base, first, second, again, newest)) == 5


def test_a_trainer_resumes_before_what_was_rejected() -> None:
    versions = [
        _version(1, PolicyState.RETIRED, 1),
        _version(2, PolicyState.REJECTED, 2),
        _version(3, PolicyState.LIVE, 2),
        _version(4, PolicyState.REJECTED, 3),
    ]
    assert [policy.resume_step(versions, "ru", n) for n in range(5)] == [0, 1, 2, 2, 2]
    assert policy.acknowledged_step(versions, "ru") == 2
    versions.append(
        _version(5, PolicyState.REJECTED, 2)
    )  # a replay that came out otherwise: its state is on the disk
    assert [policy.resume_step(versions, "ru", n) for n in range(5)] == [0, 1, 1, 1, 1]
    versions.append(_version(6, PolicyState.EXPORTED, 2))
    assert [policy.resume_step(versions, "ru", n) for n in range(5)] == [0, 1, 2, 2, 2]


def test_what_follows_a_rejected_checkpoint_is_as_bad() -> None:
    """Steps 3 and 5 export nothing."""
    base, refused = _version(0, PolicyState.LIVE, run=None), _version(1, PolicyState.REJECTED, 2)
    assert [policy.resume_step([base, refused], "ru", n) for n in range(5)] == [0, 1, 1, 1, 1]
    both = [base, refused, _version(2, PolicyState.REJECTED, 4)]
    assert [policy.resume_step(both, "ru", n) for n in (3, 5)] == [1, 1]
    taken = [base, refused, _version(2, PolicyState.EXPORTED, 4)]  # which was made of step 3
    assert [policy.resume_step(taken, "ru", n) for n in (3, 4, 5)] == [3, 4, 5]
    assert policy.resume_step([base, refused], "another", 5) == 5


def test_a_changed_run_names_the_key() -> None:
    run = RunSettings(name="r", taskset="s", harness="react", eval=RunEval(k=2))
    stored = {"name": "r", "taskset": "s", "harness": "react", "eval": {"k": 2}}
    assert first_change(stored, run) is None
    assert first_change({**stored, "n": 4}, run) == "n"
    assert first_change({**stored, "eval": {"k": 3}}, run) == "eval.k"
    assert first_change({**stored, "harness": "", "harnesses": {"react": 1.0}}, run) == "harness"


def test_pass_at_k_and_the_interval() -> None:
    assert pass_at_k(4, 2, 1) == 0.5
    assert pass_at_k(4, 2, 4) == 1.0
    assert isclose(pass_at_k(4, 1, 2), 0.5)
    low, high = mean_interval([0.0] * 50 + [1.0] * 50)
    assert 0.38 < low < 0.5 < high < 0.62
    assert mean_interval([1.0, 1.0]) == (1.0, 1.0)
    figures = round_figures([[1.0, 0.0], [], [0.0]], 2)
    assert figures["reward/mean"] == 0.25  # tasks weigh alike
    assert figures["tasks/lost"] == 1 and figures["pass@1"] == 0.25 and figures["pass@2"] == 1.0
