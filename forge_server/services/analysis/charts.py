"""Curves as inline SVG. Colours are those of the page's style sheet (``c0`` to ``c3``), so that they suit its theme."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import Markup, escape

WIDTH, HEIGHT = 380, 190
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 10, 24


class Series(NamedTuple):
    """A curve: points (step, value) in order. ``band``: (step, low, high) of an interval around it."""

    name: str
    points: Sequence[tuple[float, float]]
    band: Sequence[tuple[float, float, float]] = ()


def chart(series: Sequence[Series]) -> Markup:
    """One drawing of all curves on the same axes; empty when there is no point."""
    points = [point for one in series for point in one.points if math.isfinite(point[1])]
    if not points:
        return Markup("")
    lows = [low for one in series for _, low, _ in one.band]
    highs = [high for one in series for _, _, high in one.band]
    xs = [x for x, _ in points]
    x_ticks = ticks(min(xs), max(xs), 6, whole=True)
    y_ticks = ticks(min([y for _, y in points] + lows), max([y for _, y in points] + highs), 4)

    def at(x: float, y: float) -> str:
        return f"{_scale(x, x_ticks, LEFT, WIDTH - RIGHT):.1f},{_scale(y, y_ticks, HEIGHT - BOTTOM, TOP):.1f}"

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">']
    for y in y_ticks:
        height = _scale(y, y_ticks, HEIGHT - BOTTOM, TOP)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{height:.1f}" y2="{height:.1f}"/>'
        )
        parts.append(f'<text x="{LEFT - 5}" y="{height + 3.5:.1f}" text-anchor="end">{number(y)}</text>')
    for x in x_ticks:
        place = _scale(x, x_ticks, LEFT, WIDTH - RIGHT)
        parts.append(f'<text x="{place:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{number(x)}</text>')
    for index, one in enumerate(series):
        if one.band:
            outline = [at(x, high) for x, _, high in one.band] + [
                at(x, low) for x, low, _ in reversed(one.band)
            ]
            parts.append(f'<polygon class="band c{index}" points="{" ".join(outline)}"/>')
        drawn = [at(x, y) for x, y in one.points if math.isfinite(y)]
        parts.append(f'<polyline class="c{index}" points="{" ".join(drawn)}"/>')
        if len(drawn) <= 40:
            for point in drawn:
                left, _, top = point.partition(",")
                parts.append(f'<circle class="c{index}" cx="{left}" cy="{top}" r="2.2"/>')
    parts.append("</svg>")
    if len(series) > 1:
        keys = (f'<span class="key c{i}">{escape(one.name)}</span>' for i, one in enumerate(series))
        parts.append(f'<div class="keys">{"".join(keys)}</div>')
    return Markup("".join(parts))


def ticks(low: float, high: float, about: int, *, whole: bool = False) -> list[float]:
    """Round numbers from at or below ``low`` to at or above ``high``, at least two."""
    size = max(abs(low), abs(high))
    if high - low <= 1e-9 * size or high - low < 1e-290:  # what is smaller has no half that a float can tell
        low, high = (low, low + 1) if whole or size < 1e-280 else (low - abs(low) / 2, high + abs(high) / 2)
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    if whole:
        step = max(1.0, round(step))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, max(last, first + 1) + 1)]


def number(value: float) -> str:
    """Short, as on an axis."""
    return f"{value:.4g}".replace("e-0", "e-").replace("e+0", "e")


def _scale(value: float, marks: Sequence[float], begin: float, end: float) -> float:
    share = (value - marks[0]) / (marks[-1] - marks[0])
    return begin + share * (end - begin)
