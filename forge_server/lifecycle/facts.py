"""Gathers what the database knows about an attempt at its end, for ``domain.classify``."""

from typing import Any

import msgspec
import sqlalchemy as sa

from forge_server.domain.classify import CallFact, Facts
from forge_server.domain.states import CallEnd
from forge_server.lifecycle.change import Change
from forge_server.store import tables as t
from forge_server.store.rows import AttemptRow, RolloutRow


def gather(change: Change, attempt: AttemptRow, rollout: RolloutRow, **trigger: Any) -> Facts:
    """The facts of an attempt that is about to end; ``trigger`` are the fields that say what ends it."""
    return Facts(
        harness_started=attempt.running_at is not None,
        stop_reason=attempt.stop_reason,
        reward=reported_reward(change.connection, attempt.id),
        reward_wanted=rollout.mode != "record",
        calls=_call_log(change.connection, attempt.id),
        **trigger,
    )


def evidence(facts: Facts, details: dict[str, Any]) -> dict[str, Any]:
    """What the row keeps of the facts: calls as counts, what is empty left out."""
    kept: dict[str, Any] = {
        key: value
        for key, value in msgspec.to_builtins(facts).items()
        if key != "calls" and value not in (None, False, "")
    }
    ends: dict[str, int] = {}
    for call in facts.calls:
        name = call.end.value if call.end is not None else "in_flight"
        ends[name] = ends.get(name, 0) + 1
    return {**kept, "calls": ends, **({"details": details} if details else {})}


def reported_reward(connection: sa.Connection, attempt_id: str) -> float | None:
    """The reward of the whole attempt: the verifier's word, else the one reported from outside, else None."""
    query = sa.select(t.rewards.c.source, t.rewards.c.value).where(
        t.rewards.c.attempt_id == attempt_id, t.rewards.c.call_id.is_(None)
    )
    found = {row.source: float(row.value) for row in connection.execute(query)}
    return found.get("verifier", found.get("external"))


def _call_log(connection: sa.Connection, attempt_id: str) -> tuple[CallFact, ...]:
    query = (
        sa.select(t.calls.c.seq, t.calls.c.end, t.calls.c.error, t.calls.c.status)
        .where(t.calls.c.attempt_id == attempt_id)
        .order_by(t.calls.c.seq)
    )
    return tuple(
        CallFact(row.seq, CallEnd(row.end) if row.end is not None else None, row.error or "", row.status)
        for row in connection.execute(query)
    )
