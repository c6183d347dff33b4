"""Tokens in, tokens out: vLLM's ``render``, ``generate`` and ``derender`` (``--enable-scale-out``).

``render`` gives the token ids that the chat endpoint would send for a request, and its sampling parameters;
``generate`` takes ids as they are; ``derender`` reads a message out of sampled ids with the engine's own parsers.
Together they make one chat completion whose prompt the caller may correct in between.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from forge_server.domain.call import Ids, VersionSpan
from forge_server.domain.engine import EngineRefused, EngineUnavailable, Generated, Rendered, Template
from forge_server.engine import answers
from forge_server.engine.checkpoint import version_of
from forge_server.engine.client import EngineClient
from forge_server.engine.weights import FRESH

RENDER = "/v1/chat/completions/render"
GENERATE = "/inference/v1/generate"
DERENDER = "/v1/chat/completions/derender"

_TAIL = 1024
"""Prompt ids that derender gets: enough to join the answer's first token to the text before it, and to see
whether the template has opened the reasoning."""

_CALL_ID = "chatcmpl-tool-"
_NO_CHARACTER = "\N{REPLACEMENT CHARACTER}"


class _Sampling(msgspec.Struct):
    sampling_params: dict[str, Any]
    token_ids: msgspec.Raw = msgspec.Raw(b"[]")
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: dict[str, Any] | None = None


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct):
    token_ids: msgspec.Raw = msgspec.Raw(b"null")
    logprobs: answers.TokenLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    text: str | None = None
    weight_versions: list[_Span] | None = None


class _Generate(msgspec.Struct):
    choices: list[_Choice]
    usage: answers.Usage
    model: str = ""


_decode_render = msgspec.json.Decoder(_Sampling).decode
_decode_generate = msgspec.json.Decoder(_Generate).decode
_encode = msgspec.json.encode


async def probe(client: EngineClient) -> tuple[Template | None, str]:
    """What the chat template puts around an answer, found by rendering; None, and why, when the engine does not
    offer tokens in, tokens out. Raises EngineUnavailable only when the engine is away."""
    try:
        paths = (await client.call("GET", "/openapi.json"))["paths"]
        missing = [route for route in (RENDER, GENERATE, DERENDER) if route not in paths]
        if missing:
            return None, f"{missing[0]} is not offered"
        return await _template(client), ""
    except EngineRefused as error:
        return None, error.message
    except EngineUnavailable as error:
        if error.http_status == 0 and not error.sent:
            raise
        return None, error.what
    except (KeyError, TypeError) as error:
        return None, repr(error)


async def _template(client: EngineClient) -> Template:
    """Asks what it is like at the places that matter. Raises as ``EngineClient.call``."""
    asked = {"role": "user", "content": "x"}
    question = await _ids(client, [asked])
    followed = [await _ids(client, [asked, _said(text), asked]) for text in ("a", "b")]
    head = _common(question, followed[0])
    closing = _after(*followed)
    if closing >= 0 and closing != _after(*[await _ids(client, [asked, _said(text)]) for text in ("a", "b")]):
        closing = -1  # what follows ends it: the role of the next message
    edges = {question[at - 1] for at in (head, len(question)) if at}
    return Template(
        closing=closing,
        marker=await detokenize(client, [closing]) if closing >= 0 else "",
        closes_calls=await _closes_calls(client, closing, head),
        opening=tuple(question[head:]),
        edges=tuple([(edge, await detokenize(client, [edge])) for edge in sorted(edges)]),
        guides_tools=await _guides_tools(client),
    )


async def _guides_tools(client: EngineClient) -> bool:
    """Whether the engine's tool parser has a grammar for calls that nobody has asked for."""
    function = {"name": "f", "parameters": {"type": "object", "properties": {}}}
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function", "function": function}],
        "max_tokens": 1,
    }
    try:
        rendered = await render(client, body, request_id="forge-template")
    except EngineRefused:  # it takes no tools
        return False
    return bool(rendered.sampling.get("structured_outputs"))


async def _closes_calls(client: EngineClient, closing: int, head: int) -> bool:
    """Whether what follows ``closing`` is the same after an answer with a tool call as after one without."""
    asked = {"role": "user", "content": "x"}
    function = {"name": "f", "arguments": "{}"}
    called = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c", "type": "function", "function": function}],
    }
    result = {"role": "tool", "tool_call_id": "c", "content": "r"}
    try:
        plain, call = [await _ids(client, [asked, answer, result, asked]) for answer in (_said("a"), called)]
    except EngineRefused:
        return False
    if closing not in plain[head:] or closing not in call[head:]:
        return False
    return plain[plain.index(closing, head) :] == call[call.index(closing, head) :]


def _said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def _after(one: Sequence[int], other: Sequence[int]) -> int:
    """The token after the only one in which two prompts differ, -1 when there is none."""
    tail = _common(one[::-1], other[::-1])
    return one[len(one) - tail] if 0 < tail < len(one) else -1


async def render(
    client: EngineClient, body: dict[str, Any], *, request_id: str, known: tuple[bytes, Ids] | None = None
) -> Rendered:
    """The prompt of an OpenAI chat body. ``known`` (text and ids of an earlier prompt) only saves work."""
    payload = _encode({**body, "model": client.model, "stream": False, "logprobs": True})
    data = await client.post(RENDER, payload, request_id=request_id)
    text, rest = answers.cut_ids(data, b',"token_ids":[')
    try:
        found = _decode_render(rest)
    except msgspec.MsgspecError as error:
        raise answers.unreadable("rendered prompt", error) from None
    if text is None:
        text = answers.id_text(found.token_ids) or b""
    return Rendered(
        ids=answers.parse_ids(text, known),
        text=text,
        sampling={name: value for name, value in found.sampling_params.items() if value is not None},
        reasoning_ended=found.reasoning_ended,
        reasoning=found.reasoning_parser_kwargs,
    )


