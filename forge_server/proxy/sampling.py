"""The request as the engine gets it: what the harness may decide, and what the run has decided.

Training needs the plain distribution: temperature from the run, top_p 1, top_k -1, min_p 0, no penalties, no
bias, and a seed of its own per call. What would constrain the sampling (``response_format``, a required tool,
strict tools, one tool call at a time) is lifted in training, or passed on and the call flagged. Only parameters
named here reach the engine.
"""

import hashlib
from typing import Any

import msgspec
from msgspec import Raw

from forge_server.domain.turn import Turn
from forge_server.proxy.ports import CallPolicy

_NOTED = 100  # bytes of a value, letters of a name, names


class Pinned(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's body, what was changed on the way (``flags``, for the call's row), and whether a grammar
    is in force."""

    body: dict[str, Any]
    flags: dict[str, Any]
    constrained: bool


def seed(attempt_id: str, seq: int) -> int:
    """A 63-bit seed that belongs to this call alone."""
    digest = hashlib.blake2b(f"{attempt_id}/{seq}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def pin(turn: Turn, policy: CallPolicy, *, attempt_id: str, seq: int, tokens_left: int) -> Pinned:
    """``tokens_left``: completion tokens that the attempt may still sample."""
    flags: dict[str, Any] = {}
    lift = policy.mode == "train" and policy.grammar == "lift"
    limit = min(policy.max_completion_tokens, policy.window, tokens_left)
    if turn.max_tokens is not None and turn.max_tokens > limit:
        flags["clamped"] = {"max_tokens": turn.max_tokens}
    body: dict[str, Any] = {
        "model": policy.model,
        "messages": turn.messages,
        "temperature": policy.temperature,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "seed": seed(attempt_id, seq),
        "max_tokens": limit if turn.max_tokens is None else min(turn.max_tokens, limit),
        "n": 1,
        "stream": False,
    }
    if turn.stop:
        body["stop"] = list(turn.stop)
    constraints = _constraints(turn)
    if turn.tools:
        body["tools"] = (
            [_loose(tool) for tool in turn.tools] if "strict" in constraints and lift else turn.tools
        )
        choice = turn.tool_choice
        if choice is not None:
            body["tool_choice"] = "auto" if "tool_choice" in constraints and lift else choice
        if turn.parallel_tool_calls is not None and not ("parallel_tool_calls" in constraints and lift):
            body["parallel_tool_calls"] = turn.parallel_tool_calls
    if "response_format" in constraints and not lift:
        body["response_format"] = turn.response_format
    if constraints and lift:
        flags["lifted"] = constraints
    overridden = {name: _noted(value) for name, value in turn.asked.items() if body.get(name) != value}
    if overridden:
        flags["overridden"] = overridden
    if turn.dropped:
        flags["dropped"] = [name[:_NOTED] for name in turn.dropped[:_NOTED]]
    return Pinned(body=body, flags=flags, constrained=bool(constraints) and not lift)


def _noted(value: Any) -> Any:
    """What a row keeps of something that a harness sent: lists of calls read it, so it must be small."""
    return value if len(msgspec.json.encode(value)) <= _NOTED else "…"


def _constraints(turn: Turn) -> list[str]:
    """Names of what would make the engine sample under a grammar."""
    found = []
    if turn.response_format is not None and turn.response_format.get("type") not in (None, "text"):
        found.append("response_format")
    if turn.tools and turn.tool_choice not in (None, "auto", "none"):
        found.append("tool_choice")
    if turn.tools and turn.parallel_tool_calls is False and turn.tool_choice != "none":
        found.append("parallel_tool_calls")  # vLLM's grammar allows one call
    # vLLM compiles a grammar for a tool that says "strict": true, also under tool_choice auto
    if any(b'"strict"' in bytes(tool) and _strict(tool) for tool in turn.tools):
        found.append("strict")
    return found


def _strict(tool: Raw) -> bool:
    parsed = msgspec.json.decode(tool)
    function = parsed.get("function") if isinstance(parsed, dict) else None
    return isinstance(function, dict) and function.get("strict") is True


def _loose(tool: Raw) -> Raw:
    """The tool without its demand to be followed strictly."""
    parsed = msgspec.json.decode(tool)
    if isinstance(parsed, dict) and isinstance(parsed.get("function"), dict):
        parsed["function"].pop("strict", None)
    return Raw(msgspec.json.encode(parsed))
