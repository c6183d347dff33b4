"""Reads for the control API: rows to the Structs of ``client.schemas``. Lists come in pages."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec
import sqlalchemy as sa
from sqlalchemy import Connection

from forge_server.api.paging import page
from forge_server.client import schemas as s
from forge_server.domain.errors import InvalidRequest, NotFound
from forge_server.store import tables as t

T = TypeVar("T")

Bodies = Callable[[Connection, list[int]], Mapping[int, tuple[list[Any], Any]]]
"""Requests and responses of calls, decoded from the content-addressed messages."""


def run_row(connection: Connection, id_or_name: str) -> Any:
    """The run by id or name. Raises NotFound."""
    c = t.runs.c
    query = sa.select(t.runs).where(sa.or_(c.id == id_or_name, c.name == id_or_name))
    row = connection.execute(query.order_by((c.id == id_or_name).desc())).first()
    if row is None:
        raise NotFound(f"there is no run {id_or_name!r}", mend="`forge-server run list` shows them")
    return row


def runs(connection: Connection, after: str | None, limit: int) -> s.Page:
    """Runs, newest first."""
    query = sa.select(t.runs).order_by(t.runs.c.id.desc()).limit(limit + 1)
    if after is not None:
        query = query.where(t.runs.c.id < after)
    rows = connection.execute(query).all()
    return page(rows, limit, lambda r: r.id, lambda r: run_view(connection, r))


def step_metrics(connection: Connection, run: str, since: int = 0) -> list[s.StepMetrics]:
    """Metrics of every step from ``since`` on, of a run by id or name. Raises NotFound."""
    c = t.step_metrics.c
    query = sa.select(t.step_metrics).where(c.run_id == run_row(connection, run).id, c.step >= since)
    rows = connection.execute(query.order_by(c.step, c.source))
    return [s.StepMetrics(step=m.step, source=m.source, metrics=m.metrics, at=m.at) for m in rows]


def tasks(connection: Connection, taskset: str | None, after: str | None, limit: int) -> s.Page:
    """Tasks, oldest first."""
    query = sa.select(t.tasks).order_by(t.tasks.c.id).limit(limit + 1)
    if taskset is not None:
        query = query.where(t.tasks.c.taskset == taskset)
    if after is not None:
        query = query.where(t.tasks.c.id > after)
    return page(connection.execute(query).all(), limit, lambda r: r.id, task_view)


class RolloutFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which rollouts are listed, and how. ``task`` is a name or an id; ``text`` stands in id, task or harness."""

    run: str | None = None
    state: str | None = None
    outcome: str | None = None
    kind: str | None = None
    harness: str | None = None
    task: str | None = None
    mode: str | None = None
    text: str | None = None
    sort: Literal["created", "ended", "reward", "attempts"] = "created"
    ascending: bool = False


_SORTS: dict[str, sa.ColumnElement[Any]] = {
    "created": t.rollouts.c.id,
    "ended": sa.func.coalesce(t.rollouts.c.ended_at, 1e18),
    "reward": sa.func.coalesce(t.rollouts.c.reward, -1e18),
    "attempts": t.rollouts.c.attempts,
}


def rollouts(connection: Connection, only: RolloutFilter, after: str | None, limit: int) -> s.Page:
    """Rollouts in the order of the filter, rows of equal value by id. Raises NotFound for a run that is not there."""
    c, name = t.rollouts.c, t.tasks.c.name
    value = _SORTS[only.sort]
    query = sa.select(t.rollouts, value.label("sorted_by"))
    query = query.outerjoin(t.tasks, t.tasks.c.id == c.task_id).limit(limit + 1)
    if only.run is not None:
        query = query.where(c.run_id == run_row(connection, only.run).id)
    for key in ("state", "outcome", "kind", "harness", "mode"):
        wanted = getattr(only, key)
        if wanted is not None:
            query = query.where(c[key] == wanted)
    if only.task is not None:
        query = query.where(sa.or_(c.task_id == only.task, name == only.task))
    if only.text:
        query = query.where(sa.or_(*(_holds(column, only.text) for column in (c.id, name, c.harness))))
    if after is not None:
        at, last = _place(after, only.sort)
        further = c.id > last if only.ascending else c.id < last
        if only.sort != "created":
            beyond = value > at if only.ascending else value < at
            further = sa.or_(beyond, sa.and_(value == at, further))
        query = query.where(further)
    direction = sa.asc if only.ascending else sa.desc
    order = [direction(c.id)] if only.sort == "created" else [direction(value), direction(c.id)]
    rows = connection.execute(query.order_by(*order)).all()
    shown = {view.id: view for view in rollout_views(connection, rows[:limit])}
    return page(
        rows, limit, lambda r: msgspec.json.encode([r.sorted_by, r.id]).decode(), lambda r: shown[r.id]
    )


