"""The rules of one spec applied to requests: what is taken out, which calls are side calls, which agent asks.

Both are data of the spec, never heuristics of ours, and pure: the same request always gives the same answer.
Messages and tools are decoded, in OpenAI chat shape; what is given is not changed.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from forge_server.harness.spec import SideCall, Spec

Message = dict[str, Any]
_NAME = 100  # letters kept of an agent's name
_MAY_VANISH = ("system", "developer", "user")  # nothing refers to these, as a result does to its call


class Rules:
    """Compiled once per spec."""

    def __init__(self, spec: Spec) -> None:
        self._remove = [(rule.role, re.compile(rule.pattern)) for rule in spec.normalise.remove]
        self._drop = frozenset(spec.normalise.drop_keys)
        self._join = spec.normalise.join_text
        self._side = [(r, re.compile(r.system), re.compile(r.user)) for r in spec.side_calls]
        named = spec.sub_agents
        self._names = (
            {"agent": named.header.encode(), "parent_agent": named.parent_header.encode()} if named else {}
        )
        self.looks_inside = bool(self._remove or self._drop or self._join or self._side)
        """Whether messages must be decoded at all."""

    def normalise(self, messages: list[Message]) -> list[Message]:
        """The messages without what the harness injects and changes from call to call."""
        if not (self._remove or self._drop or self._join):
            return messages
        return [kept for message in messages if (kept := self._message(message)) is not None]

    def label(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> str:
        """The label of a side call, or an empty string. The first rule that holds counts."""
        if not self._side:
            return ""
        system = next((text_of(m) for m in messages if m.get("role") in ("system", "developer")), "")
        user = next((text_of(m) for m in reversed(messages) if m.get("role") == "user"), "")
        for rule, in_system, in_user in self._side:
            if _holds(rule, tools) and in_system.search(system) and in_user.search(user):
                return rule.label
        return ""

    def agent(self, headers: Mapping[bytes, bytes]) -> dict[str, str]:
        """``agent`` and ``parent_agent`` as the request's headers (names in lower case) tell them, if they do."""
        return {
            flag: headers[name].decode("latin-1")[:_NAME]
            for flag, name in self._names.items()
            if headers.get(name)
        }

    def _message(self, message: Message) -> Message | None:
        """The message itself if no rule changes it; None when a removal leaves nothing of it."""
        changed = {key: value for key, value in message.items() if key not in self._drop}
        content = changed.get("content")
        patterns = [pattern for role, pattern in self._remove if role == message.get("role")]
        if isinstance(content, str):
            changed["content"] = _without(content, patterns)
        elif isinstance(content, list):
            parts = [self._part(part, patterns) for part in content]
            parts = [p for p in parts if p.get("type") != "text" or p.get("text")]
            if self._join and all(p.get("type") == "text" for p in parts):
                changed["content"] = "".join(p["text"] for p in parts)
            else:
                changed["content"] = parts
        if changed == message:
            return message
        emptied = patterns and content and not changed["content"] and message.get("role") in _MAY_VANISH
        return None if emptied else changed

    def _part(self, part: dict[str, Any], patterns: list[re.Pattern[str]]) -> dict[str, Any]:
        part = {key: value for key, value in part.items() if key not in self._drop}
        if part.get("type") == "text":
            part["text"] = _without(str(part.get("text", "")), patterns)
        return part


def text_of(message: Message) -> str:
    """The text of a message, whichever shape its content has."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(p.get("text", "")) for p in content if p.get("type") == "text")
    return content if isinstance(content, str) else ""


def _without(text: str, patterns: list[re.Pattern[str]]) -> str:
    for pattern in patterns:
        text = pattern.sub("", text)
    return text


def _holds(rule: SideCall, tools: Sequence[dict[str, Any]]) -> bool:
    return rule.tools == "any" or not tools
