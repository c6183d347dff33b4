"""What a training run does next, decided from the rows each time anew (``sync`` mode).

    head not live          -> load it
    batch k at the trainer -> wait for its checkpoint
    evaluation due         -> take it one act further
    all steps trained      -> complete
    else                   -> draw, wait for the whole cohort, assemble batch k + 1

``Steps.advance`` does one act and says whether there is more to do at once. Whatever it did is a row,
so a kill between two acts loses nothing, and a kill within one repeats it.
"""

import time
from collections.abc import Callable

import sqlalchemy as sa
import structlog
from sqlalchemy import Connection

from forge_server.controller.assemble import Plan, body_of, drop_groups, store_batch
from forge_server.controller.cohort import Cohorts
from forge_server.controller.measure import ended_rollouts, step_figures
from forge_server.controller.policies import Policies
from forge_server.controller.ports import Evaluator, Events
from forge_server.controller.recordings import cut_attempt
from forge_server.controller.runs import Run
from forge_server.controller.swap import Swapper
from forge_server.controller.trainer_link import TrainerLink
from forge_server.domain import policy
from forge_server.domain.batches import Drop, Move, next_move, select
from forge_server.domain.cohort import Group
from forge_server.domain.errors import CheckpointError
from forge_server.domain.events import RunEnded, RunPaused
from forge_server.domain.policy import Version
from forge_server.domain.states import PolicyState, RunState
from forge_server.store import tables as t
from forge_server.store.database import Store
from forge_server.store.step_metrics import merge_metrics
from forge_server.trajectory.attempt import Cut

log = structlog.get_logger(__name__)

