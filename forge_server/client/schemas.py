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
    """``in_flight`` sets N of the scheduler."""

    action: Literal["pause", "resume", "cancel"] | None = None
    in_flight: Annotated[int, msgspec.Meta(ge=0, le=100_000)] | None = None


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


class TaskCreate(msgspec.Struct, forbid_unknown_fields=True):
    """``tasks`` are JSONL lines as ``tasks/`` defines them; ``path`` is a folder or file on the server's disk."""

    taskset: Name
    split: Annotated[str, msgspec.Meta(min_length=1, max_length=32)] = "train"
    tasks: list[dict[str, Any]] = []
    path: str | None = None


class TasksCreated(msgspec.Struct):
    created: int
    unchanged: int


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
    """A harness registers a rollout itself. Without ``run`` it joins the run ``external``."""

    task: str | None = None
    run: str | None = None
    harness: HarnessName = "external"
    mode: Literal["record", "eval", "train"] = "record"


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


class RolloutDetail(msgspec.Struct):
    rollout: RolloutView
    attempts: list[AttemptView]


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


class LogView(msgspec.Struct):
    attempt_id: str
    stream: str
    text: str


class Page(msgspec.Struct):
    """One page of a list: rows, the cursor of the next page (None: the last), and the time it was read at."""

    items: list[Any]
    next_cursor: str | None
    as_of: float
