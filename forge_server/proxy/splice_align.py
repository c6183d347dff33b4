"""Puts recorded tokens in the place of what the engine rendered for them, or says why that would be wrong.

A recorded conversation S is context, answer, context, answer, …; the rendered prompt R of a request that
continues it should be the same contexts with each answer written anew, then what the request adds. By
construction every context of S must stand in R token by token, so the spliced prompt reads exactly like R except
inside answers that the policy itself gave. What may differ there is decided by ``splice``, which gets the places.
"""

import re
from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np

from forge_server.domain.call import Ids
from forge_server.domain.engine import Template
from forge_server.domain.states import Fallback
from forge_server.trajectory.forest import common_prefix

_ESCAPES = re.compile(r"(?:\\u[0-9a-fA-F]{4})+")
_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
_THINK_TAG = re.compile(r"[<\[]/?(?:\w+:)?think[>\]]", re.IGNORECASE)
THINK_END = re.compile(r"[<\[]/(?:\w+:)?think[>\]]", re.IGNORECASE)
"""``</think>``, ``</seed:think>``, ``[/THINK]``."""


class Unspliceable(Exception):
    """The call cannot be served token-exact; ``reason`` is what its row says."""

    def __init__(self, reason: Fallback) -> None:
        self.reason = reason
        super().__init__(reason.value)


class Place(msgspec.Struct, frozen=True):
    """Tokens ``[start, end)`` of a recorded conversation are an answer. ``closed``: its last token is the end of
    the turn, as sampled; else it was cut off."""

    start: int
    end: int
    closed: bool


class Written(msgspec.Struct, frozen=True):
    """The tokens that stand in the rendered prompt for an answer, without the end of the turn. ``melted``: the
    last token before the answer, -1 unless it has become one with the answer's first."""

    ids: Ids
    melted: int


class Aligned(msgspec.Struct, frozen=True):
    """``tail``: where in the rendered prompt begins what follows the last answer. ``unopened``: before some answer
    the template has left out what it puts before one that is asked for."""

    tail: int
    written: tuple[Written, ...]
    unopened: bool = False


def align(
    recorded: Ids,
    places: Sequence[Place],
    rendered: Ids,
    template: Template,
    *,
    done: int = 0,
) -> Aligned:
    """Find the answers at ``places`` of ``recorded`` [S] in ``rendered`` [R]; see the module's docstring.

    ``done``: so many tokens of the rendered prompt are known to be right, the last one perhaps melted, and only
    the last answer, which stands behind them, is looked for. Raises Unspliceable.
    """
    written = []
    at, before = 0, 0
    unopened = False
    if done:
        places, at, before = places[-1:], done - 1, places[-1].start - 1
    for place in places:
        at, melted, unopened_here = _past(recorded[before : place.start], rendered, at, template)
        unopened = unopened or unopened_here
        begin, at = at, _end(recorded[place.start : place.end], rendered, at, place.closed, template.closing)
        written.append(Written(rendered[begin:at], melted))
        at += place.closed
        before = place.end
    if at >= rendered.size:
        raise Unspliceable(Fallback.END_UNKNOWN)
    return Aligned(at, tuple(written), unopened)


def _past(context: Ids, rendered: Ids, at: int, template: Template) -> tuple[int, int, bool]:
    """The position behind ``context`` in ``rendered``, the token of it that has melted into what follows, and
    whether the opening was missing at its end."""
    opening = template.opening
    bare = context.size - len(opening)
    ends = [(context.size, False)]
    if opening and bare > 0 and context[bare:].tolist() == list(opening):
        ends.append((bare, True))
    for size, unopened in ends:
        agree = common_prefix(context[:size], rendered[at:])
        if agree == size:
            return at + size, -1, unopened
        if agree == size - 1:
            return at + size - 1, int(context[size - 1]), unopened
    raise Unspliceable(Fallback.CONTEXT_DIFFERS)


def _end(answer: Ids, rendered: Ids, at: int, closed: bool, closing: int) -> int:
    """Where the answer that begins at ``at`` ends in ``rendered``: before the end of its turn."""
    if not closed:
        end = at + answer.size
        if end <= rendered.size and np.array_equal(rendered[at:end], answer):
            return end  # what the template adds to close it is context
        if closing < 0:
            raise Unspliceable(Fallback.END_UNKNOWN)
    found = (rendered[at:] == (answer[-1] if closed else closing)).argmax()
    end = at + int(found)
    if end >= rendered.size or rendered[end] != (answer[-1] if closed else closing):
        raise Unspliceable(Fallback.END_UNKNOWN)
    return end


def says(text: str, parts: Sequence[str]) -> bool:
    """Whether ``text`` has each of the ``parts`` in it; white space, which templates trim, makes no difference."""
    whole = "".join(text.split())
    return all("".join(part.split()) in whole for part in parts)


def covers(text: str, sampled: str) -> bool:
    """Whether ``text`` has all letters and digits of ``sampled``. In what order makes no difference, nor how JSON
    writes a character or a number; the tags of a think block do not count, which templates leave out when it is
    empty."""
    return not _letters(_THINK_TAG.sub("", sampled)) - _letters(text)


def _letters(text: str) -> Counter[str]:
    plain = _NUMBER.sub(lambda found: _number(found[0]), _ESCAPES.sub(lambda found: _escaped(found[0]), text))
    return Counter(filter(str.isalnum, plain.casefold()))


def _escaped(escapes: str) -> str:
    """The characters that ``\\uXXXX`` stand for; two that are halves are one."""
    return bytes.fromhex(escapes.replace("\\u", "")).decode("utf-16-be", "replace")


def _number(digits: str) -> str:
    if digits.isdecimal():
        return digits
    value = float(digits)
    return str(int(value)) if value.is_integer() else str(value)
