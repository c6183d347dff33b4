"""Every key of the dashboard is pressed, against the real API of a server in this process, and does what it says."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from api_rig import Rig, eventually
from forge_tui import dialogs
from forge_tui.app import VIEWS, ForgeApp, own_bindings
from forge_tui.grid import Grid
from forge_tui.trouble import TroubleScreen
from forge_tui.views.rollout import RolloutScreen
from forge_tui.views.rollouts import RolloutsView
from textual.pilot import Pilot
from textual.widgets import Input
from tui_world import FEATURED, RUN, dashboard, press, rollout_id, settled, shown, world

from forge_server.store import tables as t


class Keys:
    """What was pressed where, as the classes spell it."""

    def __init__(self, app: ForgeApp, pilot: object) -> None:
        self.app, self.pilot = app, pilot
        self.pressed: set[str] = set()

    async def __call__(self, *keys: str) -> str:
        self.pressed |= set(keys)
        await press(self.app, self.pilot, *keys)  # type: ignore[arg-type]
        return shown(self.app)

    async def until(self, text: str, *keys: str) -> None:
        """Press them; then wait until the text is on the screen: a busy machine paints late."""
        await self(*keys)
        await self.see(text)

    async def see(self, *texts: str, no: str = "\0") -> None:
        """Wait until these are on the screen and that is not."""
        await eventually(lambda: all(text in shown(self.app) for text in texts) and no not in shown(self.app))

    async def on(self, screen: type) -> None:
        """Wait until that one is in front."""
        await eventually(lambda: isinstance(self.app.screen, screen))


class Notices:
    """What a person was told so far; how long it stands on the screen does not matter."""

    def __init__(self, app: ForgeApp, monkeypatch: pytest.MonkeyPatch) -> None:
        self._said: list[str] = []
        notify = app.notify

        def heard(message: str, **more: Any) -> None:
            self._said.append(f"{more.get('title', '')}: {message}")
            notify(message, **more)

        monkeypatch.setattr(app, "notify", heard)

    async def next(self, text: str) -> None:
        """Wait until what is told next is there: it must have the text in it."""
        await eventually(lambda: bool(self._said))
        assert text in self._said.pop(0)

    async def told(self, text: str) -> None:
        """Wait until it is told, whatever else was before."""
        await eventually(lambda: any(text in said for said in self._said))
        self._said.clear()


def keys_of(holder: type) -> set[str]:
    return {key for binding in own_bindings(holder) for key in binding.key.split(",")}


@pytest.fixture
def size() -> Iterator[tuple[int, int]]:
    yield (120, 40)


@asynccontextmanager
async def watching(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]
) -> AsyncIterator[tuple[Rig, ForgeApp, Pilot[None]]]:
    """A server with rows, and the dashboard that has read them."""
    async with (
        world(tmp_path, monkeypatch) as api,
        dashboard(api) as app,
        app.run_test(size=size, notifications=True) as pilot,
    ):
        await settled(app, pilot)
        yield api, app, pilot


async def test_every_key_of_the_main_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]
) -> None:
    async with watching(tmp_path, monkeypatch, size) as (_, app, pilot):
        keys = Keys(app, pilot)

        # rollouts: filter, sort, group, search, move
        await keys("2")
        await keys.see("43 rollouts", "▌00000042")
        await keys.until("▌00000041", "down")
        await keys.until("▌00000040", "j")
        await keys.until("▌00000041", "up")
        await keys.until("▌00000042", "k")
        await keys.until("▌00000000", "end")
        await keys("pageup")
        await keys.until("▌00000042", "home")
        await keys("pagedown")
        await keys.see("▌", no="▌00000042")
        await keys.until("state:active", "f")
        await keys.see("6 rollouts")
        await keys("escape", "o", "o", "o")
        await keys.see("3 rollouts  outcome:infra_failure", no="policy failure")
        await keys.until("sorted by ended", "escape", "s")
        await keys.until("sorted by reward ▼", "s")
        await keys.until("reward ▲", "r")
        await keys.until("pass@k", "g")
        await keys.until("harness▲", "g")
        await keys.until("harness:claude-code", "enter")
        await keys("escape", "m")
        await keys("slash")
        app.query_one("#rollouts Input", Input).value = "kind:startup_timeout find"
        await keys("enter")
        await keys.see("kind:startup_timeout text:find", "1 rollouts")
        await keys("slash", "escape", "escape")

        # comparison
        await keys.until("3 harnesses", "4")
        await keys.until("▼", "s", "s")
        await keys.until("▲", "r")
        await keys.until("train rollouts", "o")
        await keys.until("task:find-secret", "5", "enter")

        # training, cost, events
        await keys.until("Versions", "3", "v")
        await keys.until("Where each step", "t")
        await keys.until("Entropy", "c")
        await keys.until("Wall-clock", "6")
        await keys.until("showing all", "7")
        await keys.until("showing runs and policies", "f")
        await keys.until("halted", "f", "f", "space")
        await keys("space", "m", "slash")
        app.query_one("#events Input", Input).value = "startup_timeout"
        await keys("enter")
        await keys.see("startup_timeout", no="attempt queued")
        await keys("enter")
        await keys.on(RolloutScreen)
        await keys("escape", "escape")

        # everywhere
        await keys("1", "d")
        assert app.theme == "forge-light"
        await keys("d", "ctrl+r", "question_mark")
        await keys.on(dialogs.Help)
        await keys("escape", "u")
        await keys.on(dialogs.Pick)
        await keys.until("baseline", "down", "enter")
        await keys("u", "enter")
        assert app.model.run == RUN

        expected = keys_of(ForgeApp) | keys_of(Grid)
        for view in VIEWS.values():
            expected |= keys_of(view)
        left_for_others = {"p", "i", "x", "H", "E", "S", "q"}  # steering and quitting
        assert expected - keys.pressed == left_for_others


async def test_every_key_of_a_rollout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]
) -> None:
    async with watching(tmp_path, monkeypatch, size) as (_, app, pilot):
        keys = Keys(app, pilot)
        await keys("2")
        app.query_one("#rollouts-grid", Grid).go(42 - FEATURED)
        await keys("enter")
        await keys.see(rollout_id(FEATURED), "Not yet: its group is in no batch.")
        await keys.until("4 more lines", "2")
        await keys.until("notes-13.txt", "e")
        await keys("a", "a")
        await keys.see("grep the notes", no="ls -la")
        await keys("a")
        await keys.until("searcher", "3")
        await keys("down", "enter")
        await eventually(lambda: "─ 1 ◆ main" in shown(app).splitlines()[2])
        await keys.until("segment 1 of 2  by mask", "4")
        await keys.until("segment 2 of 2", "n")
        await keys.until("segment 1 of 2", "b")
        await keys.until("token 2/25", "right")
        await keys.until("token 1/25", "left")
        await keys.until("by logprob", "m")
        await keys.until("by version: context v11", "m")
        await keys.until("v10 v11", "n")
        await keys.until("v10–v11", "5")
        await keys.until("segment 2 of 2", "down", "enter")
        await keys.until("verifier: ok, 1.0", "6")
        assert "\x1b" not in shown(app)
        await keys.until("◆ searcher", "1")
        await keys("tab", "right_square_bracket", "shift+tab", "left_square_bracket")
        await keys("backspace")
        assert not isinstance(app.screen, RolloutScreen)
        await keys("enter", "escape")
        assert not isinstance(app.screen, RolloutScreen)
        assert keys_of(RolloutScreen) - keys.pressed == {"c", "t"}


async def test_steering_asks_first_and_shows_what_came_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]
) -> None:
    async with world(tmp_path, monkeypatch) as api, dashboard(api) as app:

        async def of_run(column: str) -> object:
            return await api.server.store.read(
                lambda c: c.execute(sa.select(t.runs.c[column]).where(t.runs.c.id == RUN)).scalar_one()
            )

        async with app.run_test(size=size, notifications=True) as pilot:
            await settled(app, pilot)
            keys, notices = Keys(app, pilot), Notices(app, monkeypatch)
            for no in ("n", "escape", "enter"):  # enter is on No
                await keys.until("Pause run demo?", "p")
                await keys(no)
                assert await of_run("state") == "active"
            await keys("p", "y")
            await notices.told("demo is paused")
            assert await of_run("state") == "paused"
            app._overview_at = float("-inf")
            await settled(app, pilot)
            await keys.see("paused by a person")
            await keys.until("Resume run demo?", "p")
            await keys("y")
            await notices.told("demo is active")
            assert await of_run("state") == "active"

            await keys("i")
            app.screen.query_one(Input).value = "21"
            await keys.until("Keep 21 attempts in flight instead of 8?", "enter")
            await keys("y")
            await notices.told("21 attempts in flight from now on")
            assert api.server.scheduler.in_flight == 21

            # one that goes on is cancelled, one that has ended cannot be
            await keys("2", "c", "y")
            await notices.told(f"{rollout_id(42)} is cancelled")
            found = await app.ask(lambda: app.client.rollout(rollout_id(42)))
            assert found.rollout.outcome == "cancelled"
            await keys("down", "t", "y")
            await notices.told(f"{rollout_id(41)} is pending")
            found = await app.ask(lambda: app.client.rollout(rollout_id(41)))
            assert found.rollout.state == "pending"
            app.open_rollout(rollout_id(FEATURED))
            await settled(app, pilot)
            await keys("t", "y")
            await notices.told("refused")
            await keys("escape")

            await keys.until("It cannot be resumed", "x")
            await keys("y")
            await notices.told("demo is cancelled")
            assert await of_run("state") == "cancelled"
            app._overview_at = float("-inf")
            await settled(app, pilot)
            await keys("p")
            await notices.told("no run that goes on")
            await keys("q")
        assert not app.is_running
        assert keys_of(dialogs.Confirm) <= keys.pressed


def setting(**changes: object) -> Callable[[sa.Connection], None]:
    """The run's settings were others."""

    def write(connection: sa.Connection) -> None:
        now = connection.execute(sa.select(t.runs.c.settings).where(t.runs.c.id == RUN)).scalar_one()
        connection.execute(sa.update(t.runs).where(t.runs.c.id == RUN).values(settings=now | changes))

    return write


