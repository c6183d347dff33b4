"""The controller: one supervised loop per run that has not ended.

A loop looks at the run's row, does the next act, and otherwise waits for a bell: the lifecycle's events
and the trainer's calls ring it. The wait has a limit only so that a bell that never rang costs time and
not the run. What goes wrong is attributed: the run pauses with the reason, and a person resumes it.
"""

import asyncio
from collections.abc import Awaitable, Callable

import structlog
from sqlalchemy import Connection

from forge_server.controller.bell import Bells, listen
from forge_server.controller.keeper import Keeper
from forge_server.controller.policies import Policies
from forge_server.controller.ports import Lifecycle
from forge_server.controller.rounds import Rounds
from forge_server.controller.runs import Run, going_runs, read_run
from forge_server.controller.steps import Steps
from forge_server.controller.swap import Swapper
from forge_server.domain.engine import EngineUnavailable
from forge_server.domain.errors import CheckpointError, Conflict, EngineError, ForgeError, StoreError
from forge_server.domain.events import EventRow, RunPaused, RunResumed
from forge_server.domain.policy import POLICY_BUSY
from forge_server.domain.states import PolicyState, RunState
from forge_server.store.database import Store

log = structlog.get_logger(__name__)

IDLE_S = 30.0
LEAVE_S = 60.0
"""How long a trainer may take to leave by itself once its run has ended."""
ENGINE_TRIES = 8
ENGINE_BACKOFF_S = 1.0
_WAKING = ("group_complete", "batch_assembled", "checkpoint_reported", "evaluation_asked")
_WAKING_ALL = ("run_paused", "run_resumed", "run_ended")


