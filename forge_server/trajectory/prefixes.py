"""Does a chat template keep what a conversation has been? Which habits of harnesses and models it does not bear,
and what that costs.

A call continues a sample only if its prompt begins with all that came before, sampled tokens included. In record
mode the prompt is rendered anew from messages at every call; whether it then begins so is up to the template. This
plays short conversations through it: what the model is asked, what it writes (as the template itself would write
it), and the prompt of the next call.

Compares text, not tokens: a difference here is one there. The one break that text cannot show is a word that was
sampled in other pieces than the tokenizer would cut it into; no template helps there.
"""

import json
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

import msgspec
from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = dict[str, Any]
Render = Callable[[Sequence[Message], bool], str]
"""Messages, and whether the prompt is to open an answer -> text."""

EACH_CALL = "a sample per call: n calls hold about n/2 times the tokens"
EACH_TURN = "a sample more per user message"
EACH_TIME = "a sample more each time"
SPLICE = "splice"
KEEP_REASONING = "splice with keep_reasoning"
_BEFORE, _SHOWN = 8, 32  # characters shown before and from the place where the two sides part

_THOUGHT = "I should run ls first."
_SAID = "Let me look."
_ARGUMENTS = {"cmd": "ls -la café", "t": 5}
_JSON = json.dumps(_ARGUMENTS, ensure_ascii=False)
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Run a command.",
            "parameters": {
                "type": "object",
                "properties": {"cmd": {"type": "string"}, "t": {"type": "integer"}},
                "required": ["cmd"],
            },
        },
    }
]
_ASKED: list[Message] = [
    {"role": "system", "content": "You are an agent."},
    {"role": "user", "content": "List the files, then count them."},
]
_RESULT: Message = {"role": "tool", "tool_call_id": "call00001", "name": "bash", "content": "a.py\nb.py"}
_NEXT: Message = {"role": "user", "content": "Now delete them."}
_REMINDER: Message = {"role": "user", "content": "<system-reminder>The list is empty.</system-reminder>"}


_REFUSALS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, OverflowError)
"""What a template raises for messages that it was not written for."""


