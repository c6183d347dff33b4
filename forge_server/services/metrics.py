"""What ``/metrics`` tells: the one list of its names, filled from counters that are kept anyway and one read of rows.

Nothing is counted for it on the way of a call but ``proxy.tally``. Labels are closed sets. Figures of training
are those of the newest run of kind ``train`` that has not ended, else of the newest.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import msgspec
import sqlalchemy as sa
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from sqlalchemy import Connection

from forge_server import __version__
from forge_server.domain.histogram import Histogram
from forge_server.domain.states import AttemptState, RolloutState
from forge_server.proxy.tally import Tally
from forge_server.services.event_tally import EventTally
from forge_server.store import tables as t
from forge_server.store.database import Store

COUNTED = {
    "batch_assembled": ("controller_batches", "Batches assembled"),
    "checkpoint_reported": ("trainer_checkpoints", "Checkpoints reported by trainers"),
    "group_complete": ("controller_groups", "Groups whose last rollout has ended"),
    "policy_live": ("controller_policies_live", "Policy versions that went live"),
    "policy_rejected": ("controller_policies_rejected", "Policy versions that were refused"),
    "run_paused": ("controller_run_pauses", "Runs paused, by a person or by themselves"),
}
"""Kinds of event whose number is a metric."""

FIGURES = {
    ("controller", "reward/mean"): (
        "controller_reward_mean",
        "Mean reward of valid rollouts of the last step",
    ),
    ("controller", "pass_rate"): (
        "controller_pass_rate",
        "Share of valid rollouts of the last step that passed",
    ),
    ("controller", "staleness/mean"): ("controller_staleness_mean", "Mean versions behind of the last batch"),
    ("controller", "groups/mixed_share"): ("controller_mixed_groups_share", "Groups with unequal rewards"),
    ("trainer", "loss"): ("trainer_loss", "Loss of the last step"),
    ("trainer", "grad_norm"): ("trainer_grad_norm", "Gradient norm of the last step"),
    ("trainer", "entropy"): ("trainer_entropy", "Entropy of the last step"),
    ("trainer", "clip_fraction"): ("trainer_clip_fraction", "Share of clipped tokens of the last step"),
    ("trainer", "sampling_kl"): ("trainer_sampling_kl", "KL between engine and trainer in the last step"),
    ("trainer", "logprob_gap_mean"): ("trainer_logprob_gap_mean", "Mean gap of engine and trainer logprobs"),
    ("trainer", "seconds/step"): ("trainer_step_seconds", "Time of the last step"),
}
"""Figures of the last step that are metrics; the others are at ``/runs/{run}/metrics``."""


class Gate(Protocol):
    running: int
    waiting: int

    @property
    def held(self) -> bool: ...


class Scheduler(Protocol):
    @property
    def in_flight(self) -> int: ...

    @property
    def live(self) -> frozenset[str]: ...


class Engine(Protocol):
    @property
    def ready(self) -> bool: ...

    @property
    def serving(self) -> tuple[int, int]: ...


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """Whose counters are told. ``policy``: the one that is served. ``spans``: of traces, by what became of them."""

    store: Store
    gate: Gate
    calls: Tally
    events: EventTally
    scheduler: Scheduler
    engine: Engine
    policy: str
    spans: Mapping[str, int]


class Metrics:
    """``render`` is one scrape."""

    def __init__(self, parts: Parts, *, clock: Callable[[], float] = time.time) -> None:
        self._parts, self._clock = parts, clock
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)

    async def render(self) -> bytes:
        """In Prometheus's text format. Raises StoreError."""
        parts, now = self._parts, self._clock()
        seen = await parts.store.read(lambda c: look(c, parts.policy, now))
        registry = CollectorRegistry(auto_describe=False)
        registry.register(
            _Once([*_proxy(parts), *_attempts(parts, seen), *_learning(parts, seen), *_rest(parts, seen)])
        )
        return generate_latest(registry) + generate_latest(self._process)


class _Once:
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


class Seen(msgspec.Struct):
    """What only rows tell. ``trainer``: phase of the newest session whose lease holds."""

    runs: Mapping[str, int]
    rollouts: Mapping[str, int]
    attempts: Mapping[str, int]
    version: int | None
    step: int
    trainer: str | None
    figures: Mapping[tuple[str, str], float]
    size: int


