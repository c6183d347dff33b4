"""State machines of attempts, rollouts, policies and runs: which step may follow which."""

from enum import StrEnum


class AttemptState(StrEnum):
    QUEUED = "queued"  # a row, nothing launched
    LAUNCHING = "launching"  # the backend was asked (row written before the act)
    STARTING = "starting"  # the runner has joined and got its keys
    RUNNING = "running"  # the harness runs; the agent clock ticks
    SEALED = "sealed"  # keys sealed: no further call is accepted
    VERIFYING = "verifying"  # the agent is dead, verifier files handed out
    ENDED = "ended"


ATTEMPT_STEPS: dict[AttemptState, frozenset[AttemptState]] = {
    AttemptState.QUEUED: frozenset({AttemptState.LAUNCHING, AttemptState.STARTING, AttemptState.ENDED}),
    AttemptState.LAUNCHING: frozenset({AttemptState.STARTING, AttemptState.ENDED}),
    AttemptState.STARTING: frozenset({AttemptState.RUNNING, AttemptState.SEALED, AttemptState.ENDED}),
    AttemptState.RUNNING: frozenset({AttemptState.SEALED, AttemptState.ENDED}),
    AttemptState.SEALED: frozenset({AttemptState.VERIFYING, AttemptState.ENDED}),
    AttemptState.VERIFYING: frozenset({AttemptState.ENDED}),
    AttemptState.ENDED: frozenset(),
}
"""``queued -> starting`` without ``launching`` is the way of a rollout that a harness registered itself."""

INFERENCE_STATES: frozenset[AttemptState] = frozenset({AttemptState.STARTING, AttemptState.RUNNING})
"""States in which the agent key may make calls."""


class RolloutState(StrEnum):
    PENDING = "pending"  # waits for a slot (first attempt, or the next after an infra failure)
    ACTIVE = "active"  # has an attempt that has not ended
    ENDED = "ended"


class RunState(StrEnum):
    ACTIVE = "active"
    PAUSED = "paused"  # by a person, or by itself with a reason (no_signal, breaker, policy_busy)
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    FAILED = "failed"


class PolicyState(StrEnum):
    EXPORTED = "exported"  # the trainer wrote it, nobody loaded it
    LOADING = "loading"  # the hold is on; the engine is being swapped to it
    LIVE = "live"
    RETIRED = "retired"  # was live
    REJECTED = "rejected"  # failed validation or the probe; never served


class CallEnd(StrEnum):
    """How a call ended (invariant I1). A call without an end is in flight."""

    OK = "ok"
    CLIENT_GONE = "client_gone"
    UPSTREAM_ERROR = "upstream_error"
    REJECTED = "rejected"
    SERVER_LOST = "server_lost"


class Delivery(StrEnum):
    """Whether the harness got the answer (invariant I3)."""

    YES = "yes"
    NO = "no"
    UNKNOWN = "unknown"


class Untrainable(StrEnum):
    """Why a call is not trained: the closed list of reasons (invariant I3)."""

    NOT_OK = "not_ok"  # the call did not end ok
    NOT_DELIVERED = "not_delivered"
    DELIVERY_UNKNOWN = "delivery_unknown"
    COUNT_MISMATCH = "count_mismatch"  # ids, usage and logprobs disagree (I2)
    NO_LOGPROBS = "no_logprobs"
    BAD_LOGPROBS = "bad_logprobs"  # null, NaN, infinite, positive or a filler such as -9999
    EMPTY = "empty"
    CONSTRAINED = "constrained"  # a grammar or forced tool choice shaped the distribution
    SIDE_CALL = "side_call"  # labelled so by the harness spec
    MIXED_VERSIONS = "mixed_versions"  # two policy versions answered and no spans tell which token is whose
    UNKNOWN_VERSION = "unknown_version"  # the engine names weights that are no version of the policy
    FOREIGN_SAMPLING = "foreign_sampling"  # not sampled from the plain distribution that training assumes
    EVALUATION = "evaluation"  # an evaluation rollout
    DUPLICATE = "duplicate"  # identical prompt and completion of an already trained call
    ABORTED = "aborted"  # the engine cut the generation
    MEDIA = "media"  # its prompt holds images, and batches carry no pixels (training rollouts only)
    MEDIA_UNKNOWN = (
        "media_unknown"  # its prompt holds images, and which tokens stand for which cannot be told
    )


class Fallback(StrEnum):
    """Why a call was not served token-exact but recorded as the engine rendered it: the closed list of
    reasons."""

    NOT_OFFERED = "not_offered"  # the engine has no render, generate and derender
    CONSTRAINED = "constrained"  # a grammar is in force
    MEDIA = "media"  # there are images in the conversation
    FOREIGN_ANSWER = "foreign_answer"  # the last answer in the request was not sampled in this attempt
    EDITED_ANSWER = "edited_answer"  # the last answer is not what was sampled there
    HISTORY_CHANGED = "history_changed"  # what stands before the last answer is not what it was sampled after
    NOT_DELIVERED = "not_delivered"  # the last answer is one that is known not to have reached the harness
    UNKNOWN_AFTER_RESTART = "unknown_after_restart"  # what earlier calls said could not be read back
    CONTEXT_DIFFERS = "context_differs"  # the template now writes something between answers differently
    REASONING_DROPPED = "reasoning_dropped"  # an answer's reasoning is not in the context any more
    ANSWER_DROPPED = "answer_dropped"  # another part of an answer is not in the context any more
    CUT_REASONING = "cut_reasoning"  # an answer was cut off within its reasoning
    END_UNKNOWN = "end_unknown"  # where an answer ends in the rendered prompt cannot be told
    WINDOW = "window"  # the exact prompt is longer than the rendered one and does not fit
    RENDER_FAILED = "render_failed"
    GENERATE_REFUSED = "generate_refused"
    DERENDER_FAILED = "derender_failed"
