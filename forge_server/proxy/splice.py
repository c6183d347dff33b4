"""Token-exact forwarding: a call whose history is the very tokens that were sampled, not their rendering anew.

    find the answer that the request continues -> render -> recorded tokens in the place of their rendering ->
    generate -> message

By construction (``splice_align``) what is sent reads like the rendered prompt everywhere but inside answers that
this attempt's policy sampled, whose meaning the request repeats (``splice_index``). Whatever stands in the way is
raised as Unspliceable, and the call is recorded as the engine renders it instead: token-exactness is never bought
with a context that the harness did not ask for.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np

from forge_server.domain.call import Ids
from forge_server.domain.engine import ChatResult, EngineRefused, EngineUnavailable, Rendered, Template
from forge_server.domain.states import Delivery, Fallback
from forge_server.domain.turn import Completion
from forge_server.proxy.ports import CallPolicy, Engine
from forge_server.proxy.recall import Said
from forge_server.proxy.splice_align import (
    THINK_END,
    Aligned,
    Place,
    Unspliceable,
    Written,
    align,
    covers,
    says,
)
from forge_server.proxy.splice_index import Answers, Asked, Prompt, Tip
from forge_server.trajectory.forest import Forest, common_prefix

_LACKING = (403, 404, 405, 501)
_THINK_END = "</think>"


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """A call that is to be served: its request, the engine's body, the answers given so far and their tokens."""

    asked: Asked
    body: dict[str, Any]
    constrained: bool
    images: bool
    answers: Answers
    forest: Forest
    policy: CallPolicy
    attempt_id: str
    request_id: str


class Served(msgspec.Struct, frozen=True):
    """The result, the answer that its prompt continues, and what was rendered for it."""

    result: ChatResult
    before: Tip | None
    prompt: Prompt


async def serve(engine: Engine, template: Template | None, ask: Ask) -> Served:
    """Raises Unspliceable (the call can be recorded instead), and EngineUnavailable as ``Engine.chat`` does."""
    if template is None:
        raise Unspliceable(Fallback.NOT_OFFERED)
    if ask.constrained:
        raise Unspliceable(Fallback.CONSTRAINED)
    if ask.images:
        raise Unspliceable(Fallback.MEDIA)
    try:
        tip = ask.answers.find(ask.asked, lambda call_id: _delivery(ask.forest, call_id))
        if tip is not None and any(t.contains(template.marker) for t in tip.line()):
            raise Unspliceable(Fallback.END_UNKNOWN)
    except Unspliceable:
        if ask.body.get("tools"):
            # it will be asked by its messages, and with some parsers by a grammar all the same
            _refuse_grammar(await _rendered(engine, ask, None))
        raise
    near = ask.answers.prompt(tip)
    rendered = await _rendered(engine, ask, near)
    _refuse_grammar(rendered)
    if tip is None:
        prompt, text = rendered.ids, rendered.text
    else:
        recorded = ask.forest.tokens(tip.call_id)
        aligned = align(
            recorded,
            [t.place for t in tip.line()],
            rendered.ids,
            template,
            done=near.ids.size if near is not None and _continues(rendered.ids, near.ids) else 0,
        )
        await _permit(engine, template, ask, tip, recorded, aligned)
        rest = rendered.ids[aligned.tail :]
        prompt = np.concatenate((recorded, rest))
        text = b",".join((near.recorded if near is not None else _text(recorded), _text(rest)))
    limit = int(ask.body["max_tokens"])
    if prompt.size > rendered.ids.size and prompt.size + limit > ask.policy.window:
        raise Unspliceable(Fallback.WINDOW)
    try:
        found = await engine.generate(
            text, rendered, limit, request_id=ask.request_id, affinity=ask.attempt_id
        )
    except (EngineRefused, EngineUnavailable) as error:
        # a generation that fails is the engine's trouble, as in record mode; a route that is not there is none
        if isinstance(error, EngineUnavailable) and error.http_status not in _LACKING:
            raise
        raise Unspliceable(Fallback.GENERATE_REFUSED) from error
    message: dict[str, object] = {"role": "assistant", "content": ""}
    if found.finish_reason != "abort" and found.completion_ids is not None:
        message = await _message(engine, ask, found, rendered, prompt)
    result = ChatResult(
        prompt_ids=prompt,
        completion_ids=found.completion_ids,
        logprobs=found.logprobs,
        message=message,
        finish_reason="tool_calls" if message.get("tool_calls") else found.finish_reason,
        usage_prompt=found.usage_prompt,
        usage_completion=found.usage_completion,
        model=found.model,
        raw_prompt_ids=text,
        stop_reason=found.stop_reason,
        versions=found.versions,
    )
    whole = b",".join((text, found.completion_text)) if found.completion_text else text
    return Served(result, tip, Prompt(rendered.ids, rendered.text, whole))


