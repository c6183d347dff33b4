"""How few samples a rollout could be, going by nothing but what the harness sent: an oracle for the merge ratio.

Reads raw request bodies of the four APIs, on its own: neither the proxy's dialects nor the trajectory code. Two
requests can be in one sample if the later one's history is the earlier one's, then what the model answered, then
anything. Histories are compared by what they say: roles, texts, parsed arguments of tool calls, images. Ids,
``cache_control``, text given bare or in blocks, whitespace at either end, and reasoning do not count.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Item = tuple[Any, ...]
"""("system" | "user" | "tool", text) or ("assistant", text, ((name, arguments), …)) or ("image", digest)."""


@dataclass(frozen=True)
class Asking:
    """One request for a completion. ``answer``: what the model said to it, in the form of a chat message; None: not
    known, then any answer is taken for it. ``side``: a side call, which is never trained. ``dead``: it was not
    answered, or its answer never arrived."""

    path: str
    body: Any
    answer: dict[str, Any] | None = None
    side: bool = False
    dead: bool = False


@dataclass(frozen=True)
class Found:
    """``samples``: the least number. ``parents``: for each request that counts, the one it goes on from. ``breaks``:
    why each one that begins a sample (but the first) goes on from none."""

    samples: int
    parents: dict[int, int | None]
    breaks: dict[int, str]


def minimum(askings: Sequence[Asking], strip: Iterable[str] = ()) -> Found:
    """The least number of samples. ``strip``: patterns of what the harness writes anew into each request and the
    server takes out of it."""
    patterns = [re.compile(pattern, re.DOTALL) for pattern in strip]
    histories = {
        at: (tools_of(asking), history_of(asking.path, asking.body, patterns))
        for at, asking in enumerate(askings)
        if not asking.side and not asking.dead and is_generation(asking.path)
    }
    parents: dict[int, int | None] = {}
    breaks: dict[int, str] = {}
    continued: set[int] = set()
    for at, (tools, history) in histories.items():
        best, why = None, ""
        for other in reversed(list(parents)):
            other_tools, before = histories[other]
            said = "other tools" if tools != other_tools else ""
            said = said or _difference(before, askings[other].answer, history)
            why = why or said
            # the longest; of equally long ones (the same asked twice) one that nobody has gone on from
            if not said and (
                best is None or _rank(other, before, continued) > _rank(best, histories[best][1], continued)
            ):
                best = other
        if best is None and parents:
            breaks[at] = why
        elif best is not None and best in continued:
            breaks[at] = f"another request goes on from {best} already"
        if best is not None:
            continued.add(best)
        parents[at] = best
    return Found(len(parents) - len(continued), parents, breaks)


def _rank(at: int, history: list[Item], continued: set[int]) -> tuple[int, bool]:
    return len(history), at not in continued


def _difference(before: list[Item], answer: dict[str, Any] | None, history: list[Item]) -> str:
    """Empty when ``history`` is ``before``, the answer, and anything."""
    for place, item in enumerate(before):
        if place >= len(history):
            return f"the history became shorter: {len(history)} items instead of {len(before)}"
        if history[place] != item:
            return f"item {place} ({item[0]}) differs: {_show(history[place])} instead of {_show(item)}"
    if len(history) == len(before):
        return "the same was asked again"
    said = history[len(before)]
    if said[0] != "assistant":
        return f"no answer follows what was asked, but {_show(said)}"
    if answer is not None and not _same_answer(said, answer):
        return f"the answer came back as {_show(said)}"
    return ""


def _same_answer(said: Item, answer: dict[str, Any]) -> bool:
    calls = answer.get("tool_calls") or ()
    if _clean(said[1]) != _clean(_text(answer.get("content"))) or len(said[2]) != len(calls):
        return False
    for (name, arguments), call in zip(said[2], calls, strict=True):
        function = call["function"]
        sampled = _arguments(function.get("arguments"))
        if sampled != arguments and sampled != _arguments({"input": json.loads(arguments)}):
            return False  # a freeform tool's text travels to the model as its one argument
        if not (function["name"] == name or function["name"].endswith(name)):
            return False  # the name of a namespace may stand before it
    return True


def _show(item: Item) -> str:
    text = " ".join(str(part) for part in item[1:])
    return f"{item[0]} {text[:60]!r}"


# --- reading ----------------------------------------------------------------------------------------------------

_GENERATION = re.compile(
    r"/(chat/completions|completions|responses|messages|models/[^/]+:(stream)?[gG]enerateContent)$"
)


def is_generation(path: str) -> bool:
    """Whether a POST there asks for a completion."""
    return bool(_GENERATION.search(path.partition("?")[0]))


def history_of(path: str, body: dict[str, Any], patterns: Sequence[re.Pattern[str]] = ()) -> list[Item]:
    """What is said in a request, in order. Raises ValueError for an API that is not known."""
    path = path.partition("?")[0]
    if path.endswith("chat/completions"):
        items = _chat(body)
    elif path.endswith("responses"):
        items = _responses(body)
    elif path.endswith("messages"):
        items = _messages(body)
    elif "enerateContent" in path:
        items = _gemini(body)
    elif path.endswith("completions"):
        items = [("user", _text(body.get("prompt")))]
    else:
        raise ValueError(path)
    return _merged(items, patterns)


def tools_of(asking: Asking) -> str:
    """The tools, written so that equal ones are equal texts; neither order of keys nor ``cache_control`` counts."""
    return json.dumps(_without(asking.body.get("tools") or []), sort_keys=True)


def _without(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without(entry) for key, entry in value.items() if key != "cache_control"}
    return [_without(entry) for entry in value] if isinstance(value, list) else value


def _merged(items: list[Item], patterns: Sequence[re.Pattern[str]]) -> list[Item]:
    """Answers that arrive in pieces are one; empty texts are none."""
    out: list[Item] = []
    for item in items:
        if item[0] == "image":
            out.append(item)
            continue
        text = item[1]
        for pattern in patterns:
            text = pattern.sub("", text)
        text = _clean(text)
        if item[0] != "assistant":
            if text or item[0] == "tool":
                out.append((item[0], text))
        elif out and out[-1][0] == "assistant":
            last = out.pop()
            out.append(("assistant", _clean(f"{last[1]}\n{text}"), (*last[2], *item[2])))
        else:
            out.append(("assistant", text, tuple(item[2])))
    return out


def _clean(text: str) -> str:
    return text.strip()


def _text(content: Any) -> str:
    """The text of a content: a string, or the text blocks of a list."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = [b if isinstance(b, str) else b.get("text") for b in content if isinstance(b, str | dict)]
        return "\n".join(text for text in texts if isinstance(text, str))
    return "" if content is None else json.dumps(content, sort_keys=True)


