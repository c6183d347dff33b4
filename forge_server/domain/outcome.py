"""Outcomes: how an attempt and a rollout may end, and who is to blame.

1. *Vocabulary.* Five outcomes, each with a closed list of kinds (DESIGN §6).
2. *Attribution.* Done once, by the lifecycle, from three sources of fact: the runner's finish, the call log and
   the backend's facts about the process or pod. Exit codes and pod phases never decide alone.
3. *Benefit.* An agent cannot turn its own bad result into an infra failure: the kinds in ``NEEDS_EVIDENCE`` are
   infra only with evidence independent of the agent.
4. *Consequence.* Infra failures get a new attempt and never reach training or a baseline; policy failures keep
   their reward; task failures stop the use of the task.
"""

from enum import StrEnum


class Outcome(StrEnum):
    COMPLETED = "completed"
    POLICY_FAILURE = "policy_failure"
    INFRA_FAILURE = "infra_failure"
    TASK_FAILURE = "task_failure"
    CANCELLED = "cancelled"


class Kind(StrEnum):
    """What exactly happened. ``ok`` is the kind of completed."""

    OK = "ok"
    # cancelled
    CANCELLED = "cancelled"
    SURPLUS = "surplus"  # its group was oversampled and had enough valid rollouts
    # infra_failure
    UNSCHEDULABLE = "unschedulable"
    IMAGE_PULL = "image_pull"
    STARTUP_TIMEOUT = "startup_timeout"
    POD_LOST = "pod_lost"
    EVICTED = "evicted"
    NODE_LOST = "node_lost"
    RUNNER_LOST = "runner_lost"
    ENGINE_ERROR = "engine_error"
    SERVER_LOST = "server_lost"
    RECORD_INCOMPLETE = "record_incomplete"
    VERIFIER_CRASH = "verifier_crash"
    HARNESS_NO_CALL = "harness_no_call"
    # policy_failure
    AGENT_TIMEOUT = "agent_timeout"
    BUDGET_CALLS = "budget_calls"
    BUDGET_TOKENS = "budget_tokens"
    CONTEXT_OVERFLOW = "context_overflow"
    BAD_TOOL_CALL = "bad_tool_call"
    HARNESS_EXIT = "harness_exit"
    OOM_AGENT = "oom_agent"
    # task_failure
    BAD_SPEC = "bad_spec"
    GOLD_FAILS = "gold_fails"
    VERIFIER_INVALID = "verifier_invalid"


KINDS: dict[Outcome, frozenset[Kind]] = {
    Outcome.COMPLETED: frozenset({Kind.OK}),
    Outcome.CANCELLED: frozenset({Kind.CANCELLED, Kind.SURPLUS}),
    Outcome.INFRA_FAILURE: frozenset(
        {
            Kind.UNSCHEDULABLE,
            Kind.IMAGE_PULL,
            Kind.STARTUP_TIMEOUT,
            Kind.POD_LOST,
            Kind.EVICTED,
            Kind.NODE_LOST,
            Kind.RUNNER_LOST,
            Kind.ENGINE_ERROR,
            Kind.SERVER_LOST,
            Kind.RECORD_INCOMPLETE,
            Kind.VERIFIER_CRASH,
            Kind.HARNESS_NO_CALL,
        }
    ),
    Outcome.POLICY_FAILURE: frozenset(
        {
            Kind.AGENT_TIMEOUT,
            Kind.BUDGET_CALLS,
            Kind.BUDGET_TOKENS,
            Kind.CONTEXT_OVERFLOW,
            Kind.BAD_TOOL_CALL,
            Kind.HARNESS_EXIT,
            Kind.OOM_AGENT,
            # the same names with the blame on the policy, when no independent evidence exists:
            Kind.RUNNER_LOST,
            Kind.RECORD_INCOMPLETE,
            Kind.VERIFIER_CRASH,
        }
    ),
    Outcome.TASK_FAILURE: frozenset({Kind.BAD_SPEC, Kind.GOLD_FAILS, Kind.VERIFIER_INVALID}),
}

NEEDS_EVIDENCE: frozenset[Kind] = frozenset({Kind.RUNNER_LOST, Kind.RECORD_INCOMPLETE, Kind.VERIFIER_CRASH})
"""Infra only with evidence independent of the agent; otherwise the policy bears it."""


def check(outcome: Outcome, kind: Kind) -> None:
    """Raise ``ValueError`` unless ``kind`` belongs to ``outcome``."""
    if kind not in KINDS[outcome]:
        raise ValueError(f"kind {kind} does not belong to outcome {outcome}")


def counts_for_training(outcome: Outcome) -> bool:
    """Whether a rollout with this outcome is valid: part of its group's baseline and trainable."""
    return outcome in (Outcome.COMPLETED, Outcome.POLICY_FAILURE)
