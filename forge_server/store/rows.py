"""Rows of runs, rollouts and attempts as typed values: what the parts of the server pass around."""

from typing import Any, TypeVar

import msgspec
import sqlalchemy as sa

from forge_server.domain.outcome import Kind, Outcome
from forge_server.domain.states import AttemptState, RolloutState, RunState
from forge_server.store import tables as t


class RunRow(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    name: str
    kind: str
    state: RunState
    reason: str
    settings: dict[str, Any]
    step: int
    infra_streak: int
    infra_since: float | None
    base_version: int | None
    created_at: float
    ended_at: float | None


class RolloutRow(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    run_id: str
    group_id: str | None
    task_id: str | None
    slot: int
    harness: str
    mode: str
    external: bool
    state: RolloutState
    epoch: int
    attempts: int
    max_attempts: int
    not_before: float
    outcome: Outcome | None
    kind: Kind | None
    reward: float | None
    final_attempt_id: str | None
    policy_version: int
    created_at: float
    ended_at: float | None


class AttemptRow(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    rollout_id: str
    number: int
    state: AttemptState
    epoch: int
    backend: str
    handle: dict[str, Any] | None
    start_nonce: str | None
    startup_deadline: float | None
    agent_deadline: float | None
    verify_deadline: float | None
    heartbeat_at: float | None
    stop_reason: str
    exit_code: int | None
    outcome: Outcome | None
    kind: Kind | None
    reward: float | None
    evidence: dict[str, Any] | None
    not_trained: str
    created_at: float
    launched_at: float | None
    started_at: float | None
    running_at: float | None
    sealed_at: float | None
    ended_at: float | None


T = TypeVar("T", RunRow, RolloutRow, AttemptRow)

_TABLES: dict[type, sa.Table] = {RunRow: t.runs, RolloutRow: t.rollouts, AttemptRow: t.attempts}


def select(kind: type[T]) -> sa.Select[Any]:
    """A query of every column of ``kind``, to be narrowed with ``where``."""
    table = _TABLES[kind]
    return sa.select(*(table.c[name] for name in kind.__struct_fields__))


def fetch(connection: sa.Connection, kind: type[T], query: sa.Select[Any]) -> list[T]:
    """The rows of a query made by ``select(kind)``."""
    names = kind.__struct_fields__
    return [msgspec.convert(dict(zip(names, row, strict=True)), kind) for row in connection.execute(query)]


def by_id(connection: sa.Connection, kind: type[T], id: str) -> T | None:
    """The row with this id, or None."""
    found = fetch(connection, kind, select(kind).where(_TABLES[kind].c.id == id))
    return found[0] if found else None
