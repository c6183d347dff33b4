"""Every screen of the dashboard in a small and in a large terminal, as the golden files have it; time stands still.

With FORGE_GOLDEN=write in the environment the files are written anew, to be looked at before they are committed.
"""

import contextlib
import os
from pathlib import Path

import pytest
from api_rig import eventually
from forge_tui.app import ForgeApp
from tui_world import FEATURED, dashboard, press, rollout_id, settled, shown, world

GOLDEN = Path(__file__).parent / "golden" / "tui"
SCREENS = {
    "overview": ("1",),
    "rollouts": ("2",),
    "rollouts-by-task": ("g",),
    "training": ("escape", "3"),
    "timeline": ("t",),
    "versions": ("v",),
    "harnesses": ("c", "4"),
    "tasks": ("5",),
    "cost": ("6",),
    "events": ("7",),
    "keys": ("question_mark",),
}
STEERING = {
    "pause": ("escape", "1", "p"),
    "in-flight": ("n", "i"),
    "mixture": ("escape", "H"),
    "mixture-sure": ("end", "space", *"codex=3", "enter"),
    "evaluate": ("n", "E"),
    "checkpoint": ("n", "S"),
    "end-run": ("n", "x"),
}
ROLLOUT = {
    "rollout-summary": ("1",),
    "rollout-conversation": ("2",),
    "rollout-calls": ("3",),
    "rollout-tokens": ("4", "n"),
    "rollout-segments": ("5",),
    "rollout-logs": ("6",),
    "rollout-cancel": ("c",),
}


def same(name: str, text: str) -> str | None:
    """The name, if the screen is not what it was."""
    file = GOLDEN / f"{name}.txt"
    if os.environ.get("FORGE_GOLDEN") == "write":
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    if file.exists() and file.read_text() == text:
        return None
    return f"{name} is now\n{text}"


async def painted(name: str, app: ForgeApp) -> str | None:
    """The same of what is shown in the end: a busy machine paints late."""
    with contextlib.suppress(TimeoutError):
        await eventually(lambda: same(name, shown(app)) is None, 10.0)
    return same(name, shown(app))


@pytest.mark.parametrize("size", [(80, 24), (160, 50)], ids=["80x24", "160x50"])
async def test_screens_are_as_they_were(
    size: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suffix = f"{size[0]}x{size[1]}"
    changed = []
    async with world(tmp_path, monkeypatch) as api, dashboard(api) as app, app.run_test(size=size) as pilot:
        await settled(app, pilot)
        for name, keys in (SCREENS | STEERING).items():
            await press(app, pilot, *keys)
            changed.append(await painted(f"{name}-{suffix}", app))
        await press(app, pilot, "n")
        app.open_rollout(rollout_id(FEATURED))
        await settled(app, pilot)
        for name, keys in ROLLOUT.items():
            await press(app, pilot, *keys)
            changed.append(await painted(f"{name}-{suffix}", app))
    assert [text for text in changed if text] == []


@pytest.mark.parametrize("size", [(80, 24), (160, 50)], ids=["80x24", "160x50"])
async def test_an_empty_database_says_how_to_begin(
    size: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = []
    async with (
        world(tmp_path, monkeypatch, empty=True) as api,
        dashboard(api) as app,
        app.run_test(size=size) as pilot,
    ):
        await settled(app, pilot)
        changed.append(await painted(f"empty-{size[0]}x{size[1]}", app))
        for key in "234567":  # and no screen minds
            await press(app, pilot, key)
    assert [text for text in changed if text] == []


async def test_nothing_sticks_out_and_nothing_is_lost_when_the_terminal_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        world(tmp_path, monkeypatch) as api,
        dashboard(api) as app,
        app.run_test(size=(160, 50)) as pilot,
    ):
        await settled(app, pilot)
        first = shown(app)
        for size in ((80, 24), (40, 12), (200, 50), (160, 50)):
            await pilot.resize_terminal(*size)
            for key in ("2", "3", "4", "7", "1"):
                await press(app, pilot, key)
                assert "Overview" in shown(app)
        assert shown(app) == first
