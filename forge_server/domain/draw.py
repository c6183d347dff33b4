"""Which tasks a step draws and which harness each group is run in: deterministic by the run's seed.

The state is what has been drawn so far, which the ``groups`` rows tell; there is no cursor to lose. Tasks
drawn least come first, and among those the order is a shuffle by (seed, times drawn): that is a fresh shuffle
per epoch, across the borders of steps and restarts. A task that fails for good drops out without moving the
others.
"""

from collections.abc import Mapping, Sequence
from hashlib import sha256


def draw_tasks(ready: Sequence[str], drawn: Mapping[str, int], seed: int, count: int) -> list[str]:
    """The next ``count`` task names. ``drawn`` tells how often each was drawn before.

    A task comes twice only when there are fewer tasks than ``count``. Raises ValueError when there are none.
    """
    if not ready:
        raise ValueError("there are no tasks to draw from")
    times = {name: drawn.get(name, 0) for name in ready}
    picked: list[str] = []
    while len(picked) < count:
        order = sorted(times, key=lambda name: (times[name], _rank(seed, times[name], name)))
        for name in order[: count - len(picked)]:
            times[name] += 1
            picked.append(name)
    return picked


def draw_harness(mixture: Sequence[tuple[str, float]], used: Mapping[str, int]) -> str:
    """The harness of the next group: the one furthest behind its share. ``used`` counts groups so far."""
    total = sum(used.get(name, 0) for name, _ in mixture) + 1
    return max(mixture, key=lambda entry: (entry[1] * total - used.get(entry[0], 0), entry[0]))[0]


def _rank(seed: int, epoch: int, name: str) -> bytes:
    return sha256(f"{seed}\0{epoch}\0{name}".encode()).digest()
