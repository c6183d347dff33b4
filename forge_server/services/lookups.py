"""What an attempt is to do and how its calls are sampled, joined from its run, its task and its harness spec."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
import sqlalchemy as sa

from forge_server.domain.errors import SpecError, TaskError
from forge_server.domain.run import RunSettings
from forge_server.domain.states import AttemptState
from forge_server.harness.plan import Plan, PlanLimits, TaskInput, build_plan
from forge_server.harness.rules import Rules
from forge_server.harness.spec import Spec
from forge_server.proxy.ports import CallPolicy
from forge_server.settings import Settings
from forge_server.store import tables as t
from forge_server.store.database import Store
from forge_server.tasks.load import from_row
from forge_server.tasks.task import Task


class _Attempt(msgspec.Struct, frozen=True, kw_only=True):
    state: AttemptState
    harness: str
    mode: Literal["train", "eval", "record"]
    task_id: str | None
    run: RunSettings


class AttemptLookups:
    """Reads rows; keeps what cannot change (settings of a run, parsed tasks, rules of a spec)."""

    def __init__(self, store: Store, settings: Settings, specs: Mapping[str, Spec]) -> None:
        self._store, self._settings, self._specs = store, settings, specs
        self._runs: dict[str, RunSettings] = {}
        self._tasks: dict[str, Task] = {}
        self._rules: dict[str, Rules] = {}

    async def call_policy(self, attempt_id: str) -> CallPolicy | None:
        """How the attempt's calls are sampled and bounded; None when there is no such attempt."""
        attempt = await self._attempt(attempt_id)
        if attempt is None:
            return None
        run, spec = attempt.run, self._specs.get(attempt.harness)
        hold = self._settings.proxy.max_hold_s
        return CallPolicy(
            state=attempt.state,
            mode=attempt.mode,
            model=self._settings.engine.served_model,
            temperature=run.temperature_of(attempt.mode),
            max_calls=run.max_calls,
            max_tokens=run.max_tokens,
            max_completion_tokens=run.max_completion_tokens,
            window=self._settings.engine.max_model_len,
            max_hold_s=min(hold, spec.max_hold_s) if spec else hold,
            grammar=self._settings.proxy.grammar,
            rules=self._rules_of(attempt.harness),
        )

    async def plan(self, attempt_id: str) -> Plan:
        """What the runner is told to do. Raises SpecError or TaskError."""
        attempt = await self._attempt(attempt_id)
        if attempt is None:
            raise TaskError("there is no such attempt", where=attempt_id)
        spec = self._specs.get(attempt.harness)
        if spec is None:
            raise SpecError(
                f"there is no harness {attempt.harness!r}", mend="`forge-server harness list` shows them"
            )
        task = await self._task(attempt.task_id)
        scheduler, local = self._settings.scheduler, self._settings.local
        limits = PlanLimits(
            model=self._settings.engine.served_model,
            heartbeat_s=scheduler.heartbeat_s,
            agent_s=attempt.run.max_seconds,
            verify_s=scheduler.verify_s,
            grace_s=scheduler.grace_s,
            pids=local.pids,
            memory_mb=local.memory_mb,
        )
        return build_plan(spec, task.input if task else TaskInput(instruction=""), limits)

    async def verifier(self, attempt_id: str) -> bytes | None:
        """The tar of the task's verifier files."""
        attempt = await self._attempt(attempt_id)
        task = await self._task(attempt.task_id) if attempt else None
        return task.verifier_tar if task else None

    async def instruction(self, task_id: str) -> str:
        task = await self._task(task_id)
        return task.instruction if task else ""

    async def _attempt(self, attempt_id: str) -> _Attempt | None:
        query = (
            sa.select(
                t.attempts.c.state, t.rollouts.c.harness, t.rollouts.c.mode, t.rollouts.c.task_id, t.rollouts.c.run_id
            )
            .join(t.rollouts, t.rollouts.c.id == t.attempts.c.rollout_id)
            .where(t.attempts.c.id == attempt_id)
        )

        def read(connection: sa.Connection) -> tuple[Any, Any]:
            row = connection.execute(query).one_or_none()
            if row is None or row.run_id in self._runs:
                return row, None
            found = connection.execute(sa.select(t.runs.c.settings).where(t.runs.c.id == row.run_id))
            return row, found.scalar_one()

        row, settings = await self._store.read(read)
        if row is None:
            return None
        if settings is not None:
            self._runs[row.run_id] = msgspec.convert(settings, RunSettings, strict=False)
        return _Attempt(
            state=AttemptState(row.state),
            harness=row.harness,
            mode=row.mode,
            task_id=row.task_id,
            run=self._runs[row.run_id],
        )

    async def _task(self, task_id: str | None) -> Task | None:
        if task_id is None:
            return None
        task = self._tasks.get(task_id)
        if task is None:
            row = await self._store.read(
                lambda c: c.execute(sa.select(t.tasks).where(t.tasks.c.id == task_id)).mappings().one()
            )
            task = self._tasks[task_id] = from_row(row)
        return task

    def _rules_of(self, harness: str) -> Rules | None:
        spec = self._specs.get(harness)
        if spec is None:
            return None
        if harness not in self._rules:
            self._rules[harness] = Rules(spec)
        return self._rules[harness]
