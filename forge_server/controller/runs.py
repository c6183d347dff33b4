"""Runs as people handle them: create or resume by name, pause, resume, cancel."""

from collections.abc import Callable
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy import Connection

from forge_server.controller.ports import Events
from forge_server.domain.errors import ConfigError, Conflict, NotFound
from forge_server.domain.events import Event, Refusal, RunCreated, RunEnded, RunPaused, RunResumed
from forge_server.domain.ids import new_id
from forge_server.domain.policy import Version
from forge_server.domain.run import RunSettings, first_change
from forge_server.domain.states import RunState
from forge_server.store import tables as t
from forge_server.store.database import Store


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """A row of ``runs``. ``step`` counts the batches assembled; ``given`` are the settings it was created with, and
    ``settings`` those in force: with the mixture that a person set since.
    """

    id: str
    name: str
    kind: str
    state: RunState
    reason: str
    given: RunSettings
    settings: RunSettings
    step: int
    base_version: int | None
    evaluation_asked: bool
    save_asked: str | None
    created_at: float

    @property
    def over(self) -> bool:
        return self.state not in (RunState.ACTIVE, RunState.PAUSED)

    def step_of(self, version: Version) -> int:
        """The step of the run that the version came out of; 0 for the weights it started from."""
        return version.step or 0 if version.run_id == self.id else 0

    def uses(self, version: Version) -> bool:
        """Whether the run made the version, or started from it."""
        return self.step_of(version) > 0 or version.version == self.base_version


def run_of(row: Any) -> Run:
    """The row as a Run. Settings were checked when the run was created."""
    given = msgspec.convert(row.settings, RunSettings, strict=False)
    return Run(
        id=row.id,
        name=row.name,
        kind=row.kind,
        state=RunState(row.state),
        reason=row.reason,
        given=given,
        settings=given.mixed(row.mixture) if row.mixture else given,
        step=row.step,
        base_version=row.base_version,
        evaluation_asked=row.evaluation_asked,
        save_asked=row.save_asked,
        created_at=row.created_at,
    )


def read_run(connection: Connection, run_id: str) -> Run | None:
    row = connection.execute(sa.select(t.runs).where(t.runs.c.id == run_id)).one_or_none()
    return run_of(row) if row is not None else None


def going_runs(connection: Connection) -> list[Run]:
    """Runs that have not ended, oldest first."""
    going = (RunState.ACTIVE.value, RunState.PAUSED.value)
    query = sa.select(t.runs).where(t.runs.c.state.in_(going)).order_by(t.runs.c.created_at, t.runs.c.id)
    return [run_of(row) for row in connection.execute(query)]


class Runs:
    """Runs of the one policy ``policy``. ``started`` is called with the id of every run that was
    created, or found again and has not ended. ``untrainable`` says why the policy's model cannot be trained,
    empty when it can.
    """

    def __init__(
        self,
        store: Store,
        events: Events,
        policy: str,
        started: Callable[[str], None],
        *,
        untrainable: str = "",
    ) -> None:
        self._store, self._events, self._policy, self._started = store, events, policy, started
        self._untrainable = untrainable

    async def check(self, settings: RunSettings) -> Run | None:
        """The run of that name, if there is one; changes nothing.

        Raises Conflict naming the key when the settings differ from those it was created with,
        ConfigError when they ask for another policy than the engine serves, or to train one that cannot be.
        """
        if settings.policy != self._policy:
            raise ConfigError(
                f"the engine serves policy {self._policy!r}, not {settings.policy!r}",
                where=f"run {settings.name}",
                mend="mend policy",
            )
        if settings.kind == "train" and self._untrainable:
            raise ConfigError(
                self._untrainable,
                where=f"run {settings.name}",
                mend='give the run kind = "record" or kind = "eval", or the engine a model of text alone',
            )
        found = await self._by_name(settings.name)
        key = first_change(msgspec.to_builtins(found.given), settings) if found else None
        if key is not None:
            raise Conflict(
                f"the run exists with another value of {key!r}",
                where=settings.name,
                mend="restore the value, or give the run a new name",
            )
        return found

    async def create(self, settings: RunSettings) -> str:
        """Create the run, or find the one of that name; its id. Raises as ``check`` does."""
        found = await self.check(settings)
        if found is None:
            event = RunCreated(
                run_id=new_id("ru"),
                name=settings.name,
                kind=settings.kind,
                settings=msgspec.to_builtins(settings),
            )
            applied = await self._events.apply(event)
            if applied.ok:
                self._started(event.run_id)
                return event.run_id
            found = await self.check(settings)
            if found is None:
                raise Conflict(f"the run was not taken ({applied.refusal})", where=settings.name)
        if not found.over:
            self._started(found.id)
        return found.id

    async def pause(self, run_id: str, reason: str) -> None:
        """Raises NotFound and Conflict (the run has ended)."""
        await self._apply(run_id, RunPaused(run_id=run_id, reason=reason))

    async def resume(self, run_id: str) -> None:
        """Raises NotFound and Conflict (the run has ended)."""
        await self._apply(run_id, RunResumed(run_id=run_id))

    async def cancel(self, run_id: str) -> None:
        """Raises NotFound and Conflict (the run has ended otherwise)."""
        await self._apply(run_id, RunEnded(run_id=run_id, state=RunState.CANCELLED))

    async def _apply(self, run_id: str, event: Event) -> None:
        applied = await self._events.apply(event)
        if applied.refusal is Refusal.UNKNOWN:
            raise NotFound(f"there is no run {run_id!r}", mend="`forge-server run list` shows the runs")
        if not applied.ok:
            raise Conflict("the run has ended", where=run_id, mend="create a new one")

    async def _by_name(self, name: str) -> Run | None:
        def read(connection: Connection) -> Run | None:
            row = connection.execute(sa.select(t.runs).where(t.runs.c.name == name)).one_or_none()
            return run_of(row) if row is not None else None

        return await self._store.read(read)
