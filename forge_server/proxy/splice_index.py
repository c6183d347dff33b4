"""The answers that one attempt was given, found again by the conversations that they end.

An entry is known by its chain: model, tools, and what every message up to the answer says (``splice_keys``).
Several answers may end one chain (retries, best-of-n, answers that differ in their reasoning alone); the one that
a request means is told by the reasoning it echoes, the ids of the tool calls, and delivery. What is known not to
have been delivered is never found (I3).
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence

import msgspec

from forge_server.domain.call import Ids
from forge_server.domain.states import Delivery, Fallback
from forge_server.domain.turn import Completion, Turn, as_message
from forge_server.proxy.splice_align import Place, Unspliceable
from forge_server.proxy.splice_keys import Key, chain, key_of, key_of_tool

_KEPT = 4
"""Conversations of an attempt whose rendered prompts are at hand: with more that alternate, they are parsed
again."""


class Asked(msgspec.Struct, frozen=True):
    """A request: ``start`` stands for model and tools, ``keys`` for the messages."""

    start: bytes
    keys: tuple[Key, ...]

    def until(self, count: int) -> bytes:
        """The chain of the first ``count`` messages."""
        return chain(self.start, self.keys[:count])


class Tip:
    """A sampled answer, the end of a conversation. ``before``: the answer in whose place recorded tokens stand in
    its prompt, which has those of all answers before. ``index``: which message of a request it is. ``stop``: the stop
    string that cut it off, which its tokens have and its text may not. ``proven``: token sequences known to say all
    that was sampled, as templates have written it."""

    __slots__ = (
        "arguments",
        "before",
        "call_id",
        "cut_reasoning",
        "index",
        "key",
        "names",
        "place",
        "proven",
        "said",
        "stop",
        "thought",
    )

    def __init__(
        self,
        call_id: int,
        before: "Tip | None",
        index: int,
        place: Place,
        completion: Completion,
        stop: str = "",
    ) -> None:
        self.stop = stop
        self.call_id, self.before, self.index, self.place = call_id, before, index, place
        self.key = key_of(msgspec.json.encode(as_message(completion)))
        self.thought = completion.reasoning or ""
        self.said = completion.text or ""
        self.names = tuple(call.name for call in completion.tool_calls)
        self.cut_reasoning = not place.closed and bool(self.thought) and not self.said and not self.names
        self.arguments = tuple(call.arguments for call in completion.tool_calls)
        self.proven: list[Ids] = []

    def contains(self, marker: str) -> bool:
        """Whether the marker's text stands in the answer; also where its letters are escaped as JSON may be."""
        texts = (self.said, self.thought, *self.arguments, *map(_unescaped, self.arguments))
        return bool(marker) and any(marker in text for text in texts)

    def line(self) -> list["Tip"]:
        """The answers of its conversation whose recorded tokens stand in it, itself last."""
        tips = []
        at: Tip | None = self
        while at is not None:
            tips.append(at)
            at = at.before
        return tips[::-1]


class Prompt(msgspec.Struct, frozen=True):
    """What the engine rendered for a call: the ids and their text (``1,2,3``); and ``recorded``, the text of the
    prompt that was sent and of the completion."""

    ids: Ids
    text: bytes
    recorded: bytes


