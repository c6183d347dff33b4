"""What both ways of generating share: cutting what is complete, and making a batch or a pause of it."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import structlog
from sqlalchemy import Connection

from forge_server.controller.assemble import Plan, body_of, drop_groups, store_batch
from forge_server.controller.cohort import Cohorts
from forge_server.controller.measure import ended_rollouts, step_figures
from forge_server.controller.ports import Events
from forge_server.controller.recordings import cut_attempt
from forge_server.controller.runs import Run
from forge_server.domain.batches import Drop, EndedRollout, Selection
from forge_server.domain.cohort import Group
from forge_server.domain.events import RunPaused
from forge_server.domain.policy import Version
from forge_server.store.database import Store
from forge_server.store.step_metrics import put_metrics
from forge_server.trajectory.attempt import Cut

log = structlog.get_logger(__name__)

NO_SIGNAL = "no_signal"


class Generate(Protocol):
    """A mode: one act towards batch ``run.step + 1``; False when it must wait."""

    async def __call__(
        self, workshop: "Workshop", run: Run, versions: Sequence[Version], live: int
    ) -> bool: ...


class Workshop:
    """Keeps the cuts of one run's open groups in memory, so that a group is cut once; any of them can
    be cut again from its rows. ``window`` is the engine's, in tokens.
    """

    def __init__(
        self,
        store: Store,
        events: Events,
        cohorts: Cohorts,
        *,
        window: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.cohorts = cohorts
        self._store, self._events, self._window, self._clock = store, events, window, clock
        self._cuts: dict[str, Cut] = {}  # by attempt id

    async def look_at(self, run: Run, groups: Sequence[Group]) -> dict[str, list[EndedRollout]]:
        """The rollouts of each complete group, cut one attempt at a time: the loop and the readers stay
        free."""
        max_len = run.settings.max_sample_tokens or self._window
        for group in groups:
            for member in group.members:
                attempt_id = member.attempt_id
                if attempt_id is not None and attempt_id not in self._cuts:
                    self._cuts[attempt_id] = await self._store.read(
                        lambda connection, a=attempt_id: cut_attempt(connection, a, max_len)  # type: ignore[misc]
                    )
        return {group.id: ended_rollouts(group, self._cuts) for group in groups}

    async def assemble(
        self,
        run: Run,
        groups: Sequence[Group],
        rollouts: Mapping[str, Sequence[EndedRollout]],
        selection: Selection,
        versions: Sequence[Version],
    ) -> None:
        """Batch ``run.step + 1`` of ``groups``: each of them is in ``selection``, trained or dropped."""
        began = self._clock()
        plan = Plan(
            run_id=run.id,
            k=run.step + 1,
            seed=run.settings.seed,
            groups=groups,
            selection=selection,
            cuts=self._cuts,
            figures=self._figures(run, groups, rollouts, selection, versions),
        )
        body = await asyncio.to_thread(body_of, plan)
        now = self._clock()
        plan.figures["seconds/assemble"] = now - began
        await store_batch(self._events, plan, body, now)
        self._forget(groups)
        log.info("batch assembled", run=run.name, k=plan.k, groups=len(selection.groups), bytes=len(body))

    async def drop(self, groups: Sequence[Group], reason: Drop) -> None:
        """Train none of ``groups``; others are drawn for them."""
        await self.cohorts.drop([group.id for group in groups], reason.value)
        self._forget(groups)

    async def pause_without_signal(
        self,
        run: Run,
        groups: Sequence[Group],
        rollouts: Mapping[str, Sequence[EndedRollout]],
        selection: Selection,
        versions: Sequence[Version],
    ) -> None:
        """Pause; the groups are dropped with it, so that a resumed run draws new ones."""
        k, now = run.step + 1, self._clock()
        reason = f"{NO_SIGNAL}: none of {len(groups)} groups of step {k} has unequal rewards"
        figures = self._figures(run, groups, rollouts, selection, versions)

        def also(connection: Connection) -> None:
            drop_groups(connection, selection.dropped)
            put_metrics(connection, run.id, k, "controller", figures, now)

        await self._events.apply(RunPaused(run_id=run.id, reason=reason), also=also)
        self._forget(groups)

    def _figures(
        self,
        run: Run,
        groups: Sequence[Group],
        rollouts: Mapping[str, Sequence[EndedRollout]],
        selection: Selection,
        versions: Sequence[Version],
    ) -> dict[str, float]:
        steps = {v.version: v.step for v in versions if v.run_id == run.id and v.step is not None}

        def age(version: int) -> int:
            """Updates made between the weights that sampled and those that this batch updates."""
            return run.step - steps.get(version, 0)

        return step_figures(groups, rollouts, selection, self._cuts, age)

    def _forget(self, groups: Sequence[Group]) -> None:
        for group in groups:
            for member in group.members:
                self._cuts.pop(member.attempt_id or "", None)
