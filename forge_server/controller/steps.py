"""What a training run does next, decided from the rows each time anew.

    last checkpoint refused -> pause
    evaluation due or asked -> take it one act further
    head not live           -> load it
    all steps trained       -> complete
    else                    -> generate, as the run's mode says

``Steps.advance`` does one act and says whether there is more to do at once. Whatever it did is a row,
so a kill between two acts loses nothing, and a kill within one repeats it.
"""

import time
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from forge_server.controller import drain, stream
from forge_server.controller.cohort import Cohorts
from forge_server.controller.generation import Generate, Workshop
from forge_server.controller.policies import Policies
from forge_server.controller.ports import Evaluator, Events
from forge_server.controller.runs import Run
from forge_server.controller.swap import Swapper
from forge_server.controller.trainer_link import TrainerLink
from forge_server.domain import policy
from forge_server.domain.errors import CheckpointError, TaskError
from forge_server.domain.events import Noted, RunEnded, RunPaused
from forge_server.domain.policy import Version
from forge_server.domain.states import PolicyState, RunState
from forge_server.store import tables as t
from forge_server.store.database import Store
from forge_server.store.step_metrics import merge_metrics

REJECTED = "checkpoint_rejected"
MODES: dict[str, Generate] = {"sync": drain.generate, "async": stream.generate}


class Steps:
    """The next act of one training run. ``window`` is the engine's, in tokens."""

    def __init__(
        self,
        store: Store,
        events: Events,
        cohorts: Cohorts,
        policies: Policies,
        swapper: Swapper,
        link: TrainerLink,
        evaluator: Evaluator,
        *,
        window: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store, self._events = store, events
        self._workshop = Workshop(store, events, cohorts, window=window, clock=clock)
        self._policies, self._swapper, self._link = policies, swapper, link
        self._evaluator, self._clock = evaluator, clock

    async def advance(self, run: Run) -> bool:
        """One act; False when nothing is to be done before something happens.

        Raises ForgeError: the run cannot go on and must pause with that reason.
        """
        versions = await self._policies.versions()
        if run.base_version is None:
            await self._begin(run, versions)
            return True
        if await self._refused(run, versions):
            return True
        live = policy.live(versions)
        if live is not None and run.uses(live) and not await self._measured(run, live):
            return False  # measured before it is replaced
        head = policy.head(versions, run.id, run.base_version)
        if head is None:
            raise CheckpointError("the weights the run started from were rejected", where=run.name)
        if head.state is not PolicyState.LIVE:
            await self._load(run, head)
            return True
        trained = run.step_of(head)
        if trained >= run.settings.steps:
            await self._events.apply(RunEnded(run_id=run.id, state=RunState.COMPLETED))
            return True
        if run.step >= run.settings.steps or (run.settings.mode == "sync" and trained < run.step):
            return False  # the trainer has the word
        return await MODES[run.settings.mode](self._workshop, run, versions, head.version)

    async def _begin(self, run: Run, versions: list[Version]) -> None:
        """Remember which version the run starts from."""
        serving = policy.live(versions)
        if serving is None:
            raise CheckpointError("no policy version is live", mend="set [engine] model to a folder")

        def write(connection: Connection) -> None:
            c = t.runs.c
            connection.execute(
                sa.update(t.runs)
                .where(c.id == run.id, c.base_version.is_(None))
                .values(base_version=serving.version)
            )

        await self._store.write(write)

    async def _refused(self, run: Run, versions: list[Version]) -> bool:
        """Whether the trainer's last checkpoint was refused; the run is paused then.

        The trainer's session is ended with it: it comes again, goes back before that step, and what it
        reports then is a new version.
        """
        own = [v for v in versions if v.run_id == run.id and v.step is not None]
        newest = max(own, key=lambda v: (v.step or 0, v.version), default=None)
        if newest is None or newest.state is not PolicyState.REJECTED:
            return False
        if await self._link.fenced_off_since(run.id, newest.created_at):
            return False
        reason = f"{REJECTED}: version {newest.version} of step {newest.step}: {newest.reason}"
        await self._link.fence_off(run.id, RunPaused(run_id=run.id, reason=reason))
        return True

    async def _measured(self, run: Run, live: Version) -> bool:
        """Whether nothing more is to be measured of the live version; else the round goes one act further.

        A person's wish is taken back with its round, and when there is nothing to run it on: a run that is
        resumed must not stop at it again.
        """
        if not (run.evaluation_asked or _evaluation_due(run, live)):
            return True
        step = run.step_of(live)
        try:
            if not await self._evaluator.advance(run.id, run.settings, step, live.version):
                return False
        except TaskError as error:
            await self._take_back(
                run, "evaluation_failed", step=step, version=live.version, reason=str(error)
            )
            raise
        await self._take_back(run, "evaluation_done", step=step, version=live.version)
        return True

    async def _take_back(self, run: Run, kind: str, **data: Any) -> None:
        """The wish for an evaluation, if there is one."""
        if not run.evaluation_asked:
            return

        def also(connection: Connection) -> None:
            connection.execute(sa.update(t.runs).where(t.runs.c.id == run.id).values(evaluation_asked=False))

        await self._events.apply(Noted(kind=kind, run_id=run.id, data=data), also=also)

    async def _load(self, run: Run, head: Version) -> None:
        try:
            report = await self._swapper.load(head.version)
        except CheckpointError:
            if (await self._policies.get(head.version)).state is PolicyState.REJECTED:
                return  # the next look pauses the run
            raise  # it was live before, and is what the run goes on from all the same
        step = run.step_of(head)
        if report is None or not step:
            return
        now = self._clock()
        figures = {
            "seconds/swap": report.total_s,
            "seconds/held": self._swapper.held_s.get(head.version, report.total_s),
            "swap/probe_max_gap": report.probe_max_gap,
        }

        def write(connection: Connection) -> None:
            merge_metrics(
                connection, run.id, step, "controller", {**figures, **_waits(connection, run.id, step)}, now
            )

        await self._store.write(write)


def _evaluation_due(run: Run, live: Version) -> bool:
    """Whether the run's settings want an evaluation round of the version, which it uses."""
    wanted, step = run.settings.eval, run.step_of(live)
    if wanted is None:
        return False
    if step == 0:
        return wanted.at_start
    if step >= run.settings.steps:
        return wanted.at_end
    return wanted.every > 0 and step % wanted.every == 0


def _waits(connection: Connection, run_id: str, k: int) -> dict[str, float]:
    """How long batch ``k`` waited for the trainer, and how long that took for it."""
    c = t.batches.c
    row = connection.execute(
        sa.select(c.created_at, c.fetched_at, c.trained_at).where(c.run_id == run_id, c.k == k)
    ).one_or_none()
    if row is None or row.fetched_at is None or row.trained_at is None:
        return {}
    return {
        "seconds/wait_trainer": row.fetched_at - row.created_at,
        "seconds/train": row.trained_at - row.fetched_at,
    }