def _holds(column: sa.ColumnElement[Any], text: str) -> sa.ColumnElement[bool]:
    return sa.func.lower(column).contains(text.lower(), autoescape=True)


def _place(cursor: str, sort: str) -> tuple[Any, str]:
    """Raises InvalidRequest for a cursor of another list."""
    try:
        value, last = msgspec.json.decode(cursor, type=tuple[str | float, str])
    except msgspec.MsgspecError:
        value, last = None, ""
    if isinstance(value, str) is not (sort == "created") or value is None:
        raise InvalidRequest(
            "the cursor is of another list", where="cursor", mend="start again without a cursor"
        )
    return value, last


_ROLLOUT = [name for name in s.RolloutView.__struct_fields__ if name in t.rollouts.c]


def rollout_views(connection: Connection, rows: Sequence[Any]) -> list[s.RolloutView]:
    """Rows of ``rollouts`` with their task's name, and what their newest attempts came to."""
    if not rows:
        return []
    a, c = t.attempts.c, t.calls.c
    ids = [row.id for row in rows]
    newest: dict[str, Any] = {}
    query = sa.select(a.id, a.rollout_id, a.state, a.not_trained).where(a.rollout_id.in_(ids))
    for attempt in connection.execute(query.order_by(a.number)):
        newest[attempt.rollout_id] = attempt
    query = (
        sa.select(c.attempt_id, sa.func.count(), sa.func.sum(c.completion_len))
        .where(c.attempt_id.in_([attempt.id for attempt in newest.values()]))
        .group_by(c.attempt_id)
    )
    made = {row[0]: (row[1], row[2] or 0) for row in connection.execute(query)}
    wanted = {row.task_id for row in rows if row.task_id is not None}
    tasks = connection.execute(sa.select(t.tasks.c.id, t.tasks.c.name).where(t.tasks.c.id.in_(wanted)))
    task_names = {row.id: row.name for row in tasks}
    views = []
    for row in rows:
        last = newest.get(row.id)
        calls, tokens = made.get(last.id, (0, 0)) if last is not None else (0, 0)
        view = s.RolloutView(
            **{name: row._mapping[name] for name in _ROLLOUT},
            task=task_names.get(row.task_id),
            phase=last.state if last is not None else None,
            calls=calls,
            tokens=tokens,
            not_trained=last.not_trained if last is not None else "",
        )
        views.append(view)
    return views


def policies(connection: Connection) -> list[s.PolicyView]:
    """Every version of every policy, oldest first."""
    query = sa.select(t.policies).order_by(t.policies.c.name, t.policies.c.version)
    return [policy_view(row) for row in connection.execute(query)]


def policies_of(connection: Connection, name: str) -> list[s.PolicyView]:
    """Every version of one policy, newest first."""
    c = t.policies.c
    query = sa.select(t.policies).where(c.name == name).order_by(c.version.desc())
    return [policy_view(row) for row in connection.execute(query)]


def samples(connection: Connection, rollout_id: str) -> list[s.SampleView]:
    """What a rollout's final attempt was cut into. Raises NotFound."""
    rollout_detail(connection, rollout_id)
    query = sa.select(t.samples).where(t.samples.c.rollout_id == rollout_id).order_by(t.samples.c.index)
    return [sample_view(row) for row in connection.execute(query)]


def calls(connection: Connection, rollout_id: str, bodies: Bodies | None) -> list[s.CallView]:
    """A rollout's calls in order, with their messages when ``bodies`` is given. Raises NotFound."""
    rollout_detail(connection, rollout_id)
    out = [call_view(row) for row in call_rows(connection, rollout_id)]
    found = bodies(connection, [call.id for call in out]) if bodies else {}
    for call in out:
        call.request, call.response = found.get(call.id, (None, None))
    return out


def counts_of(connection: Connection, run_id: str) -> list[tuple[str, str | None, str | None, int]]:
    """How many rollouts of the run there are by state, outcome and kind."""
    r = t.rollouts.c
    query = sa.select(r.state, r.outcome, r.kind, sa.func.count()).where(r.run_id == run_id)
    return [(*row,) for row in connection.execute(query.group_by(r.state, r.outcome, r.kind))]


