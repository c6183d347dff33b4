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


def draw_harness(
    mixture: Sequence[tuple[str, float]], used: Mapping[str, int], of_task: Mapping[str, int]
) -> str:
    """The harness of the next group: the one furthest behind its share, of the run and of the group's task
    together, so that no task meets one harness only. ``used`` counts the run's groups so far, ``of_task`` those of
    the task. Either share is kept to within two groups."""
    total = sum(used.get(name, 0) + of_task.get(name, 0) for name, _ in mixture) + 2

    def behind(entry: tuple[str, float]) -> tuple[float, str]:
        name, share = entry
        return share * total - used.get(name, 0) - of_task.get(name, 0), name

    return max(mixture, key=behind)[0]


def _rank(seed: int, epoch: int, name: str) -> bytes:
    return sha256(f"{seed}\0{epoch}\0{name}".encode()).digest()
