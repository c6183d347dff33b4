"""How each family of clients expects an error to be worded."""

import msgspec

from forge_server.proxy.dialects.base import Refusal

_ANTHROPIC = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
}
_GEMINI = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    404: "NOT_FOUND",
    409: "ABORTED",
    413: "INVALID_ARGUMENT",
    503: "UNAVAILABLE",
}


def openai_error(refusal: Refusal) -> bytes:
    """Chat Completions, Completions and Responses."""
    return _openai(refusal, refusal.code)


def _openai(refusal: Refusal, code: str | int) -> bytes:
    kind = "invalid_request_error" if refusal.status < 500 else "server_error"
    body = {"message": refusal.message, "type": kind, "param": refusal.param, "code": code}
    return msgspec.json.encode({"error": body})


def anthropic_error(refusal: Refusal) -> bytes:
    """Messages."""
    fallback = "invalid_request_error" if refusal.status < 500 else "api_error"
    kind = _ANTHROPIC.get(refusal.status, fallback)
    message = refusal.message
    if refusal.code == "context_length_exceeded":
        message = f"prompt is too long: {message}"  # by these words clients know that they should compact
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message}})


def gemini_error(refusal: Refusal) -> bytes:
    """generateContent and its kin."""
    status = _GEMINI.get(refusal.status, "INTERNAL")
    message = refusal.message
    if refusal.code == "context_length_exceeded":
        message = f"The input token count exceeds the maximum number of tokens allowed: {message}"
    return msgspec.json.encode({"error": {"code": refusal.status, "message": message, "status": status}})


def openai_error_event(refusal: Refusal) -> bytes:
    """An error after the headers of a stream have left. One of ours has the status as its code, as vLLM writes it:
    without a status that says so Qwen Code does not ask again."""
    return b"data: " + _openai(refusal, refusal.status if refusal.status >= 500 else refusal.code) + b"\n\n"
