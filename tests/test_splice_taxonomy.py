"""What breaks a conversation in practice, one case each: recording breaks there, splicing goes on where the context
that the harness asked for is the same, and gives way with a reason where it is not.
"""

import json
from collections.abc import Callable

import msgspec
import pytest
from qwen3 import Message, parse_answer, qwen3
from splice_world import TOOLS, Engine, World, call, think, tool, user

from forge_server.domain.engine import Generated
from forge_server.domain.states import Fallback
from forge_server.proxy.splice_align import covers

FLIGHT = call('{"city": "Paris"}')
MADE_UP = "\n<tool_response>\nsunny, 31 degrees\n</tool_response>\nIt is sunny in Paris."
Echo = Callable[[Message], Message]


def same(answer: Message) -> Message:
    return answer


def without_reasoning(answer: Message) -> Message:
    return {k: v for k, v in answer.items() if k != "reasoning_content"}


def arguments(change: Callable[[str], object]) -> Echo:
    def echo(answer: Message) -> Message:
        calls = []
        for entry in answer["tool_calls"]:
            function = {**entry["function"], "arguments": change(entry["function"]["arguments"])}
            calls.append({**entry, "id": "toolu_" + entry["id"][-8:], "function": function})
        return {**answer, "tool_calls": calls}

    return echo


def compact(raw: str) -> str:
    return json.dumps(json.loads(raw), separators=(",", ":"))


def reordered(raw: str) -> str:
    value = json.loads(raw)
    return json.dumps(dict(reversed(value.items())))


def trimmed(answer: Message) -> Message:
    return {**answer, "content": (answer["content"] or "").strip() or None}


def in_parts(answer: Message) -> Message:
    part = {"type": "text", "text": answer["content"], "cache_control": {"type": "ephemeral"}}
    return {**answer, "content": [part]}


def unusual(text: str) -> list[int]:
    return qwen3().split_one(qwen3().encode(text))


NEXT = [tool("21 degrees")]
LATER = [user("And now?")]
REMINDED = [tool("21 degrees"), user("<system-reminder>mind the budget</system-reminder>")]

