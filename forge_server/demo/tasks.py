"""The demo's task family: one number is asked for, and it can only be known by looking it up in a file.

A work folder holds three small folders of files named by number; the instruction names one file. The files
beside it hold other numbers, so that neither habit nor guessing helps. The sets are drawn from the seed
alone, and no number that occurs in one split occurs in another.
"""

import random
from collections.abc import Sequence
from typing import Any

import msgspec

PLACES = ("bag", "box", "jar")
NAMES = tuple(f"{number:02d}" for number in range(100))
VALUES = tuple(f"{number:03d}" for number in range(1000))
BESIDE = 3  # files that are not asked for and have other names
SHARES = {"teach": 450, "train": 350, "heldout": 200}
"""Split -> how many of VALUES are its own."""


class Lookup(msgspec.Struct, frozen=True):
    """Which number is in ``path``? ``files`` are contents by path, ``answer`` is that of ``path``."""

    name: str
    path: str
    answer: str
    files: dict[str, str]

    @property
    def instruction(self) -> str:
        return f"Which number is in {self.path}?"

    def line(self) -> dict[str, Any]:
        """The task as one JSONL line of the local task format."""
        return {
            "name": self.name,
            "instruction": self.instruction,
            "files": self.files,
            "verify": {"answer_file": "answer.txt", "equals": self.answer},
        }


def draw(split: str, count: int, seed: int) -> list[Lookup]:
    """``count`` tasks of ``split``; the same for the same seed."""
    rng = random.Random(f"{split}-{seed}")
    values = values_of(split)
    return [_one(rng, f"{split}-{index:04d}", values) for index in range(count)]


def values_of(split: str) -> Sequence[str]:
    """The numbers that occur in ``split``: a fixed shuffle of all of them, cut by SHARES."""
    mixed = random.Random(0).sample(VALUES, len(VALUES))
    start = 0
    for name, share in SHARES.items():
        if name == split:
            return mixed[start : start + share]
        start += share
    raise ValueError(f"there is no split {split!r}")


def _one(rng: random.Random, name: str, values: Sequence[str]) -> Lookup:
    place = rng.choice(PLACES)
    asked, *others = rng.sample(NAMES, 1 + BESIDE)
    # the asked name also exists in another folder: the folder has to be read too
    decoy = rng.choice([other for other in PLACES if other != place])
    paths = [f"{place}/{asked}", f"{decoy}/{asked}", *(f"{rng.choice(PLACES)}/{other}" for other in others)]
    files = dict(zip(paths, rng.sample(values, len(paths)), strict=True))
    return Lookup(name=name, path=paths[0], answer=files[paths[0]], files=dict(sorted(files.items())))
