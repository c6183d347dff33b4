"""A weight update whose writes fail or are slow: the gate opens once, and never under a wrong number (I9)."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from controller_support import FakeGate, FakeWeights
from sqlalchemy import Connection

from forge_server.controller import swap
from forge_server.controller.policies import Policies
from forge_server.controller.swap import Swapper
from forge_server.domain.errors import StoreError
from forge_server.domain.events import Applied, Event, HoldEnded, Noted
from forge_server.domain.policy import Version
from forge_server.domain.states import PolicyState
from forge_server.lifecycle.apply import Lifecycle
from forge_server.store.database import Store


class Shaky:
    """The lifecycle, whose events fail as often as told: before they are written, or after."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self.lifecycle = lifecycle
        self.trouble: list[tuple[str, bool]] = []

    async def apply(self, event: Event, *, also: Any = None) -> Applied:
        name = event.kind if isinstance(event, Noted) else type(event).__name__
        for entry in self.trouble:
            if entry[0] == name:
                self.trouble.remove(entry)
                if entry[1]:
                    await self.lifecycle.apply(event, also=also)
                raise StoreError("the disk is full")
        return await self.lifecycle.apply(event, also=also)


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("step", ["policy_loading", "policy_live", "HoldEnded"])
async def test_i9_a_step_that_is_not_written_is_written_before_the_gate_opens(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, written: bool
) -> None:
    monkeypatch.setattr(swap, "FIRST_WAIT_S", 0.001)
    store = Store.open(database_url, create=True)
    try:
        events = Shaky(Lifecycle(store))
        policies = Policies(store, events, "p")
        await policies.open(tmp_path)
        second = Version(name="p", version=1, state=PolicyState.EXPORTED, path=str(tmp_path), created_at=0.0)
        await store.write(lambda c: _insert(c, second))
        gate, weights = FakeGate(), FakeWeights()
        events.trouble = [(step, written)] * 2
        async with asyncio.timeout(100):
            await Swapper(policies, events, weights, gate, drain_s=1.0).load(1)
        assert gate.holds == 0 and weights.loaded == [1] and policies.current == 1
        states = [(row.version, row.state) for row in await policies.versions()]
        assert states == [(0, PolicyState.RETIRED), (1, PolicyState.LIVE)]
        if step == "HoldEnded":
            repeat = await events.lifecycle.apply(HoldEnded(reason="weight_update"))
            assert not repeat.rows  # no hold is left open: agent clocks would stand still
    finally:
        store.close()


def _insert(connection: Connection, version: Version) -> None:
    from forge_server.controller.policies import _insert as insert

    insert(connection, version)


async def test_i9_an_update_that_broke_off_holds_once(database_url: str, tmp_path: Path) -> None:
    """Nobody knows what the engine serves: calls stay held until the update is done again, and then go."""
    store = Store.open(database_url, create=True)
    try:
        lifecycle = Lifecycle(store)
        policies = Policies(store, lifecycle, "p")
        await policies.open(tmp_path)
        second = Version(name="p", version=1, state=PolicyState.EXPORTED, path=str(tmp_path), created_at=0.0)
        await store.write(lambda c: _insert(c, second))
        gate, weights = FakeGate(), FakeWeights()
        weights.fail = [RuntimeError("a bug")]
        swapper = Swapper(policies, lifecycle, weights, gate, drain_s=1.0)
        with pytest.raises(RuntimeError):
            await swapper.load(1)
        assert gate.holds == 1
        await swapper.load(1)
        assert gate.holds == 0
    finally:
        store.close()
