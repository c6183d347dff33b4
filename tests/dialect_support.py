"""What the dialect tests share: reading the recorded requests, and looking at what came of them."""

from pathlib import Path
from typing import Any

import msgspec

from forge_server.domain.turn import Completion, ToolCall, Turn
from forge_server.proxy.dialects import gemini, messages, responses
from forge_server.proxy.dialects.base import Dialect

WIRE = Path(__file__).parent / "wire"
ID = "chatcmpl-2a"


def recorded() -> list[str]:
    """Names of the recorded requests."""
    return sorted(path.stem for path in WIRE.glob("*.json"))


def request(name: str) -> dict[str, Any]:
    """``dialect``, ``path`` and ``body`` of a recorded request; its long strings and lists are cut."""
    found: dict[str, Any] = msgspec.json.decode((WIRE / f"{name}.json").read_bytes())
    return found


def dialect_of(name: str, path: str) -> Dialect:
    if name == "responses":
        return responses.RESPONSES
    if name == "messages":
        return messages.MESSAGES
    target, _, query = path.rpartition("/models/")[2].partition("?")
    found = gemini.method(target, query.encode())
    assert isinstance(found, Dialect)
    return found


GEMINI = dialect_of("gemini", "/v1beta/models/m:generateContent")
GEMINI_STREAM = dialect_of("gemini", "/v1beta/models/m:streamGenerateContent?alt=sse")


def said(turn: Turn) -> list[dict[str, Any]]:
    """The messages of a turn, decoded."""
    return [msgspec.json.decode(message) for message in turn.messages]


def tools(turn: Turn) -> dict[str, Any]:
    """The functions of a turn by name."""
    functions = [msgspec.json.decode(tool)["function"] for tool in turn.tools]
    return {function["name"]: function for function in functions}


def completion(
    text: str | None = "done",
    *calls: tuple[str, str],
    reasoning: str | None = None,
    finish: str | None = None,
) -> Completion:
    """An answer; ``calls`` are names and argument texts."""
    return Completion(
        id=ID,
        created=7,
        text=text,
        reasoning=reasoning,
        tool_calls=tuple(ToolCall(f"call_{n}", *call) for n, call in enumerate(calls)),
        finish_reason=finish or ("tool_calls" if calls else "stop"),
        prompt_tokens=11,
        completion_tokens=5,
    )


def sse(stream: bytes) -> list[tuple[str | None, Any]]:
    """Name and data of every event."""
    out: list[tuple[str | None, Any]] = []
    for block in stream.decode().replace("\r\n", "\n").split("\n\n"):
        if not block:
            continue
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        data = fields["data"]
        out.append((fields.get("event"), data if data == "[DONE]" else msgspec.json.decode(data)))
    return out
