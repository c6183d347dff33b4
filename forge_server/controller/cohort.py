"""The groups of a run step: drawing them, and looking at what has become of them."""

from collections import Counter, defaultdict
from collections.abc import Sequence

import sqlalchemy as sa
from sqlalchemy import Connection

from forge_server.controller.ports import Events
from forge_server.domain.cohort import Group, Member, new_group
from forge_server.domain.draw import draw_harness, draw_tasks
from forge_server.domain.errors import Conflict, TaskError
from forge_server.domain.events import GroupCreated, GroupDropped
from forge_server.domain.run import Mode, RunSettings
from forge_server.domain.states import RolloutState
from forge_server.store import tables as t
from forge_server.store.database import Store


class Cohorts:
    """Draws groups through the lifecycle and reads them back."""

    def __init__(self, store: Store, events: Events) -> None:
        self._store, self._events = store, events

    async def groups(self, run_id: str, mode: Mode, step: int) -> list[Group]:
        """All groups that were drawn for the step and not dropped, in the order they were drawn."""
        g = t.groups.c
        where = (g.run_id == run_id) & (g.mode == mode) & (g.step == step) & (g.dropped == "")
        return await self._store.read(lambda connection: _read(connection, where))

    async def open_groups(self, run_id: str) -> list[Group]:
        """Training groups that are in no batch and were not dropped, in the order they were drawn."""
        g = t.groups.c
        where = (g.run_id == run_id) & (g.mode == "train") & g.batch_k.is_(None) & (g.dropped == "")
        return await self._store.read(lambda connection: _read(connection, where))

    async def last_step(self, run_id: str, mode: Mode) -> int:
        """The last step that groups were drawn for; 0 before the first."""
        g = t.groups.c
        query = sa.select(sa.func.max(g.step)).where(g.run_id == run_id, g.mode == mode)
        return await self._store.read(lambda connection: connection.execute(query).scalar_one()) or 0

    async def last_round(self, run_id: str, step: int) -> int:
        """The last round of the training groups that were drawn for the step; -1 before the first."""
        g = t.groups.c
        query = sa.select(sa.func.max(g.round)).where(g.run_id == run_id, g.mode == "train", g.step == step)
        last = await self._store.read(lambda connection: connection.execute(query).scalar_one())
        return -1 if last is None else int(last)

    async def trained(self, run_id: str) -> int:
        """The last batch that the trainer is through with; 0 before the first."""
        return await self._store.read(lambda connection: last_trained(connection, run_id))

    async def draw(
        self, run_id: str, settings: RunSettings, mode: Mode, step: int, round: int, count: int, version: int
    ) -> None:
        """Admit the next ``count`` groups, drawn as ``domain.draw`` says from what was drawn before.

        Raises TaskError when no task is ready, Conflict when the run takes no more groups.
        """

        def plan(connection: Connection) -> list[GroupCreated]:
            tasks = ready_tasks(connection, settings.taskset, settings.split, settings.tasks)
            ever, used, of_task = _drawn(connection, run_id, mode)
            groups = []
            times = {name: ever[task_id] for name, task_id in tasks.items()}
            for name in draw_tasks(list(tasks), times, settings.seed, count):
                harness = draw_harness(settings.mixture, used, of_task[tasks[name]])
                used[harness] += 1
                of_task[tasks[name]][harness] += 1
                groups.append(
                    new_group(
                        run_id,
                        settings,
                        task_id=tasks[name],
                        harness=harness,
                        mode=mode,
                        step=step,
                        round=round,
                        size=settings.n + settings.oversample,
                        policy_version=version,
                    )
                )
            return groups

        await self._admit(await self._store.read(plan))

    async def draw_split(
        self,
        run_id: str,
        settings: RunSettings,
        step: int,
        *,
        split: str,
        k: int,
        max_tasks: int,
        version: int,
    ) -> None:
        """Admit one evaluation group of ``k`` rollouts for every task of the split that has none yet.

        Raises TaskError and Conflict as ``draw`` does.
        """

        def plan(connection: Connection) -> list[GroupCreated]:
            names = settings.tasks if split == settings.split else ()
            tasks = ready_tasks(connection, settings.taskset, split, names)
            g = t.groups.c
            query = sa.select(g.task_id).where(
                g.run_id == run_id, g.mode == "eval", g.step == step, g.dropped == ""
            )
            done = set(connection.execute(query).scalars())
            used: Counter[str] = Counter()
            groups = []
            for name in list(tasks)[: max_tasks or None]:
                harness = draw_harness(settings.mixture, used, {})
                used[harness] += 1
                if tasks[name] not in done:
                    groups.append(
                        new_group(
                            run_id,
                            settings,
                            task_id=tasks[name],
                            harness=harness,
                            mode="eval",
                            step=step,
                            size=k,
                            policy_version=version,
                        )
                    )
            return groups

        await self._admit(await self._store.read(plan))

    async def drop(self, group_ids: Sequence[str], reason: str) -> None:
        """What these groups came to is not used; others may be drawn for them."""
        for group_id in group_ids:
            await self._events.apply(GroupDropped(group_id=group_id, reason=reason))

    async def _admit(self, groups: Sequence[GroupCreated]) -> None:
        for group in groups:
            applied = await self._events.apply(group)
            if not applied.ok:
                raise Conflict(f"the run takes no more groups ({applied.refusal})", where=group.run_id)


