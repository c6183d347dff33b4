"""Events: everything that may change the state of a run, group, rollout or attempt.

An event is a *fact or a wish* stated by whoever saw it (proxy, scheduler, runner API, controller, a
person); what follows from it is decided in one place, ``lifecycle``. Events are plain data and may be
stated twice: the lifecycle answers the second with ``repeat``.
"""

from enum import StrEnum
from typing import Any, Literal

import msgspec

from forge_server.domain.outcome import Kind
from forge_server.domain.states import RunState


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all events."""


# --- runs and groups -------------------------------------------------------------------------------------


class RunCreated(Event, frozen=True, kw_only=True):
    """A run is admitted. A second one with the same name is refused (``name_taken``) unless its id is
    equal.
    """

    run_id: str
    name: str
    kind: Literal["train", "eval", "record"]
    settings: dict[str, Any]


class RunPaused(Event, frozen=True, kw_only=True):
    """No new attempt of the run is launched until it is resumed; attempts in flight go on."""

    run_id: str
    reason: str


class RunResumed(Event, frozen=True, kw_only=True):
    """With a ``reason`` only if it is paused for that one."""

    run_id: str
    reason: str = ""


class RunEnded(Event, frozen=True, kw_only=True):
    """``state`` is completed, cancelled or failed; rollouts that have not ended are cancelled with it."""

    run_id: str
    state: RunState
    reason: str = ""


class RolloutCreated(Event, frozen=True, kw_only=True):
    """A rollout is admitted, alone (evaluation, recording, a harness that registered itself) or in a
    group.
    """

    rollout_id: str
    run_id: str
    harness: str
    mode: Literal["train", "eval", "record"]
    task_id: str | None = None
    group_id: str | None = None
    slot: int = 0
    external: bool = False
    max_attempts: int = 3
    policy_version: int = 0


class GroupCreated(Event, frozen=True, kw_only=True):
    """A group and all its rollouts are admitted at once; each rollout's ``group_id`` must be this group's."""

    group_id: str
    run_id: str
    task_id: str
    step: int
    mode: Literal["train", "eval", "record"]
    rollouts: tuple[RolloutCreated, ...]
    round: int = 0


class GroupDropped(Event, frozen=True, kw_only=True):
    """The controller will not train on this group (``stale`` …)."""

    group_id: str
    reason: str


class BatchAssembled(Event, frozen=True, kw_only=True):
    """Batch ``k`` of a run: immutable from here on (I8). ``body`` is the safetensors file."""

    run_id: str
    k: int
    group_ids: tuple[str, ...]
    rollout_ids: tuple[str, ...]
    sha256: str
    body: bytes
    stats: dict[str, Any]


# --- rollouts --------------------------------------------------------------------------------------------


class RolloutCancelled(Event, frozen=True, kw_only=True):
    rollout_id: str
    reason: str = ""


class RolloutRetried(Event, frozen=True, kw_only=True):
    """A person discards the attempt in flight and asks for a new one. Ended rollouts stay ended (I6)."""

    rollout_id: str


# --- attempts --------------------------------------------------------------------------------------------


class AttemptQueued(Event, frozen=True, kw_only=True):
    """A pending rollout gets its next attempt. The caller draws ``attempt_id``, so that a repeat is known."""

    attempt_id: str
    rollout_id: str
    backend: Literal["local", "kubernetes", "external"]


class AttemptLaunching(Event, frozen=True, kw_only=True):
    """Written before the backend is asked. ``startup_s`` is the time until the harness must have started."""

    attempt_id: str
    startup_s: float


class AttemptLaunched(Event, frozen=True, kw_only=True):
    """``handle`` is what the backend needs to find the process or pod again. The startup clock begins anew with
    ``startup_s``: what the backend waited for was no fault of the attempt."""

    attempt_id: str
    handle: dict[str, Any]
    startup_s: float | None = None


class RunnerJoined(Event, frozen=True, kw_only=True):
    """``start {token, nonce}``: the same nonce is a repeat, another one is refused (``other_nonce``)."""

    attempt_id: str
    nonce: str


class HarnessStarted(Event, frozen=True, kw_only=True):
    """The agent clock starts: ``agent_s`` seconds from now."""

    attempt_id: str
    agent_s: float


class StopRequested(Event, frozen=True, kw_only=True):
    """The runner is told to stop the harness; the attempt goes on to sealing and verification."""

    attempt_id: str
    reason: str


class BudgetExceeded(Event, frozen=True, kw_only=True):
    """The policy used up a budget. The first reason is kept and decides the kind of failure."""

    attempt_id: str
    kind: Literal[
        Kind.BUDGET_CALLS, Kind.BUDGET_TOKENS, Kind.CONTEXT_OVERFLOW, Kind.BAD_TOOL_CALL, Kind.OOM_AGENT
    ]


class AttemptSealed(Event, frozen=True, kw_only=True):
    """The harness has exited or was stopped and every agent process is dead; no further call is accepted."""

    attempt_id: str
    reason: str = ""


class VerifierFetched(Event, frozen=True, kw_only=True):
    """The verifier's files leave the server: only for a sealed attempt. The verify clock starts."""

    attempt_id: str
    verify_s: float


