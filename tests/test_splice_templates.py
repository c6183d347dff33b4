"""Other chat templates than Qwen3's, made of its tokens: how an answer begins and ends in them, and what is found out
about a template by asking the engine."""

import functools
from collections.abc import Callable

import pytest
from qwen3 import Message, qwen3
from scripted_engine import ScriptedEngine
from splice_world import TOOLS, World, call, think, tool, user

from forge_server.domain.engine import Template
from forge_server.domain.states import Fallback
from forge_server.engine import scale_out
from forge_server.engine.client import EngineClient

USER, TOOL, ANSWER = "<|box_start|>", "<|box_end|>", "<|quad_start|>"
ROLES = {"user": USER, "tool": TOOL, "assistant": ANSWER}


def ended_by_roles(messages: list[Message], tools: list[Message] | None) -> str:
    """As GLM does: a turn ends where the next role begins, and the model samples that role."""
    text = ""
    for message in messages:
        text += f"{ROLES[message['role']]}\n{message['content']}"
        for entry in message.get("tool_calls", ()):
            text += call(qwen3_json(entry["function"]["arguments"]))
    return f"{text}{ANSWER}\n"


def qwen3_json(value: object) -> str:
    import json

    return json.dumps(value, ensure_ascii=False)


def opens_thinking(messages: list[Message], tools: list[Message] | None) -> str:
    """As DeepSeek-R1's does: the prompt opens the reasoning, and the history is without any."""
    text = ""
    for message in messages:
        text += f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n"
    return f"{text}<|im_start|>assistant\n<think>\n"


def roles_world() -> World:
    world = World()
    world.engine.write = ended_by_roles
    world.engine.template = Template(closing=-1, marker="")
    return world


def test_a_role_that_ends_an_answer_is_not_doubled() -> None:
    world = roles_world()
    world.engine.end = qwen3().id_of(TOOL)
    first = world.ask([user("Paris?")], call('{"city":"Paris"}'), tools=TOOLS)
    history = [user("Paris?"), first.answer, tool("warm")]
    second = world.ask(history, call('{"city": "Z\\u00fcrich"}'), tools=TOOLS)
    assert second.spliced and second.sent != second.rendered
    assert second.sent.count(world.engine.end) == 1
    third = world.ask([*history, second.answer, tool("cold")], "Done.", tools=TOOLS)
    assert third.fallback is Fallback.END_UNKNOWN  # the template writes the call in other letters


def test_what_follows_an_answer_is_never_taken_for_a_part_of_it() -> None:
    """The model ended its turn for the user, the harness goes on with a tool result and only then the user."""
    world = roles_world()
    world.engine.end = qwen3().id_of(USER)
    first = world.ask([user("Paris?")], "I am done.")
    second = world.ask(
        [user("Paris?"), first.answer, {"role": "tool", "content": "warm"}, user("And?")], "Yes."
    )
    assert second.fallback is Fallback.END_UNKNOWN
    third = world.ask([user("Paris?"), first.answer, user("And?")], "Yes.")
    assert third.spliced and third.sent == third.rendered


def test_an_answer_that_was_cut_off_has_no_end_in_such_a_template() -> None:
    world = roles_world()
    said = qwen3().split_one(qwen3().encode("I am not done and"))
    first = world.ask([user("Paris?")], said, cut=True)
    second = world.ask([user("Paris?"), first.answer, user("Go on")], "Yes.", cut=True)
    assert second.fallback is Fallback.END_UNKNOWN


OPENING = tuple(qwen3().encode("<think>\n"))
EDGES = ((198, "\n"),)


@pytest.mark.parametrize("keep", [False, True])
def test_a_prompt_that_opens_the_reasoning(keep: bool) -> None:
    world = World(keep_reasoning=keep)
    world.engine.write = opens_thinking
    world.engine.template = Template(
        closing=qwen3().end_id, marker="<|im_end|>", opening=OPENING, edges=EDGES
    )
    said = "let me see\n</think>\n\nIt is warm."
    first = world.ask([user("Paris?")], said)
    history = [user("Paris?"), first.answer, user("And Rome?")]
    second = world.ask(history, said)
    if not keep:
        assert second.fallback is Fallback.REASONING_DROPPED
        return
    assert second.spliced
    third = world.ask([*history, second.answer, user("And?")], said)
    assert third.spliced and len(world.cover().samples) == 1
    assert qwen3().decode(third.sent).count("<think>") == 3