def run_view(connection: Connection, row: Any, by_kind: Sequence[tuple[Any, ...]] | None = None) -> s.RunView:
    """``by_kind``: its ``counts_of``, where the caller has them."""
    counts: dict[str, int] = {}
    for state, outcome, _, count in counts_of(connection, row.id) if by_kind is None else by_kind:
        key = outcome if state == "ended" and outcome else state
        counts[key] = counts.get(key, 0) + count
    asked = {"evaluation": row.evaluation_asked, "save": row.save_asked is not None}
    return s.RunView(
        id=row.id,
        name=row.name,
        kind=row.kind,
        state=row.state,
        reason=row.reason,
        step=row.step,
        settings=row.settings,
        created_at=row.created_at,
        ended_at=row.ended_at,
        rollouts=counts,
        harnesses=row.mixture or row.settings.get("harnesses") or {row.settings["harness"]: 1.0},
        asked=[name for name, pending in asked.items() if pending] if row.ended_at is None else [],
    )


def task_view(row: Any) -> s.TaskView:
    return s.TaskView(**{name: getattr(row, name) for name in s.TaskView.__struct_fields__})


def attempt_view(row: Any) -> s.AttemptView:
    return s.AttemptView(**{name: getattr(row, name) for name in s.AttemptView.__struct_fields__})


def policy_view(row: Any) -> s.PolicyView:
    return s.PolicyView(**{name: getattr(row, name) for name in s.PolicyView.__struct_fields__})


def event_view(row: Any) -> s.EventView:
    return s.EventView(**{name: getattr(row, name) for name in s.EventView.__struct_fields__})


def sample_view(row: Any) -> s.SampleView:
    return s.SampleView(**{name: getattr(row, name) for name in s.SampleView.__struct_fields__})


def rollout_detail(connection: Connection, rollout_id: str) -> s.RolloutDetail:
    """The rollout with its attempts, first to last. Raises NotFound."""
    r = t.rollouts.c
    query = sa.select(t.rollouts, t.tasks.c.instruction)
    row = connection.execute(
        query.outerjoin(t.tasks, t.tasks.c.id == r.task_id).where(r.id == rollout_id)
    ).one_or_none()
    if row is None:
        raise NotFound(f"there is no rollout {rollout_id!r}", mend="`forge-server rollout list` shows them")
    attempts = connection.execute(
        sa.select(t.attempts).where(t.attempts.c.rollout_id == rollout_id).order_by(t.attempts.c.number)
    ).all()
    rewards = connection.execute(
        sa.select(t.rewards)
        .where(t.rewards.c.attempt_id.in_([attempt.id for attempt in attempts]))
        .order_by(t.rewards.c.id)
    )
    return s.RolloutDetail(
        rollout=rollout_views(connection, [row])[0],
        attempts=[attempt_view(a) for a in attempts],
        rewards=[_struct(s.RewardView, reward) for reward in rewards],
        group=_group(connection, row.group_id),
        instruction=row.instruction or "",
    )


def _group(connection: Connection, group_id: str | None) -> s.GroupView | None:
    if group_id is None:
        return None
    row = connection.execute(sa.select(t.groups).where(t.groups.c.id == group_id)).one()
    rewards = sa.select(t.rollouts.c.reward).where(t.rollouts.c.group_id == group_id)
    found = connection.execute(rewards.order_by(t.rollouts.c.slot, t.rollouts.c.id)).scalars()
    names = [name for name in s.GroupView.__struct_fields__ if name != "rewards"]
    return s.GroupView(**{name: getattr(row, name) for name in names}, rewards=list(found))


def _struct(kind: type[T], row: Any) -> T:
    return kind(**{name: getattr(row, name) for name in kind.__struct_fields__})  # type: ignore[attr-defined]


def call_rows(connection: Connection, rollout_id: str) -> list[Any]:
    query = (
        sa.select(t.calls)
        .join(t.attempts, t.attempts.c.id == t.calls.c.attempt_id)
        .where(t.attempts.c.rollout_id == rollout_id)
        .order_by(t.attempts.c.number, t.calls.c.seq)
    )
    return list(connection.execute(query).all())


def call_view(row: Any) -> s.CallView:
    plain = [n for n in s.CallView.__struct_fields__ if n not in ("request", "response")]
    return s.CallView(**{name: getattr(row, name) for name in plain})
