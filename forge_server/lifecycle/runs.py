"""Events of runs, groups, rollouts, batches and holds."""

import sqlalchemy as sa

from forge_server.domain import events as e
from forge_server.domain.clock import Interval
from forge_server.domain.events import Refusal
from forge_server.domain.outcome import Outcome
from forge_server.domain.policy import POLICY_BUSY
from forge_server.domain.states import RolloutState, RunState
from forge_server.lifecycle import attempts, deadlines
from forge_server.lifecycle.change import Change
from forge_server.lifecycle.ending import cancel_rollout, end_attempt
from forge_server.store import batch_bodies, events, rows
from forge_server.store import tables as t
from forge_server.store.rows import RolloutRow

_ACTIVE = frozenset({RunState.ACTIVE})
_GOING = _ACTIVE | {RunState.PAUSED}


def run_created(change: Change, event: e.RunCreated) -> Refusal | None:
    known = change.connection.execute(
        sa.select(t.runs.c.id).where(t.runs.c.name == event.name)
    ).scalar_one_or_none()
    if known is not None:
        return Refusal.REPEAT if known == event.run_id else Refusal.NAME_TAKEN
    change.connection.execute(
        sa.insert(t.runs),
        {
            "id": event.run_id,
            "name": event.name,
            "kind": event.kind,
            "state": RunState.ACTIVE.value,
            "settings": event.settings,
            "created_at": change.now,
        },
    )
    change.emit("run_created", run_id=event.run_id, name=event.name, run_kind=event.kind)
    return None


def run_paused(change: Change, event: e.RunPaused) -> Refusal | None:
    run = change.run(event.run_id)
    if run is None:
        return Refusal.UNKNOWN
    # who waits for the policy goes on by itself: not if there is another reason to stay
    waits = run.reason == POLICY_BUSY and event.reason != POLICY_BUSY
    if run.state is RunState.PAUSED and not waits:
        return Refusal.REPEAT
    if run.state not in _GOING:
        return Refusal.ENDED
    change.move_run(run, RunState.PAUSED, reason=event.reason)
    change.emit("run_paused", run_id=run.id, reason=event.reason)
    return None


def run_resumed(change: Change, event: e.RunResumed) -> Refusal | None:
    run = change.run(event.run_id)
    if run is None:
        return Refusal.UNKNOWN
    if run.state is RunState.ACTIVE:
        return Refusal.REPEAT
    if run.state is not RunState.PAUSED:
        return Refusal.ENDED
    if event.reason and run.reason != event.reason:
        return Refusal.WRONG_STATE
    change.move_run(run, RunState.ACTIVE, reason="", infra_streak=0, infra_since=None)
    change.emit("run_resumed", run_id=run.id)
    return None


def run_ended(change: Change, event: e.RunEnded) -> Refusal | None:
    if event.state in _GOING:
        raise ValueError(f"a run does not end as {event.state}")
    run = change.run(event.run_id)
    if run is None:
        return Refusal.UNKNOWN
    if run.state not in _GOING:
        return Refusal.REPEAT if run.state is event.state else Refusal.ENDED
    change.move_run(run, event.state, reason=event.reason, ended_at=change.now)
    change.emit("run_ended", run_id=run.id, state=event.state.value, reason=event.reason)
    query = rows.select(RolloutRow).where(
        t.rollouts.c.run_id == run.id, t.rollouts.c.state != RolloutState.ENDED
    )
    for rollout in rows.fetch(change.connection, RolloutRow, query):
        cancel_rollout(change, rollout, f"run {event.state.value}")
    return None


def rollout_created(change: Change, event: e.RolloutCreated) -> Refusal | None:
    if change.rollout(event.rollout_id) is not None:
        return Refusal.REPEAT
    # nobody would start one from outside later
    refusal = _not_admitting(change, event.run_id, _ACTIVE if event.external else _GOING)
    if refusal is None:
        _admit(change, event)
    return refusal


