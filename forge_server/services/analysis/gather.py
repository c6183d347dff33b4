"""Everything that the report of a run tells, from its rows."""

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any, get_args

import msgspec
import sqlalchemy as sa
from sqlalchemy import Connection

from forge_server.api import cost, views
from forge_server.api.compare import compared
from forge_server.api.inspect import turns_of
from forge_server.client import schemas as s
from forge_server.client.cost import Cost
from forge_server.domain.outcome import Outcome
from forge_server.domain.run import Mode
from forge_server.evaluation.cost import Prices
from forge_server.evaluation.stats import PASS_REWARD
from forge_server.export import reports
from forge_server.export.records import Run
from forge_server.store import tables as t
from forge_server.store.database import Store
from forge_server.trajectory.drift import DriftReport

TURNS, LETTERS = 40, 4000
"""Of an example conversation at most so many turns, and of a message so many letters, are shown."""


class Said(msgspec.Struct, frozen=True):
    """A message of an example: who, what, and the tools that it calls as (name, arguments)."""

    role: str
    text: str
    thought: str = ""
    calls: tuple[tuple[str, str], ...] = ()


class Example(msgspec.Struct, frozen=True):
    why: str
    rollout: s.RolloutView
    said: tuple[Said, ...]
    cut: bool
    """There is more of it."""


class Analysis(msgspec.Struct, frozen=True, kw_only=True):
    run: s.RunView
    k: int
    by_harness: dict[str, list[s.Comparison]]
    """By mode: rollouts of training and of evaluation are not mixed."""
    by_task: list[s.Comparison]
    failures: dict[str, int]
    """``outcome / kind`` of ended rollouts, most first."""
    lost_attempts: dict[str, int]
    """Infra failures of attempts by kind, those tried again included."""
    cost: Cost
    drift: DriftReport
    metrics: list[s.StepMetrics]
    policies: list[s.PolicyView]
    """Those that the run made, oldest first."""
    examples: list[Example]
    made_at: float


def analyse(store: Store, run: Run, prices: Prices, k: int | None = None) -> Analysis:
    """``k``: rollouts per task for pass@k, the run's own if not given. Raises NotFound and StoreError."""
    drift = reports.drift(store, run)

    def read(connection: Connection) -> Analysis:
        row = views.run_row(connection, run.id)
        return Analysis(
            run=views.run_view(connection, row),
            k=k or int(row.settings.get("n") or 1),
            by_harness={
                mode: rows
                for mode in get_args(Mode)
                if (rows := compared(connection, run.id, "harness", mode, k))
            },
            by_task=compared(connection, run.id, "task", None, k),
            failures=_failures(connection, run.id),
            lost_attempts=_lost(connection, run.id),
            cost=cost.read(connection, run.id, prices),
            drift=drift,
            metrics=views.step_metrics(connection, run.id),
            policies=[p for p in views.policies(connection) if p.run_id == run.id],
            examples=list(_examples(connection, run.id)),
            made_at=time.time(),
        )

    return store.read_now(read)


def _failures(connection: Connection, run_id: str) -> dict[str, int]:
    c = t.rollouts.c
    query = sa.select(c.outcome, c.kind, sa.func.count()).where(c.run_id == run_id, c.outcome.is_not(None))
    rows = connection.execute(query.group_by(c.outcome, c.kind)).all()
    return {f"{outcome} / {kind}": count for outcome, kind, count in sorted(rows, key=lambda row: -row[2])}


def _lost(connection: Connection, run_id: str) -> dict[str, int]:
    a = t.attempts.c
    query = (
        sa.select(a.kind, sa.func.count())
        .join(t.rollouts, t.rollouts.c.id == a.rollout_id)
        .where(t.rollouts.c.run_id == run_id, a.outcome == Outcome.INFRA_FAILURE.value)
        .group_by(a.kind)
    )
    return {kind: count for kind, count in connection.execute(query)}


def _examples(connection: Connection, run_id: str) -> Iterator[Example]:
    """The last rollout of each sort, if there is one."""
    c = t.rollouts.c
    completed = c.outcome == Outcome.COMPLETED.value
    for why, which in (
        ("The last that passed", sa.and_(completed, c.reward >= PASS_REWARD)),
        ("The last that did not pass", sa.and_(completed, c.reward < PASS_REWARD)),
        ("The last that ended by a failure of the policy", c.outcome == Outcome.POLICY_FAILURE.value),
    ):
        query = sa.select(t.rollouts).where(c.run_id == run_id, c.final_attempt_id.is_not(None), which)
        row = connection.execute(query.order_by(c.ended_at.desc(), c.id.desc()).limit(1)).first()
        if row is None:
            continue
        turns = turns_of(connection, row.final_attempt_id, 0, TURNS + 1)
        if turns:
            (view,) = views.rollout_views(connection, [row])
            yield Example(why, view, tuple(_conversation(turns[:TURNS])), len(turns) > TURNS)


def _conversation(turns: Sequence[s.Turn]) -> Iterator[Said]:
    for turn in turns:
        for message in turn.messages:
            yield _said(message)
        if turn.response is not None:
            yield _said(turn.response)


def _said(message: Any) -> Said:
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        calls.append((str(function.get("name", "")), _short(_text(function.get("arguments", "")))))
    return Said(
        role=str(message.get("role", "assistant")),
        text=_short(_text(message.get("content"))),
        thought=_short(_text(message.get("reasoning") or message.get("reasoning_content"))),
        calls=tuple(calls),
    )


def _text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        return "\n".join(
            part["text"] if isinstance(part.get("text"), str) else f"[{part.get('type')}]" for part in content
        )
    return json.dumps(content, ensure_ascii=False)


def _short(text: str) -> str:
    return text if len(text) <= LETTERS else f"{text[:LETTERS]} … ({len(text) - LETTERS} more letters)"
