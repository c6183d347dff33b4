"""Conversations as lines: messages with their roles, tool calls and answers. Pure.

Long texts are folded unless ``whole``. Nothing that an agent wrote is obeyed by the terminal (``ink.plain``).
"""

import json
from collections.abc import Sequence
from typing import Any

from forge_server.client.schemas import CallView, Turn
from forge_tui import ink, words
from forge_tui.ink import Line
from forge_tui.palette import SERIES
from forge_tui.plot import number

FOLDED = 10
MEASURED = 40  # rows: how many lines are folded is counted of texts up to this length
_STYLES = {"system": "muted", "developer": "muted", "user": "warn", "assistant": "good", "tool": "accent"}


def conversation(
    turns: Sequence[Turn], calls: dict[int, CallView], width: int, *, whole: bool, agent: str | None = None
) -> list[Line]:
    """Turns in order; only those of ``agent`` if one is given."""
    agents = agents_of(turns)
    out: list[Line] = []
    for turn in turns:
        if agent is not None and turn.agent != agent:
            continue
        out.append(heading(turn, calls.get(turn.call_id), agents, width))
        if turn.tools:
            text = f"offers {len(turn.tools)} tools: {', '.join(turn.tools)}"
            out += [[("      ", ""), (row, "muted")] for row in _folded(text, width - 6, whole, 2)]
        for message in turn.messages:
            out += said(message, width, whole)
        if turn.response is not None:
            out += said(turn.response, width, whole)
        elif turn.end is None:
            out.append([("      … no answer yet", "info")])
        else:
            call = calls.get(turn.call_id)
            out.append([(f"      no answer: {turn.end} {call.error or '' if call else ''}", "bad")])
        out.append([])
    return out


def agents_of(turns: Sequence[Turn]) -> list[str]:
    """Names of agents in the order of their first call; the main one has none."""
    return list(dict.fromkeys(turn.agent for turn in turns))


def agent_style(agent: str, agents: Sequence[str]) -> str:
    return SERIES[agents.index(agent) % len(SERIES)] if agent in agents else "text"


def heading(turn: Turn, call: CallView | None, agents: Sequence[str], width: int) -> Line:
    line: Line = [(f"─ {turn.seq} ", "text bold")]
    if len(agents) > 1:
        line.append((f"◆ {turn.agent or 'main'} ", agent_style(turn.agent, agents)))
    if turn.label:
        line.append((f"[{turn.label}] ", "muted"))
    if turn.after is not None and turn.after != turn.seq - 1:
        line.append((f"goes on from {turn.after} ", "muted"))
    elif turn.after is None and turn.seq:
        line.append(("a new conversation ", "warn"))
    if call is not None:
        line += [
            (f"{number(call.prompt_len)}→{number(call.completion_len)} tokens ", "muted"),
            (f"{words.span_of(_seconds(call))} ", "text"),
            (f"{words.version(call.policy_version)} ", "muted"),
            (f"{call.finish_reason or call.end or 'in flight'} ", "muted"),
        ]
        if call.untrainable:
            line.append((f"▲ not trained: {call.untrainable.replace('_', ' ')} ", "warn"))
    return [*line, ("─" * max(0, width - ink.width_of(line)), "rule")]


def _seconds(call: CallView) -> float | None:
    return None if call.ended_at is None else call.ended_at - call.began_at


def said(message: Any, width: int, whole: bool) -> list[Line]:
    """One message: its role, its text, its tool calls."""
    if not isinstance(message, dict):
        return [[("      ", ""), (ink.plain(str(message)), "muted")]]
    role = str(message.get("role", "?"))
    style = _STYLES.get(role, "text")
    room = width - 6
    out: list[Line] = []
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    if reasoning:
        out += [
            [("  … │ " if not i else "    │ ", "muted"), (row, "muted italic")]
            for i, row in enumerate(_folded(str(reasoning), room, whole))
        ]
    text = text_of(message.get("content"))
    mark = {"assistant": "  ◀ │ ", "tool": "  ⚙ │ ", "user": "  ▶ │ "}.get(role, "  § │ ")
    if text or not (reasoning or message.get("tool_calls")):
        for i, row in enumerate(_folded(text, room, whole)):
            out.append([(mark if not i else "    │ ", style), (row, "text")])
    for call in message.get("tool_calls") or []:
        function = call.get("function", {}) if isinstance(call, dict) else {}
        shown = f"{function.get('name', '?')}({_arguments(function.get('arguments'))})"
        for i, row in enumerate(_folded(shown, room, whole)):
            out.append([("  → │ " if not i else "    │ ", "info"), (row, "info")])
    return out


def _folded(text: str, width: int, whole: bool, most: int = FOLDED) -> list[str]:
    """Of a text that is long and folded only the beginning is wrapped: the screen is painted again and again."""
    begin = text if whole else text[: MEASURED * (max(width, 1) + 1)]
    rows = ink.wrap(begin, width)
    if len(begin) < len(text) and len(rows) < most + 2:  # much of it takes no room
        begin, rows = text, ink.wrap(text, width)
    if whole or len(rows) <= most + 1:
        return rows
    left = f"{len(rows) - most} more lines"
    if len(begin) < len(text):
        left = f"{number(_characters(text) - sum(map(_characters, rows[:most])))} more characters"
    return [*rows[:most], f"… {left} (e unfolds)"]


def _characters(text: str) -> int:
    """How many there are, without those that wrapping may drop."""
    return len(text) - sum(map(text.count, " \t\n"))


def text_of(content: Any) -> str:
    """What a message says, images and the like by their type."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(_part(part) for part in content)
    return json.dumps(content, ensure_ascii=False)


def _part(part: Any) -> str:
    if isinstance(part, dict):
        if isinstance(part.get("text"), str):
            return str(part["text"])
        return f"[{part.get('type', '?')}]"
    return str(part)


def _arguments(value: Any) -> str:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return str(value)
    if isinstance(value, dict):
        return ", ".join(f"{key}={json.dumps(each, ensure_ascii=False)}" for key, each in value.items())
    return json.dumps(value, ensure_ascii=False)