def look(connection: Connection, policy: str, now: float) -> Seen:
    """One look at the rows; only counts of what has not ended, so that its price does not grow with the database."""
    c = t.policies.c
    live = sa.select(sa.func.max(c.version)).where(c.name == policy, c.state == "live")
    run = _training_run(connection)
    return Seen(
        runs=_counts(connection, t.runs.c.state),
        rollouts=_counts(connection, t.rollouts.c.state, t.rollouts.c.state.in_(("pending", "active"))),
        attempts=_counts(connection, t.attempts.c.state, t.attempts.c.state.in_(_GOING)),
        version=connection.execute(live).scalar(),
        step=run.step if run is not None else 0,
        trainer=_trainer(connection, now),
        figures=_figures(connection, run.id) if run is not None else {},
        size=_size(connection),
    )


_GOING = [state.value for state in AttemptState if state is not AttemptState.ENDED]
_UNENDED = [state.value for state in RolloutState if state is not RolloutState.ENDED]


def _counts(connection: Connection, column: sa.ColumnElement[str], *where: Any) -> dict[str, int]:
    query = sa.select(column, sa.func.count()).where(*where).group_by(column)
    return {state: count for state, count in connection.execute(query)}


def _training_run(connection: Connection) -> Any:
    c = t.runs.c
    going = sa.case((c.ended_at.is_(None), 0), else_=1)
    query = sa.select(c.id, c.step).where(c.kind == "train").order_by(going, c.id.desc()).limit(1)
    return connection.execute(query).first()


def _trainer(connection: Connection, now: float) -> str | None:
    c = t.trainer_sessions.c
    going = sa.select(c.phase).join(t.runs, t.runs.c.id == c.run_id).where(t.runs.c.ended_at.is_(None))
    query = going.where(c.lease_until > now).order_by(c.created_at.desc()).limit(1)
    return connection.execute(query).scalar()


def _figures(connection: Connection, run_id: str) -> dict[tuple[str, str], float]:
    c = t.step_metrics.c
    found: dict[tuple[str, str], float] = {}
    for source in ("controller", "trainer"):
        query = sa.select(c.metrics).where(c.run_id == run_id, c.source == source)
        last = connection.execute(query.order_by(c.step.desc()).limit(1)).scalar() or {}
        found |= {
            (source, name): last[name] for of, name in FIGURES if of == source and last.get(name) is not None
        }
    return found


def _size(connection: Connection) -> int:
    if connection.dialect.name == "sqlite":
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar() or 0
        return int(pages) * int(connection.exec_driver_sql("PRAGMA page_size").scalar() or 0)
    return int(connection.exec_driver_sql("SELECT pg_database_size(current_database())").scalar() or 0)


# --- families ----------------------------------------------------------------------------------------------


def _proxy(parts: Parts) -> Iterator[Metric]:
    tally, gate = parts.calls, parts.gate
    yield _counter("proxy_calls", "Calls that ended", ("dialect", "end"), tally.calls)
    yield _counter(
        "proxy_repeats", "Requests that got the answer of an earlier call", (), {(): tally.repeats}
    )
    yield _counter("proxy_prompt_tokens", "Prompt tokens of answered calls", (), {(): tally.prompt_tokens})
    yield _counter("proxy_completion_tokens", "Tokens sampled", (), {(): tally.completion_tokens})
    yield _counter(
        "proxy_spliced_calls",
        "Calls whose history went to the engine as the sampled tokens",
        (),
        {(): tally.spliced},
    )
    yield _counter(
        "proxy_splice_fallbacks",
        "Calls whose history went as messages instead",
        ("reason",),
        _one(tally.fallbacks),
    )
    yield _counter(
        "proxy_untrainable_calls", "Answered calls that are not trained", ("reason",), _one(tally.untrainable)
    )
    yield _counter(
        "proxy_unrecorded_calls",
        "Calls whose rows the database did not take at once",
        (),
        {(): tally.unrecorded},
    )
    yield _histogram("proxy_call_seconds", "Calls from their admission to their end", (), {(): tally.whole})
    yield _histogram("proxy_engine_seconds", "Answered calls in the engine", (), {(): tally.engine})
    yield _histogram("proxy_held_seconds", "Calls that were held, by how long", (), {(): tally.held})
    yield _gauge("proxy_calls_running", "Calls in the engine now", gate.running)
    yield _gauge("proxy_calls_waiting", "Calls that are held now", gate.waiting)
    yield _gauge("proxy_held", "1 while calls are held", int(gate.held))