NO_SIGNAL = "no_signal"
REJECTED = "checkpoint_rejected"


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
        self._store, self._events, self._cohorts = store, events, cohorts
        self._policies, self._swapper, self._link = policies, swapper, link
        self._evaluator, self._window, self._clock = evaluator, window, clock
        self._cuts: dict[str, Cut] = {}  # by attempt id, of the step that is being drawn

    async def advance(self, run: Run) -> bool:
        """One act; False when nothing is to be done before something happens.

        Raises ForgeError: the run cannot go on and must pause with that reason.
        """
        versions = await self._policies.versions()
        if run.base_version is None:
            await self._begin(run, versions)
            return True
        head = policy.head(versions, run.id, run.base_version)
        if head is None:
            raise CheckpointError("the weights the run started from were rejected", where=run.name)
        trained = head.step or 0 if head.run_id == run.id else 0
        if trained < run.step:
            return await self._await_checkpoint(run, versions)
        if head.state is not PolicyState.LIVE:
            await self._load(run, head)
            return True
        if _evaluation_due(run, trained) and not await self._evaluator.advance(
            run.id, run.settings, trained, head.version
        ):
            return False
        if run.step >= run.settings.steps:
            await self._events.apply(RunEnded(run_id=run.id, state=RunState.COMPLETED))
            return True
        return await self._generate(run, head.version)

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

    async def _await_checkpoint(self, run: Run, versions: list[Version]) -> bool:
        """Nothing to do but wait, unless the trainer has reported a checkpoint that was refused.

        Then its session is ended: it comes again and reports what it has on disk, which is a new version.
        """
        refused = [v for v in versions if v.run_id == run.id and v.step == run.step]
        if not refused:
            return False
        newest = max(refused, key=lambda v: v.version)
        if not await self._link.opened_before(run.id, newest.created_at):
            return False
        await self._link.fence_off(run.id)
        reason = f"{REJECTED}: version {newest.version} of step {run.step}: {newest.reason}"
        await self._events.apply(RunPaused(run_id=run.id, reason=reason))
        return True

    async def _load(self, run: Run, head: Version) -> None:
        try:
            report = await self._swapper.load(head.version)
        except CheckpointError:
            return  # the row says so; the next look pauses the run
        if report is None or head.step is None:
            return
        now = self._clock()
        figures = {
            "seconds/swap": report.total_s,
            "seconds/held": self._swapper.held_s.get(head.version, report.total_s),
            "swap/probe_max_gap": report.probe_max_gap,
        }
        step = head.step

        def write(connection: Connection) -> None:
            merge_metrics(
                connection, run.id, step, "controller", {**figures, **_waits(connection, run.id, step)}, now
            )

        await self._store.write(write)

    async def _generate(self, run: Run, version: int) -> bool:
        """Draw, wait, and assemble batch ``run.step + 1``."""
        k, settings = run.step + 1, run.settings
        groups = [group for group in await self._cohorts.open_groups(run.id) if group.step == k]
        first_round = [group for group in groups if group.round == min(g.round for g in groups)]
        if len(first_round) < settings.groups and len(first_round) == len(groups):
            missing = settings.groups - len(groups)
            round = first_round[0].round if first_round else await self._next_round(run.id, k)
            await self._cohorts.draw(run.id, settings, "train", k, round, missing, version)
            return True
        complete = [group for group in groups if group.complete]
        await self._cut(complete, settings.max_sample_tokens or self._window)
        if len(complete) < len(groups):
            return False
        rollouts = {group.id: ended_rollouts(group, self._cuts) for group in groups}
        selection = select(rollouts)
        rounds = len({group.round for group in groups})
        move = next_move(len(selection.groups), settings.groups, rounds, settings.max_generation_batches)
        if move is Move.DRAW:
            missing = settings.groups - len(selection.groups)
            round = max(group.round for group in groups) + 1
            await self._cohorts.draw(run.id, settings, "train", k, round, missing, version)
            return True
        figures = step_figures(groups, rollouts, selection, self._cuts, live_version=version, max_staleness=0)
        if move is Move.NO_SIGNAL:
            await self._pause_without_signal(run, k, groups, selection.dropped, figures)
            return True
        began = self._clock()
        plan = Plan(
            run_id=run.id,
            k=k,
            seed=settings.seed,
            groups=groups,
            selection=selection,
            cuts=self._cuts,
            figures=figures,
        )
        body = body_of(plan)
        now = self._clock()
        plan.figures["seconds/assemble"] = now - began
        await store_batch(self._events, plan, body, now)
        self._cuts = {}
        log.info("batch assembled", run=run.name, k=k, groups=len(selection.groups), bytes=len(body))
        return True

    async def _cut(self, groups: list[Group], max_len: int) -> None:
        """Cut what is complete, one attempt at a time, so that the loop and the readers stay free."""
        for group in groups:
            for member in group.members:
                attempt_id = member.attempt_id
                if attempt_id is not None and attempt_id not in self._cuts:
                    self._cuts[attempt_id] = await self._store.read(
                        lambda connection, a=attempt_id: cut_attempt(connection, a, max_len)  # type: ignore[misc]
                    )

    async def _next_round(self, run_id: str, step: int) -> int:
        """After rounds without a signal, whose groups were dropped, the numbers go on."""
        groups = await self._cohorts.groups(run_id, "train", step)
        return max((group.round for group in groups), default=-1) + 1

    async def _pause_without_signal(
        self, run: Run, k: int, groups: list[Group], dropped: dict[str, Drop], figures: dict[str, float]
    ) -> None:
        """Pause; the groups are dropped with it, so that a resumed run draws new ones."""
        reason = f"{NO_SIGNAL}: none of {len(groups)} groups of step {k} has unequal rewards"
        now = self._clock()

        def also(connection: Connection) -> None:
            drop_groups(connection, dropped)
            merge_metrics(connection, run.id, k, "controller", figures, now)

        await self._events.apply(RunPaused(run_id=run.id, reason=reason), also=also)
        self._cuts = {}


def _evaluation_due(run: Run, trained: int) -> bool:
    """Whether the run wants an evaluation round of the version after ``trained`` steps."""
    wanted = run.settings.eval
    if wanted is None:
        return False
    if trained == 0:
        return wanted.at_start
    if trained >= run.settings.steps:
        return wanted.at_end
    return wanted.every > 0 and trained % wanted.every == 0


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