async def test_the_mixture_is_read_asked_for_and_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]
) -> None:
    async with watching(tmp_path, monkeypatch, size) as (_, app, pilot):
        keys, notices = Keys(app, pilot), Notices(app, monkeypatch)

        async def answered(text: str, *more: str) -> str:
            await keys("H")
            app.screen.query_one(Input).value = text
            return await keys("enter", *more)

        await keys.until("Mixture of run demo", "H")
        assert app.screen.query_one(Input).value == "react=1"
        await keys("enter")  # as it is: there is nothing to ask
        assert not isinstance(app.screen, dialogs.Confirm)
        for text, told in (
            ("react=1 codex", "'codex' is not NAME=WEIGHT"),
            ("react=1 codex=0", "'codex' must be above 0"),
        ):
            await answered(text)
            await notices.next(told)
        await answered("absent=1", "y")
        await notices.next("there is no harness 'absent'")
        await answered("react=1 codex=3")
        await keys.see("Draw groups in codex 75%, react 25%?", "Instead of react 100%")
        await keys("n")
        assert (await app.ask(lambda: app.client.run(RUN))).harnesses == {"react": 1.0}
        await answered("react=1 codex=3", "y")
        await notices.next("codex 75%, react 25% from now on")
        assert (await app.ask(lambda: app.client.run(RUN))).harnesses == {"react": 1.0, "codex": 3.0}
        app._overview_at = float("-inf")
        await settled(app, pilot)
        await keys("H")
        assert app.screen.query_one(Input).value == "codex=3 react=1"


