"""Conversations at random, harnesses that change what they send at random: whatever is spliced is right, and whatever
is not is recorded.

For every request, by means of their own and not of the code under test:

- what was sent reads like the rendered prompt everywhere but inside recorded answers;
- each recorded answer in it is one that was sampled in this attempt, was not lost, and says what the request says;
- the first tokens of the prompt are the whole prompt and answer of the call that it continues;
- splicing never needs more samples than recording the same conversation.
"""

import json
import re
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from qwen3 import Message, qwen3
from splice_world import TOOLS, Made, World, call, think, tool, user

from forge_server.domain.states import Delivery

WORDS = (
    "",
    "yes",
    "It is warm.",
    "\n\nI see.",
    "Zürich",
    "a  b\n\nc\n",
    "<b>&</b>",
    "1. one\n2. two",
    "<|im_end|>",
    "ok ",
)
ARGUMENTS = (
    '{"city": "Paris"}',
    '{"city":"Paris","n":1.0}',
    '{"city": "Z\\u00fcrich", "n": [1, 2]}',
    '{"n": 1, "city": ""}',
    '{ "city" : "x\\ny" }',
    "{}",
)

outputs = st.builds(
    lambda thought, text, calls, between: (
        (think(thought) if thought is not None else "")
        + text
        + between
        + "\n".join(call(raw) for raw in calls)
    ),
    st.sampled_from((None, None, "", "hm", " let me\nsee ")),
    st.sampled_from(WORDS),
    st.lists(st.sampled_from(ARGUMENTS), max_size=2),
    st.sampled_from(("", "\n", "\n\n")),
)
mutations = st.lists(
    st.sampled_from(
        (
            "reasoning",
            "compact",
            "object",
            "reorder",
            "trim",
            "parts",
            "ids",
            "edit",
            "numbers",
            "none_content",
        )
    ),
    max_size=3,
)
steps = st.lists(
    st.fixed_dictionaries(
        {
            "output": outputs,
            "split": st.booleans(),
            "cut": st.sampled_from((False,) * 5 + (True,)),
            "echo": mutations,
            "then": st.sampled_from(("tool",) * 8 + ("user", "user", "both", "foreign")),
            "lost": st.sampled_from((False,) * 9 + (True,)),
            "fork": st.sampled_from((None,) * 9 + (0, 1, 2)),
            "system": st.sampled_from((False,) * 11 + (True,)),
        }
    ),
    min_size=1,
    max_size=8,
)


def echoed(answer: Message, changes: list[str], at: int) -> Message:
    out: Message = json.loads(json.dumps(answer))
    for change in changes:
        calls = out.get("tool_calls", [])
        if change == "reasoning":
            out.pop("reasoning_content", None)
        elif change == "trim":
            out["content"] = (
                (out["content"] or "").strip() if isinstance(out["content"], str | None) else out["content"]
            )
        elif change == "parts" and isinstance(out["content"], str):
            out["content"] = [
                {"type": "text", "text": out["content"], "cache_control": {"type": "ephemeral"}}
            ]
        elif change == "none_content" and not out["content"]:
            out["content"] = None
        elif change == "edit":
            if isinstance(out["content"], str):
                out["content"] += " (edited)"
        elif change == "ids":
            for index, entry in enumerate(calls):
                entry["id"] = f"toolu_{at}_{index}"
        for entry in calls:
            given_arguments = entry["function"]["arguments"]
            value = json.loads(given_arguments) if isinstance(given_arguments, str) else given_arguments
            if change == "compact":
                entry["function"]["arguments"] = json.dumps(value, separators=(",", ":"))
            elif change == "object":
                entry["function"]["arguments"] = value
            elif change == "reorder":
                entry["function"]["arguments"] = json.dumps(dict(reversed(value.items())))
            elif change == "numbers" and value.get("n") == 1.0:
                entry["function"]["arguments"] = json.dumps({**value, "n": 1})
    return out