async def generate(
    client: EngineClient, prompt: bytes, rendered: Rendered, max_tokens: int, *, request_id: str
) -> Generated:
    """Sample after the ids in ``prompt`` (``1,2,3``), as the chat endpoint would after ``rendered``."""
    body: dict[str, Any] = {
        "request_id": request_id,
        "model": client.model,
        "sampling_params": {**rendered.sampling, "max_tokens": max_tokens},
        "output_mode": "text",
        "stream": False,
    }
    if rendered.reasoning_ended is not None:
        body["reasoning_ended"] = rendered.reasoning_ended
    if rendered.reasoning is not None:
        body["reasoning_parser_kwargs"] = rendered.reasoning
    payload = b"".join((_encode(body)[:-1], b',"token_ids":[', prompt, b"]}"))
    return generated(await client.post(GENERATE, payload, request_id=request_id))


def generated(data: bytes) -> Generated:
    """The result in the 200 answer ``data`` of ``generate``."""
    try:
        answer = _decode_generate(data)
        choice = answer.choices[0]
    except (msgspec.MsgspecError, IndexError) as error:
        raise answers.unreadable("generation", error) from None
    text = answers.id_text(choice.token_ids)
    ids = None if text is None else answers.parse_ids(text)
    return Generated(
        completion_ids=ids,
        completion_text=text or b"",
        logprobs=answers.logprobs(choice.logprobs),
        text=choice.text,
        finish_reason=choice.finish_reason or "",
        stop_reason=choice.stop_reason,
        usage_prompt=answer.usage.prompt_tokens,
        usage_completion=answer.usage.completion_tokens,
        model=answer.model,
        versions=_versions(choice.weight_versions or [], 0 if ids is None else ids.size),
    )


def _versions(spans: Sequence[_Span], size: int) -> tuple[VersionSpan, ...]:
    """The engine's labels as versions, -1 for a label that is none of ours; () unless they cover everything."""
    found = []
    at = 0
    for span in spans:
        if span.start != at or span.end <= at:
            return ()
        at = span.end
        version = 0 if span.version == FRESH else version_of(span.version)
        found.append(VersionSpan(-1 if version is None else version, span.start, span.end))
    return tuple(found) if at == size else ()


async def message(
    client: EngineClient,
    found: Generated,
    rendered: Rendered,
    body: dict[str, Any],
    prompt_tail: Ids,
    *,
    request_id: str,
) -> dict[str, object]:
    """The assistant message that the chat endpoint would make of the sampled ids."""
    said, ids = found.text, found.completion_ids
    if said == "" or (said is not None and not body.get("tools") and rendered.reasoning is None):
        return {"role": "assistant", "content": said}
    assert ids is not None
    broken = ""
    if said is not None and _text_differs(found, rendered, said):
        whole = said.rstrip(_NO_CHARACTER)  # derender takes what is no character, at the end, for half of one
        ids, broken = await tokenize(client, whole), said[len(whole) :]
    elif found.finish_reason == "stop":
        ids = ids[:-1]  # else the end of the turn stands in the text
    if not ids.size:
        return {"role": "assistant", "content": broken}
    tail = prompt_tail[-_TAIL:].tolist()
    choice = {"index": 0, "finish_reason": found.finish_reason, "token_ids": ids.tolist()}
    chat: dict[str, Any] = {"model": client.model, "messages": [{"role": "user", "content": ""}]}
    chat |= {name: body[name] for name in ("tools", "tool_choice", "parallel_tool_calls") if name in body}
    payload = {
        "model": client.model,
        "generate_response": {"request_id": request_id, "choices": [choice], "prompt_token_ids": tail},
        "prompt_token_ids": tail,
        "chat_request": chat,
    }
    read = answers.message(await client.post(DERENDER, _encode(payload), request_id=request_id))
    calls: Any = read.get("tool_calls")
    if broken and not calls:
        last = "content" if read.get("content") or not read.get("reasoning") else "reasoning"
        read[last] = f"{read.get(last) or ''}{broken}"
    if calls:
        if body.get("parallel_tool_calls") is False:
            del calls[1:]
        for call in calls:  # derender gives bare random ids
            if not str(call.get("id", "")).startswith(_CALL_ID):
                call["id"] = f"{_CALL_ID}{call.get('id', '')}"
    return read


def _text_differs(found: Generated, rendered: Rendered, text: str) -> bool:
    """Whether the sampled ids say more, or something else, than the text that the chat endpoint would read.

    A stop string is cut off from the text and not from the ids; special tokens may be left out of it; and bytes
    that are no characters are replaced.
    """
    return (
        isinstance(found.stop_reason, str)
        or bool(rendered.sampling.get("skip_special_tokens", True))
        or _NO_CHARACTER in text
    )


async def tokenize(client: EngineClient, text: str) -> Ids:
    """The ids of a plain text, special tokens in it included."""
    body = {"model": client.model, "prompt": text, "add_special_tokens": False}
    return np.array((await client.call("POST", "/tokenize", body))["tokens"], np.int32)


async def detokenize(client: EngineClient, ids: Sequence[int]) -> str:
    """The text of ids, special tokens in it included."""
    body = {"model": client.model, "tokens": list(ids)}
    return str((await client.call("POST", "/detokenize", body))["prompt"])


async def _ids(client: EngineClient, messages: list[dict[str, Any]]) -> list[int]:
    body = {"messages": messages, "max_tokens": 1}
    ids: list[int] = (await render(client, body, request_id="forge-template")).ids.tolist()
    return ids


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    count = 0
    for left, right in zip(a, b, strict=False):
        if left != right:
            break
        count += 1
    return count