def _images(content: Any) -> list[Item]:
    """Whatever in a list of blocks is neither text nor thought, by digest."""
    out: list[Item] = []
    for block in content if isinstance(content, list) else ():
        kind = block.get("type", "") if isinstance(block, dict) else ""
        if "image" in kind or "file" in kind or "inlineData" in (block if isinstance(block, dict) else ()):
            found = {k: v for k, v in block.items() if k not in ("cache_control", "id")}
            digest = hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()
            out.append(("image", digest[:16]))
    return out


def _arguments(given: Any) -> str:
    """Arguments so written that equal ones are equal; text that is no JSON stands for itself."""
    if isinstance(given, str):
        try:
            given = json.loads(given or "{}")
        except ValueError:
            return json.dumps(given)
    return json.dumps(given if given is not None else {}, sort_keys=True)


def _role(role: str) -> str:
    return "system" if role == "developer" else role


def _chat(body: dict[str, Any]) -> list[Item]:
    out: list[Item] = []
    for message in body.get("messages") or ():
        role, content = _role(message["role"]), message.get("content")
        if role == "assistant":
            functions = [call["function"] for call in message.get("tool_calls") or ()]
            calls = tuple((f["name"], _arguments(f.get("arguments"))) for f in functions)
            out.append(("assistant", _text(content), calls))
        else:
            out += [(role, _text(content)), *_images(content)]
    return out


def _responses(body: dict[str, Any]) -> list[Item]:
    if body.get("previous_response_id"):
        raise ValueError("the history is kept elsewhere (previous_response_id)")
    out: list[Item] = []
    if body.get("instructions"):
        out.append(("system", body["instructions"]))
    given = body.get("input") or ()
    for item in [{"role": "user", "content": given}] if isinstance(given, str) else given:
        kind = item.get("type", "message")
        if kind == "message" and item["role"] == "assistant":
            out.append(("assistant", _text(item.get("content")), ()))
        elif kind == "message":
            content = item.get("content")
            out += [(_role(item["role"]), _text(content)), *_images(content)]
        elif kind == "function_call":
            out.append(("assistant", "", ((item["name"], _arguments(item.get("arguments"))),)))
        elif kind == "custom_tool_call":
            out.append(("assistant", "", ((item["name"], json.dumps(item.get("input"))),)))
        elif kind.endswith("_call_output"):
            out += [("tool", _text(item.get("output"))), *_images(item.get("output"))]
        elif kind != "reasoning":
            rest = {k: v for k, v in item.items() if k not in ("id", "status", "encrypted_content")}
            out.append(("user", json.dumps(rest, sort_keys=True)))
    return out


def _messages(body: dict[str, Any]) -> list[Item]:
    out: list[Item] = [("system", _text(body.get("system")))] if body.get("system") else []
    for message in body.get("messages") or ():
        role, content = message["role"], message.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
        for block in blocks:
            kind = block.get("type")
            if kind == "text" and role == "assistant":
                out.append(("assistant", block["text"], ()))
            elif kind == "text":
                out.append((_role(role), block["text"]))
            elif kind == "tool_use":
                out.append(("assistant", "", ((block["name"], _arguments(block.get("input"))),)))
            elif kind == "tool_result":
                inner = block.get("content")
                out += [("tool", _text(inner)), *_images(inner)]
            elif kind not in ("thinking", "redacted_thinking"):
                out += _images([block])
    return out


def _gemini(body: dict[str, Any]) -> list[Item]:
    instruction = body.get("systemInstruction") or {}
    out: list[Item] = [("system", _text(instruction.get("parts") or []))] if instruction else []
    for content in body.get("contents") or ():
        role = "assistant" if content.get("role") == "model" else "user"
        for part in content.get("parts") or ():
            if part.get("thought"):
                continue
            if "functionCall" in part:
                call = part["functionCall"]
                out.append(("assistant", "", ((call["name"], _arguments(call.get("args"))),)))
            elif "functionResponse" in part:
                out.append(("tool", json.dumps(part["functionResponse"].get("response"), sort_keys=True)))
            elif isinstance(part.get("text"), str):
                text = part["text"]
                out.append(("assistant", text, ()) if role == "assistant" else ("user", text))
            else:
                out += _images([part])
    return out
