"""Builds the canonical messages of a turn (OpenAI chat shape) out of the pieces that other dialects send.

Assistant messages come out byte for byte as ``domain.turn.as_message`` writes them, so that an answer that
comes back is the message that was recorded. A tool result needs its call earlier in the history. What stands
as system messages at the start is one message: many chat templates allow no more. ``developer`` is no role of
theirs (Qwen3's leaves such a message out without a word): it is the system's.
"""

from typing import Any

import msgspec
from msgspec import Raw

from forge_server.proxy.dialects.reading import bad

_encode = msgspec.json.encode

Part = dict[str, Any]


def text_part(text: str) -> Part:
    """A piece of text."""
    return {"type": "text", "text": text}


def image_part(url: str) -> Part:
    """An image as a data URL."""
    return {"type": "image_url", "image_url": {"url": url}}


def content_of(parts: list[Part]) -> str | list[Part]:
    """Text alone becomes one string, whatever pieces it came in; with images the pieces stay."""
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


class Conversation:
    """The messages so far. Pieces of an assistant's turn are gathered until something else follows, or until
    they can no longer be one turn, in which reasoning, text and calls follow each other in this order.
    """

    def __init__(self) -> None:
        self._messages: list[Raw] = []
        self._opening: str | None = None  # the system message that comes first
        self._called: set[str] = set()
        self._reasoning: str | None = None
        self._text: str | None = None
        self._calls: list[dict[str, Any]] = []

    def add(self, role: str, content: str | list[Part]) -> None:
        """A message of anyone but the assistant."""
        self.flush()
        if role == "system" and isinstance(content, str):
            if not self._messages:
                self._opening = content
            elif len(self._messages) == 1 and self._opening is not None:
                self._opening = content = f"{self._opening}\n\n{content}"
                self._messages.clear()
        self._messages.append(Raw(_encode({"role": role, "content": content})))

    def think(self, reasoning: str) -> None:
        """The assistant's reasoning; it opens a turn."""
        self.flush()
        self._reasoning = reasoning

    @property
    def thought(self) -> bool:
        """Whether the turn that is being gathered has reasoning."""
        return self._reasoning is not None

    def recall(self, reasoning: str) -> None:
        """The reasoning of the turn that is being gathered, which its client has kept apart from it; text may
        stand before it.
        """
        if self._calls:
            self.flush()
        self._reasoning = reasoning

    def say(self, text: str, *, own: bool = False) -> None:
        """The assistant's text; pieces that follow each other are one text, unless each stands on its
        ``own``.
        """
        if self._calls or (own and self._text is not None):
            self.flush()
        self._text = text if self._text is None else self._text + text

    def call(self, id: str, name: str, arguments: str) -> None:
        """A tool call of the assistant."""
        self._called.add(id)
        function = {"name": name, "arguments": arguments}
        self._calls.append({"id": id, "type": "function", "function": function})

    def result(self, call_id: str, content: str | list[Part], param: str) -> None:
        """What a tool gave back."""
        self.flush()
        if call_id not in self._called:
            raise bad(f"there is no tool call {call_id!r} that this is the result of", param=param)
        self._messages.append(Raw(_encode({"role": "tool", "tool_call_id": call_id, "content": content})))

    def flush(self) -> None:
        """End the assistant's turn."""
        if self._reasoning is None and self._text is None and not self._calls:
            return
        message: dict[str, Any] = {"role": "assistant", "content": self._text}
        if self._reasoning:
            message["reasoning_content"] = self._reasoning
        if self._calls:
            message["tool_calls"] = self._calls
        self._messages.append(Raw(_encode(message)))
        self._reasoning, self._text, self._calls = None, None, []

    def messages(self) -> tuple[Raw, ...]:
        """Everything, the turn that is being gathered included."""
        self.flush()
        return tuple(self._messages)


def tool(
    name: str, description: str | None, parameters: Raw | dict[str, Any] | None, *, strict: bool = False
) -> Raw:
    """A tool in chat shape."""
    function: dict[str, Any] = {"name": name}
    if description is not None:
        function["description"] = description
    function["parameters"] = {"type": "object", "properties": {}} if parameters is None else parameters
    if strict:
        function["strict"] = True
    return Raw(_encode({"type": "function", "function": function}))
