"""What the control API takes and gives, as msgspec Structs. Times are float seconds since the Unix epoch."""

from typing import Annotated, Any, Literal

import msgspec

_NAME = r"^[^\x00-\x1f]+$"
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128, pattern=_NAME)]
HarnessName = Annotated[str, msgspec.Meta(min_length=1, max_length=64, pattern=_NAME)]


class Problem(msgspec.Struct):
    """An error body (RFC 9457, ``application/problem+json``). ``type`` is a stable slug."""

    type: str
    title: str
    status: int
    detail: str
    instance: str = ""


class Check(msgspec.Struct):
    """One line of ``/readyz``: ``ok``, or what is missing and the mend."""

    name: str
    ok: bool
    detail: str = ""


class Readiness(msgspec.Struct):
    ready: bool
    checks: list[Check]


class RunCreate(msgspec.Struct, forbid_unknown_fields=True):
    """``settings`` is a ``[[run]]`` table."""

    settings: dict[str, Any]


class RunPatch(msgspec.Struct, forbid_unknown_fields=True):
    """``in_flight`` sets N of the scheduler, ``harnesses`` the weights of the harnesses that groups are drawn in from
    now on."""

    action: Literal["pause", "resume", "cancel"] | None = None
    in_flight: Annotated[int, msgspec.Meta(ge=0, le=100_000)] | None = None
    harnesses: dict[HarnessName, float] | None = None


class EvaluationAsked(msgspec.Struct):
    """The round that is run now: ``tasks`` of a split, ``k`` rollouts each, under the live ``version`` of ``step``."""

    version: int
    step: int
    split: str
    tasks: int
    k: int


class SaveAsked(msgspec.Struct):
    """``asked``: the trainer is told to save its state; if not, ``detail`` says why it need not be."""

    asked: bool
    detail: str


class RunView(msgspec.Struct):
    id: str
    name: str
    kind: str
    state: str
    reason: str
    step: int
    settings: dict[str, Any]
    created_at: float
    ended_at: float | None
    rollouts: dict[str, int]
    """Counts by state, and of the ended ones by outcome."""
    harnesses: dict[str, float] = {}
    """Weights in force: those of the settings, or what a person set since."""
    asked: list[str] = []
    """What a person asked for and is still to come: ``evaluation``, ``save``."""


class TaskCreate(msgspec.Struct, forbid_unknown_fields=True):
    """``tasks`` are JSONL lines as ``tasks/`` defines them; ``path`` is a folder or file on the server's disk."""

    taskset: Name
    split: Annotated[str, msgspec.Meta(min_length=1, max_length=32)] = "train"
    tasks: list[dict[str, Any]] = []
    path: str | None = None


class TasksCreated(msgspec.Struct):
    """``renewed``: those of the ``unchanged`` that lie elsewhere now, or had failed and are used again."""

    created: int
    unchanged: int
    renewed: int = 0


class TaskView(msgspec.Struct):
    id: str
    name: str
    taskset: str
    split: str
    state: str
    reason: str
    instruction: str
    digest: str
    created_at: float


class RolloutCreate(msgspec.Struct, forbid_unknown_fields=True):
    """A harness registers a rollout itself. Without ``run`` it joins the run ``external``. ``ttl_s``: it will send
    heartbeats, and is taken for lost when none came for so long; null: it sends none."""

    task: str | None = None
    run: str | None = None
    harness: HarnessName = "external"
    mode: Literal["record", "eval", "train"] = "record"
    ttl_s: Annotated[float, msgspec.Meta(ge=1, le=1e6)] | None = None


class Registration(msgspec.Struct):
    """Where and with which keys the registered harness talks: ``base_url`` + ``/v1`` is a model API."""

    rollout_id: str
    attempt_id: str
    base_url: str
    agent_key: str
    runner_key: str
    instruction: str | None = None


class RolloutView(msgspec.Struct):
    id: str
    run_id: str
    group_id: str | None
    task_id: str | None
    harness: str
    mode: str
    state: str
    attempts: int
    outcome: str | None
    kind: str | None
    reward: float | None
    policy_version: int
    final_attempt_id: str | None
    created_at: float
    ended_at: float | None
    task: str | None = None
    """Name of its task."""
    phase: str | None = None
    """State of its newest attempt."""
    calls: int = 0
    """Of its newest attempt, as the next two."""
    tokens: int = 0
    """Completion tokens."""
    not_trained: str = ""


class AttemptView(msgspec.Struct):
    id: str
    number: int
    state: str
    backend: str
    outcome: str | None
    kind: str | None
    reward: float | None
    exit_code: int | None
    evidence: dict[str, Any] | None
    not_trained: str
    created_at: float
    started_at: float | None
    running_at: float | None
    sealed_at: float | None
    ended_at: float | None


class RewardView(msgspec.Struct):
    attempt_id: str
    source: str
    value: float
    call_id: int | None
    detail: dict[str, Any] | None
    at: float


class GroupView(msgspec.Struct):
    """The group of a rollout. ``batch_k``: the batch it was trained in; ``dropped``: why it is in none."""

    id: str
    step: int
    round: int
    mode: str
    size: int
    batch_k: int | None
    dropped: str
    rewards: list[float | None]
    """Of its rollouts, by slot; null: not ended, or not valid."""


class RolloutDetail(msgspec.Struct):
    rollout: RolloutView
    attempts: list[AttemptView]
    rewards: list[RewardView] = []
    group: GroupView | None = None
    instruction: str = ""


