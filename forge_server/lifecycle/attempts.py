"""Events of attempts: each function decides what one event changes, or why it changes nothing.

The first terminal event wins: whatever comes after it is answered ``ended``. Repeats are answered ``repeat``.
Rows are written before the act they announce (launch, handing out keys or verifier files).
"""

import math

import sqlalchemy as sa

from forge_server.domain import events as e
from forge_server.domain.classify import MAX_REWARD, Finish
from forge_server.domain.events import Clock, Refusal
from forge_server.domain.outcome import Kind
from forge_server.domain.states import ATTEMPT_STEPS, INFERENCE_STATES, AttemptState, RolloutState, RunState
from forge_server.lifecycle import deadlines, liveness
from forge_server.lifecycle.change import Change
from forge_server.lifecycle.ending import end_attempt
from forge_server.store import tables as t
from forge_server.store.rows import AttemptRow

SEAL_TO_VERIFY_S = 120.0
"""How long after sealing the runner may take to kill what is left and to fetch the verifier."""

REPORT_S = 15.0
"""How long after the verifier's own time the runner, who watches it, may take to report."""

_NO_LONGER_ASKING = (AttemptState.SEALED, AttemptState.VERIFYING)


def queued(change: Change, event: e.AttemptQueued) -> Refusal | None:
    if change.attempt(event.attempt_id) is not None:
        return Refusal.REPEAT
    rollout = change.rollout(event.rollout_id)
    if rollout is None:
        return Refusal.UNKNOWN
    if rollout.state is RolloutState.ENDED:
        return Refusal.ENDED
    if rollout.state is not RolloutState.PENDING:
        return Refusal.WRONG_STATE
    if rollout.not_before > change.now:
        return Refusal.TOO_EARLY
    run = change.run(rollout.run_id)
    assert run is not None
    if run.state is not RunState.ACTIVE:
        return Refusal.RUN_NOT_ACTIVE
    number = rollout.attempts + 1
    change.move_rollout(rollout, RolloutState.ACTIVE, attempts=number)
    change.connection.execute(
        sa.insert(t.attempts),
        {
            "id": event.attempt_id,
            "rollout_id": rollout.id,
            "number": number,
            "state": AttemptState.QUEUED.value,
            "backend": event.backend,
            "created_at": change.now,
        },
    )
    change.emit(
        "attempt_queued",
        run_id=rollout.run_id,
        rollout_id=rollout.id,
        attempt_id=event.attempt_id,
        backend=event.backend,
        number=number,
    )
    return None


def launching(change: Change, event: e.AttemptLaunching) -> Refusal | None:
    attempt = change.attempt(event.attempt_id)
    if attempt is None:
        return Refusal.UNKNOWN
    if attempt.state is AttemptState.ENDED:
        return Refusal.ENDED
    if attempt.state is AttemptState.LAUNCHING:
        return Refusal.REPEAT
    if attempt.state is not AttemptState.QUEUED:
        return Refusal.WRONG_STATE
    change.move_attempt(
        attempt,
        AttemptState.LAUNCHING,
        launched_at=change.now,
        startup_deadline=change.now + event.startup_s,
    )
    change.emit_attempt("attempt_launching", attempt, change.rollout_of(attempt))
    return None


def launched(change: Change, event: e.AttemptLaunched) -> Refusal | None:
    attempt = change.attempt(event.attempt_id)
    if attempt is None:
        return Refusal.UNKNOWN
    if attempt.state is AttemptState.ENDED:
        return Refusal.ENDED
    if attempt.handle == event.handle:
        return Refusal.REPEAT
    clock = {} if event.startup_s is None else {"startup_deadline": change.now + event.startup_s}
    change.set_attempt(attempt, handle=event.handle, **clock)
    change.emit_attempt("attempt_launched", attempt, change.rollout_of(attempt), handle=event.handle)
    return None


