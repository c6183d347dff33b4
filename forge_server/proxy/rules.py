"""Applies the rules of the harness spec to a turn: normalisation, and the label of a side call."""

import msgspec
from msgspec import Raw

from forge_server.domain.turn import Turn
from forge_server.proxy.ports import CallRules


def apply(turn: Turn, rules: CallRules | None) -> tuple[Turn, str]:
    """The turn without what the harness injects, and its label. Messages that no rule changes keep their
    bytes."""
    if rules is None or not rules.looks_inside:
        return turn, ""
    given = [msgspec.json.decode(message) for message in turn.messages]
    tools = [msgspec.json.decode(tool) for tool in turn.tools]
    normal = rules.normalise(given)
    if normal != given:
        before = dict(zip(map(id, given), turn.messages, strict=True))
        turn = msgspec.structs.replace(
            turn, messages=tuple(before.get(id(m)) or Raw(msgspec.json.encode(m)) for m in normal)
        )
    return turn, rules.label(normal, tools)