class RewardReported(Event, frozen=True, kw_only=True):
    """One reward. ``verifier`` only once sealed; ``external`` at any time before the end. The first of a
    (source, call) is kept. Values that are not finite or absurdly large are refused (``bad_reward``).
    """

    attempt_id: str
    value: float
    source: Literal["verifier", "external"]
    call_id: int | None = None
    detail: dict[str, Any] | None = None


class VerifierReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the runner saw of the verifier. ``none``: the task has no verifier or it was not run."""

    status: Literal["ok", "crash", "timeout", "invalid", "none"] = "none"
    exit_code: int | None = None
    error: str = ""


class RunnerFinished(Event, frozen=True, kw_only=True):
    """The runner's last word. With the call log it decides the outcome.

    ``stopped_by`` is why the runner itself stopped the harness ("" when it exited by itself).
    """

    attempt_id: str
    exit_code: int | None = None
    signal: int | None = None
    stopped_by: str = ""
    verifier: VerifierReport = VerifierReport()
    runner_error: str = ""


class Fact(StrEnum):
    """What a backend may know about a process or pod."""

    UNSCHEDULABLE = "unschedulable"
    IMAGE_PULL = "image_pull"
    LAUNCH_FAILED = "launch_failed"  # the backend refused or could not start it
    PROCESS_GONE = "process_gone"  # the runner's process or container ended without a finish
    POD_LOST = "pod_lost"  # the pod was deleted, not by us
    EVICTED = "evicted"
    NODE_LOST = "node_lost"
    OOM_AGENT = "oom_agent"
    BAD_SPEC = "bad_spec"  # the task or its environment cannot be launched at all


class BackendFact(Event, frozen=True, kw_only=True):
    """A backend's fact that ends the attempt unless the runner's finish came first.

    ``independent``: the agent cannot have caused it (I5); a backend says so only if its sandbox keeps the
    agent from killing or starving the runner.
    """

    attempt_id: str
    fact: Fact
    evidence: dict[str, Any]
    independent: bool = False


class Clock(StrEnum):
    STARTUP = "startup"
    AGENT = "agent"
    VERIFY = "verify"
    HEARTBEAT = "heartbeat"


class DeadlinePassed(Event, frozen=True, kw_only=True):
    """A sweep found a deadline behind. It is checked again in the transaction, holds included.

    ``limit_s`` is the silence allowed, for the clocks that look at it; ``evidence`` is what was seen of the attempt.
    """

    attempt_id: str
    clock: Clock
    limit_s: float = 0.0
    evidence: dict[str, Any] = {}


class ServerLost(Event, frozen=True, kw_only=True):
    """A restart found an attempt that died with the server."""

    attempt_id: str


class RolloutRegistered(Event, frozen=True, kw_only=True):
    """A harness from outside registers itself: its rollout and an attempt that may make calls, or neither. With
    ``ttl_s`` the attempt is lost when its heartbeats stay away so long.
    """

    rollout: RolloutCreated
    attempt_id: str
    agent_s: float
    ttl_s: float | None = None


# --- clocks and everything else --------------------------------------------------------------------------


class HoldBegan(Event, frozen=True, kw_only=True):
    """Calls are held from now on: the agent clocks stand still."""

    reason: Literal["weight_update", "engine_down"]


class HoldEnded(Event, frozen=True, kw_only=True):
    """The hold with this reason is over: its length is added to the agent deadlines."""

    reason: Literal["weight_update", "engine_down"]


class Noted(Event, frozen=True, kw_only=True):
    """A change of something else (a policy, a trainer session) that the event stream should show.

    The change itself is written in the same transaction by ``Lifecycle.apply(..., also=fn)``.
    """

    kind: str
    run_id: str | None = None
    data: dict[str, Any]


# --- answers ---------------------------------------------------------------------------------------------


class EventRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the ``events`` table: one state change, numbered in commit order."""

    id: int
    at: float
    kind: str
    data: dict[str, Any]
    run_id: str | None = None
    rollout_id: str | None = None
    attempt_id: str | None = None


class Refusal(StrEnum):
    """Why an event changed nothing."""

    REPEAT = "repeat"  # already so: success for whoever repeats himself
    UNKNOWN = "unknown"  # no such run, group, rollout or attempt
    ENDED = "ended"  # a terminal event came first
    WRONG_STATE = "wrong_state"
    OTHER_NONCE = "other_nonce"  # another runner has joined this attempt
    NAME_TAKEN = "name_taken"
    RUN_NOT_ACTIVE = "run_not_active"
    TOO_EARLY = "too_early"  # back-off, or a deadline that has moved
    BAD_REWARD = "bad_reward"
    CONFLICT = "conflict"  # a different value was recorded before


class Applied(msgspec.Struct, frozen=True, kw_only=True):
    """What became of an event. ``rows`` are the state changes it caused, in order; empty when refused."""

    refusal: Refusal | None = None
    rows: tuple[EventRow, ...] = ()

    @property
    def applied(self) -> bool:
        return self.refusal is None

    @property
    def ok(self) -> bool:
        """Applied now or before."""
        return self.refusal in (None, Refusal.REPEAT)