def _refuse_grammar(rendered: Rendered) -> None:
    """With some parsers the engine samples every call with tools under a grammar."""
    if rendered.sampling.get("structured_outputs"):
        raise Unspliceable(Fallback.CONSTRAINED)


def remember(
    answers: Answers,
    call_id: int,
    asked: Asked,
    served: Served | None,
    result: ChatResult,
    completion: Completion,
) -> None:
    """A call is recorded: its answer may be continued. ``served`` is None when it was recorded as messages."""
    if result.prompt_ids is None or result.completion_ids is None or not result.completion_ids.size:
        return
    start = result.prompt_ids.size
    stop = result.stop_reason if isinstance(result.stop_reason, str) else ""
    closed = result.finish_reason != "length" and not stop
    place = Place(start, start + result.completion_ids.size, closed)
    if served is not None:
        before, prompt = served.before, served.prompt
    else:
        before, text = None, result.raw_prompt_ids or _text(result.prompt_ids)
        prompt = Prompt(result.prompt_ids, text, b",".join((text, _text(result.completion_ids))))
    answers.add(asked, Tip(call_id, before, len(asked.keys), place, completion, stop), prompt)


def recover(answers: Answers, model: str, said: Sequence[Said], forest: Forest, template: Template) -> None:
    """Take up answers that were recorded before a restart, in their order.

    What a spliced prompt continues is found again by its messages, and by the tokens that it begins with. An
    answer whose end cannot be told any more is left out.
    """
    for past in said:
        call = past.call
        if not call.completion.size:
            continue
        asked = Asked(answers.start(model, past.tools), past.keys)
        closed = bool(call.completion[-1] == template.closing)
        if not closed and call.finish_reason != "length":
            answers.incomplete = True
            continue
        before = answers.begins(asked, partial(_starts, forest, call.prompt)) if past.spliced else None
        place = Place(call.prompt.size, call.prompt.size + call.completion.size, closed)
        answers.add(asked, Tip(call.id, before, len(asked.keys), place, past.completion), None)


def _starts(forest: Forest, prompt: Ids, tip: Tip) -> bool:
    end = tip.place.end
    return end <= prompt.size and np.array_equal(forest.tokens(tip.call_id), prompt[:end])


async def _rendered(engine: Engine, ask: Ask, near: Prompt | None) -> Rendered:
    known = (near.text, near.ids) if near is not None else None
    try:
        return await engine.render(ask.body, request_id=ask.request_id, affinity=ask.attempt_id, known=known)
    except (EngineRefused, EngineUnavailable) as error:
        raise _or_away(error, Fallback.RENDER_FAILED) from error


async def _permit(
    engine: Engine, template: Template, ask: Ask, tip: Tip, recorded: Ids, aligned: Aligned
) -> None:
    """Let pass what is written for the answers only if it says all that was sampled, reasoning included unless
    that is to be kept anyway. Raises Unspliceable."""
    tips = tip.line()[-len(aligned.written) :]
    if aligned.unopened and not ask.policy.keep_reasoning:
        thought = any(answer.thought for answer in tips)
        raise Unspliceable(Fallback.REASONING_DROPPED if thought else Fallback.CONTEXT_DIFFERS)
    for answer, written in zip(tips, aligned.written, strict=True):
        sampled = recorded[answer.place.start : answer.place.end - answer.place.closed]
        if written.melted < 0 and np.array_equal(written.ids, sampled):
            continue
        if any(np.array_equal(written.ids, proven) for proven in answer.proven):
            continue
        if answer.cut_reasoning:
            raise Unspliceable(Fallback.CUT_REASONING)
        if not _ends(answer, int(recorded[answer.place.end - 1]), template):
            await _same(engine, written, sampled)
            continue
        parts = _parts(answer, ask)
        text = await _spoken(engine, written.ids)
        if written.melted >= 0:
            edge = dict(template.edges).get(written.melted, "")
            if not edge or not text.startswith(edge):
                raise Unspliceable(Fallback.CONTEXT_DIFFERS)
        for reason, wanted in parts.items():
            if not says(text, wanted):
                raise Unspliceable(reason)
        if not says(text, (answer.stop,)) or not covers(text, _kept(ask, await _spoken(engine, sampled))):
            # a stop string or a parser took something away, or it is reasoning that the answer repeats
            raise Unspliceable(Fallback.ANSWER_DROPPED)
        answer.proven.append(written.ids.copy())


