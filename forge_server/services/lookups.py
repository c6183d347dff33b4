"""How an attempt's calls are sampled, and what its task consists of, joined from several tables."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import msgspec
import sqlalchemy as sa

from forge_server.domain.run import RunSettings
from forge_server.domain.states import AttemptState
from forge_server.harness.plan import TaskInput
from forge_server.harness.rules import Rules
from forge_server.harness.spec import Normalise, Spec
from forge_server.proxy.ports import CallPolicy
from forge_server.settings import Settings
from forge_server.store import tables as t
from forge_server.store.database import Store
from forge_server.tasks.load import from_row
from forge_server.tasks.task import Task

KEPT_TASKS = 512


class CallPolicies:
    """The proxy's lookup. Keeps what cannot change: the settings of a run, the rules of a spec."""

    def __init__(self, store: Store, settings: Settings, specs: Mapping[str, Spec]) -> None:
        self._store, self._settings = store, settings
        self._specs = specs
        # a spec without rules gets none: with rules the proxy decodes every message of every call
        self._rules = {
            name: Rules(spec)
            for name, spec in specs.items()
            if spec.side_calls or spec.sub_agents or spec.normalise != Normalise()
        }
        self._runs: dict[str, RunSettings] = {}

    async def __call__(self, attempt_id: str) -> CallPolicy | None:
        """The policy of an attempt as the database has it now; None when there is no such attempt."""
        c = t.rollouts.c
        query = (
            sa.select(t.attempts.c.state, c.harness, c.mode, c.run_id)
            .join(t.rollouts, c.id == t.attempts.c.rollout_id)
            .where(t.attempts.c.id == attempt_id)
        )

        def read(connection: sa.Connection) -> tuple[Any, Any]:
            row = connection.execute(query).one_or_none()
            if row is None or row.run_id in self._runs:
                return row, None
            found = connection.execute(sa.select(t.runs.c.settings).where(t.runs.c.id == row.run_id))
            return row, found.scalar_one()

        row, table = await self._store.read(read)
        if row is None:
            return None
        if table is not None:
            self._runs[row.run_id] = msgspec.convert(table, RunSettings, strict=False)
        run, spec = self._runs[row.run_id], self._specs.get(row.harness)
        longest = self._settings.proxy.max_hold_s
        return CallPolicy(
            state=AttemptState(row.state),
            mode=row.mode,
            model=self._settings.engine.served_model,
            temperature=run.temperature_of(row.mode),
            max_calls=run.max_calls,
            max_tokens=run.max_tokens,
            max_completion_tokens=run.max_completion_tokens,
            window=self._settings.engine.max_model_len,
            max_hold_s=min(longest, spec.max_hold_s) if spec else longest,
            grammar=self._settings.proxy.grammar,
            rules=self._rules.get(row.harness),
            forwarding=run.forwarding,
            keep_reasoning=run.keep_reasoning,
        )


class TaskFiles:
    """Reads what registered tasks consist of; the last ones stay at hand."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._kept: OrderedDict[str, Task] = OrderedDict()

    async def input(self, task_id: str) -> TaskInput:
        """Raises TaskError when the task's files are gone or changed."""
        return (await self._task(task_id)).input

    async def verifier(self, task_id: str) -> bytes | None:
        """The tar of its ``tests`` folder. Raises TaskError."""
        return (await self._task(task_id)).verifier_tar

    async def instruction(self, task_id: str) -> str:
        return (await self._task(task_id)).instruction

    async def _task(self, task_id: str) -> Task:
        task = self._kept.get(task_id)
        if task is None:
            query = sa.select(t.tasks).where(t.tasks.c.id == task_id)
            row = dict(await self._store.read(lambda c: c.execute(query).mappings().one()))
            task = self._kept[task_id] = from_row(row)
            if len(self._kept) > KEPT_TASKS:
                self._kept.popitem(last=False)
        return task
