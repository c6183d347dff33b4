"""What a run has cost and where its wall-clock went, from the rows that it left.

Every moment of the run belongs to one phase of the loop, and every moment of a rollout to one phase of its
life: the figures add up because they are cuts of the same interval, not separate measurements.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Protocol

import msgspec
import numpy as np
import sqlalchemy as sa
from sqlalchemy import Connection

from forge_server.client.cost import Cost, CostLine, LoopTime, RolloutTime, StartUp
from forge_server.domain.clock import Interval, union
from forge_server.domain.run import EXTERNAL
from forge_server.evaluation.stats import PASS_REWARD
from forge_server.store import tables as t
from forge_server.store.rows import RunRow

HOUR = 3600.0


class Prices(Protocol):
    """``[cost]``."""

    @property
    def currency(self) -> str: ...

    @property
    def gpu_hour(self) -> float: ...

    @property
    def engine_gpus(self) -> int: ...

    @property
    def trainer_gpus(self) -> int: ...

    @property
    def pod_hour(self) -> Mapping[str, float]: ...


def cost_of(connection: Connection, run: RunRow, prices: Prices, now: float) -> Cost:
    """Everything about what ``run`` took until its end, or until ``now``."""
    until = run.ended_at if run.ended_at is not None else now
    whole = Interval(run.created_at, max(run.created_at, until))
    attempts = _attempts(connection, run.id)
    sessions = _sessions(connection, run.id, whole.end)
    loop = loop_time(
        whole,
        down=_holds(connection, whole, ("server_down", "engine_down")),
        paused=_pauses(connection, run.id, whole.end),
        swap=_holds(connection, whole, ("weight_update",)),
        train=_training(connection, run.id, whole.end),
        generate=[Interval(a.created_at, _or(a.ended_at, whole.end)) for a in attempts],
    )
    busy = whole.end - whole.begin - loop.paused_s - loop.down_s
    if run.kind != "train":  # it does not keep the engine while nothing of it is in flight
        busy -= loop.wait_s
    lines = [
        _line("engine", "gpu", prices.engine_gpus * busy, prices.gpu_hour),
        _line("trainer", "gpu", prices.trainer_gpus * _length(sessions), prices.gpu_hour),
    ]
    pods: dict[str, float] = defaultdict(float)
    for attempt in attempts:
        if attempt.backend != EXTERNAL:
            pods[attempt.backend] += max(0.0, _or(attempt.ended_at, whole.end) - attempt.created_at)
    lines += [
        _line(f"attempts {name}", "pod", seconds, prices.pod_hour.get(name, 0.0))
        for name, seconds in sorted(pods.items())
    ]
    lines = [line for line in lines if line.hours > 0]
    total = sum(line.cost for line in lines)
    rollouts, ended, solved = _counts(connection, run.id)
    time, tokens = _rollout_time(connection, run.id, attempts, whole.end)
    return Cost(
        run=run.id,
        currency=prices.currency,
        since=whole.begin,
        until=whole.end,
        wall_s=whole.end - whole.begin,
        lines=lines,
        total=total,
        rollouts=rollouts,
        ended=ended,
        solved=solved,
        per_rollout=total / ended if ended else None,
        per_solved=total / solved if solved else None,
        gpu_hours=sum(line.hours for line in lines if line.unit == "gpu"),
        pod_hours=sum(line.hours for line in lines if line.unit == "pod"),
        completion_tokens=tokens,
        loop=loop,
        time=time,
        start_up=_start_up(attempts),
    )


def loop_time(
    whole: Interval,
    *,
    down: Sequence[Interval],
    paused: Sequence[Interval],
    swap: Sequence[Interval],
    train: Sequence[Interval],
    generate: Sequence[Interval],
) -> LoopTime:
    """Cut ``whole`` so that each moment is in one phase; where several hold, the first argument wins, except that
    training and generating at the same time is a phase of its own."""
    seconds = [0.0] * 7
    layers = [_clipped(found, whole) for found in (down, paused, swap, train, generate)]
    edges = sorted(
        {whole.begin, whole.end, *(x for layer in layers for i in layer for x in (i.begin, i.end))}
    )
    at = [0] * len(layers)
    for begin, end in pairwise(edges):
        inside = []
        for which, layer in enumerate(layers):
            while at[which] < len(layer) and layer[at[which]].end <= begin:
                at[which] += 1
            inside.append(at[which] < len(layer) and layer[at[which]].begin <= begin)
        is_down, is_paused, is_swap, is_train, is_generate = inside
        if is_down or is_paused or is_swap:
            phase = 0 if is_down else 1 if is_paused else 2
        elif is_train and is_generate:
            phase = 5
        else:
            phase = 3 if is_train else 4 if is_generate else 6
        seconds[phase] += end - begin
    return LoopTime(
        down_s=seconds[0],
        paused_s=seconds[1],
        swap_s=seconds[2],
        train_s=seconds[3],
        generate_s=seconds[4],
        both_s=seconds[5],
        wait_s=seconds[6],
    )


class _Attempt(msgspec.Struct, frozen=True):
    id: str
    rollout_id: str
    backend: str
    created_at: float
    launched_at: float | None
    running_at: float | None
    sealed_at: float | None
    ended_at: float | None


def _attempts(connection: Connection, run_id: str) -> list[_Attempt]:
    a = t.attempts.c
    columns = [a[name] for name in _Attempt.__struct_fields__]
    query = sa.select(*columns).join(t.rollouts, t.rollouts.c.id == a.rollout_id)
    return [_Attempt(*row) for row in connection.execute(query.where(t.rollouts.c.run_id == run_id))]


def _counts(connection: Connection, run_id: str) -> tuple[int, int, int]:
    c = t.rollouts.c
    passed = sa.case((c.reward >= PASS_REWARD, 1), else_=0)
    row = connection.execute(
        sa.select(sa.func.count(), sa.func.count(c.ended_at), sa.func.sum(passed)).where(c.run_id == run_id)
    ).one()
    return row[0], row[1], row[2] or 0


def _rollout_time(
    connection: Connection, run_id: str, attempts: Sequence[_Attempt], until: float
) -> tuple[RolloutTime, int]:
    """And the completion tokens of all its attempts."""
    c = t.rollouts.c
    total = sum(
        max(0.0, _or(ended, until) - created)
        for created, ended in connection.execute(
            sa.select(c.created_at, c.ended_at).where(c.run_id == run_id)
        )
    )
    calls = t.calls.c
    query = (
        sa.select(
            calls.attempt_id,
            sa.func.sum(calls.engine_ms),
            sa.func.sum(calls.held_ms),
            sa.func.sum(calls.completion_len),
        )
        .join(t.attempts, t.attempts.c.id == calls.attempt_id)
        .join(t.rollouts, c.id == t.attempts.c.rollout_id)
        .where(c.run_id == run_id)
        .group_by(calls.attempt_id)
    )
    asked = {row[0]: (row[1] or 0.0, row[2] or 0.0, row[3] or 0) for row in connection.execute(query)}
    startup = agent = verify = engine = held = 0.0
    for attempt in attempts:
        end = max(attempt.created_at, _or(attempt.ended_at, until))
        running = min(end, _or(attempt.running_at, end))
        sealed = min(end, max(running, _or(attempt.sealed_at, end)))
        startup += running - attempt.created_at
        agent += sealed - running
        verify += end - sealed
        engine_ms, held_ms, _ = asked.get(attempt.id, (0.0, 0.0, 0))
        in_engine = min(sealed - running, engine_ms / 1000.0)
        engine += in_engine
        held += min(sealed - running - in_engine, held_ms / 1000.0)
    time = RolloutTime(
        total_s=total,
        idle_s=max(0.0, total - startup - agent - verify),
        startup_s=startup,
        agent_s=agent,
        verify_s=verify,
        engine_s=engine,
        held_s=held,
    )
    return time, sum(tokens for _, _, tokens in asked.values())


def _start_up(attempts: Iterable[_Attempt]) -> StartUp:
    found = [
        a.running_at - a.launched_at
        for a in attempts
        if a.running_at is not None and a.launched_at is not None and a.backend != EXTERNAL
    ]
    if not found:
        return StartUp(0, None, None, None, None)
    p50, p90, p99 = (float(value) for value in np.percentile(found, (50, 90, 99)))
    return StartUp(len(found), p50, p90, p99, max(found))


def _holds(connection: Connection, whole: Interval, reasons: Sequence[str]) -> list[Interval]:
    c = t.holds.c
    rows = connection.execute(
        sa.select(c.begin_at, c.end_at).where(
            c.reason.in_(reasons), sa.or_(c.end_at.is_(None), c.end_at > whole.begin), c.begin_at < whole.end
        )
    )
    return [Interval(begin, _or(end, whole.end)) for begin, end in rows]


def _pauses(connection: Connection, run_id: str, until: float) -> list[Interval]:
    """As far back as events are kept."""
    c = t.events.c
    rows = connection.execute(
        sa.select(c.at, c.kind)
        .where(c.run_id == run_id, c.kind.in_(("run_paused", "run_resumed", "run_ended")))
        .order_by(c.id)
    )
    found, began = [], None
    for at, kind in rows:
        if kind == "run_paused":
            began = at if began is None else began
        elif began is not None:
            found.append(Interval(began, at))
            began = None
    return [*found, Interval(began, until)] if began is not None else found


def _training(connection: Connection, run_id: str, until: float) -> list[Interval]:
    c = t.batches.c
    query = sa.select(c.fetched_at, c.trained_at).where(c.run_id == run_id, c.fetched_at.is_not(None))
    return [Interval(fetched, _or(trained, until)) for fetched, trained in connection.execute(query)]


def _sessions(connection: Connection, run_id: str, until: float) -> list[Interval]:
    """When a trainer was there: until its lease ran out, the next one came, or the run ended."""
    c = t.trainer_sessions.c
    query = sa.select(c.created_at, c.lease_until).where(c.run_id == run_id).order_by(c.fence)
    found: list[Interval] = []
    for began, lease_until in connection.execute(query):
        if found:
            found[-1] = Interval(found[-1].begin, min(found[-1].end, began))
        found.append(Interval(began, min(lease_until, until)))
    return found


def _clipped(intervals: Iterable[Interval], whole: Interval) -> list[Interval]:
    return union(Interval(max(i.begin, whole.begin), min(i.end, whole.end)) for i in intervals)


def _length(intervals: Iterable[Interval]) -> float:
    return sum(i.end - i.begin for i in union(intervals))


def _line(what: str, unit: str, seconds: float, price: float) -> CostLine:
    hours = max(0.0, seconds) / HOUR
    return CostLine(what=what, unit=unit, hours=hours, price=price, cost=hours * price)


def _or(value: float | None, other: float) -> float:
    return other if value is None else value