CASES = {
    # name: (sampled, echoed, then, recording extends, why splicing does not)
    "canonical": (FLIGHT, same, NEXT, True, None),
    "canonical, reasoning echoed": (think("hm") + FLIGHT, same, NEXT, True, None),
    "reasoning not echoed": (
        think("hm") + FLIGHT,
        without_reasoning,
        NEXT,
        False,
        Fallback.REASONING_DROPPED,
    ),
    "compact JSON": (call('{"city":"Paris"}'), same, NEXT, False, None),
    "compact JSON, reasoning": (think("hm") + call('{"city":"Paris"}'), same, NEXT, False, None),
    "arguments echoed compact": (call('{"city":"Paris"}'), arguments(compact), NEXT, False, None),
    "arguments echoed as an object": (FLIGHT, arguments(json.loads), NEXT, True, None),
    "key order changed": (
        call('{"city": "Paris", "day": 1}'),
        arguments(reordered),
        NEXT,
        False,
        None,
    ),
    "blank line before the call": ("I will look.\n\n" + FLIGHT, same, NEXT, False, None),
    "text trimmed": ("I will look.\n" + FLIGHT, trimmed, NEXT, None, None),
    "text in parts": ("I will look.\n" + FLIGHT, in_parts, NEXT, None, None),
    "unicode escape": (call('{"city": "Z\\u00fcrich"}'), same, NEXT, False, None),
    "think with a trailing space": (think("hm ") + FLIGHT, same, NEXT, None, None),
    "empty think block": (think("") + FLIGHT, same, NEXT, None, None),
    "a split token": (unusual(FLIGHT), same, NEXT, False, None),
    "a split token in the reasoning": (unusual(think("hm, let me see") + FLIGHT), same, NEXT, False, None),
    "new user turn": (think("hm") + "It is warm.", same, LATER, False, Fallback.REASONING_DROPPED),
    "new user turn, the answer repeats the reasoning": (
        think("warm") + "It is warm.",
        same,
        LATER,
        False,
        Fallback.ANSWER_DROPPED,
    ),
    "new user turn without reasoning": ("It is warm.", same, LATER, True, None),
    "new user turn, split token": (unusual("It is warm."), same, LATER, False, None),
    "reminder inside the tool loop": (
        think("hm") + FLIGHT,
        same,
        REMINDED,
        False,
        Fallback.REASONING_DROPPED,
    ),
    "answer edited": (
        "It is warm.",
        lambda answer: {**answer, "content": "It is cold."},
        LATER,
        False,
        Fallback.EDITED_ANSWER,
    ),
    "arguments edited": (
        FLIGHT,
        arguments(lambda raw: raw.replace("Paris", "Rome")),
        NEXT,
        False,
        Fallback.EDITED_ANSWER,
    ),
    "reasoning edited": (
        think("hm") + FLIGHT,
        lambda answer: {**answer, "reasoning_content": "aha"},
        NEXT,
        False,
        Fallback.EDITED_ANSWER,
    ),
    "number written differently": (
        call('{"city": 1.0}'),
        arguments(lambda raw: '{"city":1}'),
        NEXT,
        False,
        None,
    ),
    "numbers as a model may write them": (call('{"city": 1E3, "day": 2.50}'), same, NEXT, False, None),
    "escaped letters beyond 16 bits": (call('{"city": "\\ud840\\udc0b"}'), same, NEXT, False, None),
    # a tool parser throws away what stands behind the first call and is none
    "a made-up result behind the call": (FLIGHT + MADE_UP, same, NEXT, False, Fallback.ANSWER_DROPPED),
    "words between calls": (f"{FLIGHT}\nAnd Rome:\n{FLIGHT}", same, NEXT, False, Fallback.ANSWER_DROPPED),
    "a made-up result behind a thoughtful call": (
        think("hm") + FLIGHT + MADE_UP,
        same,
        NEXT,
        False,
        Fallback.ANSWER_DROPPED,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_record_breaks_where_splice_goes_on(name: str) -> None:
    sampled, echo, then, extends, why = CASES[name]
    samples = {}
    for mode in ("record", "splice"):
        world = World(forwarding=mode)
        first = world.ask([user("How is Paris?")], sampled, tools=TOOLS)
        second = world.ask([user("How is Paris?"), echo(first.answer), *then], "Done.", tools=TOOLS)
        samples[mode] = len(world.cover().samples)
        if mode == "splice":
            assert first.spliced and first.sent == first.rendered
            assert (second.spliced, second.fallback) == (why is None, why)
            if second.spliced:
                whole = [*first.sent, *first.call.completion.tolist()]
                assert second.sent[: len(whole)] == whole
                assert world.engine.log.count("chat") == 0
    if extends is not None:
        assert samples["record"] == (1 if extends else 2)
    assert samples["splice"] == (1 if why is None else 2)


@pytest.mark.parametrize(
    "name",
    [
        "reasoning not echoed",
        "new user turn",
        "reminder inside the tool loop",
        "empty think block",
        "compact JSON",
    ],
)
def test_kept_reasoning_goes_on_where_only_reasoning_was_dropped(name: str) -> None:
    sampled, echo, then, _, _ = CASES[name]
    world = World(keep_reasoning=True)
    first = world.ask([user("How is Paris?")], sampled, tools=TOOLS)
    second = world.ask([user("How is Paris?"), echo(first.answer), *then], "Done.", tools=TOOLS)
    assert second.spliced
    assert len(world.cover().samples) == 1


def test_kept_reasoning_keeps_nothing_else_that_was_dropped() -> None:
    world = World(keep_reasoning=True)
    first = world.ask([user("How is Paris?")], think("hm") + FLIGHT + MADE_UP, tools=TOOLS)
    echo = without_reasoning(first.answer)
    second = world.ask([user("How is Paris?"), echo, *NEXT], "Done.", tools=TOOLS)
    assert second.fallback is Fallback.ANSWER_DROPPED
    assert "sunny" not in qwen3().decode(second.sent)


def test_kept_reasoning_of_several_turns_survives_new_questions() -> None:
    world = World(keep_reasoning=True)
    history: list[Message] = []
    for turn in range(4):
        history.append(user(f"Question {turn}"))
        history.append(world.ask(history, think(f"thought {turn}") + FLIGHT, tools=TOOLS).answer)
        history.append(tool("fine"))
        history.append(world.ask(history, think(f"then {turn}") + f"Answer {turn}.", tools=TOOLS).answer)
    assert [made.fallback for made in world.made] == [None] * 8
    [sample] = world.cover().samples
    text = qwen3().decode(sample.tokens.tolist())
    assert all(f"thought {turn}" in text and f"then {turn}" in text for turn in range(4))


def test_without_kept_reasoning_each_question_begins_a_sample_and_its_tool_loop_goes_on() -> None:
    world = World()
    history: list[Message] = []
    for turn in range(3):
        history.append(user(f"Question {turn}"))
        history.append(
            world.ask(history, think(f"thought {turn}") + call('{"city":"Rome"}'), tools=TOOLS).answer
        )
        history.append(tool("fine"))
        history.append(world.ask(history, think(f"then {turn}") + f"Answer {turn}.", tools=TOOLS).answer)
    dropped = Fallback.REASONING_DROPPED
    assert [made.fallback for made in world.made] == [None, None, dropped, None, dropped, None]
    assert len(world.cover().samples) == 3


class Stopping(Engine):
    """The API leaves out the stop string that the answer was cut off at; the sampled ids have it."""

    stop = ""

    def _generated(self, ids: list[int], finish: str) -> Generated:
        return msgspec.structs.replace(super()._generated(ids, "stop"), stop_reason=self.stop)

    async def message(self, found: Generated, *more: object, **options: object) -> dict[str, object]:
        text = qwen3().decode(found.completion_ids.tolist())
        return parse_answer(text.partition(self.stop)[0], tools=False)


@pytest.mark.parametrize("stop", ["\nObservation:", "\n```", "###"])
def test_what_a_stop_string_cut_off_does_not_come_back(stop: str) -> None:
    """ReAct harnesses stop there and say it themselves."""
    world = World()
    world.engine = Stopping()
    world.engine.stop = stop
    first = world.ask([user("List the files.")], f"Action: ls{stop}", cut=True)
    assert first.answer["content"] == "Action: ls"
    made = world.ask(
        [user("List the files."), first.answer, user("Observation: a.py")], "Action: end", cut=True
    )
    assert made.fallback == Fallback.ANSWER_DROPPED and f"{stop}<|im_end|>" not in qwen3().decode(made.sent)


@pytest.mark.parametrize(
    ("text", "sampled"),
    [
        ("The answer.", "<think>\n\n</think>The answer."),
        ("The answer.", "<seed:think></seed:think>The answer."),
        ("The answer.", "[THINK][/THINK]The answer."),
    ],
)
def test_the_tags_of_an_empty_think_block_are_no_words(text: str, sampled: str) -> None:
    assert covers(text, sampled) and not covers(text, sampled.replace("The", "Then the"))