def joined(change: Change, event: e.RunnerJoined) -> Refusal | None:
    attempt = change.attempt(event.attempt_id)
    if attempt is None:
        return Refusal.UNKNOWN
    if attempt.state is AttemptState.ENDED:
        return Refusal.ENDED
    if attempt.start_nonce is not None:
        return Refusal.REPEAT if attempt.start_nonce == event.nonce else Refusal.OTHER_NONCE
    if AttemptState.STARTING not in ATTEMPT_STEPS[attempt.state]:
        return Refusal.WRONG_STATE
    change.move_attempt(
        attempt,
        AttemptState.STARTING,
        start_nonce=event.nonce,
        started_at=change.now,
        heartbeat_at=change.now,
    )
    change.emit_attempt("attempt_starting", attempt, change.rollout_of(attempt))
    return None


def harness_started(change: Change, event: e.HarnessStarted) -> Refusal | None:
    attempt = change.attempt(event.attempt_id)
    if attempt is None:
        return Refusal.UNKNOWN
    if attempt.state is AttemptState.ENDED:
        return Refusal.ENDED
    if attempt.running_at is not None:
        return Refusal.REPEAT
    if attempt.state is not AttemptState.STARTING:
        return Refusal.WRONG_STATE
    change.move_attempt(
        attempt,
        AttemptState.RUNNING,
        running_at=change.now,
        agent_deadline=change.now + event.agent_s,
    )
    change.emit_attempt("attempt_running", attempt, change.rollout_of(attempt))
    return None


def stop_requested(change: Change, event: e.StopRequested) -> Refusal | None:
    return _stop(change, event.attempt_id, event.reason)


def budget_exceeded(change: Change, event: e.BudgetExceeded) -> Refusal | None:
    return _stop(change, event.attempt_id, event.kind.value)


def _stop(change: Change, attempt_id: str, reason: str) -> Refusal | None:
    attempt = change.attempt(attempt_id)
    if attempt is None:
        return Refusal.UNKNOWN
    if attempt.state is AttemptState.ENDED:
        return Refusal.ENDED
    if attempt.stop_reason:
        return Refusal.REPEAT  # the first reason is kept
    if attempt.state in _NO_LONGER_ASKING:
        return Refusal.WRONG_STATE
    change.set_attempt(attempt, stop_reason=reason)
    change.emit_attempt("attempt_stopping", attempt, change.rollout_of(attempt), reason=reason)
    return None


def sealed(change: Change, event: e.AttemptSealed) -> Refusal | None:
    attempt = change.attempt(event.attempt_id)
    if attempt is None:
        return Refusal.UNKNOWN
    if attempt.sealed_at is not None:
        return Refusal.REPEAT
    if attempt.state is AttemptState.ENDED:
        return Refusal.ENDED
    if attempt.state not in INFERENCE_STATES:
        return Refusal.WRONG_STATE
    _seal(change, attempt, event.reason, attempt.stop_reason)
    return None


def _seal(change: Change, attempt: AttemptRow, reason: str, stop_reason: str) -> None:
    change.move_attempt(
        attempt,
        AttemptState.SEALED,
        sealed_at=change.now,
        stop_reason=stop_reason,
        verify_deadline=change.now + SEAL_TO_VERIFY_S,
    )
    change.emit_attempt("attempt_sealed", attempt, change.rollout_of(attempt), reason=reason)


def verifier_fetched(change: Change, event: e.VerifierFetched) -> Refusal | None:
    attempt = change.attempt(event.attempt_id)
    if attempt is None:
        return Refusal.UNKNOWN
    if attempt.state is AttemptState.ENDED:
        return Refusal.ENDED
    if attempt.state is AttemptState.VERIFYING:
        return Refusal.REPEAT
    if attempt.state is not AttemptState.SEALED:
        return Refusal.WRONG_STATE
    deadline = change.now + event.verify_s + REPORT_S
    change.move_attempt(attempt, AttemptState.VERIFYING, verify_deadline=deadline)
    change.emit_attempt("attempt_verifying", attempt, change.rollout_of(attempt))
    return None