def rollout_registered(change: Change, event: e.RolloutRegistered) -> Refusal | None:
    """The rollout may be refused. Its attempt may not: what is half a registration is rolled back."""
    refusal = rollout_created(change, event.rollout)
    if refusal is not None:
        return refusal
    attempt_id, rollout_id = event.attempt_id, event.rollout.rollout_id
    queued = e.AttemptQueued(attempt_id=attempt_id, rollout_id=rollout_id, backend="external")
    refusals = [attempts.queued(change, queued)]
    if event.ttl_s is not None:
        launched = e.AttemptLaunched(attempt_id=attempt_id, handle={"ttl_s": event.ttl_s})
        refusals.append(attempts.launched(change, launched))
    refusals.append(attempts.joined(change, e.RunnerJoined(attempt_id=attempt_id, nonce=attempt_id)))
    started = e.HarnessStarted(attempt_id=attempt_id, agent_s=event.agent_s)
    refusals.append(attempts.harness_started(change, started))
    if any(refusals):
        raise AssertionError(f"half of a registration was refused: {refusals}")
    return None


def group_created(change: Change, event: e.GroupCreated) -> Refusal | None:
    if any(rollout.group_id != event.group_id for rollout in event.rollouts):
        raise ValueError(f"a rollout of another group is given for {event.group_id}")
    known = change.connection.execute(
        sa.select(t.groups.c.id).where(t.groups.c.id == event.group_id)
    ).scalar_one_or_none()
    if known is not None:
        return Refusal.REPEAT
    refusal = _not_admitting(change, event.run_id, _GOING)
    if refusal is not None:
        return refusal
    change.connection.execute(
        sa.insert(t.groups),
        {
            "id": event.group_id,
            "run_id": event.run_id,
            "task_id": event.task_id,
            "step": event.step,
            "round": event.round,
            "mode": event.mode,
            "size": len(event.rollouts),
            "created_at": change.now,
        },
    )
    change.emit(
        "group_created",
        run_id=event.run_id,
        group_id=event.group_id,
        task_id=event.task_id,
        step=event.step,
        round=event.round,
        size=len(event.rollouts),
    )
    for rollout in event.rollouts:
        _admit(change, rollout)
    return None


def group_dropped(change: Change, event: e.GroupDropped) -> Refusal | None:
    group = change.connection.execute(
        sa.select(t.groups.c.run_id, t.groups.c.dropped, t.groups.c.batch_k).where(
            t.groups.c.id == event.group_id
        )
    ).one_or_none()
    if group is None:
        return Refusal.UNKNOWN
    if group.batch_k is not None:
        return Refusal.CONFLICT
    if group.dropped:
        return Refusal.REPEAT
    change.connection.execute(
        sa.update(t.groups).where(t.groups.c.id == event.group_id).values(dropped=event.reason)
    )
    change.emit("group_dropped", run_id=group.run_id, group_id=event.group_id, reason=event.reason)
    return None


def batch_assembled(change: Change, event: e.BatchAssembled) -> Refusal | None:
    """The batch, its body, the mark on its groups and the run's step: one commit (I8)."""
    run = change.run(event.run_id)
    if run is None:
        return Refusal.UNKNOWN
    known = change.connection.execute(
        sa.select(t.batches.c.sha256).where(t.batches.c.run_id == run.id, t.batches.c.k == event.k)
    ).scalar_one_or_none()
    if known is not None:
        return Refusal.REPEAT if known == event.sha256 else Refusal.CONFLICT
    if run.step != event.k - 1:
        return Refusal.WRONG_STATE
    change.connection.execute(
        sa.insert(t.batches),
        {
            "run_id": run.id,
            "k": event.k,
            "state": "assembled",
            "sha256": event.sha256,
            "size": len(event.body),
            "rollout_ids": list(event.rollout_ids),
            "stats": event.stats,
            "created_at": change.now,
        },
    )
    batch_bodies.write(change.connection, run.id, event.k, event.body)
    change.connection.execute(
        sa.update(t.groups)
        .where(t.groups.c.id.in_(event.group_ids), t.groups.c.batch_k.is_(None))
        .values(batch_k=event.k)
    )
    change.connection.execute(sa.update(t.runs).where(t.runs.c.id == run.id).values(step=event.k))
    change.emit(
        "batch_assembled",
        run_id=run.id,
        k=event.k,
        rollouts=len(event.rollout_ids),
        groups=len(event.group_ids),
        size=len(event.body),
    )
    return None