class CallView(msgspec.Struct):
    id: int
    attempt_id: str
    seq: int
    dialect: str
    mode: str
    end: str | None
    status: int | None
    error: str | None
    delivered: str
    untrainable: str | None
    label: str
    parent_id: int | None
    prompt_len: int | None
    completion_len: int | None
    finish_reason: str | None
    policy_version: int | None
    temperature: float | None
    began_at: float
    ended_at: float | None
    engine_ms: float | None
    held_ms: float | None
    flags: dict[str, Any] | None = None
    """What was clamped, lifted, dropped or labelled; ``agent`` and ``parent_agent`` of sub-agents."""
    retry_of: int | None = None
    request: list[Any] | None = None
    """Messages, only with ``?messages=true``."""
    response: Any = None


class SampleView(msgspec.Struct):
    rollout_id: str
    index: int
    attempt_id: str
    length: int
    trained: int
    prompt_len: int
    break_reason: str
    min_version: int
    max_version: int
    call_ids: list[int]


class Turn(msgspec.Struct):
    """One call as a step of a conversation: what its request says beyond the call it goes on from, and the answer.

    ``after``: ``seq`` of that call; null: the conversation begins. An answer that is only handed back is left out.
    """

    call_id: int
    attempt_id: str
    seq: int
    after: int | None
    agent: str
    parent_agent: str
    label: str
    tools: list[str]
    """Names of the tools offered, where they differ from those of ``after``."""
    messages: list[Any]
    response: Any
    end: str | None


class SegmentView(msgspec.Struct):
    """A sample that the attempt is cut into as it stands now, whether trained or not."""

    index: int
    length: int
    trained: int
    prompt_len: int
    break_reason: str
    min_version: int
    max_version: int
    calls: list[int]
    """``seq`` of the calls trained in it."""


class SegmentsView(msgspec.Struct):
    """``fault``: why the attempt gives none. ``untrained``: why the call with that ``seq`` is not trained."""

    attempt_id: str
    segments: list[SegmentView]
    untrained: dict[int, str]
    clipped: dict[int, int]
    fault: str = ""
    detail: str = ""


class TokensView(msgspec.Struct):
    """Tokens ``[offset, offset + len(ids))`` of a segment of ``length`` tokens. Where ``mask`` is 0, logprob
    and version mean nothing. ``text``: each token's piece; null when the tokenizer is not known here."""

    length: int
    offset: int
    ids: list[int]
    mask: list[int]
    logprobs: list[float]
    versions: list[int]
    text: list[str] | None


class PolicyView(msgspec.Struct):
    name: str
    version: int
    run_id: str | None
    step: int | None
    parent_version: int | None
    state: str
    reason: str
    path: str
    created_at: float
    live_at: float | None


class EventView(msgspec.Struct):
    id: int
    at: float
    kind: str
    run_id: str | None
    rollout_id: str | None
    attempt_id: str | None
    data: dict[str, Any]


class StepMetrics(msgspec.Struct):
    step: int
    source: str
    metrics: dict[str, float | None]
    at: float


class Alarm(msgspec.Struct):
    """Something a person should look at: what is wrong, and what to do."""

    level: Literal["error", "warning"]
    name: str
    what: str
    mend: str


class Rates(msgspec.Struct):
    """Calls that began in the last ``window_s`` seconds and have ended. Tokens are per second."""

    window_s: float
    calls: float
    """Per second."""
    prompt_tokens: float
    completion_tokens: float
    failed: int
    engine_ms: float | None
    """Mean time of a call in the engine."""


class TrainerView(msgspec.Struct):
    """The newest session. ``alive``: its lease has not run out."""

    phase: str
    world_size: int
    alive: bool
    since: float


class Overview(msgspec.Struct):
    """Whether all is well, in one answer; computed at most once a second."""

    version: str
    now: float
    last_event: int
    run: RunView | None
    checks: list[Check]
    alarms: list[Alarm]
    in_flight: int
    """N: attempts that are to be in flight, of all runs."""
    attempts: dict[str, int]
    """Attempts that have not ended by state, of all runs."""
    calls_running: int
    calls_waiting: int
    """Held before the engine."""
    held: bool
    rates: Rates
    policy: PolicyView | None
    trainer: TrainerView | None
    failures: dict[str, int]
    """``outcome/kind`` of the run's ended rollouts, and how many; without those completed."""
    lost: dict[str, int]
    """Kinds of infra failure of attempts made in the last quarter of an hour, of all runs."""
    recent_attempts: int
    infra_streak: int
    breaker: int


class Comparison(msgspec.Struct):
    """Rollouts of one task or harness. ``pass_at_k``: the chance that one of k passes; ``pass_hat_k``: that all do;
    mean over tasks with at least k valid rollouts. Means are per ended rollout."""

    name: str
    rollouts: int
    ended: int
    valid: int
    passed: int
    reward: float | None
    k: int
    pass_at_1: float | None
    pass_at_k: float | None
    pass_hat_k: float | None
    calls: float | None
    prompt_tokens: float | None
    completion_tokens: float | None
    seconds: float | None
    attempts: float
    failures: dict[str, int]


class LogView(msgspec.Struct):
    attempt_id: str
    stream: str
    text: str


class Page(msgspec.Struct):
    """One page of a list: rows, the cursor of the next page (None: the last), and the time it was read at."""

    items: list[Any]
    next_cursor: str | None
    as_of: float


class RolloutPage(msgspec.Struct):
    items: list[RolloutView]
    next_cursor: str | None
    as_of: float


class EventPage(msgspec.Struct):
    items: list[EventView]
    next_cursor: str | None
    as_of: float
