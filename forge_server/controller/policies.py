"""The ``policies`` rows of one policy name, and the number that is in force.

Owns every write to that table: a new version, a step of its state machine. Each write checks the state
that it leaves in the same transaction, so two writers cannot both take a step, and tells the event
stream.
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import sqlalchemy as sa
from sqlalchemy import Connection

from forge_server.controller.ports import Events
from forge_server.domain import policy
from forge_server.domain.errors import Conflict, NotFound
from forge_server.domain.events import Noted
from forge_server.domain.policy import Version
from forge_server.domain.states import PolicyState
from forge_server.store import tables as t
from forge_server.store.database import Store
from forge_server.store.policy_rows import versions_in

NONE_LIVE = -1


class Policies:
    """Versions of the policy ``name``. ``current`` is the one in force (``NONE_LIVE`` before there is
    any)."""

    def __init__(
        self, store: Store, events: Events, name: str, *, clock: Callable[[], float] = time.time
    ) -> None:
        self.name = name
        self.current = NONE_LIVE
        self._store, self._events, self._clock = store, events, clock

    async def open(self, initial: Path) -> None:
        """Make the folder ``initial`` version 0, live, if there is no version yet; set ``current``."""
        now = self._clock()
        versions = await self.versions()
        if not versions:
            first = Version(
                name=self.name,
                version=0,
                state=PolicyState.LIVE,
                path=str(initial),
                created_at=now,
                live_at=now,
            )
            await self._events.apply(_note(first), also=lambda connection: _insert(connection, first))
            versions = [first]
        serving = policy.live(versions)
        self.current = serving.version if serving is not None else NONE_LIVE

    async def serving(self) -> Version | None:
        """The live version: what an engine that comes up has to serve."""
        return policy.live(await self.versions())

    async def versions(self) -> list[Version]:
        """Every version, oldest first."""
        return await self._store.read(lambda connection: versions_in(connection, self.name))

    async def get(self, version: int) -> Version:
        """Raises NotFound."""
        for row in await self.versions():
            if row.version == version:
                return row
        raise NotFound(
            f"policy {self.name} has no version {version}", mend="`forge-server policy list` shows them"
        )

    async def move(self, row: Version, to: PolicyState, reason: str = "") -> Version:
        """One step of the state machine, durable on return. What was live before is retired with it.

        Raises Conflict when ``row`` is not as it stands any more, or may not take the step.
        """
        policy.check_step(row, to)
        now = self._clock()
        live_at = now if to is PolicyState.LIVE else row.live_at
        moved = msgspec.structs.replace(row, state=to, reason=reason, live_at=live_at)

        def also(connection: Connection) -> None:
            if to is PolicyState.LIVE:
                serving = policy.live(versions_in(connection, self.name))
                if serving is not None:
                    _update(connection, serving, {"state": PolicyState.RETIRED.value})
            _update(connection, row, {"state": to.value, "reason": reason, "live_at": live_at})

        await self._events.apply(_note(moved), also=also)
        if to is PolicyState.LIVE:
            self.current = row.version
        return moved

    async def stands(self, row: Version, state: PolicyState) -> bool:
        """Whether the version is in ``state`` by its row: what became of a step whose answer was lost."""
        if (await self.get(row.version)).state is not state:
            return False
        if state is PolicyState.LIVE:
            self.current = row.version
        return True


def add_exported(
    connection: Connection, name: str, *, run_id: str, step: int, path: str, manifest_sha256: str, at: float
) -> int:
    """Insert the checkpoint as a new version, ``exported``, within the caller's transaction; its number.

    The same checkpoint reported again is the same version, unless that was rejected: then it gets a new
    number and another chance.
    """
    rows = versions_in(connection, name)
    of_step = [row for row in rows if row.run_id == run_id and row.step == step]
    for row in of_step:
        if row.manifest_sha256 == manifest_sha256 and row.state is not PolicyState.REJECTED:
            if row.path != path:  # the trainer found that folder damaged
                _update(connection, row, {"path": path})
            return row.version
    base: int | None = connection.execute(
        sa.select(t.runs.c.base_version).where(t.runs.c.id == run_id)
    ).scalar_one()
    earlier = [row for row in rows if row.run_id != run_id or (row.step or 0) < step]
    parent = policy.head(earlier, run_id, base)
    version = Version(
        name=name,
        version=policy.next_version(row.version for row in rows),
        state=PolicyState.EXPORTED,
        path=path,
        manifest_sha256=manifest_sha256,
        run_id=run_id,
        step=step,
        parent_version=parent.version if parent is not None else None,
        created_at=at,
    )
    _insert(connection, version)
    return version.version


def _insert(connection: Connection, version: Version) -> None:
    values = msgspec.structs.asdict(version)
    connection.execute(sa.insert(t.policies).values({**values, "state": version.state.value}))


def _update(connection: Connection, row: Version, changes: Mapping[str, object]) -> None:
    c = t.policies.c
    where = (c.name == row.name) & (c.version == row.version) & (c.state == row.state.value)
    if connection.execute(sa.update(t.policies).where(where).values(changes)).rowcount != 1:
        raise Conflict(
            f"policy {row.name} version {row.version} changed meanwhile", mend="look and try again"
        )


def _note(version: Version) -> Noted:
    data = {
        "policy": version.name,
        "version": version.version,
        "step": version.step,
        "reason": version.reason,
    }
    return Noted(kind=f"policy_{version.state.value}", run_id=version.run_id, data=data)