def rollout_cancelled(change: Change, event: e.RolloutCancelled) -> Refusal | None:
    rollout = change.rollout(event.rollout_id)
    if rollout is None:
        return Refusal.UNKNOWN
    if rollout.state is RolloutState.ENDED:
        return Refusal.REPEAT if rollout.outcome is Outcome.CANCELLED else Refusal.ENDED
    cancel_rollout(change, rollout, event.reason)
    return None


def rollout_retried(change: Change, event: e.RolloutRetried) -> Refusal | None:
    rollout = change.rollout(event.rollout_id)
    if rollout is None:
        return Refusal.UNKNOWN
    if rollout.state is RolloutState.ENDED:
        return Refusal.ENDED
    if rollout.state is RolloutState.PENDING:
        return Refusal.REPEAT
    if rollout.external:
        return Refusal.WRONG_STATE  # only its own harness can start it again
    attempt = change.live_attempt_of(rollout)
    assert attempt is not None  # an active rollout has one
    end_attempt(change, attempt, {"reason": "retry"}, retry=True, cancelled=True)
    return None


def hold_began(change: Change, event: e.HoldBegan) -> Refusal | None:
    if _open_hold(change, event.reason) is not None:
        return Refusal.REPEAT
    change.connection.execute(sa.insert(t.holds), {"reason": event.reason, "begin_at": change.now})
    change.emit("hold_began", reason=event.reason)
    return None


def hold_ended(change: Change, event: e.HoldEnded) -> Refusal | None:
    """Close the hold and move the clocks by what no other open hold will still add."""
    hold = _open_hold(change, event.reason)
    if hold is None:
        return Refusal.REPEAT
    change.connection.execute(sa.update(t.holds).where(t.holds.c.id == hold[0]).values(end_at=change.now))
    others = deadlines.open_holds(change.connection, change.now)
    first_other = min((other.begin for other in others), default=change.now)
    deadlines.add_hold(change.connection, [Interval(hold[1], first_other)])
    change.emit("hold_ended", reason=event.reason, seconds=change.now - hold[1])
    return None


def noted(change: Change, event: e.Noted) -> Refusal | None:
    row = events.append(
        change.connection, at=change.now, kind=event.kind, data=event.data, run_id=event.run_id
    )
    change.rows.append(row)
    return None


def _open_hold(change: Change, reason: str) -> tuple[int, float] | None:
    row = change.connection.execute(
        sa.select(t.holds.c.id, t.holds.c.begin_at).where(
            t.holds.c.reason == reason, t.holds.c.end_at.is_(None)
        )
    ).one_or_none()
    return None if row is None else (row.id, row.begin_at)


def _not_admitting(change: Change, run_id: str, admitting: frozenset[RunState]) -> Refusal | None:
    run = change.run(run_id)
    if run is None:
        return Refusal.UNKNOWN
    return None if run.state in admitting else Refusal.RUN_NOT_ACTIVE


def _admit(change: Change, event: e.RolloutCreated) -> None:
    change.connection.execute(
        sa.insert(t.rollouts),
        {
            "id": event.rollout_id,
            "run_id": event.run_id,
            "group_id": event.group_id,
            "task_id": event.task_id,
            "slot": event.slot,
            "harness": event.harness,
            "mode": event.mode,
            "external": event.external,
            "state": RolloutState.PENDING.value,
            "max_attempts": event.max_attempts,
            "policy_version": event.policy_version,
            "created_at": change.now,
        },
    )
    change.emit(
        "rollout_created",
        run_id=event.run_id,
        rollout_id=event.rollout_id,
        group_id=event.group_id,
        mode=event.mode,
        harness=event.harness,
    )
