"""Draws the pictures of docs/tui.md, to be looked at afterwards: ``PYTHONPATH=tests python -m tui_pictures``.

With an address and a key those of the demo, while it trains there.
"""

import asyncio
import re
import sys
import tempfile
from pathlib import Path

import pytest
from forge_tui.app import ForgeApp
from tui_world import FEATURED, dashboard, press, rollout_id, settled, world

from forge_server.client.http import ForgeClient

OUT = Path(__file__).resolve().parents[1] / "docs" / "img"
SIZE = (124, 34)
MAIN = {"overview": "1", "rollouts": "2", "training": "3", "tasks": "5", "cost": "6"}
ROLLOUT = {"conversation": ("2",), "calls": ("3",), "tokens": ("4", "n", "m")}


def write(name: str, svg: str) -> None:
    """Without the fonts that the picture would fetch from elsewhere."""
    OUT.mkdir(parents=True, exist_ok=True)
    plain = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    plain = plain.replace("Fira Code, monospace", "Fira Code, DejaVu Sans Mono, Menlo, Consolas, monospace")
    (OUT / f"tui-{name}.svg").write_text(plain)


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        async with (
            world(Path(folder), patch) as api,
            dashboard(api) as app,
            app.run_test(size=SIZE) as pilot,
        ):
            await settled(app, pilot)
            for name, key in MAIN.items():
                await press(app, pilot, key)
                write(name, app.export_screenshot())
            app.open_rollout(rollout_id(FEATURED))
            await settled(app, pilot)
            for name, keys in ROLLOUT.items():
                await press(app, pilot, *keys)
                write(name, app.export_screenshot())
            await press(app, pilot, "escape", "d", "1")
            write("light", app.export_screenshot())


async def live(url: str, key: str) -> None:
    with ForgeClient(url, key, timeout_s=20.0) as client:
        app = ForgeApp(client)
        async with app.run_test(size=SIZE) as pilot:
            await settled(app, pilot)
            for name in ("overview", "training"):
                await press(app, pilot, MAIN[name])
                write(f"demo-{name}", app.export_screenshot())


if __name__ == "__main__":
    asyncio.run(live(*sys.argv[1:3]) if len(sys.argv) > 1 else main())
