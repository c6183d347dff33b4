"""Reads vLLM's answers: bytes in, typed results out. No I/O.

Token ids come as JSON text and are turned into int32 without a Python object per id. A prompt grows
with every turn, so the text of the previous call's prompt is compared (memcmp) and only what is new is
parsed.
"""

import re

import msgspec
import numpy as np

from forge_server.domain.call import Ids, Logprobs
from forge_server.domain.engine import ChatResult, EngineRefused, EngineUnavailable


class _Token(msgspec.Struct, gc=False):
    logprob: float | None = None


class TokenLogprobs(msgspec.Struct):
    """``logprobs`` of a choice, whatever each entry says beside the logprob."""

    content: list[_Token] | None = None


class _Message(msgspec.Struct):
    role: str = "assistant"
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[dict[str, object]] | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: msgspec.Raw = msgspec.Raw(b"null")
    logprobs: TokenLogprobs | None = None


class Usage(msgspec.Struct):
    """``usage`` of an answer."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Chat(msgspec.Struct):
    choices: list[_Choice]
    usage: Usage
    model: str = ""
    prompt_token_ids: msgspec.Raw = msgspec.Raw(b"null")


class _Error(msgspec.Struct):
    message: str = ""
    param: str | None = None


class _ErrorBody(msgspec.Struct):
    error: _Error


_decode_chat = msgspec.json.Decoder(_Chat).decode
_decode_error = msgspec.json.Decoder(_ErrorBody).decode


def chat_result(body: bytes, known: ChatResult | None = None) -> ChatResult:
    """The result in the 200 answer ``body``. Raises EngineUnavailable when it is no chat completion.

    ``known`` is an earlier result of the same session; it only saves work. Prompt ids whose number is not the
    usage's are worth nothing and left out.
    """
    prompt_text, rest = cut_ids(body, _PROMPT_KEY)
    try:
        chat = _decode_chat(rest)
        choice = chat.choices[0]
    except (msgspec.MsgspecError, IndexError) as error:
        raise unreadable("chat completion", error) from None
    if prompt_text is None:
        prompt_text = id_text(chat.prompt_token_ids)
    before = None
    if known is not None and known.raw_prompt_ids and known.prompt_ids is not None:
        before = (known.raw_prompt_ids, known.prompt_ids)
    prompt_ids = None if prompt_text is None else parse_ids(prompt_text, before)
    if prompt_ids is not None and prompt_ids.size != chat.usage.prompt_tokens:
        prompt_ids = prompt_text = None
    completion_text = id_text(choice.token_ids)
    return ChatResult(
        prompt_ids=prompt_ids,
        completion_ids=None if completion_text is None else parse_ids(completion_text),
        logprobs=logprobs(choice.logprobs),
        message=_plain(choice.message),
        finish_reason=choice.finish_reason or "",
        stop_reason=choice.stop_reason,
        usage_prompt=chat.usage.prompt_tokens,
        usage_completion=chat.usage.completion_tokens,
        model=chat.model,
        raw_prompt_ids=prompt_text,
    )


def message(body: bytes) -> dict[str, object]:
    """The message of the first choice in the 200 answer ``body``. Raises as ``chat_result``."""
    try:
        return _plain(_decode_chat(body).choices[0].message)
    except (msgspec.MsgspecError, IndexError) as error:
        raise unreadable("chat completion", error) from None


def _plain(message: _Message) -> dict[str, object]:
    out: dict[str, object] = {"role": message.role, "content": message.content}
    if message.reasoning is not None:
        out["reasoning"] = message.reasoning
    if message.tool_calls:
        out["tool_calls"] = message.tool_calls
    return out


def unreadable(what: str, error: Exception) -> EngineUnavailable:
    """The engine answered 200 with something else than ``what``."""
    return EngineUnavailable(
        f"the engine's answer is no {what} ({error})",
        mend="check that [engine] url points at vLLM",
        sent=True,
    )


_WINDOW = re.compile(r"maximum (context|model) length|max_model_len")
_REQUEST_AT_FAULT = (400, 413, 422)


def failure(status: int, body: bytes, *, names_model: bool = True) -> EngineRefused | EngineUnavailable:
    """The error that an answer with ``status`` other than 200 stands for; ``names_model``: so did the request.

    Only statuses that blame the request itself refuse it; a wrong key or model name is the server's own fault
    and passes like any other trouble.
    """
    try:
        message = _decode_error(body).error.message
    except msgspec.MsgspecError:
        message = body[:300].decode("utf-8", "replace")
    if status in _REQUEST_AT_FAULT:
        code = "context_length_exceeded" if _WINDOW.search(message) else "invalid_request"
        return EngineRefused(status, message, code)
    mends = {
        401: "check [engine] api_key",
        403: "check [engine] api_key",
        404: "check [engine] served_model" if names_model else "check [engine] url",
    }
    return EngineUnavailable(
        f"the engine answered {status}: {message}",
        mend=mends.get(status, "see the engine's log"),
        sent=True,
        http_status=status,
    )


_PROMPT_KEY = b',"prompt_token_ids":['


def cut_ids(body: bytes, key: bytes) -> tuple[bytes | None, bytes]:
    """The text of the ids behind ``key`` (``,"name":[``) and the body without them, so that the decoder need
    not walk through them.

    The key with its comma and bare quotes cannot stand inside a JSON string, so no text of the model's or the
    user's can fake it. A body that spells it otherwise is returned as it is.
    """
    at = body.rfind(key)
    if at < 0:
        return None, body
    start = at + len(key)
    end = body.find(b"]", start)
    return (None, body) if end < 0 else (body[start:end], body[:at] + body[end + 1 :])


def id_text(raw: msgspec.Raw) -> bytes | None:
    """``1,2,3`` of the JSON list ``[1,2,3]``; None for anything else."""
    view = bytes(raw)
    return view[1:-1] if view[:1] == b"[" else None


def parse_ids(text: bytes, known: tuple[bytes, Ids] | None = None) -> Ids:
    """int32 ids of ``1,2,3``. Of a text that continues ``known`` (text, ids), its last id aside, only the rest is
    parsed."""
    if known is not None and known[0]:
        old, ids = known
        for shared in (old, old.rpartition(b",")[0]):
            if shared and text.startswith(shared) and text[len(shared) : len(shared) + 1] in (b",", b""):
                count = ids.size if shared is old else ids.size - 1
                return np.concatenate([ids[:count], parse_ids(text[len(shared) + 1 :])])
    return np.fromstring(text, dtype=np.int32, sep=",") if text else np.empty(0, np.int32)


def logprobs(found: TokenLogprobs | None) -> Logprobs | None:
    if found is None or found.content is None:
        return None
    values = [np.nan if token.logprob is None else token.logprob for token in found.content]
    return np.array(values, np.float32)
