"""Why a conversation did not continue where it could have: a name for every break between samples.

Decided on token ids alone. The names explain cost (`forge-server drift`); nothing that is trained depends
on them, so a rule of thumb is good enough where ids cannot tell, and each rule is one function with its
reason.
"""

import numpy as np

from forge_server.domain.call import Call, Ids
from forge_server.domain.sample import BreakReason

_NEEDLE = 16  # tokens that, found again, show that a text was carried over
_HEADER = 4  # tokens a template may put before or in place of removed reasoning


def find(needle: Ids, hay: Ids) -> int:
    """The first index at which ``needle`` occurs in ``hay``, or -1."""
    last = hay.size - needle.size
    if needle.size == 0 or last < 0:
        return -1
    for at in np.flatnonzero(hay[: last + 1] == needle[0]).tolist():
        if np.array_equal(hay[at : at + needle.size], needle):
            return int(at)
    return -1


def in_completion(completion: Ids, at: int, after: Ids) -> BreakReason | None:
    """The prompt agrees with a completion up to token ``at`` of it, and goes on as ``after`` instead.

    Where the rest of the completion turns up again, what lies between was taken out or written differently.
    None when nothing of the completion turns up: the prompt then leaves the context before it.
    """
    rest = completion[at:]
    window = after[: 2 * rest.size + 64]
    begin, same = -1, 0
    for same in (8, 2):
        begin = find(rest[-same:], window) if same <= rest.size else -1
        if begin >= 0:
            break
    if begin < 0:
        return BreakReason.HISTORY_EDITED if at else None
    while same < rest.size and begin > 0 and after[begin - 1] == rest[-same - 1]:
        begin, same = begin - 1, same + 1
    gone, put = rest.size - same, begin
    if at <= _HEADER and put <= _HEADER and gone > put:
        return BreakReason.REASONING_STRIPPED  # the head of the answer is gone, its end is whole
    if 2 * min(gone, put) >= max(gone, put) or max(gone, put) <= _HEADER:
        return BreakReason.TEMPLATE  # about as many tokens on either side: the same thing written differently
    return BreakReason.HISTORY_EDITED


def in_context(prompt: Ids, shared: int, before: list[Call], alive: bool) -> BreakReason:
    """The prompt leaves text that the harness itself had sent.

    ``before``: the calls it may come from, the likeliest first. ``alive``: another conversation that began
    earlier goes on after this one.
    """
    new = prompt[shared:]
    for call in before:
        if find(call.prompt[-_NEEDLE:], new) >= 0:
            return (
                BreakReason.HISTORY_EDITED
            )  # the question last asked is there still: text before it was changed
    shorter = [call for call in before if prompt.size < call.prompt.size]
    for call in shorter:
        middle = call.completion[call.completion.size // 4 :][:_NEEDLE]
        if middle.size == _NEEDLE and find(middle, new) >= 0:
            return BreakReason.COMPACTION  # goes on from an answer, without what the answer was about
    if alive or shared == 0:
        return BreakReason.ROOT
    if shorter and 2 * shared < prompt.size:
        return BreakReason.COMPACTION
    return BreakReason.HISTORY_EDITED if 2 * shared >= prompt.size else BreakReason.ROOT
