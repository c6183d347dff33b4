"""What a person asks of a run that goes on: another mixture of harnesses, an evaluation now, a save of the trainer's
state now.

Each wish is a column of the run's row, written with its event in one transaction, so it outlives the server. Who
fulfils it takes it back: ``Cohorts`` reads the mixture, ``Steps`` evaluates, ``TrainerLink`` hands the save to the
trainer. A wish that cannot be fulfilled is refused here, in one sentence.
"""

import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from forge_server.client.schemas import EvaluationAsked, SaveAsked
from forge_server.controller.cohort import last_trained, ready_tasks
from forge_server.controller.ports import Events
from forge_server.controller.runs import Run, read_run
from forge_server.domain import policy
from forge_server.domain.errors import Conflict, InvalidRequest, NotFound
from forge_server.domain.events import Noted
from forge_server.domain.run import EXTERNAL, RunSettings
from forge_server.domain.states import RunState
from forge_server.store import tables as t
from forge_server.store.database import Store
from forge_server.store.policy_rows import versions_in

SAVED = "at the end of the trainer's next step"


class Steering:
    """``known`` raises SpecError when a harness of the settings cannot be run here."""

    def __init__(
        self,
        store: Store,
        events: Events,
        known: Callable[[RunSettings], None],
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store, self._events, self._known, self._clock = store, events, known, clock

    async def mix(self, run_id: str, weights: Mapping[str, float]) -> None:
        """Draw the groups from now on in these harnesses.

        Raises NotFound, InvalidRequest (the weights are none), SpecError (an unknown harness), Conflict.
        """

        def check(connection: Connection) -> Run:
            run = _going(connection, run_id)
            if run.kind == "eval":
                raise Conflict("an evaluation run draws its groups all at once", where=run.name)
            if run.settings.harness == EXTERNAL:
                raise Conflict("nothing is drawn for a run that harnesses join by themselves", where=run.name)
            return run

        run = await self._store.read(check)
        if not weights or EXTERNAL in weights:
            raise InvalidRequest("no harness to draw is given", where=run.name, mend="give NAME=WEIGHT")
        try:
            mixed = run.settings.mixed(weights)
        except ValueError as error:
            raise InvalidRequest(
                str(error), where=run.name, mend="leave out what is not to be drawn"
            ) from None
        self._known(mixed)
        if mixed.mixture == run.settings.mixture:
            return
        data = {"harnesses": mixed.weights, "instead_of": run.settings.weights}
        values = {"mixture": mixed.weights, "mixture_at": self._clock()}
        await self._ask(run_id, "mixture_set", data, check, values)

    async def evaluate(self, run_id: str) -> EvaluationAsked:
        """Measure the live policy before anything else is drawn or loaded.

        Raises NotFound, TaskError (the split has no tasks), Conflict (not configured, under way, done).
        """

        def check(connection: Connection) -> EvaluationAsked:
            return _round(connection, _going(connection, run_id, at_once=True))

        found = await self._store.read(check)
        data = {"version": found.version, "step": found.step}
        await self._ask(run_id, "evaluation_asked", data, check, {"evaluation_asked": True})
        return found

    async def save(self, run_id: str) -> SaveAsked:
        """Have the trainer write its full state with its next step. Asked again, it is the same wish.

        Raises NotFound, Conflict.
        """

        def check(connection: Connection) -> Run:
            run = _going(connection, run_id, at_once=True)
            if run.kind != "train":
                raise Conflict("only a training run has a trainer", where=run.name)
            if last_trained(connection, run_id) >= run.settings.steps:
                raise Conflict("the last step is trained, and its state is saved", where=run.name)
            return run

        run = await self._store.read(check)
        if run.settings.save_every == 1:
            return SaveAsked(asked=False, detail="every step is saved as it is: save_every is 1")
        if run.save_asked:
            return SaveAsked(asked=True, detail=f"asked for already: the state is saved {SAVED}")
        await self._ask(run_id, "save_asked", {}, check, {"save_asked": secrets.token_hex(8)})
        return SaveAsked(asked=True, detail=f"the state is saved {SAVED}")

    async def _ask(
        self,
        run_id: str,
        kind: str,
        data: dict[str, Any],
        check: Callable[[Connection], Any],
        values: Mapping[str, Any],
    ) -> None:
        """Write the wish, if it still may be: ``check`` says so again."""

        def also(connection: Connection) -> None:
            check(connection)
            connection.execute(sa.update(t.runs).where(t.runs.c.id == run_id).values(values))

        await self._events.apply(Noted(kind=kind, run_id=run_id, data=data), also=also)


def _going(connection: Connection, run_id: str, *, at_once: bool = False) -> Run:
    """The run, which has not ended; ``at_once``: nor is it paused. Raises NotFound, Conflict."""
    run = read_run(connection, run_id)
    if run is None:
        raise NotFound(f"there is no run {run_id!r}", mend="`forge-server run list` shows the runs")
    if run.over:
        raise Conflict(f"the run is {run.state}", where=run.name, mend="create a new one")
    if at_once and run.state is RunState.PAUSED:
        raise Conflict("the run is paused", where=run.name, mend="resume it first")
    return run


def _round(connection: Connection, run: Run) -> EvaluationAsked:
    """The round that would be run now. Raises Conflict, TaskError."""
    plan = run.settings.eval
    if plan is None:
        raise Conflict(
            "the run has no evaluation", where=run.name, mend="create a run with a [run.eval] table"
        )
    if run.evaluation_asked:
        raise Conflict("an evaluation was asked for already", where=run.name, mend="wait for its result")
    live = policy.live(versions_in(connection, run.settings.policy))
    if live is None or not run.uses(live):
        raise Conflict("weights of the run are not live yet", where=run.name, mend="ask again then")
    step, m, g = run.step_of(live), t.step_metrics.c, t.groups.c
    stored = sa.select(m.step).where(m.run_id == run.id, m.step == step, m.source == "eval")
    if connection.execute(stored).first() is not None:
        raise Conflict(
            f"the policy of step {step} was evaluated already",
            where=run.name,
            mend="`forge-server run show` has its figures",
        )
    drawn = sa.select(g.id).where(g.run_id == run.id, g.step == step, g.mode == "eval").limit(1)
    if connection.execute(drawn).first() is not None:
        raise Conflict(f"the policy of step {step} is being evaluated", where=run.name, mend="wait for it")
    names = run.settings.tasks if plan.split == run.settings.split else ()
    ready = len(ready_tasks(connection, run.settings.taskset, plan.split, names))
    tasks = min(ready, plan.max_tasks or ready)
    return EvaluationAsked(version=live.version, step=step, split=plan.split, tasks=tasks, k=plan.k)
