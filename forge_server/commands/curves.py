"""``forge-server run show --plot``: a run's figures as the dashboard draws them, and its attempts in flight."""

from collections.abc import Sequence

from rich.text import Text

from forge_server.client.schemas import EventView, StepMetrics
from forge_server.commands import show as out

ATTEMPTS = "attempt_launching,attempt_ended"
"""Kinds of event that tell how many are in flight."""
SLOTS = 120
_STYLES = {"bold": "bold", "muted": "dim", "rule": "dim"}  # its colours are for its own background
HEIGHT = 60
"""Wished for; a few curves are drawn tall, many are not."""


def show(metrics: Sequence[StepMetrics], attempts: Sequence[EventView]) -> None:
    """``attempts``: events of the kinds ``ATTEMPTS``, newest first."""
    from forge_tui import curves
    from forge_tui.model import Model

    model = Model()
    model.add(metrics)
    found = curves.of_run(model.series)
    if flying := in_flight(attempts):
        found.append(("In flight, over time", flying, "accent"))
    for line in curves.sheet(found, out.console.width, HEIGHT):
        text = Text()
        for part, style in line:
            text.append(part, " ".join(_STYLES[word] for word in style.split() if word in _STYLES))
        text.rstrip()
        out.console.print(text, soft_wrap=True)


def in_flight(attempts: Sequence[EventView]) -> list[float]:
    """How many attempts were in flight, as means of equal parts of the time from the first launch to the last event.

    An attempt whose launch is no longer kept does not count.
    """
    launched: set[str] = set()
    changes: list[tuple[float, int]] = []
    for event in reversed(attempts):
        attempt = event.attempt_id or ""
        if event.kind == "attempt_launching":
            launched.add(attempt)
            changes.append((event.at, 1))
        elif attempt in launched:
            changes.append((event.at, -1))
    if not changes or changes[0][0] == changes[-1][0]:
        return []
    begin, slot = changes[0][0], (changes[-1][0] - changes[0][0]) / SLOTS
    means = [0.0] * SLOTS
    for at, change in changes:  # each changes what is left of its slot, and all that follow
        place = min((at - begin) / slot, float(SLOTS))
        for index in range(int(place), SLOTS):
            means[index] += change * min(1.0, index + 1 - place)
    return [max(0.0, round(mean, 6)) for mean in means]