def canonical(message: Message) -> Any:
    """What an assistant message says, written down independently of the code under test."""
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "\n".join(part["text"] for part in content)
    calls = []
    for entry in message.get("tool_calls") or []:
        arguments = entry["function"]["arguments"]
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
        calls.append([entry["function"]["name"], json.loads(json.dumps(value), parse_float=float)])
    return [content.strip(), calls]


def reads_alike(made: Made) -> bool:
    """What was sent is the rendered text with other text in the places of recorded answers only."""
    pattern, at = "", 0
    for _, _, start, end in made.places:
        closed = made.sent[end - 1] == qwen3().end_id
        pattern += re.escape(qwen3().decode(made.sent[at:start])) + "(?:.*?)"
        at = end - closed
    pattern += re.escape(qwen3().decode(made.sent[at:]))
    return re.fullmatch(pattern, qwen3().decode(made.rendered), re.DOTALL) is not None


def play(world: World, script: list[dict[str, Any]], keep: list[list[Message]]) -> None:
    """The same conversation in any world: requests are made of the answers alone. ``keep`` collects the requests."""
    history: list[Message] = [{"role": "system", "content": "Be brief."}, user("How is Paris?")]
    heads: list[list[Message]] = []
    for at, step in enumerate(script):
        said: str | list[int] = step["output"]
        if step["split"]:
            said = qwen3().split_one(qwen3().encode(said))
        if isinstance(said, str) and not said:
            said = "x"
        if step["system"]:
            history = [{"role": "system", "content": f"Be brief. {at}"}, *history[1:]]
        heads.append(list(history))
        keep.append(list(history))
        made = world.ask(history, said, tools=TOOLS, cut=step["cut"])
        if step["lost"]:
            world.settle(made, Delivery.NO)
        if step["fork"] is not None:
            history = [*heads[min(step["fork"], len(heads) - 1)], user(f"again {at}")]
            continue
        history = [*history, echoed(made.answer, step["echo"], at)]
        if step["then"] == "foreign":
            history += [user("an example"), {"role": "assistant", "content": "like this"}]
        ids = [entry["id"] for entry in history[-1].get("tool_calls", [])]
        if step["then"] in ("tool", "both"):
            history += [tool("21 degrees", id) for id in ids or ["c"]]
        if step["then"] != "tool":
            history.append(user(f"and {at}?"))


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(script=steps, keep_reasoning=st.booleans())
def test_what_is_spliced_is_right(script: list[dict[str, Any]], keep_reasoning: bool) -> None:
    world = World(keep_reasoning=keep_reasoning)
    requests: list[list[Message]] = []
    play(world, script, requests)
    calls = {made.call.id: made for made in world.made}
    lost = {made.call.id for made in world.made if made.call.delivered is Delivery.NO}
    for made, request in zip(world.made, requests, strict=True):
        assert made.spliced == (made.fallback is None)
        if not made.spliced:
            assert made.sent == made.rendered
            continue
        if not keep_reasoning:
            assert reads_alike(made)
        for call_id, index, start, end in made.places:
            earlier = calls[call_id]
            assert made.sent[start:end] == earlier.call.completion.tolist()
            assert call_id < made.call.id and call_id not in lost
            assert canonical(request[index]) == canonical(earlier.answer)
            thought = request[index].get("reasoning_content")
            assert thought is None or thought.strip() == earlier.answer["reasoning_content"].strip()
        if made.places:
            before = calls[made.places[-1][0]]
            whole = [*before.sent, *before.call.completion.tolist()]
            assert made.sent[: len(whole)] == whole
            assert not any(m["role"] == "assistant" for m in request[made.places[-1][1] + 1 :])


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(script=steps, keep_reasoning=st.booleans())
def test_splicing_never_needs_more_samples(script: list[dict[str, Any]], keep_reasoning: bool) -> None:
    found = {}
    for mode, options in (("record", {}), ("splice", {"keep_reasoning": keep_reasoning})):
        world = World(forwarding=mode, **options)
        play(world, script, [])
        found[mode] = len(world.cover().samples)
    assert found["splice"] <= found["record"]
