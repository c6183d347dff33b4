"""How an attempt ends, and what follows for its rollout, group, task and run — all in one transaction.

Invariants: I5 (the outcome is ``domain.classify``'s, an infra failure leaves no reward), I6 (a rollout
gets either its next attempt or its one end).
"""

from typing import Any

import sqlalchemy as sa

from forge_server.domain import clock
from forge_server.domain.classify import Verdict, classify
from forge_server.domain.outcome import Kind, Outcome, counts_for_training
from forge_server.domain.states import AttemptState, RolloutState, RunState
from forge_server.lifecycle.change import Change
from forge_server.lifecycle.facts import evidence, gather
from forge_server.store import rows
from forge_server.store import tables as t
from forge_server.store.rows import AttemptRow, RolloutRow

FREE_RESTARTS = 20
"""Attempts that are not charged to ``max_attempts`` may be this many per rollout."""

UNCHARGED = (Kind.SERVER_LOST, Kind.UNSCHEDULABLE)
"""Kinds of infra failure that only say that it was no time for an attempt."""


def end_attempt(
    change: Change,
    attempt: AttemptRow,
    details: dict[str, Any] | None = None,
    *,
    retry: bool = False,
    **trigger: Any,
) -> None:
    """End a live attempt by ``trigger`` (a field of ``classify.Facts``); ``details`` are kept as evidence.

    ``retry``: the rollout goes on with a new attempt whatever the outcome.
    """
    rollout = change.rollout_of(attempt)
    facts = gather(change, attempt, rollout, **trigger)
    verdict = classify(facts)
    reward = _reward(change, attempt, rollout, verdict, facts.reward)
    not_trained = verdict.not_trained.value if verdict.not_trained is not None else ""
    change.move_attempt(
        attempt,
        AttemptState.ENDED,
        outcome=verdict.outcome.value,
        kind=verdict.kind.value,
        reward=reward,
        evidence=evidence(facts, details or {}),
        not_trained=not_trained,
        ended_at=change.now,
        exit_code=facts.finish.exit_code if facts.finish is not None else attempt.exit_code,
    )
    change.emit_attempt(
        "attempt_ended",
        attempt,
        rollout,
        outcome=verdict.outcome.value,
        kind=verdict.kind.value,
        reward=reward,
        not_trained=not_trained,
        backend=attempt.backend,
        number=attempt.number,
        finished=facts.finish is not None,
    )
    if retry:
        _pend(change, rollout, "retry", change.now)
    else:
        _settle(change, attempt, rollout, verdict, reward)
    _breaker(change, attempt, rollout, verdict, (details or {}).get("error", ""))


def end_rollout(
    change: Change,
    rollout: RolloutRow,
    outcome: Outcome,
    kind: Kind,
    *,
    reward: float | None = None,
    attempt_id: str | None = None,
) -> None:
    """End a rollout; with its last sibling the group is complete."""
    change.move_rollout(
        rollout,
        RolloutState.ENDED,
        outcome=outcome.value,
        kind=kind.value,
        reward=reward,
        final_attempt_id=attempt_id,
        ended_at=change.now,
    )
    change.emit_rollout(
        "rollout_ended",
        rollout,
        outcome=outcome.value,
        kind=kind.value,
        reward=reward,
        group_id=rollout.group_id,
        mode=rollout.mode,
    )
    if rollout.group_id is not None:
        _complete_group(change, rollout.group_id, rollout.run_id)


def cancel_rollout(change: Change, rollout: RolloutRow, reason: str, *, surplus: bool = False) -> None:
    """End a rollout that has not ended, and its attempt. ``surplus``: its group has enough without it."""
    attempt = change.live_attempt_of(rollout)
    if attempt is None:
        end_rollout(change, rollout, Outcome.CANCELLED, Kind.SURPLUS if surplus else Kind.CANCELLED)
    else:
        end_attempt(change, attempt, {"reason": reason} if reason else {}, cancelled=True, surplus=surplus)


def _reward(
    change: Change, attempt: AttemptRow, rollout: RolloutRow, verdict: Verdict, reported: float | None
) -> float | None:
    """The reward that counts. A policy failure without anybody's word gets the task's minimum, as a row."""
    if not counts_for_training(verdict.outcome):
        return None
    if reported is not None or verdict.outcome is Outcome.COMPLETED:
        return reported
    minimum = change.connection.execute(
        sa.select(t.tasks.c.min_reward).where(t.tasks.c.id == rollout.task_id)
    ).scalar_one_or_none()
    value = float(minimum or 0.0)
    change.connection.execute(
        sa.insert(t.rewards),
        {"attempt_id": attempt.id, "source": "minimum", "value": value, "at": change.now},
    )
    return value


def _settle(
    change: Change, attempt: AttemptRow, rollout: RolloutRow, verdict: Verdict, reward: float | None
) -> None:
    if verdict.outcome is Outcome.INFRA_FAILURE and not rollout.external:
        failures = _charged(change, rollout)
        if failures < rollout.max_attempts and rollout.attempts < rollout.max_attempts + FREE_RESTARTS:
            lost = verdict.kind in UNCHARGED
            _pend(change, rollout, verdict.kind.value, change.now + (0 if lost else clock.backoff(failures)))
            return
    # what a harness outside leaves out says nothing of the task
    if verdict.outcome is Outcome.TASK_FAILURE and rollout.task_id is not None and not rollout.external:
        _fail_task(change, rollout, verdict.kind)
    end_rollout(change, rollout, verdict.outcome, verdict.kind, reward=reward, attempt_id=attempt.id)
    if rollout.group_id is not None and rollout.mode != "eval" and counts_for_training(verdict.outcome):
        _stop_surplus(change, rollout.group_id, rollout.run_id)