def _ends(answer: Tip, last: int, template: Template) -> bool:
    """Whether the end of the answer in a rendered prompt is told by a token that stands for nothing else."""
    if answer.names and not template.closes_calls:
        return False
    return last == template.closing or not answer.place.closed


async def _same(engine: Engine, written: Written, sampled: Ids) -> None:
    """The role of the next message ended the answer, or something else that may stand elsewhere too: only its
    very text, white space aside, shows that it ends where it was thought to. Raises Unspliceable."""
    texts = [await _spoken(engine, ids) for ids in (written.ids, sampled)]
    if written.melted >= 0 or not says(texts[0], texts[1:]) or not says(texts[1], texts[:1]):
        raise Unspliceable(Fallback.END_UNKNOWN)


def _parts(answer: Tip, ask: Ask) -> dict[Fallback, tuple[str, ...]]:
    """What must stand in the rendered prompt for an answer, by the reason that it gives when it does not."""
    names = answer.names
    if ask.policy.keep_reasoning:
        return {Fallback.ANSWER_DROPPED: (answer.said.rpartition(_THINK_END)[2], *names)}
    if answer.thought and not ask.asked.keys[answer.index].thought:
        raise Unspliceable(Fallback.REASONING_DROPPED)
    if _THINK_END in answer.said:  # an engine without a reasoning parser
        return {Fallback.REASONING_DROPPED: (answer.thought, answer.said), Fallback.ANSWER_DROPPED: names}
    return {Fallback.REASONING_DROPPED: (answer.thought,), Fallback.ANSWER_DROPPED: (answer.said, *names)}


def _kept(ask: Ask, sampled: str) -> str:
    """What of a sampled text has to stand in the rendered prompt."""
    end = THINK_END.search(sampled)
    return sampled[end.end() :] if end and ask.policy.keep_reasoning else sampled


async def _spoken(engine: Engine, ids: Ids) -> str:
    if not ids.size:
        return ""
    try:
        return await engine.detokenize(ids.tolist())
    except (EngineRefused, EngineUnavailable) as error:
        raise _or_away(error, Fallback.RENDER_FAILED) from error


async def _message(
    engine: Engine, ask: Ask, found: Any, rendered: Rendered, prompt: Ids
) -> dict[str, object]:
    try:
        return await engine.message(
            found, rendered, ask.body, prompt, request_id=ask.request_id, affinity=ask.attempt_id
        )
    except (EngineRefused, EngineUnavailable) as error:
        raise _or_away(error, Fallback.DERENDER_FAILED) from error


def _or_away(error: EngineRefused | EngineUnavailable, reason: Fallback) -> Exception:
    """An engine that answers, if with an error, may answer the chat endpoint better."""
    return Unspliceable(reason) if error.http_status else error


def _delivery(forest: Forest, call_id: int) -> Delivery:
    return forest.delivery(call_id) if call_id in forest else Delivery.NO


def _continues(prompt: Ids, before: Ids) -> bool:
    """Whether a prompt goes on from an earlier one, whose last token may have melted into what follows."""
    return common_prefix(before, prompt) >= before.size - 1


def _text(ids: Ids | Sequence[int]) -> bytes:
    """``1,2,3``."""
    return msgspec.json.encode(ids.tolist() if isinstance(ids, np.ndarray) else ids)[1:-1]