async def test_an_evaluation_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]
) -> None:
    async with watching(tmp_path, monkeypatch, size) as (api, app, pilot):
        keys, notices = Keys(app, pilot), Notices(app, monkeypatch)
        await keys.until("Evaluate run demo now?", "E")
        await keys("y")
        await notices.next("the run has no evaluation")
        await api.server.store.write(setting(eval={"split": "train", "k": 2}))
        await keys("E", "n")
        assert (await app.ask(lambda: app.client.run(RUN))).asked == []
        await keys("E", "y")
        await notices.next("v11 of step 11: 6 tasks of split train, 2 rollouts each")
        assert (await app.ask(lambda: app.client.run(RUN))).asked == ["evaluation"]
        await keys("E", "y")
        await notices.next("asked for already")


async def test_a_checkpoint_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]
) -> None:
    async with watching(tmp_path, monkeypatch, size) as (api, app, pilot):
        keys, notices = Keys(app, pilot), Notices(app, monkeypatch)
        await keys.until("Save the trainer of run demo now?", "S")
        await keys("y")
        await notices.next("every step is saved as it is")
        assert (await app.ask(lambda: app.client.run(RUN))).asked == []
        await api.server.store.write(setting(save_every=5))
        await keys("S", "n")
        assert (await app.ask(lambda: app.client.run(RUN))).asked == []
        await keys("S", "y")
        await notices.next("the state is saved at the end")
        assert (await app.ask(lambda: app.client.run(RUN))).asked == ["save"]


async def test_the_palette_and_the_mouse_reach_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]
) -> None:
    async with watching(tmp_path, monkeypatch, size) as (_, app, pilot):
        for command in list(app.get_system_commands(app.screen)):
            if command.title.startswith("Go to "):
                command.callback()
                await settled(app, pilot)
                assert command.title.removeprefix("Go to ") == app.view.TITLE
        await pilot.click("#tabs", offset=(15, 0))
        await settled(app, pilot)
        assert isinstance(app.view, RolloutsView)
        await pilot.click("#rollouts-grid", offset=(10, 3))
        await pilot.click("#rollouts-grid", offset=(10, 3))
        await settled(app, pilot)
        assert isinstance(app.screen, RolloutScreen) and app.screen.rollout_id == rollout_id(40)
        await pilot.click("#rollout-head", offset=(18, 1))
        await settled(app, pilot)
        assert app.screen.part == "conversation"
        assert not isinstance(app.screen, TroubleScreen)