class Answers:
    """All answers of an attempt. ``incomplete``: some that were given before a restart could not be read back."""

    def __init__(self) -> None:
        self._tips: dict[bytes, list[Tip]] = {}
        self._asked: set[bytes] = set()
        self._sampled: set[bytes] = set()
        self._prompts: OrderedDict[int, Prompt] = OrderedDict()
        self._keys: dict[bytes, Key] = {}
        self._tools: dict[bytes, bytes] = {}
        self.incomplete = False

    def asked(self, model: str, turn: Turn, digests: Sequence[bytes]) -> Asked:
        """The request; ``digests`` identify its entries (tools, then messages) within the attempt."""
        count = len(turn.tools)
        tools = [self._tool(d, e) for d, e in zip(digests[:count], turn.tools, strict=True)]
        keys = tuple(
            self._keys.get(digest) or self._keys.setdefault(digest, key_of(entry))
            for digest, entry in zip(digests[count:], turn.messages, strict=True)
        )
        return Asked(self.start(model, tools), keys)

    @staticmethod
    def start(model: str, tools: Sequence[bytes]) -> bytes:
        """What stands for a model and the keys of tools at the begin of a chain."""
        return chain(model.encode() + b"\0" + b"".join(tools), ())

    def begins(self, asked: Asked, fits: Callable[[Tip], bool]) -> Tip | None:
        """The latest answer that the request continues and that ``fits``; None when there is none."""
        index = _last(asked)
        tips = [] if index is None else self._tips.get(asked.until(index + 1), [])
        return next((tip for tip in reversed(tips) if fits(tip)), None)

    def find(self, asked: Asked, delivery: Callable[[int], Delivery]) -> Tip | None:
        """The answer that the request continues; None when there is no answer in it. Raises Unspliceable."""
        index = _last(asked)
        if index is None:
            return None
        tips = self._tips.get(asked.until(index + 1), [])
        meant = [tip for tip in tips if _echoes(asked, tip)]
        usable = [tip for tip in meant if delivery(tip.call_id) is not Delivery.NO]
        if usable:
            ids = asked.keys[index].call_ids
            return max(
                usable,
                key=lambda tip: (
                    _kept(asked, tip),
                    bool(ids) and tip.key.call_ids == ids,
                    delivery(tip.call_id) is Delivery.YES,
                    tip.call_id,
                ),
            )
        raise Unspliceable(self._why(asked, index, bool(meant)))

    def _why(self, asked: Asked, index: int, undelivered: bool) -> Fallback:
        if undelivered:
            return Fallback.NOT_DELIVERED
        if self.incomplete:
            return Fallback.UNKNOWN_AFTER_RESTART
        if asked.until(index) in self._asked:
            return Fallback.EDITED_ANSWER
        ours = asked.keys[index].digest in self._sampled
        return Fallback.HISTORY_CHANGED if ours else Fallback.FOREIGN_ANSWER

    def add(self, asked: Asked, tip: Tip, prompt: Prompt | None) -> None:
        """An answer to ``asked`` has been recorded."""
        self._asked.add(asked.until(len(asked.keys)))
        self._sampled.add(tip.key.digest)
        self._tips.setdefault(chain(asked.start, (*asked.keys, tip.key)), []).append(tip)
        if tip.before is not None:
            self._prompts.pop(tip.before.call_id, None)  # its conversation has gone on
        if prompt is not None:
            self._prompts[tip.call_id] = prompt
            while len(self._prompts) > _KEPT:
                self._prompts.popitem(last=False)

    def prompt(self, tip: Tip | None) -> Prompt | None:
        """What was rendered for the call of ``tip``, if that is still at hand; of the latest call for None."""
        if tip is None:
            return next(reversed(self._prompts.values()), None)
        return self._prompts.get(tip.call_id)

    def _tool(self, digest: bytes, body: bytes) -> bytes:
        return self._tools.get(digest) or self._tools.setdefault(digest, key_of_tool(body))


def _last(asked: Asked) -> int | None:
    """Which message is the last answer in the request."""
    return next((i for i in range(len(asked.keys) - 1, -1, -1) if asked.keys[i].assistant), None)


def _unescaped(arguments: str) -> str:
    if "\\u" not in arguments:
        return ""
    try:
        return msgspec.json.encode(msgspec.json.decode(arguments)).decode()
    except msgspec.MsgspecError:
        return ""


def _echoes(asked: Asked, tip: Tip) -> bool:
    """Whether the reasoning in the request is that of the answers, where there is any."""
    return all(asked.keys[t.index].thought in (b"", t.key.thought) for t in tip.line())


def _kept(asked: Asked, tip: Tip) -> int:
    return sum(asked.keys[t.index].thought == t.key.thought for t in tip.line())
