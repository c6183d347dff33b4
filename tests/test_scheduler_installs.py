"""Harnesses that have to be installed before their attempts can start."""

import asyncio
import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from api_rig import eventually
from scheduler_rig import CALL, rig, script_spec
from test_kubernetes_backend import order

from forge_server.domain.errors import EnvironmentMissing
from forge_server.scheduler.backend import LaunchFailed
from forge_server.scheduler.local import LocalBackend, LocalOptions

pytestmark = pytest.mark.sandbox

PLUM = CALL + "echo -n plum > answer.txt; call"
HELD_S = 240.0


class Homes:
    """Installs harnesses, each until it is told that they are ``installed``."""

    def __init__(self) -> None:
        self.installed, self.asked = threading.Event(), list[str]()
        self.error: Exception | None = None

    def __call__(self, harness: str) -> None:
        self.asked.append(harness)
        assert self.installed.wait(HELD_S)
        if self.error:
            raise self.error


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


async def asking(homes, folder, launches):
    """Launches of one harness that wait for its installation."""
    backend = LocalBackend(LocalOptions(instance="in-1", pod_url="", folder=folder), homes)
    waiting = [asyncio.create_task(backend.launch(order(f"at-{n}"))) for n in range(launches)]
    await eventually(lambda: bool(homes.asked), HELD_S / 2)
    return backend, waiting


async def test_an_installation_that_fails_does_so_once_for_all_that_wait(tmp_path, homes):
    """It takes minutes; a launch that begins later tries anew."""
    homes.error = EnvironmentMissing("no network", where="pip")
    backend, waiting = await asking(homes, tmp_path, 8)
    homes.installed.set()
    for launch in waiting:
        with pytest.raises(LaunchFailed, match="no network"):
            await asyncio.wait_for(launch, HELD_S / 2)
    assert len(homes.asked) == 1
    with pytest.raises(LaunchFailed, match="no network"):
        await asyncio.wait_for(backend.launch(order("at-9")), HELD_S / 2)
    assert len(homes.asked) == 2


@pytest.mark.parametrize("left", [0, 1])
async def test_a_launch_that_is_given_up_leaves_the_installation_to_the_others(tmp_path, homes, left):
    """If none is left, nobody is told of its failure."""
    unheard = list[str]()
    asyncio.get_running_loop().set_exception_handler(lambda loop, about: unheard.append(about["message"]))
    homes.error = EnvironmentMissing("no network", where="pip")
    backend, waiting = await asking(homes, tmp_path, 1 + left)
    waiting[0].cancel()
    await asyncio.wait(waiting[:1])
    assert waiting[0].cancelled()
    homes.installed.set()
    for launch in waiting[1:]:
        with pytest.raises(LaunchFailed, match="no network"):
            await asyncio.wait_for(launch, HELD_S / 2)
    await eventually(lambda: not backend._installing, HELD_S / 2)
    gc.collect()
    assert len(homes.asked) == 1 and unheard == []