@pytest.mark.parametrize("keep", [False, True])
def test_a_prompt_that_rules_out_reasoning_by_an_empty_block(keep: bool) -> None:
    """Qwen3 with thinking switched off: the block stands before an answer that is asked for, not in the history."""
    world = World(keep_reasoning=keep)
    world.engine.write = functools.partial(qwen3().render, enable_thinking=False)
    empty = tuple(qwen3().encode("<think>\n\n</think>\n\n"))
    world.engine.template = Template(closing=qwen3().end_id, marker="<|im_end|>", opening=empty, edges=EDGES)
    first = world.ask([user("Paris?")], "It is warm.")
    second = world.ask([user("Paris?"), first.answer, user("And Rome?")], "Too.")
    assert (second.spliced, second.fallback) == (keep, None if keep else Fallback.CONTEXT_DIFFERS)


def test_an_answer_that_spells_out_the_end_of_a_turn() -> None:
    """Its letters, not the token: rendered anew they become the token, and the answer would seem to end there."""
    spelled = [i for c in "<|im_end|>" for i in qwen3().encode(c)]
    for said in (spelled, qwen3().encode('<tool_call>\n{"name": "look", "arguments": {"city": "') + spelled):
        world = World()
        tail = qwen3().encode('"}}\n</tool_call>') if said is not spelled else []
        first = world.ask([user("Paris?")], [*said, *tail], tools=TOOLS)
        second = world.ask([user("Paris?"), first.answer, user("And?")], "Yes.", tools=TOOLS)
        assert second.fallback is Fallback.END_UNKNOWN


@pytest.mark.parametrize(
    ("said", "spliced"),
    [
        ("It is warm and", True),
        (qwen3().split_one(qwen3().encode("It is warm and")), True),
        (think("hm") + "It is warm and", True),
        ("<think>\nI wonder whether", True),
        (qwen3().split_one(qwen3().encode("<think>\nI wonder whether")), False),
        (call('{"city":"Par')[:-25], True),
    ],
)
def test_an_answer_that_was_cut_off_is_closed_as_context(said: str | list[int], spliced: bool) -> None:
    world = World()
    first = world.ask([user("Paris?")], said, cut=True, tools=TOOLS)
    second = world.ask([user("Paris?"), first.answer, tool("go on", "c")], "Done.", tools=TOOLS)
    assert (second.spliced, second.fallback) == (spliced, None if spliced else Fallback.CUT_REASONING)
    if spliced:
        [sample] = world.cover().samples
        at = first.call.prompt.size + first.call.completion.size
        assert (
            qwen3().end_id in sample.tokens[at : at + 4].tolist() and not sample.loss_mask[at : at + 4].any()
        )


async def test_what_is_found_out_about_a_template() -> None:
    with ScriptedEngine().serving() as engine:
        client = EngineClient(engine.url, "forge")
        found, lacks = await scale_out.probe(client)
        await client.close()
    assert (found, lacks) == (
        Template(closing=qwen3().end_id, marker="<|im_end|>", closes_calls=True, opening=(), edges=EDGES),
        "",
    )


@pytest.mark.parametrize(
    ("write", "expected"),
    [
        (ended_by_roles, Template(closing=-1, marker="", closes_calls=False, edges=EDGES)),
        (opens_thinking, Template(closing=151645, marker="<|im_end|>", opening=OPENING, edges=EDGES)),
    ],
)
async def test_what_is_found_out_about_other_templates(
    write: Callable[[list[Message], list[Message] | None], str],
    expected: Template,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(qwen3(), "render", lambda messages, tools, **options: write(messages, tools))
    with ScriptedEngine().serving() as engine:
        client = EngineClient(engine.url, "forge")
        found, lacks = await scale_out.probe(client)
        await client.close()
    assert (found, lacks) == (expected, "")


async def test_an_engine_without_the_routes_says_which() -> None:
    with ScriptedEngine(scale_out=False).serving() as engine:
        client = EngineClient(engine.url, "forge")
        found, lacks = await scale_out.probe(client)
        await client.close()
    assert found is None and lacks == "/v1/chat/completions/render is not offered"
