"""Attribution: from the facts of an attempt to its outcome, its kind, and whether it may be trained.
Pure.

Facts come from three sources: the runner's finish, the call log, and the backend. Their order of
precedence:

1. A person's cancel and the death of our own server decide alone.
2. Facts that the agent cannot have made come next: the pod's node died, the harness never started, the engine
   failed on the last thing the harness asked. They are infra failures.
3. Then what the policy did: budgets, clocks, memory. They are policy failures and keep the verifier's reward.
4. Then the verifier's word, and last the exit of the harness.

Invariant I5: within the agent's reach are its own exit, its calls, the files that the verifier reads
and, on a weak sandbox, the life of the runner. None of these leads to an infra failure, nor to a task
failure, without evidence that is independent of the agent. Invariant I4: a valid attempt whose call log
has a hole is not trained.
"""

from collections.abc import Iterable
from enum import StrEnum
from typing import Literal

import msgspec

from forge_server.domain.events import Clock, Fact
from forge_server.domain.outcome import Kind, Outcome
from forge_server.domain.states import CallEnd

MAX_REWARD = 1e6
"""Rewards beyond this are taken for nonsense."""

POLICY_STOPS: frozenset[str] = frozenset(
    {
        Kind.AGENT_TIMEOUT,
        Kind.BUDGET_CALLS,
        Kind.BUDGET_TOKENS,
        Kind.CONTEXT_OVERFLOW,
        Kind.BAD_TOOL_CALL,
        Kind.OOM_AGENT,
    }
)
"""Reasons to stop an attempt that are the policy's own doing."""

CONTEXT_ERROR = "context_length_exceeded"
"""How the error of a call begins that was rejected because its prompt does not fit the window."""

DISK_EXCESS = "disk_excess"
"""Why a runner stopped a harness that took more of the disk than it may: told as a pod's eviction for that is."""

RECORD_ERROR = "store"
"""How the error of a call begins whose answer was withheld because it could not be stored."""


class NotTrained(StrEnum):
    """Why a valid attempt is not trained (I4). The row holds "" when it may be."""

    CALL_IN_FLIGHT = "call_in_flight"  # the end of a call is not recorded: nobody knows what the harness got
    CALL_MISSING = "call_missing"  # the numbering of the calls has a hole
    NO_CALL = "no_call"  # no call was answered: there is nothing to train


class CallFact(msgspec.Struct, frozen=True):
    """One call of the log, as far as attribution goes. ``end`` is None while no end is recorded;
    ``status`` is what the harness was answered.
    """

    seq: int
    end: CallEnd | None
    error: str = ""
    status: int | None = None


