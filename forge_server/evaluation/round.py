"""One evaluation round of a run: every task of a split, ``k`` rollouts each, under one policy version.

Its groups carry the run step they measure and mode ``eval``; its result is the ``step_metrics`` row
with source ``eval``, whose presence says that the round is over. A group in which another version has
answered, because that was put live while the run was paused, is dropped and drawn again.
"""

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import sqlalchemy as sa
from sqlalchemy import Connection

from forge_server.domain.cohort import Group
from forge_server.domain.run import Mode, RunSettings
from forge_server.domain.states import CallEnd
from forge_server.evaluation.stats import round_figures
from forge_server.store import tables as t
from forge_server.store.database import Store
from forge_server.store.step_metrics import merge_metrics

OTHER_VERSION = "other_version"


class Cohorts(Protocol):
    """Who draws groups and reads them back."""

    async def groups(self, run_id: str, mode: Mode, step: int) -> list[Group]: ...

    async def drop(self, group_ids: Sequence[str], reason: str) -> None: ...

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
    ) -> None: ...


class Evaluation:
    """Takes rounds further, one act at a time."""

    def __init__(self, store: Store, cohorts: Cohorts, *, clock: Callable[[], float] = time.time) -> None:
        self._store, self._cohorts, self._clock = store, cohorts, clock
        self._drawn: set[tuple[str, int]] = set()

    async def advance(self, run_id: str, settings: RunSettings, step: int, version: int) -> bool:
        """Draw the round of ``step`` or look at it; True once its result is stored.

        Raises TaskError when the split has no tasks, Conflict when the run takes no more groups.
        """
        plan = settings.evaluation
        if plan is None or await self._store.read(lambda c: _stored(c, run_id, step)):
            return True
        while True:
            if (run_id, step) not in self._drawn:
                await self._cohorts.draw_split(
                    run_id,
                    settings,
                    step,
                    split=plan.split,
                    k=plan.k,
                    max_tasks=plan.max_tasks,
                    version=version,
                )
                self._drawn.add((run_id, step))
            groups = await self._cohorts.groups(run_id, "eval", step)
            if not all(group.complete for group in groups):
                return False
            others = await self._store.read(lambda c: _of_other_versions(c, run_id, step, version))
            if not others:
                break
            await self._cohorts.drop(others, OTHER_VERSION)
            self._drawn.discard((run_id, step))
        figures = round_figures([_valid_rewards(group) for group in groups], plan.k)
        figures |= {"version": version, "temperature": plan.temperature, **_lost(groups)}
        ended = [m.ended_at for group in groups for m in group.members if m.ended_at is not None]
        figures["seconds"] = max(ended) - min(m.created_at for group in groups for m in group.members)
        now = self._clock()
        await self._store.write(lambda c: merge_metrics(c, run_id, step, "eval", figures, now))
        return True


def _of_other_versions(connection: Connection, run_id: str, step: int, version: int) -> list[str]:
    """The groups of the round in whose rollouts another policy version has answered a call."""
    g, r, c = t.groups.c, t.rollouts.c, t.calls.c
    query = (
        sa.select(g.id)
        .distinct()
        .join(t.rollouts, r.group_id == g.id)
        .join(t.calls, c.attempt_id == r.final_attempt_id)
        .where(g.run_id == run_id, g.mode == "eval", g.step == step, g.dropped == "")
        .where(c.end == CallEnd.OK, c.policy_version != version)
    )
    return list(connection.execute(query.order_by(g.id)).scalars())


def _stored(connection: Connection, run_id: str, step: int) -> bool:
    c = t.step_metrics.c
    query = sa.select(c.step).where(c.run_id == run_id, c.step == step, c.source == "eval")
    return connection.execute(query).first() is not None


def _valid_rewards(group: Group) -> list[float]:
    return [member.reward or 0.0 for member in group.members if member.valid]


def _lost(groups: list[Group]) -> dict[str, float]:
    """Rollouts by outcome, for those that were not measured."""
    counts: dict[str, float] = {}
    for group in groups:
        for member in group.members:
            if not member.valid:
                name = f"rollouts/{member.outcome}"
                counts[name] = counts.get(name, 0) + 1
    return counts
