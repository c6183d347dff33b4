"""Legacy Completions: a prompt of text becomes the one user message of a chat.

The chat template is applied to it, which the call's row notes as ``prompt``: in this dialect the policy is not
asked to continue bare text. What only bare text could serve (token ids, ``suffix``, ``echo``) is refused.
"""

from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

from forge_server.domain.turn import Completion, Turn
from forge_server.proxy.dialects.base import Dialect
from forge_server.proxy.dialects.errors import openai_error, openai_error_event
from forge_server.proxy.dialects.reading import bad, bounded, check_limit, choices, parse, unsupported
from forge_server.proxy.dialects.writing import bare, sse


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Request(msgspec.Struct):
    model: str
    prompt: str | list[str | int | list[int]]
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    n: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    logprobs: int | None = None
    temperature: float | UnsetType | None = UNSET
    top_p: float | UnsetType | None = UNSET
    presence_penalty: float | UnsetType | None = UNSET
    frequency_penalty: float | UnsetType | None = UNSET
    logit_bias: dict[str, float] | UnsetType | None = UNSET
    seed: int | UnsetType | None = UNSET


_ASKED = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias", "seed")
_KNOWN = frozenset(_Request.__struct_fields__) - {"prompt"}

_decode = msgspec.json.Decoder(_Request).decode
_encode = msgspec.json.encode


@bounded
def read(body: bytes) -> Turn:
    """Parse and validate a request body; raises ``Refusal`` 400 that names what is wrong."""
    request, keys = parse(body, _decode)
    wanted = choices(request.n, "n")
    if request.best_of not in (None, wanted):
        raise unsupported("best_of other than n", param="best_of", instead="ask for n and choose")
    if request.echo:
        raise unsupported("echo", param="echo")
    if request.suffix:
        raise unsupported("suffix", param="suffix")
    if request.logprobs is not None:
        raise unsupported("logprobs", param="logprobs")
    check_limit(request.max_tokens, "max_tokens")
    stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    asked = {name: getattr(request, name) for name in _ASKED}
    message = {"role": "user", "content": _prompt(request.prompt)}
    return Turn(
        messages=(Raw(_encode(message)),),
        stop=stop,
        max_tokens=request.max_tokens,
        choices=wanted,
        model=request.model,
        stream=bool(request.stream),
        stream_usage=bool(request.stream_options and request.stream_options.include_usage),
        asked={name: value for name, value in asked.items() if value is not UNSET and value is not None},
        dropped=tuple(sorted(keys - _KNOWN)),
    )


def _prompt(prompt: str | list[str | int | list[int]]) -> str:
    if isinstance(prompt, list):
        if any(not isinstance(entry, str) for entry in prompt):
            raise unsupported("a prompt of token ids", param="prompt", instead="send its text")
        if len(prompt) > 1:
            raise unsupported("more than one prompt", param="prompt", instead="send one request for each")
        prompt = str(prompt[0]) if prompt else ""
    if not prompt:
        raise bad("prompt is empty", param="prompt")
    return prompt


def _body(turn: Turn, completion: Completion, choices: list[Any], usage: bool) -> dict[str, Any]:
    body: dict[str, Any] = {
        "id": f"cmpl-{bare(completion.id)}",
        "object": "text_completion",
        "created": completion.created,
        "model": turn.model,
        "choices": choices,
    }
    if usage:
        body["usage"] = {
            "prompt_tokens": completion.prompt_tokens,
            "completion_tokens": completion.sampled_tokens,
            "total_tokens": completion.prompt_tokens + completion.sampled_tokens,
        }
    return body


def _choice(index: int, text: str, finish: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish}


def write(turn: Turn, completion: Completion) -> bytes:
    """The response body of a request that does not stream."""
    written = [
        _choice(index, choice.text or "", _finish(choice)) for index, choice in enumerate(completion.choices)
    ]
    return _encode(_body(turn, completion, written, True))


def _finish(completion: Completion) -> str:
    return "length" if completion.finish_reason == "length" else "stop"


def events(turn: Turn, completion: Completion) -> bytes:
    """The event stream of a finished completion, one choice after the other."""
    out = []
    for index, choice in enumerate(completion.choices):
        out.append(sse(_body(turn, completion, [_choice(index, choice.text or "", None)], False)))
        last = [_choice(index, "", _finish(choice))]
        ends = index == len(completion.others)
        out.append(sse(_body(turn, completion, last, ends and not turn.stream_usage)))
    if turn.stream_usage:
        out.append(sse(_body(turn, completion, [], True)))
    out.append(b"data: [DONE]\n\n")
    return b"".join(out)


def keepalive(turn: Turn, id: str, created: int, first: bool) -> bytes:
    """A chunk without choices."""
    return sse(
        {
            "id": f"cmpl-{bare(id)}",
            "object": "text_completion",
            "created": created,
            "model": turn.model,
            "choices": [],
        }
    )


COMPLETIONS = Dialect(
    name="completions",
    read=read,
    write=write,
    events=events,
    keepalive=keepalive,
    error=openai_error,
    error_event=openai_error_event,
)
