"""The plan of an attempt, from the rows of its rollout, run and task and the harness's spec."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Protocol

import msgspec
import sqlalchemy as sa

from forge_server.domain.errors import SpecError, TaskError, TaskUnreadable
from forge_server.domain.events import Fact
from forge_server.domain.run import RunSettings
from forge_server.harness.plan import Plan, PlanLimits, TaskInput, build_plan
from forge_server.harness.spec import Spec
from forge_server.store import tables as t
from forge_server.store.database import Store

KEPT = 256
"""Plans kept at hand: a runner asks for its plan when it joins, starts and verifies."""


def fact_of(error: SpecError | TaskError) -> Fact:
    """What it means for an attempt that its plan cannot be made. A harness that is not there, or files that are not
    to be read at the moment, are no fault of the task."""
    return Fact.LAUNCH_FAILED if isinstance(error, SpecError | TaskUnreadable) else Fact.BAD_SPEC


class TaskFiles(Protocol):
    """Reads what a registered task consists of."""

    async def input(self, task_id: str) -> TaskInput:
        """Raises TaskError when the task's files are gone or wrong."""

    async def verifier(self, task_id: str) -> bytes | None:
        """The tar of its ``tests`` folder, or None when it has none. Raises TaskError."""


class PlanOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The server's limits, used where neither task nor spec has one. Tokens, seconds, processes, MiB."""

    model: str
    window: int
    heartbeat_s: float = 5.0
    verify_s: float = 120.0
    grace_s: float = 5.0
    pids: int = 256
    memory_mb: int = 2048


class Plans:
    """Serves the pod-facing routes and the scheduler, who each state what they need of it."""

    def __init__(
        self, store: Store, specs: Mapping[str, Spec], tasks: TaskFiles, options: PlanOptions
    ) -> None:
        self._store, self._specs, self._tasks, self._options = store, specs, tasks, options
        self._kept: OrderedDict[str, Plan] = OrderedDict()

    async def plan(self, attempt_id: str) -> Plan:
        """The attempt's plan. Raises SpecError or TaskError when it cannot be made."""
        if attempt_id in self._kept:
            return self._kept[attempt_id]
        harness, task_id, settings = await self._rollout(attempt_id)
        spec = self._specs.get(harness)
        if spec is None:
            raise SpecError(
                f"there is no harness {harness!r}",
                where=attempt_id,
                mend=f"known: {', '.join(sorted(self._specs))}",
            )
        if task_id is None:
            raise TaskError("the rollout has no task", where=attempt_id, mend="give it one")
        options = self._options
        limits = PlanLimits(
            model=options.model,
            heartbeat_s=options.heartbeat_s,
            agent_s=settings.max_seconds,
            verify_s=options.verify_s,
            grace_s=options.grace_s,
            pids=options.pids,
            memory_mb=options.memory_mb,
            window=options.window,
            output=settings.max_completion_tokens,
        )
        plan = build_plan(spec, await self._tasks.input(task_id), limits)
        self._kept[attempt_id] = plan
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return plan

    async def verifier(self, attempt_id: str) -> bytes | None:
        """The tar of the task's ``tests`` folder; None when the task has no verifier."""
        _, task_id, _ = await self._rollout(attempt_id)
        return None if task_id is None else await self._tasks.verifier(task_id)

    async def _rollout(self, attempt_id: str) -> tuple[str, str | None, RunSettings]:
        query = (
            sa.select(t.rollouts.c.harness, t.rollouts.c.task_id, t.runs.c.settings)
            .join(t.attempts, t.attempts.c.rollout_id == t.rollouts.c.id)
            .join(t.runs, t.runs.c.id == t.rollouts.c.run_id)
            .where(t.attempts.c.id == attempt_id)
        )
        row = await self._store.read(lambda connection: connection.execute(query).one_or_none())
        if row is None:
            raise TaskError("there is no such attempt", where=attempt_id)
        return row.harness, row.task_id, msgspec.convert(row.settings, RunSettings, strict=False)
