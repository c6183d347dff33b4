"""``forge-server demo``"""

from pathlib import Path

import msgspec

from forge_server.demo.recipe import RECIPE
from forge_server.demo.run import run_demo


def demo(folder: str, seed: int, versions: int | None, control: bool) -> None:
    learning = RECIPE.learning
    if versions is not None:
        learning = msgspec.structs.replace(learning, versions=versions)
    if control:
        learning = msgspec.structs.replace(learning, lr=0.0)
    run_demo(Path(folder), seed, msgspec.structs.replace(RECIPE, learning=learning))
