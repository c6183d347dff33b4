"""``forge-server demo``"""

import signal
import sys
from pathlib import Path

from msgspec.structs import replace

from forge_server.demo.recipe import RECIPE
from forge_server.demo.run import run_demo


def demo(folder: str, seed: int, versions: int | None, control: bool) -> None:
    """The control has learning rate 0: whatever it seems to gain is noise of the measurement."""
    # by default SIGTERM ends a program on the spot, and the server that the demo started would be left behind
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    learning = RECIPE.learning
    if versions is not None:
        learning = replace(learning, versions=versions)
    if control:
        learning = replace(learning, lr=0.0)
    run_demo(Path(folder), seed, replace(RECIPE, learning=learning))
