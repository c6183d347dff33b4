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
    parameters that are not known here. ``model`` is echoed in the answer, nothing more.
    """

    messages: tuple[Raw, ...]
    tools: tuple[Raw, ...] = ()
    tool_choice: Any = None  # "auto" | "none" | "required" | {"type": "function", ...}
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    model: str = ""
    stream: bool = False
    stream_usage: bool = False
    asked: dict[str, Any] = {}
    dropped: tuple[str, ...] = ()


class ToolCall(msgspec.Struct, frozen=True):
    """One tool call as the engine's parser read it; ``arguments`` is the sampled text, not re-serialised."""

    id: str
    name: str
    arguments: str


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The policy's answer to a turn. Token ids and logprobs are not part of it: no harness sees them."""

    id: str
    created: int
    text: str | None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
