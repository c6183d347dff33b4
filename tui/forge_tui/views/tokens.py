"""A segment's tokens as flowing text, coloured by mask, by logprob or by policy version. Pure."""

from collections.abc import Sequence
from typing import Literal

from forge_server.client.schemas import TokensView
from forge_tui import ink
from forge_tui.ink import Line, Span
from forge_tui.palette import RAMP, SERIES

Mode = Literal["mask", "logprob", "version"]
MODES: tuple[Mode, ...] = ("mask", "logprob", "version")
LIMITS = (-0.01, -0.1, -0.7, -2.3)
"""Logprobs between the five colours: probability 0.99, 0.9, 0.5, 0.1."""


def pieces(found: TokensView) -> list[str]:
    """What is shown of each token: whitespace that matters is marked."""
    texts = found.text or [f"{id} " for id in found.ids]
    return [text.replace("\n", "⏎").replace("\t", "→   ") or "∅" for text in texts]


def style_of(found: TokensView, index: int, mode: Mode, versions: Sequence[int]) -> str:
    if not found.mask[index]:
        return "muted"
    if mode == "mask":
        return "info bold underline"
    if mode == "logprob":
        rank = sum(found.logprobs[index] < limit for limit in LIMITS)
        return f"text on {RAMP[rank]}"
    return f"{SERIES[versions.index(found.versions[index]) % len(SERIES)]} bold underline"


def versions_of(found: TokensView) -> list[int]:
    return sorted({version for version, mask in zip(found.versions, found.mask, strict=True) if mask})


def flow(found: TokensView, width: int, mode: Mode, cursor: int) -> tuple[list[Line], list[int]]:
    """The lines, and the line on which each token begins. A line break in the text breaks the line too."""
    versions = versions_of(found)
    lines: list[Line] = [[]]
    places: list[int] = []
    used = 0
    for index, piece in enumerate(pieces(found)):
        text = ink.plain(piece)
        size = ink.width_of([(text, "")])
        if used and used + size > width:
            lines.append([])
            used = 0
        places.append(len(lines) - 1)
        style = style_of(found, index, mode, versions)
        lines[-1].append((text, f"{style} reverse" if index == cursor else style))
        used += size
        if piece.endswith("⏎"):
            lines.append([])
            used = 0
    return lines, places


def legend(found: TokensView, mode: Mode) -> Line:
    muted: Span = ("context ", "muted")
    if mode == "mask":
        return [muted, ("trained", "info bold underline")]
    if mode == "version":
        versions = versions_of(found)
        return [
            muted,
            *(
                (f"v{version} ", f"{SERIES[i % len(SERIES)]} bold underline")
                for i, version in enumerate(versions)
            ),
        ]
    names = ("p>.99", ">.9", ">.5", ">.1", "<.1")
    return [muted, *((f" {name} ", f"text on {colour}") for name, colour in zip(names, RAMP, strict=True))]


def under_cursor(found: TokensView, cursor: int, texts: Sequence[str]) -> Line:
    at = f"token {found.offset + cursor + 1}/{found.length} "
    line: Line = [(at, "muted"), (f"{texts[cursor]!r} ", "text bold"), (f"id {found.ids[cursor]} ", "muted")]
    if found.mask[cursor]:
        value = found.logprobs[cursor]
        line += [
            ("trained ", "info"),
            (f"logprob {value:.3f} ", "text"),
            (f"v{found.versions[cursor]}", "text"),
        ]
    else:
        line.append(("context", "muted"))
    return line