def last_trained(connection: Connection, run_id: str) -> int:
    """The last batch that the run's trainer is through with; 0 before the first."""
    c = t.batches.c
    query = sa.select(sa.func.max(c.k)).where(c.run_id == run_id, c.trained_at.is_not(None))
    return connection.execute(query).scalar_one() or 0


def ready_tasks(
    connection: Connection, taskset: str, split: str, names: Sequence[str] = ()
) -> dict[str, str]:
    """Task ids by name, in order of the name. Raises TaskError when there are none."""
    c = t.tasks.c
    query = sa.select(c.name, c.id).where(c.taskset == taskset, c.split == split, c.state == "ready")
    if names:
        query = query.where(c.name.in_(names))
    tasks = {row.name: row.id for row in connection.execute(query.order_by(c.name))}
    if not tasks:
        raise TaskError(
            f"no task of taskset {taskset!r}, split {split!r} is ready",
            mend="`forge-server task import` adds tasks, `task list` shows them",
        )
    return tasks


def _drawn(
    connection: Connection, run_id: str, mode: Mode
) -> tuple[Counter[str], Counter[str], defaultdict[str, Counter[str]]]:
    """How often the run drew each task id so far, in groups; how often it used each harness since its mixture was
    set, and how often for each task id. What was drawn under another mixture is not to be made up for."""
    since = connection.execute(sa.select(t.runs.c.mixture_at).where(t.runs.c.id == run_id)).scalar_one()
    g, r = t.groups.c, t.rollouts.c
    query = (
        sa.select(g.task_id, r.harness, g.created_at)
        .join(t.rollouts, r.group_id == g.id)
        .where(g.run_id == run_id, g.mode == mode, r.slot == 0)
    )
    ever: Counter[str] = Counter()
    of_task: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for row in connection.execute(query):
        ever[row.task_id] += 1
        if since is None or row.created_at >= since:
            of_task[row.task_id][row.harness] += 1
    return ever, sum(of_task.values(), Counter[str]()), of_task


def _read(connection: Connection, where: sa.ColumnElement[bool]) -> list[Group]:
    g, r, a = t.groups.c, t.rollouts.c, t.attempts.c
    members: dict[str, list[Member]] = {}
    query = (
        sa.select(
            r.id,
            r.group_id,
            r.state,
            r.outcome,
            r.kind,
            r.reward,
            r.attempts,
            r.final_attempt_id,
            a.not_trained,
            r.created_at,
            r.ended_at,
        )
        .join(t.groups, g.id == r.group_id)
        .outerjoin(t.attempts, a.id == r.final_attempt_id)
        .where(where)
        .order_by(r.slot, r.id)
    )
    for row in connection.execute(query):
        member = Member(
            id=row.id,
            ended=row.state == RolloutState.ENDED,
            outcome=row.outcome,
            kind=row.kind,
            reward=row.reward,
            attempts=row.attempts,
            attempt_id=row.final_attempt_id,
            not_trained=row.not_trained or "",
            created_at=row.created_at,
            ended_at=row.ended_at,
        )
        members.setdefault(row.group_id, []).append(member)
    groups = sa.select(g.id, g.step, g.round, g.task_id).where(where)
    return [
        Group(id=row.id, step=row.step, round=row.round, task_id=row.task_id, members=tuple(members[row.id]))
        for row in connection.execute(groups.order_by(g.step, g.round, g.created_at, g.id))
    ]