def _stop_surplus(change: Change, group_id: str, run_id: str) -> None:
    """An oversampled group needs no further rollout once n of them are valid."""
    run = change.run(run_id)
    assert run is not None  # a foreign key
    extra = int(run.settings.get("oversample", 0))
    if not extra:
        return
    query = rows.select(RolloutRow).where(t.rollouts.c.group_id == group_id).order_by(t.rollouts.c.slot)
    members = rows.fetch(change.connection, RolloutRow, query)
    valid = sum(m.outcome is not None and counts_for_training(Outcome(m.outcome)) for m in members)
    if valid >= len(members) - extra:
        for member in members:
            if member.state is not RolloutState.ENDED:
                cancel_rollout(change, member, "surplus", surplus=True)


def _pend(change: Change, rollout: RolloutRow, after: str, not_before: float) -> None:
    change.move_rollout(rollout, RolloutState.PENDING, not_before=not_before)
    change.emit_rollout("rollout_pending", rollout, after=after, not_before=not_before)


def _charged(change: Change, rollout: RolloutRow) -> int:
    """Attempts of the rollout that count against ``max_attempts``."""
    return int(
        change.connection.execute(
            sa.select(sa.func.count())
            .select_from(t.attempts)
            .where(
                t.attempts.c.rollout_id == rollout.id,
                t.attempts.c.outcome == Outcome.INFRA_FAILURE,
                t.attempts.c.kind.not_in(UNCHARGED),
            )
        ).scalar_one()
    )


def _fail_task(change: Change, rollout: RolloutRow, kind: Kind) -> None:
    done = change.connection.execute(
        sa.update(t.tasks)
        .where(t.tasks.c.id == rollout.task_id, t.tasks.c.state != "failed")
        .values(state="failed", reason=f"{kind.value}, seen in rollout {rollout.id}")
    )
    if done.rowcount:
        change.emit_rollout("task_failed", rollout, task_id=rollout.task_id, kind=kind.value)


def _complete_group(change: Change, group_id: str, run_id: str) -> None:
    members = change.connection.execute(
        sa.select(t.rollouts.c.state, t.rollouts.c.outcome, t.rollouts.c.reward)
        .where(t.rollouts.c.group_id == group_id)
        .order_by(t.rollouts.c.slot)
    ).all()
    if any(member.state != RolloutState.ENDED for member in members):
        return
    valid = [m.reward for m in members if counts_for_training(Outcome(m.outcome))]
    change.emit(
        "group_complete", run_id=run_id, group_id=group_id, size=len(members), valid=len(valid), rewards=valid
    )


def _set_streak(change: Change, run_id: str, streak: int, since: float | None) -> None:
    values = {"infra_streak": streak, "infra_since": since}
    change.connection.execute(sa.update(t.runs).where(t.runs.c.id == run_id).values(values))


def _breaker(change: Change, attempt: AttemptRow, rollout: RolloutRow, verdict: Verdict, error: str) -> None:
    """Infra failures in a row pause the run: whatever is broken would eat every rollout's attempts. Attempts that
    were in flight already when the first of the row was seen do not count again: a node takes many with it, and only
    what is launched after that tells whether more is broken. A cluster that is full is not broken: others of the run
    are under way in it."""
    if verdict.outcome is Outcome.CANCELLED or verdict.kind is Kind.SERVER_LOST:
        return
    if verdict.kind is Kind.UNSCHEDULABLE and _under_way(change, rollout.run_id):
        return
    run = change.run(rollout.run_id)
    assert run is not None  # a foreign key
    if verdict.outcome is not Outcome.INFRA_FAILURE:
        if run.infra_streak:
            _set_streak(change, run.id, 0, None)
        return
    if run.infra_since is not None and attempt.created_at < run.infra_since:
        return
    streak = run.infra_streak + 1
    _set_streak(change, run.id, streak, change.now if run.infra_since is None else run.infra_since)
    if streak >= change.breaker_after and run.state is RunState.ACTIVE:
        reason = f"breaker: {streak} infra failures in a row, the last was {verdict.kind.value}"
        if error:
            reason += f": {error}"
        change.move_run(run, RunState.PAUSED, reason=reason)
        change.emit("run_paused", run_id=run.id, reason=reason)


def _under_way(change: Change, run_id: str) -> bool:
    """Whether the runner of any attempt of the run has joined."""
    gone_or_not_yet = (AttemptState.QUEUED, AttemptState.LAUNCHING, AttemptState.ENDED)
    query = (
        sa.select(t.attempts.c.id)
        .join(t.rollouts, t.rollouts.c.id == t.attempts.c.rollout_id)
        .where(t.rollouts.c.run_id == run_id, t.attempts.c.state.not_in(gone_or_not_yet))
        .limit(1)
    )
    return change.connection.execute(query).first() is not None
