"""Runs that train nothing: one evaluation round, or some steps of recorded groups."""

import time
from collections.abc import Callable

from forge_server.controller.cohort import Cohorts
from forge_server.controller.measure import reward_figures
from forge_server.controller.policies import Policies
from forge_server.controller.ports import Evaluator, Events
from forge_server.controller.runs import Run
from forge_server.domain.events import RunEnded
from forge_server.domain.run import EXTERNAL
from forge_server.domain.states import RunState
from forge_server.store.database import Store
from forge_server.store.step_metrics import merge_metrics


class Rounds:
    """The next act of an evaluation or recording run; see ``Steps`` for the manner."""

    def __init__(
        self,
        store: Store,
        events: Events,
        cohorts: Cohorts,
        policies: Policies,
        evaluator: Evaluator,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store, self._events, self._cohorts = store, events, cohorts
        self._policies, self._evaluator, self._clock = policies, evaluator, clock

    async def advance(self, run: Run) -> bool:
        """One act; False when nothing is to be done before something happens. Raises ForgeError."""
        if run.kind == "record":
            return await self._record(run)
        if not await self._evaluator.advance(run.id, run.settings, 0, self._policies.current):
            return False
        await self._events.apply(RunEnded(run_id=run.id, state=RunState.COMPLETED))
        return True

    async def _record(self, run: Run) -> bool:
        settings = run.settings
        if settings.harness == EXTERNAL:
            return False
        step = await self._cohorts.last_step(run.id, "record")
        groups = await self._cohorts.groups(run.id, "record", step) if step else []
        if groups and len(groups) < settings.groups:
            await self._draw(run, step, settings.groups - len(groups))
            return True
        if any(not group.complete for group in groups):
            return False
        if groups:
            rewards = [m.reward or 0.0 for group in groups for m in group.members if m.valid]
            now = self._clock()
            figures = reward_figures(rewards)
            await self._store.write(lambda c: merge_metrics(c, run.id, step, "controller", figures, now))
        if step >= settings.steps:
            await self._events.apply(RunEnded(run_id=run.id, state=RunState.COMPLETED))
        else:
            await self._draw(run, step + 1, settings.groups)
        return True

    async def _draw(self, run: Run, step: int, count: int) -> None:
        await self._cohorts.draw(run.id, run.settings, "record", step, 0, count, self._policies.current)
