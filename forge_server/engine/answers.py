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


class _Logprobs(msgspec.Struct):
    content: list[_Token] | None = None


class _Message(msgspec.Struct):
    role: str = "assistant"
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[dict[str, object]] | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None
    token_ids: msgspec.Raw = msgspec.Raw(b"null")
    logprobs: _Logprobs | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Chat(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage
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
    prompt_text, rest = _cut_prompt_ids(body)
    try:
        chat = _decode_chat(rest)
        choice = chat.choices[0]
    except (msgspec.MsgspecError, IndexError) as error:
        raise EngineUnavailable(
            f"the engine's answer is no chat completion ({error})",
            mend="check that [engine] url points at vLLM",
            sent=True,
        ) from None
    if prompt_text is None:
        prompt_text = _id_text(chat.prompt_token_ids)
    prompt_ids = None if prompt_text is None else _prompt_ids(prompt_text, known)
    if prompt_ids is not None and prompt_ids.size != chat.usage.prompt_tokens:
        prompt_ids = prompt_text = None
    completion_text = _id_text(choice.token_ids)
    message: dict[str, object] = {"role": choice.message.role, "content": choice.message.content}
    if choice.message.reasoning is not None:
        message["reasoning"] = choice.message.reasoning
    if choice.message.tool_calls:
        message["tool_calls"] = choice.message.tool_calls
    return ChatResult(
        prompt_ids=prompt_ids,
        completion_ids=None if completion_text is None else _parse_ids(completion_text),
        logprobs=_logprobs(choice.logprobs),
        message=message,
        finish_reason=choice.finish_reason or "",
        usage_prompt=chat.usage.prompt_tokens,
        usage_completion=chat.usage.completion_tokens,
        model=chat.model,
        raw_prompt_ids=prompt_text,
    )


_WINDOW = re.compile(r"maximum (context|model) length|max_model_len")
_REQUEST_AT_FAULT = (400, 413, 422)


def failure(status: int, body: bytes) -> EngineRefused | EngineUnavailable:
    """The error that an answer with ``status`` other than 200 stands for.

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
        404: "check [engine] served_model",
    }
    return EngineUnavailable(
        f"the engine answered {status}: {message}",
        mend=mends.get(status, "see the engine's log"),
        sent=True,
        http_status=status,
    )


_PROMPT_KEY = b',"prompt_token_ids":['


def _cut_prompt_ids(body: bytes) -> tuple[bytes | None, bytes]:
    """The text of the prompt ids and the body without them, so that the decoder need not walk through them.

    The key with its comma and bare quotes cannot stand inside a JSON string, so no text of the model's or the
    user's can fake it. A body that spells it otherwise is returned as it is.
    """
    at = body.rfind(_PROMPT_KEY)
    if at < 0:
        return None, body
    start = at + len(_PROMPT_KEY)
    end = body.find(b"]", start)
    return (None, body) if end < 0 else (body[start:end], body[:at] + body[end + 1 :])


def _id_text(raw: msgspec.Raw) -> bytes | None:
    """``1,2,3`` of the JSON list ``[1,2,3]``; None for anything else."""
    view = bytes(raw)
    return view[1:-1] if view[:1] == b"[" else None


def _parse_ids(text: bytes) -> Ids:
    return np.fromstring(text, dtype=np.int32, sep=",") if text else np.empty(0, np.int32)


def _prompt_ids(text: bytes, known: ChatResult | None) -> Ids:
    if known is not None and known.raw_prompt_ids and known.prompt_ids is not None:
        old = known.raw_prompt_ids
        if text.startswith(old) and text[len(old) : len(old) + 1] in (b",", b""):
            return np.concatenate([known.prompt_ids, _parse_ids(text[len(old) + 1 :])])
    return _parse_ids(text)


def _logprobs(found: _Logprobs | None) -> Logprobs | None:
    if found is None or found.content is None:
        return None
    values = [np.nan if token.logprob is None else token.logprob for token in found.content]
    return np.array(values, np.float32)