def reward_reported(change: Change, event: e.RewardReported) -> Refusal | None:
    if not math.isfinite(event.value) or abs(event.value) > MAX_REWARD:
        return Refusal.BAD_REWARD
    attempt = change.attempt(event.attempt_id)
    if attempt is None:
        return Refusal.UNKNOWN
    call = t.rewards.c.call_id
    known = change.connection.execute(
        sa.select(t.rewards.c.value).where(
            t.rewards.c.attempt_id == attempt.id,
            t.rewards.c.source == event.source,
            call.is_(None) if event.call_id is None else call == event.call_id,
        )
    ).scalar_one_or_none()
    if known is not None:
        return Refusal.REPEAT if known == event.value else Refusal.CONFLICT
    if attempt.state is AttemptState.ENDED:
        return Refusal.ENDED
    if event.source == "verifier" and attempt.state not in _NO_LONGER_ASKING:
        return Refusal.WRONG_STATE
    change.connection.execute(
        sa.insert(t.rewards),
        {
            "attempt_id": attempt.id,
            "source": event.source,
            "value": event.value,
            "call_id": event.call_id,
            "detail": event.detail,
            "at": change.now,
        },
    )
    change.emit_attempt(
        "reward_reported",
        attempt,
        change.rollout_of(attempt),
        source=event.source,
        value=event.value,
        call_id=event.call_id,
    )
    return None


def finished(change: Change, event: e.RunnerFinished) -> Refusal | None:
    attempt = change.attempt(event.attempt_id)
    if attempt is None:
        return Refusal.UNKNOWN
    if attempt.state is AttemptState.ENDED:
        return Refusal.REPEAT if (attempt.evidence or {}).get("finish") else Refusal.ENDED
    finish = Finish(
        exit_code=event.exit_code,
        signal=event.signal,
        stopped_by=event.stopped_by,
        verifier=event.verifier.status,
        runner_error=event.runner_error,
    )
    details = {}
    if event.verifier.error or event.verifier.exit_code:
        details = {"verifier_error": event.verifier.error, "verifier_exit_code": event.verifier.exit_code}
    end_attempt(change, attempt, details, finish=finish)
    return None


def backend_fact(change: Change, event: e.BackendFact) -> Refusal | None:
    attempt = change.attempt(event.attempt_id)
    if attempt is None:
        return Refusal.UNKNOWN
    if attempt.state is AttemptState.ENDED:
        return Refusal.ENDED
    end_attempt(change, attempt, event.evidence, backend=event.fact, independent=event.independent)
    return None


def deadline_passed(change: Change, event: e.DeadlinePassed) -> Refusal | None:
    attempt = change.attempt(event.attempt_id)
    if attempt is None:
        return Refusal.UNKNOWN
    if attempt.state is AttemptState.ENDED:
        return Refusal.ENDED
    if liveness.unsettled(change.connection, change.now):
        return Refusal.TOO_EARLY
    held = deadlines.open_holds(change.connection, change.now)
    if not deadlines.is_due(attempt, event.clock, change.now, event.limit_s, held):
        return Refusal.TOO_EARLY
    if event.clock is Clock.AGENT:
        reason = attempt.stop_reason or Kind.AGENT_TIMEOUT.value
        _seal(change, attempt, Kind.AGENT_TIMEOUT.value, reason)
    elif event.clock is Clock.HEARTBEAT and attempt.state is AttemptState.RUNNING:
        # its calls get their ends first; the clock is still behind at the next sweep
        _seal(change, attempt, "runner_silent", attempt.stop_reason)
    else:
        end_attempt(change, attempt, event.evidence, deadline=event.clock)
    return None


def server_lost(change: Change, event: e.ServerLost) -> Refusal | None:
    attempt = change.attempt(event.attempt_id)
    if attempt is None:
        return Refusal.UNKNOWN
    if attempt.state is AttemptState.ENDED:
        return Refusal.ENDED
    end_attempt(change, attempt, server_lost=True)
    return None
