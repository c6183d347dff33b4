"""What a run has cost and where its time went: the answer of ``GET /runs/{run}/cost``. Times in seconds."""

import msgspec


class CostLine(msgspec.Struct):
    """``what``: ``engine``, ``trainer``, or ``attempts BACKEND``. ``hours``: of all its GPUs or attempts together."""

    what: str
    unit: str
    """``gpu`` or ``pod``."""
    hours: float
    price: float
    """Of one hour."""
    cost: float


class LoopTime(msgspec.Struct):
    """Each moment of the run is in exactly one of these, so they add up to ``wall_s``."""

    generate_s: float
    """Attempts are in flight."""
    train_s: float
    both_s: float
    """Attempts are in flight while the trainer trains."""
    swap_s: float
    """Calls are held for new weights."""
    paused_s: float
    down_s: float
    """The server or the engine is away."""
    wait_s: float
    """None of it: batches are made, the trainer starts or saves."""


class RolloutTime(msgspec.Struct):
    """Seconds of all rollouts together, each of them from its creation to its end, so they add up to ``total_s``."""

    total_s: float
    idle_s: float
    """No attempt: it waits for a slot, or for the next attempt."""
    startup_s: float
    agent_s: float
    verify_s: float
    engine_s: float
    """Of ``agent_s``: a model call is in the engine. Calls at the same time count once at most."""
    held_s: float
    """Of ``agent_s``: a model call is held for new weights."""


class StartUp(msgspec.Struct):
    """From the launch of an attempt to the start of its harness, of those that came so far."""

    attempts: int
    p50_s: float | None
    p90_s: float | None
    p99_s: float | None
    most_s: float | None


class Cost(msgspec.Struct):
    """Prices are those of ``[cost]`` now. A run that has not ended is reckoned until ``until``."""

    run: str
    currency: str
    since: float
    until: float
    wall_s: float
    lines: list[CostLine]
    total: float
    rollouts: int
    ended: int
    solved: int
    """Rollouts that passed."""
    per_rollout: float | None
    """Of those ended."""
    per_solved: float | None
    gpu_hours: float
    pod_hours: float
    completion_tokens: int
    loop: LoopTime
    time: RolloutTime
    start_up: StartUp