def _attempts(parts: Parts, seen: Seen) -> Iterator[Metric]:
    events, scheduler = parts.events, parts.scheduler
    yield _gauge("scheduler_in_flight_target", "Attempts that are to be in flight", scheduler.in_flight)
    yield _gauge("scheduler_in_flight", "Attempts in flight, without those from outside", len(scheduler.live))
    yield _gauges("scheduler_attempts", "Attempts that have not ended", "state", _GOING, seen.attempts)
    yield _gauges("scheduler_rollouts", "Rollouts that have not ended", "state", _UNENDED, seen.rollouts)
    yield _counter(
        "scheduler_attempts_ended", "Attempts that ended", ("backend", "outcome", "kind"), events.attempts
    )
    yield _histogram(
        "scheduler_startup_seconds",
        "From an attempt's launch to its harness's start",
        ("backend",),
        _one(events.start_up),
    )
    yield _counter("controller_rollouts_ended", "Rollouts that ended", ("mode", "outcome"), events.rollouts)
    yield _counter(
        "controller_rollouts_passed", "Rollouts with a reward that passes", ("mode",), _one(events.passed)
    )


def _learning(parts: Parts, seen: Seen) -> Iterator[Metric]:
    for kind, (name, text) in COUNTED.items():
        yield _counter(name, text, (), {(): parts.events.events[kind]})
    yield _gauges(
        "controller_runs",
        "Runs",
        "state",
        ("active", "paused", "completed", "failed", "cancelled"),
        seen.runs,
    )
    yield _gauge("controller_policy_version", "The version that serves", seen.version)
    yield _gauge("controller_step", "Batches of the training run so far", seen.step)
    yield _histogram(
        "controller_hold_seconds", "Holds of calls that are over", ("reason",), _one(parts.events.holds)
    )
    yield _gauge("trainer_up", "1 while a trainer's lease holds", int(seen.trainer is not None))
    phase = GaugeMetricFamily("forge_trainer_phase", "1 for what the trainer does", labels=("phase",))
    if seen.trainer:
        phase.add_metric((seen.trainer,), 1)
    yield phase
    for key, (name, text) in FIGURES.items():
        yield _gauge(name, text, seen.figures.get(key))


def _rest(parts: Parts, seen: Seen) -> Iterator[Metric]:
    writer = parts.store.writer
    units, held = writer.queued
    ready, replicas = parts.engine.serving
    yield _gauge("engine_ready", "1 while the engine serves the current policy", int(parts.engine.ready))
    yield _gauge("engine_replicas", "Replicas of the engine", replicas)
    yield _gauge("engine_replicas_ready", "Replicas that serve the current policy", ready)
    yield _counter("store_commits", "Transactions", (), {(): writer.commits})
    yield _counter("store_units", "Durable writes, many to a transaction", (), {(): writer.units})
    yield _histogram("store_commit_seconds", "Transactions", (), {(): writer.commit_s})
    yield _gauge("store_queue_units", "Writes that wait", units)
    yield _gauge("store_queue_bytes", "What they hold in memory, about", held)
    yield _gauge("store_size_bytes", "The database", seen.size)
    yield _counter(
        "telemetry_spans", "Spans of traces, by what became of them", ("state",), _one(parts.spans)
    )
    info = GaugeMetricFamily("forge_server_info", "Always 1", labels=("version",))
    info.add_metric((__version__,), 1)
    yield info


def _one(values: Mapping[str, Any]) -> dict[tuple[str, ...], Any]:
    return {(label,): value for label, value in values.items()}


def _gauge(name: str, text: str, value: float | None) -> Metric:
    """Without a value it has no sample, and its name is told all the same."""
    family = GaugeMetricFamily(f"forge_{name}", text)
    if value is not None:
        family.add_metric((), value)
    return family


def _gauges(name: str, text: str, label: str, known: Iterable[str], values: Mapping[str, int]) -> Metric:
    """A sample for every known value of the label, so that what is none is 0."""
    family = GaugeMetricFamily(f"forge_{name}", text, labels=(label,))
    for value in known:
        family.add_metric((value,), values.get(value, 0))
    return family


def _counter(name: str, text: str, labels: tuple[str, ...], values: Mapping[Any, float]) -> Metric:
    family = CounterMetricFamily(f"forge_{name}", text, labels=labels)
    for label, value in sorted(values.items()):
        family.add_metric(label, value)
    return family


def _histogram(name: str, text: str, labels: tuple[str, ...], values: Mapping[Any, Histogram]) -> Metric:
    family = HistogramMetricFamily(f"forge_{name}", text, labels=labels)
    for label, histogram in sorted(values.items(), key=lambda item: item[0]):
        family.add_metric(label, list(histogram.cumulative()), histogram.sum)
    return family