class Controller:
    """``steps`` makes the state of one training run; ``keeper`` its trainer's keeper; ``sweep`` ends what is left of
    its trainers."""

    def __init__(
        self,
        store: Store,
        lifecycle: Lifecycle,
        bells: Bells,
        policies: Policies,
        swapper: Swapper,
        rounds: Rounds,
        steps: Callable[[], Steps],
        keeper: Callable[[str, Callable[[], None]], Keeper],
        sweep: Callable[[str], Awaitable[bool]],
        *,
        engine_backoff_s: float = ENGINE_BACKOFF_S,
        leave_s: float = LEAVE_S,
    ) -> None:
        self._store, self._lifecycle, self._bells = store, lifecycle, bells
        self._policies, self._swapper, self._rounds = policies, swapper, rounds
        self._make_steps, self._make_keeper, self._sweep = steps, keeper, sweep
        self._engine_backoff_s, self._leave_s = engine_backoff_s, leave_s
        self._loops: dict[str, asyncio.Task[None]] = {}
        self._keepers: dict[str, Keeper] = {}
        self._swept: set[str] = set()  # runs of which no trainer of an earlier life is left
        self._restoring: asyncio.Task[None] | None = None
        self._restored = asyncio.Event()
        lifecycle.subscribe(self._hear)

    async def start(self) -> None:
        """Finish what the last stop interrupted, and go on with every run that has not ended."""
        self._restoring = asyncio.create_task(self._restore())
        for run in await self._store.read(going_runs):
            self.follow(run.id)

    async def stop(self) -> None:
        """Stop the loops and every trainer. What they did is in the rows."""
        tasks = [*self._loops.values(), *([self._restoring] if self._restoring else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await asyncio.gather(*(keeper.stop() for keeper in self._keepers.values()))
        self._keepers.clear()

    @property
    def driven(self) -> list[str]:
        """Runs that have a loop."""
        return [run_id for run_id, task in self._loops.items() if not task.done()]

    def follow(self, run_id: str) -> None:
        """Drive the run, unless it is driven already."""
        task = self._loops.get(run_id)
        if task is None or task.done():
            self._loops[run_id] = asyncio.create_task(self._drive(run_id))

    async def activate(self, version: int) -> None:
        """Put a kept version live by hand. Raises NotFound, Conflict, CheckpointError, EngineError."""
        for run in await self._store.read(going_runs):
            if run.settings.policy == self._policies.name and _wants_policy(run):
                does = "trains" if run.kind == "train" else "measures"
                raise Conflict(f"run {run.name} {does} this policy", mend="pause the run first")
        await self._swapper.load(version)

    def _hear(self, row: EventRow) -> None:
        if row.kind in _WAKING_ALL:
            self._bells.ring_all()
        elif row.kind in _WAKING and row.run_id is not None:
            self._bells.ring(row.run_id)

    async def _restore(self) -> None:
        wait = self._engine_backoff_s
        while True:
            try:
                await self._swapper.restore()
                break
            except CheckpointError:
                break  # rejected, and the row says so
            except ForgeError as error:
                log.warning("the interrupted weight update failed, trying again", reason=str(error))
            except Exception:  # every run waits for this: it must not end unheard
                log.exception("the interrupted weight update failed, trying again")
            await asyncio.sleep(wait)
            wait = min(2 * wait, 30.0)
        self._restored.set()
        self._bells.ring_all()

    async def _drive(self, run_id: str) -> None:
        steps, engine_failures = self._make_steps(), 0
        while True:
            ear = self._bells.ear(run_id)
            try:
                run = await self._store.read(lambda connection: read_run(connection, run_id))
                if run is None or run.over:
                    await self._leave(run_id)
                    return
                again = await self._act(run, steps)
                engine_failures = 0
            except (EngineError, EngineUnavailable) as error:
                engine_failures += 1
                again = False
                if engine_failures >= ENGINE_TRIES:
                    await self._pause(run_id, error)
                else:
                    log.warning("engine fault, trying again", run=run_id, reason=str(error))
                    await asyncio.sleep(min(self._engine_backoff_s * 2 ** (engine_failures - 1), 30.0))
                    again = True
            except StoreError as error:
                log.error("the database is in trouble, trying again", run=run_id, reason=str(error))
                await asyncio.sleep(self._engine_backoff_s)
                again = True
            except ForgeError as error:
                again = False
                await self._pause(run_id, error)
            except Exception as error:
                log.exception("the policy loop failed", run=run_id)
                again = False
                await self._pause(run_id, error)
            if not again:
                await listen(ear, IDLE_S)

    async def _act(self, run: Run, steps: Steps) -> bool:
        busy = run.kind != "record" and await self._busy(run)
        if run.state is RunState.PAUSED:
            if await self._without_trainer(run) and run.reason == POLICY_BUSY and not busy:
                await self._lifecycle.apply(RunResumed(run_id=run.id, reason=POLICY_BUSY))
                return True
            return False
        if busy:
            await self._lifecycle.apply(RunPaused(run_id=run.id, reason=POLICY_BUSY))
            return True
        if not self._restored.is_set():
            return False
        if run.kind != "train":
            return await self._rounds.advance(run)
        keeper = self._keepers.get(run.id)
        if await self._trained_out(run):
            if keeper is not None:
                keeper.let_go()
        elif run.base_version is not None:
            if keeper is None:
                self._keepers[run.id] = self._make_keeper(run.id, lambda: self._bells.ring(run.id))
            elif keeper.over:
                await self._drop_keeper(run.id)
                if keeper.fault is not None:
                    raise keeper.fault
                return True  # it was let go, and the last checkpoint was refused: there is more to do
        return await steps.advance(run)

    async def _trained_out(self, run: Run) -> bool:
        """Whether the last step's checkpoint is there: the trainer leaves, and none is needed any more."""
        versions = await self._policies.versions()
        return any(
            version.run_id == run.id
            and version.step == run.settings.steps
            and version.state is not PolicyState.REJECTED
            for version in versions
        )

    async def _busy(self, run: Run) -> bool:
        """Whether an older run has the policy: one at a time trains it or measures it."""

        def read(connection: Connection) -> bool:
            for other in going_runs(connection):
                if other.id == run.id:
                    return False
                if other.settings.policy == run.settings.policy and _wants_policy(other):
                    return True
            return False

        return await self._store.read(read)

    async def _pause(self, run_id: str, error: Exception) -> None:
        reason = str(error) if isinstance(error, ForgeError) else f"unexpected error: {error!r}"
        log.error("the run pauses", run=run_id, reason=reason)
        try:
            await self._lifecycle.apply(RunPaused(run_id=run_id, reason=reason))
        except StoreError as fault:
            log.error("the pause could not be written", run=run_id, reason=str(fault))

    async def _drop_keeper(self, run_id: str, grace_s: float = 0.0) -> bool:
        """Forgotten only once it has ended: a stop of the server in the meantime must still find it. Whether its
        trainer has."""
        keeper = self._keepers.get(run_id)
        if keeper is None:
            return True
        gone = await keeper.stop(grace_s)
        self._keepers.pop(run_id, None)
        return gone

    async def _without_trainer(self, run: Run) -> bool:
        """End the trainer of a paused run, also one that an earlier life of the server left; whether there is none.

        What goes wrong is no reason to pause: the one that there is stands, and it is tried again at the next look.
        """
        try:
            if run.id in self._keepers:
                self._swept.discard(run.id)
                gone = await self._drop_keeper(run.id)
            else:
                gone = run.kind != "train" or run.id in self._swept or await self._sweep(run.id)
        except ForgeError as error:
            log.error("the trainer of a paused run is not ended, trying again", run=run.id, reason=str(error))
            return False
        except Exception:
            log.exception("the trainer of a paused run is not ended, trying again", run=run.id)
            return False
        if gone:
            self._swept.add(run.id)
        return gone

    async def _leave(self, run_id: str) -> None:
        """The run has ended: its trainer is told so by its link and leaves."""
        self._bells.ring(run_id)
        await self._drop_keeper(run_id, self._leave_s)
        self._loops.pop(run_id, None)


def _wants_policy(run: Run) -> bool:
    """Whether the run has the policy or waits for it."""
    going = run.state is RunState.ACTIVE or run.reason == POLICY_BUSY
    return going and run.kind != "record"
