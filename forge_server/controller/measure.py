"""The figures of one run step, from its groups and what their attempts were cut into. Pure.

``reward/mean`` and ``pass_rate`` are over all valid rollouts of the step, not only over those trained:
which groups are trained depends on their rewards.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, pstdev

from forge_server.domain.batches import Drop, EndedRollout, Selection
from forge_server.domain.cohort import Group, Member
from forge_server.domain.outcome import Kind, Outcome
from forge_server.trajectory.attempt import Cut

PASS_REWARD = 1.0
_LENGTHS = ((1_000, "1k"), (4_000, "4k"), (16_000, "16k"), (64_000, "64k"))


def ended_rollouts(group: Group, cuts: Mapping[str, Cut]) -> list[EndedRollout]:
    """The complete group as the selection sees it. ``cuts`` by attempt id; a rollout without one has no
    tokens."""
    found = []
    for member in group.members:
        cut = cuts.get(member.attempt_id or "")
        found.append(
            EndedRollout(
                id=member.id,
                group_id=group.id,
                outcome=Outcome(member.outcome or Outcome.CANCELLED),
                reward=member.reward,
                not_trained=member.not_trained or (cut.fault or "" if cut else ""),
                trained_tokens=cut.trained_tokens if cut else 0,
                clipped_tokens=sum(cut.clipped.values()) if cut else 0,
                versions=cut.versions if cut else frozenset(),
            )
        )
    return found


def step_figures(
    groups: Sequence[Group],
    rollouts: Mapping[str, Sequence[EndedRollout]],
    selection: Selection,
    cuts: Mapping[str, Cut],
    age: Callable[[int], int],
) -> dict[str, float]:
    """Everything that is known when batch k is assembled. ``rollouts`` by group id; ``age``
    of a policy version.
    """
    everyone = [r for group in groups for r in rollouts[group.id]]
    members = {m.id: m for group in groups for m in group.members}
    valid = [r for r in everyone if r.valid]
    trained = [r for kept in selection.groups.values() for r in kept]
    cut_of = {i: cut for i, m in members.items() if (cut := cuts.get(m.attempt_id or "")) is not None}
    figures: dict[str, float] = {
        "groups/drawn": len(groups),
        "groups/trained": len(selection.groups),
        "groups/rounds": len({group.round for group in groups}),
        "rollouts/drawn": len(everyone),
        "rollouts/valid": len(valid),
        "rollouts/trained": len(trained),
        **reward_figures([r.reward for r in valid if r.reward is not None]),
        **_sample_figures([cut_of[r.id] for r in trained]),
        **_staleness_figures([age(_oldest(cut_of[r.id])) for r in trained if r.trained_tokens]),
        **_stale_figures([cut_of[r.id] for r in everyone if r.trainable and _stale(selection, r)]),
        **_surplus_figures([m for m in members.values() if m.kind == Kind.SURPLUS], cut_of),
        **_death_figures(everyone, {i: m.attempts for i, m in members.items()}, cut_of),
    }
    drops = Counter(selection.dropped.values())
    mixed = len(selection.groups) + drops[Drop.STALE]  # it is the last thing that a group is dropped for
    if judged := mixed + drops[Drop.EQUAL_REWARDS]:
        figures["groups/mixed_share"] = mixed / judged
    for drop in Drop:
        figures[f"groups/dropped_{drop}"] = drops[drop]
    for name, count in Counter(
        f"outcome/{m.outcome}/{m.kind}" for m in members.values() if m.outcome
    ).items():
        figures[name] = count
    for name, count in Counter(f"not_trained/{r.not_trained}" for r in valid if r.not_trained).items():
        figures[name] = count
    ended = [m.ended_at for m in members.values() if m.ended_at is not None]
    if ended:
        figures["seconds/generate"] = max(ended) - min(m.created_at for m in members.values())
    return figures


def reward_figures(rewards: Sequence[float]) -> dict[str, float]:
    """Mean, spread and pass rate of all valid rollouts; empty without any."""
    if not rewards:
        return {}
    return {
        "reward/mean": fmean(rewards),
        "reward/std": pstdev(rewards),
        "reward/min": min(rewards),
        "reward/max": max(rewards),
        "pass_rate": fmean(reward >= PASS_REWARD for reward in rewards),
    }


def _sample_figures(cuts: Sequence[Cut]) -> dict[str, float]:
    samples = [sample for cut in cuts for sample in cut.samples]
    calls = sum(len(cut.calls) for cut in cuts)
    trained, total = sum(cut.trained_tokens for cut in cuts), sum(cut.tokens for cut in cuts)
    figures: dict[str, float] = {
        "tokens/trained": trained,
        "tokens/context": total - trained,
        "tokens/clipped": sum(sum(cut.clipped.values()) for cut in cuts),
        "samples/count": len(samples),
        "calls/count": calls,
    }
    if cuts:
        figures["samples/per_rollout"] = len(samples) / len(cuts)
        figures["calls/per_rollout"] = calls / len(cuts)
    if calls:
        # 1 when every attempt became a single sample, 0 when no call could be merged with another
        mergeable = calls - len(cuts)
        figures["samples/merge_ratio"] = (calls - len(samples)) / mergeable if mergeable > 0 else 1.0
    for name, count in Counter(f"breaks/{sample.break_reason}" for sample in samples).items():
        figures[name] = count
    untrained: Counter[str] = Counter()
    for cut in cuts:
        untrained.update(reason.value for reason in cut.untrained.values())
    return figures | {f"untrained/{reason}": count for reason, count in untrained.items()}


def _staleness_figures(ages: Sequence[int]) -> dict[str, float]:
    """How many updates old the weights are that sampled the trained rollouts."""
    return {"staleness/mean": fmean(ages), "staleness/max": max(ages)} if ages else {}


def _stale(selection: Selection, rollout: EndedRollout) -> bool:
    return selection.dropped.get(rollout.group_id) is Drop.STALE


def _stale_figures(cuts: Sequence[Cut]) -> dict[str, float]:
    """Rollouts lost to the staleness cap, by length: losing the long ones selects for short answers."""
    figures: dict[str, float] = {"staleness/dropped": len(cuts)}
    counts = _by_length([cut.trained_tokens for cut in cuts])
    return figures | {f"staleness/dropped_{name}": count for name, count in counts.items()}


def _surplus_figures(stopped: Sequence[Member], cuts: Mapping[str, Cut]) -> dict[str, float]:
    """Rollouts that their group did not wait for, by how far they had come: not waiting selects for short ones."""
    if not stopped:
        return {}
    counts = _by_length([cuts[m.id].trained_tokens for m in stopped if m.id in cuts])
    figures: dict[str, float] = {"surplus/stopped": len(stopped)}
    return figures | {f"surplus/stopped_{name}": count for name, count in counts.items()}


def _death_figures(
    rollouts: Sequence[EndedRollout], attempts: Mapping[str, int], cuts: Mapping[str, Cut]
) -> dict[str, float]:
    """Attempts lost to infra failures: a rate that grows with length selects for short rollouts."""
    made = sum(attempts.values())
    lost = sum(attempts[r.id] - (r.outcome is not Outcome.INFRA_FAILURE) for r in rollouts if attempts[r.id])
    retried = [cuts[r.id].trained_tokens for r in rollouts if attempts[r.id] > 1 and r.id in cuts]
    figures: dict[str, float] = {"infra/attempts_lost": lost}
    if made:
        figures["infra/death_rate"] = lost / made
    return figures | {f"infra/retried_{name}": count for name, count in _by_length(retried).items()}


def _oldest(cut: Cut) -> int:
    """Of the policy versions that sampled the trained tokens."""
    return min(sample.min_version for sample in cut.samples)


def _by_length(tokens: Sequence[int]) -> Counter[str]:
    """Counts by trained tokens: below 1k, 4k, 16k, 64k, or more."""
    return Counter(
        next((f"below_{name}" for limit, name in _LENGTHS if count < limit), "from_64k") for count in tokens
    )
