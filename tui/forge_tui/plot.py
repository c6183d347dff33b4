"""Curves of braille dots and bars of blocks. Pure."""

from collections.abc import Sequence
from math import isfinite

from forge_tui.ink import Line, fit

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
ABSURD = 1e100
"""So large a figure is none."""
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def number(value: float | None, digits: int = 3) -> str:
    """Short, for people."""
    if value is None or not isfinite(value):
        return "-"
    size = abs(value)
    if size >= 1e12:
        return f"{value:.0e}".replace("e+", "e")
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            scale = {"G": 1e9, "M": 1e6, "k": 1e3}[unit]
            return f"{value / scale:.{1 if size / scale < 100 else 0}f}{unit}"
    if value == int(value) or size >= 1000:
        return f"{value:.0f}"
    if size < 1e-3:
        return f"{value:.1e}".replace("e-0", "e-")
    return f"{value:.{digits}g}"


def curve(
    values: Sequence[float | None], width: int, height: int, style: str = "info", floor: float | None = None
) -> list[Line]:
    """The last of ``values`` that fit, joined by lines, with the least and the greatest at the left; where
    all are the same, that one."""
    label = 8
    columns = max(4, width - label)
    points = _columns(values, columns * 2)
    known = [value for value in points if value is not None]
    if not known:
        return [[(" " * label + "no figures yet", "muted")], *([[]] * (height - 1))]
    low, high = min(known), max(known)
    if floor is not None:
        low = min(low, floor)
    flat, top, bottom = high == low, number(high), number(low)
    if top == bottom and not flat:
        top, bottom = number(high, 5), number(low, 5)
    top, bottom = (
        text if len(text) < label else number(value, 2) for text, value in ((top, high), (bottom, low))
    )
    if flat and low == floor:
        high = low + 1
    elif flat:
        half = 0.5 * abs(low) or 1.0  # half of the least float is 0
        low, high = low - half, high + half
    rows = height * 4
    canvas = [[0] * columns for _ in range(height)]
    before: int | None = None
    for x, value in enumerate(points):
        if value is None:
            before = None
            continue
        y = round((high - value) / (high - low) * (rows - 1))
        span = range(min(y, before), max(y, before) + 1) if before is not None else (y,)
        for dot in span:
            canvas[dot // 4][x // 2] |= _DOTS[dot % 4][x % 2]
        before = y
    out: list[Line] = []
    for index, cells in enumerate(canvas):
        text = top if index == 0 else bottom if index == height - 1 else ""
        if flat:
            text = top if any(cells) else ""
        out.append(
            [
                (fit(text, label - 1, "right") + " ", "muted"),
                ("".join(chr(0x2800 + cell) for cell in cells), style),
            ]
        )
    return out


def _columns(values: Sequence[float | None], columns: int) -> list[float | None]:
    """As many as there are columns: fewer are stretched, more become means."""
    found = [value if value is not None and abs(value) < ABSURD else None for value in values]
    count = len(found)
    if not count:
        return []
    if count <= columns:
        step = (columns - 1) / (count - 1) if count > 1 else 0
        out: list[float | None] = [None] * columns
        for i in range(count - 1):
            a, b, start, end = found[i], found[i + 1], round(i * step), round((i + 1) * step)
            for x in range(start, end + 1):
                share = (x - start) / max(1, end - start)
                out[x] = (
                    a + (b - a) * share if a is not None and b is not None else (a if x == start else out[x])
                )
        if found[-1] is not None:
            out[round((count - 1) * step)] = found[-1]
        return out
    out = []
    for x in range(columns):
        part = [v for v in found[x * count // columns : (x + 1) * count // columns] if v is not None]
        out.append(sum(part) / len(part) if part else None)
    return out


def bar(share: float, width: int, style: str = "info") -> Line:
    """A bar that fills ``share`` of ``width`` cells."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    whole, rest = divmod(eighths, 8)
    text = "█" * whole + (_EIGHTHS[rest] if rest else "")
    return [(text, style), ("·" * (width - len(text)), "rule")]


def stacked(parts: Sequence[tuple[float, str, str]], width: int, total: float | None = None) -> Line:
    """(value, style, fill character) next to each other; ``total`` fills the whole width."""
    whole = total or sum(value for value, _, _ in parts)
    if whole <= 0:
        return [("·" * width, "rule")]
    out: Line = []
    used, summed = 0, 0.0
    for value, style, fill in parts:
        summed += max(0.0, value)
        end = min(width, round(summed / whole * width))
        if end > used:
            out.append((fill * (end - used), style))
            used = end
    out.append(("·" * (width - used), "rule"))
    return out