class Finish(msgspec.Struct, frozen=True, kw_only=True):
    """The runner's last word (see ``events.RunnerFinished``)."""

    exit_code: int | None = None
    signal: int | None = None
    stopped_by: str = ""
    verifier: Literal["ok", "crash", "timeout", "invalid", "none"] = "none"
    runner_error: str = ""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known at the end of an attempt. Exactly one of the five triggers is set."""

    # what ended it
    finish: Finish | None = None
    backend: Fact | None = None
    deadline: Clock | None = None
    server_lost: bool = False
    cancelled: bool = False
    # what is known besides
    surplus: bool = False  # cancelled because its group needs it no more
    independent: bool = False  # of a backend's fact: the agent cannot have caused it
    harness_started: bool = False
    stop_reason: str = ""
    reward: float | None = None  # of the verifier, or reported from outside
    reward_wanted: bool = True  # False for recording: an attempt without reward is complete
    verifier_fails_on_gold: bool = False
    calls: tuple[CallFact, ...] = ()


class Verdict(msgspec.Struct, frozen=True):
    """``not_trained`` is None for an attempt that may be trained; it says nothing unless the outcome is
    valid.
    """

    outcome: Outcome
    kind: Kind
    not_trained: NotTrained | None = None


def classify(facts: Facts) -> Verdict:
    """The verdict on an ended attempt. Never raises; every combination of facts has exactly one answer."""
    outcome, kind = _attribute(facts)
    return Verdict(outcome, kind, hole(facts.calls))


def hole(calls: tuple[CallFact, ...]) -> NotTrained | None:
    """What is wrong with a call log (I4), or None."""
    if any(call.end is None for call in calls):
        return NotTrained.CALL_IN_FLIGHT
    if {call.seq for call in calls} != set(range(len(calls))):
        return NotTrained.CALL_MISSING
    if not any(call.end is CallEnd.OK for call in calls):
        return NotTrained.NO_CALL
    return None


def _attribute(facts: Facts) -> tuple[Outcome, Kind]:
    if facts.cancelled:
        return Outcome.CANCELLED, Kind.SURPLUS if facts.surplus else Kind.CANCELLED
    if facts.server_lost:
        return Outcome.INFRA_FAILURE, Kind.SERVER_LOST
    if facts.backend is not None:
        return _by_backend(facts, facts.backend)
    if facts.deadline is Clock.STARTUP:
        return Outcome.INFRA_FAILURE, Kind.STARTUP_TIMEOUT
    if not facts.harness_started and (facts.finish is None or facts.finish.runner_error):
        return Outcome.INFRA_FAILURE, Kind.RUNNER_LOST
    return _engine_blame(facts) or _no_call(facts) or _policy_blame(facts) or _by_runner(facts)


_ALWAYS_INFRA = {
    Fact.UNSCHEDULABLE: Kind.UNSCHEDULABLE,
    Fact.IMAGE_PULL: Kind.IMAGE_PULL,
    Fact.EVICTED: Kind.EVICTED,
    Fact.NODE_LOST: Kind.NODE_LOST,
    Fact.POD_LOST: Kind.POD_LOST,
}


def _by_backend(facts: Facts, fact: Fact) -> tuple[Outcome, Kind]:
    if fact is Fact.BAD_SPEC:
        return Outcome.TASK_FAILURE, Kind.BAD_SPEC
    if fact is Fact.OOM_AGENT:
        return Outcome.POLICY_FAILURE, Kind.OOM_AGENT
    if fact in _ALWAYS_INFRA:
        return Outcome.INFRA_FAILURE, _ALWAYS_INFRA[fact]
    if fact is Fact.LAUNCH_FAILED or not facts.harness_started or facts.independent:
        return Outcome.INFRA_FAILURE, Kind.RUNNER_LOST
    blame = _engine_blame(facts) or _no_call(facts) or _policy_blame(facts)
    return blame or (Outcome.POLICY_FAILURE, Kind.RUNNER_LOST)


def _engine_blame(facts: Facts) -> tuple[Outcome, Kind] | None:
    """The last thing that the harness asked for failed for a reason of ours, and nothing was answered
    after it.

    A budget that was used up before comes first: what is asked beyond it is not owed an answer. Calls
    that the harness hung up on, or that the sealing cut short, say nothing about the engine; nor do choices
    that were withheld because another one of their request had failed.
    """
    if facts.stop_reason in POLICY_STOPS and facts.stop_reason != Kind.AGENT_TIMEOUT:
        return None
    if _took_the_disk(facts):  # which may be why a call could not be recorded
        return None
    last = _last(
        call
        for call in facts.calls
        if call.end not in (None, CallEnd.CLIENT_GONE) and call.status != 409 and not _withheld(call)
    )
    if last is None:
        return None
    if last.error.startswith(RECORD_ERROR):
        return Outcome.INFRA_FAILURE, Kind.RECORD_INCOMPLETE
    if last.end is CallEnd.SERVER_LOST:
        return Outcome.INFRA_FAILURE, Kind.SERVER_LOST
    if last.end is CallEnd.UPSTREAM_ERROR or (last.end is CallEnd.REJECTED and (last.status or 0) >= 500):
        return Outcome.INFRA_FAILURE, Kind.ENGINE_ERROR
    return None


def _withheld(call: CallFact) -> bool:
    failed = call.status is not None and call.status >= 500
    return call.end is CallEnd.OK and failed and not call.error.startswith(RECORD_ERROR)


def _last(calls: Iterable[CallFact]) -> CallFact | None:
    return max(calls, key=lambda call: call.seq, default=None)


def _no_call(facts: Facts) -> tuple[Outcome, Kind] | None:
    """No call was answered: the policy has not acted, so neither silence nor a clock is its doing.

    A prompt that did not fit, or memory that ran out, is told by its own name.
    """
    if any(call.end is CallEnd.OK for call in facts.calls):
        return None
    blame = _policy_blame(facts)
    if blame is not None and blame[1] is not Kind.AGENT_TIMEOUT:
        return None
    silent = facts.backend is not None or facts.deadline is Clock.HEARTBEAT
    return Outcome.INFRA_FAILURE, Kind.RUNNER_LOST if silent else Kind.HARNESS_NO_CALL


def _policy_blame(facts: Facts) -> tuple[Outcome, Kind] | None:
    reasons = [facts.stop_reason, facts.finish.stopped_by if facts.finish is not None else ""]
    for reason in reasons:
        if reason in POLICY_STOPS:
            return Outcome.POLICY_FAILURE, Kind(reason)
    if _took_the_disk(facts):
        return Outcome.POLICY_FAILURE, Kind.RUNNER_LOST
    last = _last(facts.calls)
    if last is not None and last.end is CallEnd.REJECTED and last.error.startswith(CONTEXT_ERROR):
        return Outcome.POLICY_FAILURE, Kind.CONTEXT_OVERFLOW
    return None


def _took_the_disk(facts: Facts) -> bool:
    return facts.finish is not None and facts.finish.stopped_by == DISK_EXCESS


def _by_runner(facts: Facts) -> tuple[Outcome, Kind]:
    """The runner's finish, or its silence, when neither the engine nor a budget explains the end."""
    finish = facts.finish
    if finish is None and facts.deadline is not Clock.VERIFY:
        return Outcome.POLICY_FAILURE, Kind.RUNNER_LOST
    if finish is None:
        return _verifier_failed(facts, invalid=False)
    if finish.runner_error:
        return Outcome.POLICY_FAILURE, Kind.RUNNER_LOST
    if finish.verifier in ("crash", "timeout", "invalid"):
        return _verifier_failed(facts, invalid=finish.verifier == "invalid")
    if facts.reward is None and finish.verifier == "ok":
        return _verifier_failed(facts, invalid=True)
    if facts.reward is None and facts.reward_wanted:
        return Outcome.TASK_FAILURE, Kind.VERIFIER_INVALID
    if finish.exit_code or finish.signal:
        return Outcome.POLICY_FAILURE, Kind.HARNESS_EXIT
    return Outcome.COMPLETED, Kind.OK


def _verifier_failed(facts: Facts, *, invalid: bool) -> tuple[Outcome, Kind]:
    """The verifier reads what the agent left behind: only its failure on the gold solution clears the
    agent.
    """
    if not facts.verifier_fails_on_gold:
        return Outcome.POLICY_FAILURE, Kind.VERIFIER_CRASH
    if invalid:
        return Outcome.TASK_FAILURE, Kind.VERIFIER_INVALID
    return Outcome.INFRA_FAILURE, Kind.VERIFIER_CRASH
