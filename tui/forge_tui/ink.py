"""Lines of coloured text, before anything knows where they will be painted. Pure.

A line is a list of (text, style); a style is words that ``palette.style`` understands.
"""

from collections.abc import Iterable, Sequence
from itertools import zip_longest

from rich.cells import cell_len, get_character_cell_size, set_cell_size
from rich.segment import Segment
from textual.strip import Strip

from forge_tui import palette

Span = tuple[str, str]
Line = list[Span]

EMOJI = "\ufe0f"  # makes the character before it as wide as an emoji
_CONTROLS = {i: 0x2400 + i for i in range(32)} | {0x7F: 0x2421} | {i: 0xFFFD for i in range(0x80, 0xA0)}
_CONTROLS |= {0x200E: None, 0x200F: None} | {
    i: None for i in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))
}


def plain(text: str) -> str:
    """``text`` without what a terminal would obey: whatever an agent wrote, it only shows."""
    return text if text.isascii() and text.isprintable() else text.expandtabs(4).translate(_CONTROLS)


def line(*spans: Span | str) -> Line:
    return [span if isinstance(span, tuple) else (span, "") for span in spans]


def width_of(found: Line) -> int:
    return sum(cell_len(text) for text, _ in found)


def fit(text: str, width: int, align: str = "left") -> str:
    """Exactly ``width`` cells; what is cut ends in an ellipsis."""
    if width <= 0:
        return ""
    size = len(text) if text.isascii() else cell_len(text)
    if size > width:
        return set_cell_size(text, width - 1) + "…" if width > 1 else "…"
    return text.rjust(len(text) + width - size) if align == "right" else text + " " * (width - size)


def cut(found: Line, width: int) -> Line:
    """The line, exactly ``width`` cells wide."""
    out: Line = []
    left = width
    for text, style in found:
        size = cell_len(text)
        if size > left:
            out.append((fit(text, left), style))
            return out
        out.append((text, style))
        left -= size
    if left > 0:
        out.append((" " * left, ""))
    return out


def beside(blocks: Sequence[tuple[Sequence[Line], int]], gap: int = 2) -> list[Line]:
    """Blocks of lines next to each other, each with its width."""
    rows = zip_longest(*(lines for lines, _ in blocks), fillvalue=None)
    out = []
    for row in rows:
        joined: Line = []
        for part, (_, width) in zip(row, blocks, strict=True):
            joined += [*cut(part or [], width), (" " * gap, "")]
        out.append(joined[:-1])
    return out


def flow(found: Line, width: int) -> list[Line]:
    """Spans, none of which is divided, in as many lines as they need."""
    out: list[Line] = [[]]
    for span in found:
        if out[-1] and width_of([*out[-1], (span[0].rstrip(), "")]) > width:
            out.append([])
        out[-1].append(span)
    return [[*spans[:-1], (spans[-1][0].rstrip(), spans[-1][1])] for spans in out if spans]


def rule(title: str, width: int, style: str = "muted") -> Line:
    """A heading."""
    return [(f"{title} ", f"{style} bold"), ("─" * max(0, width - cell_len(title) - 1), "rule")]


def wrap(text: str, width: int) -> list[str]:
    """``text`` in rows of at most ``width`` cells, broken at spaces where it goes. Looks only at what may fit into
    the next row: an agent may write a megabyte without a line break."""
    width = max(width, 1)
    out = []
    for paragraph in text.split("\n"):
        shown = plain(paragraph)
        at = 0
        while (end := _reach(shown, at, width)) < len(shown):
            space = shown.rfind(" ", at, end + 1)
            if space - at > (end - at) // 2:
                out.append(shown[at:space])
                at = space + 1
            else:
                out.append(shown[at:end])
                at = end
        out.append(shown[at:])
    return out


def _reach(text: str, at: int, width: int) -> int:
    """Where a row that begins at ``at`` has to end; it takes at least one character."""
    if text.isascii():
        return min(at + width, len(text))
    used = 0
    for end in range(at, len(text)):
        character = text[end]
        used += 1 if character == EMOJI else get_character_cell_size(character)
        if used > width:
            return max(end, at + 1)
    return len(text)


def strip(found: Line, width: int, theme: str, chosen: bool = False) -> Strip:
    """The line as it is painted."""
    segments = [Segment(plain(text), palette.style(style, theme, chosen)) for text, style in found if text]
    return Strip(segments).adjust_cell_length(width, palette.style("", theme, chosen))


def text_of(lines: Iterable[Line]) -> str:
    """Without colours; for tests."""
    return "\n".join("".join(text for text, _ in each).rstrip() for each in lines)
