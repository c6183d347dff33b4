"""What clients are told about models: there is one, whatever they call it.

``v1/models`` is read by OpenAI's clients and by Anthropic's, so that an entry carries the fields of both;
``v1beta/models``, or a key where Gemini's clients put it, asks for Gemini's.
"""

from typing import Any

import msgspec

_encode = msgspec.json.encode
_METHODS = ("generateContent", "streamGenerateContent", "countTokens")


def listed(model: str) -> bytes:
    """The list for OpenAI's and Anthropic's clients."""
    ends = {"first_id": model, "last_id": model, "has_more": False}
    return _encode({"object": "list", "data": [_entry(model)], **ends})


def shown(name: str) -> bytes:
    """One entry of it: a call by this name would be answered."""
    return _encode(_entry(name))


def gemini_listed(model: str) -> bytes:
    """The list for Gemini's clients."""
    return _encode({"models": [_gemini_entry(model)]})


def gemini_shown(name: str) -> bytes:
    """One entry of it."""
    return _encode(_gemini_entry(name))


def _entry(name: str) -> dict[str, Any]:
    openai = {"id": name, "object": "model", "created": 0, "owned_by": "forge-server"}
    return openai | {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}


def _gemini_entry(name: str) -> dict[str, Any]:
    return {"name": f"models/{name}", "displayName": name, "supportedGenerationMethods": _METHODS}
