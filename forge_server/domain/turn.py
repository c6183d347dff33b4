"""The canonical turn: one request to the policy and its answer, free of the dialect they travel in.

Messages and tools are kept as the JSON they came in (``msgspec.Raw``, OpenAI chat shape): the same bytes are
hashed, stored and forwarded, and a message is decoded only where a rule has to look into it.
"""

from typing import Any

import msgspec
from msgspec import Raw


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """What a harness asks of the policy.

    ``asked`` holds the sampling parameters it sent, which the run overrides; ``dropped`` the names of
    parameters that are not known here. ``choices`` is how many answers it wants at once: each is a call of its
    own. ``model`` is echoed in the answer, nothing more. ``memo`` is what the dialect that read the request has
    to know when it writes the answer; nobody else looks at it.
    """

    messages: tuple[Raw, ...]
    tools: tuple[Raw, ...] = ()
    tool_choice: Any = None  # "auto" | "none" | "required" | {"type": "function", ...}
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    choices: int = 1
    model: str = ""
    stream: bool = False
    stream_usage: bool = False
    asked: dict[str, Any] = {}
    dropped: tuple[str, ...] = ()
    memo: object = None


class ToolCall(msgspec.Struct, frozen=True):
    """One tool call as the engine's parser read it; ``arguments`` is the sampled text, not re-serialised."""

    id: str
    name: str
    arguments: str


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The policy's answer to a turn. Token ids and logprobs are not part of it: no harness sees them.

    ``others`` are the further answers to a turn that wants several, each a completion of its own call.
    """

    id: str
    created: int
    text: str | None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    others: tuple["Completion", ...] = ()

    @property
    def choices(self) -> tuple["Completion", ...]:
        """Every answer, this one first."""
        return (self, *self.others)

    @property
    def sampled_tokens(self) -> int:
        """Completion tokens of every answer."""
        return sum(choice.completion_tokens for choice in self.choices)


class _Function(msgspec.Struct):
    name: str
    arguments: str = ""


class _Call(msgspec.Struct):
    function: _Function
    id: str = ""


class _Message(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None


def as_message(completion: Completion) -> dict[str, Any]:
    """The assistant message of a completion, in the shape that harnesses send back with the next request."""
    out: dict[str, Any] = {"role": "assistant", "content": completion.text}
    if completion.reasoning:
        out["reasoning_content"] = completion.reasoning
    if completion.tool_calls:
        out["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in completion.tool_calls
        ]
    return out


def from_message(
    message: object, *, id: str, created: int, finish_reason: str, prompt_tokens: int, completion_tokens: int
) -> Completion:
    """The completion whose assistant message is ``message``, as the engine sent it or ``as_message`` made it.

    Raises ``msgspec.ValidationError`` when it is no assistant message.
    """
    parsed = msgspec.convert(message, _Message)
    return Completion(
        id=id,
        created=created,
        text=parsed.content,
        reasoning=parsed.reasoning or parsed.reasoning_content,
        tool_calls=tuple(
            ToolCall(call.id, call.function.name, call.function.arguments) for call in parsed.tool_calls or ()
        ),
        finish_reason=finish_reason,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
    )
