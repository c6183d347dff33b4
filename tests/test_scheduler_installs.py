"""Harnesses that have to be installed before their attempts can start."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from api_rig import eventually
from scheduler_rig import CALL, rig, script_spec

pytestmark = pytest.mark.sandbox

PLUM = CALL + "echo -n plum > answer.txt; call"
HELD_S = 240.0


class Homes:
    """Installs harnesses, each until it is told that they are ``installed``."""

    def __init__(self) -> None:
        self.installed, self.asked = threading.Event(), list[str]()

    def __call__(self, harness: str) -> None:
        self.asked.append(harness)
        assert self.installed.wait(HELD_S)


@pytest.fixture
def homes():
    found = Homes()
    yield found
    found.installed.set()


async def test_installations_leave_the_threads_to_others(tmp_path, homes):
    """Two harnesses side by side, one launch of each sees to it."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
    specs = {name: script_spec(PLUM, name) for name in ("one", "two")}
    async with rig(tmp_path, specs=specs, in_flight=6) as it:
        it.backend._home = homes
        try:
            for name in specs:
                await it.group(n=3, harness=name)
            await it.until(lambda: len(it.of("attempt_launching")) == 6)
            await eventually(lambda: set(homes.asked) == set(specs), HELD_S / 2)
            assert await asyncio.wait_for(asyncio.to_thread(lambda: "done"), HELD_S / 2) == "done"
            assert sorted(homes.asked) == ["one", "two"]
        finally:
            homes.installed.set()
        assert [row.data["outcome"] for row in await it.ended(6)] == ["completed"] * 6


async def test_a_stop_does_not_wait_for_an_installation(tmp_path, homes):
    """I6: what it gives up is attempted again at the next start, uncharged."""
    specs = {"script": script_spec(PLUM)}
    async with rig(tmp_path, specs=specs) as it:
        it.backend._home = homes
        try:
            await it.group(n=2, harness="script", max_attempts=1)
            await it.until(lambda: len(it.of("attempt_launching")) == 2)
            await eventually(lambda: bool(homes.asked))
            async with asyncio.timeout(it.scheduler._options.stop_grace_s):
                await it.scheduler.stop()
            assert [row.data["kind"] for row in it.of("attempt_ended")] == ["server_lost"] * 2
        finally:
            homes.installed.set()
    async with rig(tmp_path, specs=specs) as it:
        assert [row.data["outcome"] for row in await it.ended(2)] == ["completed"] * 2
        assert len(homes.asked) == 1


async def test_a_stop_that_drains_does_not_wait_for_what_it_gave_up(tmp_path, homes):
    async with rig(tmp_path, specs={"script": script_spec(PLUM)}) as it:
        it.backend._home = homes
        await it.group(harness="script")
        await eventually(lambda: bool(homes.asked))
        async with asyncio.timeout(HELD_S / 2):
            await it.scheduler.stop(drain_s=HELD_S)