class ChatTemplate(msgspec.Struct, frozen=True):
    """``text``: Jinja; ``special``: the special tokens that it may name, such as ``bos_token``."""

    text: str
    special: dict[str, str] = {}


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One case. ``extends`` is None where it cannot come up with this template, and ``why`` says so.

    ``written`` and ``rendered``: where they part, what had been written and what the next prompt holds instead.
    ``cost``: in record mode. ``mend``: the forwarding that spares it.
    """

    case: str
    extends: bool | None
    written: str = ""
    rendered: str = ""
    cost: str = ""
    mend: str = ""
    why: str = ""


class _Case(msgspec.Struct, frozen=True, kw_only=True):
    """``answer`` is what the model writes, ``sent_back`` what the harness makes of it, ``then`` what it adds.
    ``swap``: the model writes the second text where the template would write the first. ``thinks``: whether the
    answer begins with reasoning; None: where the template has a place for it.
    """

    name: str
    answer: Message
    sent_back: Message | None = None
    then: Sequence[Message] = (_RESULT,)
    swap: tuple[str, str] | None = None
    thinks: bool | None = None
    cost: str = EACH_TIME


def _assistant(content: str = "", arguments: dict[str, Any] | None = _ARGUMENTS) -> Message:
    message: Message = {"role": "assistant", "content": content}
    if arguments is not None:
        call = {"name": "bash", "arguments": arguments}
        message["tool_calls"] = [{"id": "call00001", "type": "function", "function": call}]
    return message


def _thinking(message: Message, thought: str = _THOUGHT) -> Message:
    return message | {"reasoning_content": thought, "reasoning": thought}


_CASES = (
    _Case(
        name="a tool result follows an answer without reasoning",
        answer=_assistant(),
        thinks=False,
        cost=EACH_CALL,
    ),
    _Case(
        name="a tool result follows, reasoning is sent back",
        answer=_assistant(),
        thinks=True,
        cost=EACH_CALL,
    ),
    _Case(
        name="a tool result follows, reasoning is not sent back",
        answer=_assistant(),
        sent_back=_assistant(),
        thinks=True,
        cost=EACH_CALL,
    ),
    _Case(
        name="a user message follows an answer without reasoning",
        answer=_assistant("There are 2 files.", None),
        then=[_NEXT],
        thinks=False,
        cost=EACH_TURN,
    ),
    _Case(
        name="a user message follows an answer with reasoning",
        answer=_assistant("There are 2 files.", None),
        then=[_NEXT],
        thinks=True,
        cost=EACH_TURN,
    ),
    _Case(
        name="a reminder follows a tool result, as a user message",
        answer=_assistant(),
        then=[_RESULT, _REMINDER],
    ),
    _Case(name="text stands before a call", answer=_assistant(_SAID)),
    _Case(
        name="text and a blank line stand before a call",
        answer=_assistant(_SAID),
        swap=(f"{_SAID}\n", f"{_SAID}\n\n"),
    ),
    _Case(
        name="arguments are written without spaces",
        answer=_assistant(),
        swap=(_JSON, json.dumps(_ARGUMENTS, ensure_ascii=False, separators=(",", ":"))),
    ),
    _Case(
        name="arguments are written with \\u escapes",
        answer=_assistant(),
        swap=(_JSON, json.dumps(_ARGUMENTS)),
    ),
    _Case(
        name="arguments are sent back in another order",
        answer=_assistant(),
        sent_back=_assistant(arguments=dict(reversed(_ARGUMENTS.items()))),
        cost=EACH_CALL,
    ),
    _Case(
        name="reasoning ends in a blank",
        answer=_assistant(),
        sent_back=_thinking(_assistant(), f"{_THOUGHT} \n"),
        swap=(_THOUGHT, f"{_THOUGHT} \n"),
        thinks=True,
    ),
)


def findings(template: ChatTemplate) -> tuple[Finding, ...]:
    """Every case played through the template. Raises ValueError when the template cannot be read at all."""
    render = _renderer(template)
    thinks = _thinks(render)
    return tuple(_play(case, render, thinks) for case in _CASES)


def _thinks(render: Render) -> bool:
    """Whether an answer can begin with reasoning: it is rendered, and the prompt does not close it beforehand."""
    try:
        written = render([*_ASKED, _thinking(_assistant("There are 2 files.", None))], False)
        return _THOUGHT in written and written.startswith(render(_ASKED, True))
    except _REFUSALS:
        return False


def _play(case: _Case, render: Render, thinks: bool) -> Finding:
    answer, sent_back = case.answer, case.sent_back
    if case.thinks and not thinks:
        return Finding(case=case.name, extends=None, why="the template renders no reasoning")
    if case.thinks or (case.thinks is None and thinks):
        answer = _thinking(answer)
        if case.thinks is None and sent_back is not None:
            sent_back = _thinking(sent_back)
    try:
        asked = render(_ASKED, True)
        written = render([*_ASKED, answer], False).rstrip()
        after = render([*_ASKED, sent_back or answer, *case.then], True)
    except _REFUSALS as error:
        return Finding(case=case.name, extends=None, why=f"the template refuses it: {error}")
    if answer.get("tool_calls") and "bash" not in written.rpartition(_ASKED[-1]["content"])[2]:
        return Finding(case=case.name, extends=None, why="the template renders no tool calls")
    if case.swap is not None and case.swap[0] not in written:
        return Finding(case=case.name, extends=None, why="the template writes it in another form")
    opens = not written.startswith(asked)
    if opens:
        written = asked  # it opens an answer with what it leaves out of one that has been given
    elif case.swap is not None:
        written = written.replace(*case.swap)
    if after.startswith(written):
        return Finding(case=case.name, extends=True)
    at = next((i for i, (a, b) in enumerate(zip(written, after, strict=False)) if a != b), len(after))
    forgets = opens or (_THOUGHT in written and _THOUGHT not in after)
    return Finding(
        case=case.name,
        extends=False,
        written=written[max(at - _BEFORE, 0) : at + _SHOWN],
        rendered=after[max(at - _BEFORE, 0) : at + _SHOWN],
        cost=case.cost,
        mend=KEEP_REASONING if forgets else SPLICE,
    )


# ---- Jinja as model repositories expect it -------------------------------------------------------------------


class _Generation(Extension):
    """``{% generation %}`` marks what a model writes, for trainers; for rendering it is nothing."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _renderer(template: ChatTemplate) -> Render:
    """A template is the model's, not ours: it runs in Jinja's sandbox."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _refuse
    now = datetime.now()  # one moment for all prompts: a date is no break within a run's hour
    environment.globals["strftime_now"] = now.strftime
    try:
        compiled = environment.from_string(template.text)
    except TemplateError as error:
        raise ValueError(f"the chat template is not valid Jinja: {error}") from error

    def render(messages: Sequence[Message], open_answer: bool) -> str:
        return compiled.render(
            messages=messages, tools=_TOOLS, add_generation_prompt=open_answer, **template.special
        )

    def of_parts(messages: Sequence[Message], open_answer: bool) -> str:
        parts = [m | {"content": [{"type": "text", "text": m["content"]}]} for m in messages]
        return render(parts, open_answer)

    try:
        return render if _ASKED[-1]["content"] in render(_ASKED, True) else of_parts
    except _REFUSALS:
        return of_parts
