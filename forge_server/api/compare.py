"""``GET /runs/{run}/compare``: how a run's rollouts fare by task or by harness."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import comb
from statistics import fmean
from typing import Annotated, Any, Literal

import msgspec
import sqlalchemy as sa
from litestar import get
from litestar.params import FromPath, FromQuery, QueryParameter
from sqlalchemy import Connection

from forge_server.api import views
from forge_server.client import schemas as s
from forge_server.domain.outcome import Outcome, counts_for_training
from forge_server.domain.run import Mode
from forge_server.evaluation.stats import PASS_REWARD, pass_at_k
from forge_server.store import tables as t
from forge_server.store.database import Store

By = Literal["task", "harness"]
K = Annotated[int | None, QueryParameter(ge=1, le=1000)]


def compare_routes(store: Store) -> list[Any]:
    @get("/runs/{run:str}/compare", summary="Its rollouts by task or by harness")
    async def compare(
        run: FromPath[str], by: FromQuery[By], mode: FromQuery[Mode | None] = None, k: K = None
    ) -> list[s.Comparison]:
        return await store.read(lambda c: compared(c, run, by, mode, k))

    return [compare]


class _Cell(msgspec.Struct):
    """Rollouts of one task in one harness."""

    rollouts: int = 0
    ended: int = 0
    valid: int = 0
    passed: int = 0
    reward: float = 0.0
    attempts: int = 0
    seconds: float = 0.0
    calls: int = 0
    prompt: int = 0
    completion: int = 0
    failures: dict[str, int] = {}


def compared(connection: Connection, run: str, by: By, mode: str | None, k: int | None) -> list[s.Comparison]:
    """By name. ``k``: the run's own rollouts per group if not given. Raises NotFound."""
    row = views.run_row(connection, run)
    depth = k or int(row.settings.get("n") or 1)
    cells = _cells(connection, row.id, mode)
    names = (
        {r.id: r.name for r in connection.execute(sa.select(t.tasks.c.id, t.tasks.c.name))}
        if by == "task"
        else {}
    )
    gathered: dict[str, list[tuple[str | None, _Cell]]] = defaultdict(list)
    for (harness, task), cell in cells.items():
        name = harness if by == "harness" else names.get(task or "", "-")
        gathered[name].append((task, cell))
    return [_comparison(name, parts, depth) for name, parts in sorted(gathered.items())]


def _cells(connection: Connection, run_id: str, mode: str | None) -> dict[tuple[str, str | None], _Cell]:
    r, c = t.rollouts.c, t.calls.c
    g = t.groups.c
    unmeasured = sa.select(g.id).where(g.run_id == run_id, g.mode == "eval", g.dropped != "")
    mine = [
        r.run_id == run_id,
        sa.or_(r.group_id.is_(None), r.group_id.not_in(unmeasured)),
        *([r.mode == mode] if mode is not None else []),
    ]
    cells: dict[tuple[str, str | None], _Cell] = defaultdict(_Cell)
    query = (
        sa.select(
            r.harness,
            r.task_id,
            r.outcome,
            r.kind,
            sa.func.count(),
            sa.func.count(r.reward),
            sa.func.sum(sa.case((r.reward >= PASS_REWARD, 1), else_=0)),
            sa.func.sum(r.reward),
            sa.func.sum(r.attempts),
            sa.func.sum(r.ended_at - r.created_at),
        )
        .where(*mine)
        .group_by(r.harness, r.task_id, r.outcome, r.kind)
    )
    ends = connection.execute(query)
    for harness, task, outcome, kind, count, scored, passed, reward, attempts, seconds in ends:
        cell = cells[harness, task]
        cell.rollouts += count
        cell.attempts += attempts or 0
        if outcome is None:
            continue
        cell.ended += count
        cell.seconds += seconds or 0.0
        if counts_for_training(Outcome(outcome)):
            cell.valid += scored
            cell.passed += passed or 0
            cell.reward += reward or 0.0
        if outcome != Outcome.COMPLETED:
            cell.failures = {**cell.failures, kind: cell.failures.get(kind, 0) + count}
    query = (
        sa.select(
            r.harness,
            r.task_id,
            sa.func.count(),
            sa.func.sum(c.prompt_len),
            sa.func.sum(c.completion_len),
        )
        .join(t.calls, c.attempt_id == r.final_attempt_id)
        .where(*mine)
        .group_by(r.harness, r.task_id)
    )
    for harness, task, calls, prompt, completion in connection.execute(query):
        cell = cells[harness, task]
        cell.calls, cell.prompt, cell.completion = calls, prompt or 0, completion or 0
    return cells


def _comparison(name: str, parts: Sequence[tuple[str | None, _Cell]], k: int) -> s.Comparison:
    tasks: dict[str | None, tuple[int, int]] = {}
    failures: dict[str, int] = {}
    for task, cell in parts:
        n, passed = tasks.get(task, (0, 0))
        tasks[task] = (n + cell.valid, passed + cell.passed)
        for kind, count in cell.failures.items():
            failures[kind] = failures.get(kind, 0) + count
    ended = sum(cell.ended for _, cell in parts)
    valid = sum(cell.valid for _, cell in parts)
    rollouts = sum(cell.rollouts for _, cell in parts)

    def per_ended(values: Iterable[float]) -> float | None:
        return sum(values) / ended if ended else None

    return s.Comparison(
        name=name,
        rollouts=rollouts,
        ended=ended,
        valid=valid,
        passed=sum(cell.passed for _, cell in parts),
        reward=sum(cell.reward for _, cell in parts) / valid if valid else None,
        k=k,
        pass_at_1=_mean(pass_at_k(n, c, 1) for n, c in tasks.values() if n),
        pass_at_k=_mean(pass_at_k(n, c, k) for n, c in tasks.values() if n >= k),
        pass_hat_k=_mean(comb(c, k) / comb(n, k) for n, c in tasks.values() if n >= k),
        calls=per_ended(cell.calls for _, cell in parts),
        prompt_tokens=per_ended(cell.prompt for _, cell in parts),
        completion_tokens=per_ended(cell.completion for _, cell in parts),
        seconds=per_ended(cell.seconds for _, cell in parts),
        attempts=sum(cell.attempts for _, cell in parts) / rollouts,
        failures=dict(sorted(failures.items(), key=lambda item: -item[1])),
    )


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return fmean(found) if found else None
