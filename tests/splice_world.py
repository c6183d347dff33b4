"""Token-exact forwarding without sockets and database: Qwen3's template and tokenizer, answers as a test says.

``World`` serves requests as the proxy does (splice, else record) and keeps what it recorded as calls, so that
samples can be cut of them. A second world with ``forwarding="record"`` tells what recording alone gives.
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from msgspec import Raw
from qwen3 import Message, parse_answer, qwen3, template_messages, template_tools

from forge_server.domain.call import Call, Ids, VersionSpan
from forge_server.domain.engine import ChatResult, EngineRefused, Generated, Rendered, Template
from forge_server.domain.states import AttemptState, Delivery, Fallback
from forge_server.domain.turn import Turn, as_message, from_message
from forge_server.proxy import splice
from forge_server.proxy.ports import CallPolicy
from forge_server.proxy.splice_align import Unspliceable
from forge_server.proxy.splice_index import Answers
from forge_server.proxy.transcript import Stored, Transcript
from forge_server.trajectory.forest import Forest
from forge_server.trajectory.samples import Cover, cover

TEMPLATE = Template(closing=151645, marker="<|im_end|>", edges=((198, "\n"),))
TOOLS: list[Message] = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look at a place.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


class Engine:
    """``says``: the output of the next generations, as text or ids; ``cut``: they end without an end of turn;
    ``aborts``: so many of them a weight update ends. ``sampling``: the parameters that render tells. ``write``: the
    chat template, ``end``: the token that the model ends its turn with."""

    template: Template | None = TEMPLATE

    def __init__(self) -> None:
        self.says: list[str | list[int]] = []
        self.cut = False
        self.aborts = 0
        self.versions: tuple[VersionSpan, ...] = ()
        self.fails: dict[str, Exception] = {}
        self.log: list[str] = []
        self.write: Callable[[list[Message], list[Message] | None], str] = qwen3().render
        self.end = TEMPLATE.closing
        self.window = 100_000
        self.sampling: dict[str, Any] = {}

    def prompt(self, body: dict[str, Any]) -> list[int]:
        messages = [msgspec.json.decode(m) for m in body["messages"]]
        tools = [msgspec.json.decode(t) for t in body.get("tools", ())]
        ids = qwen3().encode(self.write(template_messages(messages), template_tools(tools or None)))
        if len(ids) + body["max_tokens"] > self.window:
            raise EngineRefused(400, f"maximum context length is {self.window}", "context_length_exceeded")
        return ids

    def sampled(self) -> list[int]:
        said = self.says.pop(0)
        ids = qwen3().encode(said) if isinstance(said, str) else list(said)
        return ids if self.cut else [*ids, self.end]

    def _enter(self, what: str) -> None:
        self.log.append(what)
        if what in self.fails:
            raise self.fails[what]

    async def chat(
        self, body: dict[str, Any], *, request_id: str, affinity: str, known: ChatResult | None = None
    ) -> ChatResult:
        self._enter("chat")
        prompt = self.prompt(body)
        ids = self.sampled()
        message = parse_answer(qwen3().decode(ids if self.cut else ids[:-1]), tools=bool(body.get("tools")))
        finish = "length" if self.cut else "tool_calls" if message.get("tool_calls") else "stop"
        return ChatResult(
            prompt_ids=np.array(prompt, np.int32),
            completion_ids=np.array(ids, np.int32),
            logprobs=np.full(len(ids), -0.5, np.float32),
            message=message,
            finish_reason=finish,
            usage_prompt=len(prompt),
            usage_completion=len(ids),
            model="forge",
            raw_prompt_ids=",".join(map(str, prompt)).encode(),
        )

    async def count_tokens(self, messages: Sequence[Any], tools: Sequence[Any]) -> int:
        raise NotImplementedError

    async def render(
        self, body: dict[str, Any], *, request_id: str, affinity: str, known: tuple[bytes, Ids] | None = None
    ) -> Rendered:
        self._enter("render")
        ids = self.prompt(body)
        return Rendered(np.array(ids, np.int32), ",".join(map(str, ids)).encode(), self.sampling)

    async def generate(
        self, prompt: bytes, rendered: Rendered, max_tokens: int, *, request_id: str, affinity: str
    ) -> Generated:
        self._enter("generate")
        self.sent = [int(x) for x in prompt.split(b",")]
        if self.aborts:
            self.aborts -= 1
            return self._generated([], "abort")
        return self._generated(self.sampled(), "length" if self.cut else "stop")

    def _generated(self, ids: list[int], finish: str) -> Generated:
        return Generated(
            completion_ids=np.array(ids, np.int32),
            completion_text=",".join(map(str, ids)).encode(),
            logprobs=np.full(len(ids), -0.5, np.float32),
            text=None,
            finish_reason=finish,
            stop_reason=None,
            usage_prompt=len(self.sent),
            usage_completion=len(ids),
            model="forge",
            versions=self.versions or (VersionSpan(0, 0, len(ids)),),
        )

    async def message(
        self,
        found: Generated,
        rendered: Rendered,
        body: dict[str, Any],
        prompt_tail: Ids,
        *,
        request_id: str,
        affinity: str,
    ) -> dict[str, object]:
        self._enter("message")
        assert found.completion_ids is not None
        ids = found.completion_ids.tolist()
        return parse_answer(qwen3().decode(ids if self.cut else ids[:-1]), tools=bool(body.get("tools")))

    async def detokenize(self, ids: Sequence[int]) -> str:
        self._enter("detokenize")
        return qwen3().decode(ids)


@dataclass
class Made:
    """One served request. ``answer`` is the message as the harness gets it."""

    call: Call
    answer: Message
    spliced: bool
    fallback: Fallback | None
    sent: list[int]
    rendered: list[int]
    places: list[tuple[int, int, int, int]] = field(default_factory=list)
    """(call, message index, start, end) of each recorded answer in the prompt."""


class World:
    """One attempt."""

    def __init__(self, *, forwarding: str = "splice", **policy: Any) -> None:
        self.engine = Engine()
        self.policy = CallPolicy(
            state=AttemptState.RUNNING,
            mode="train",
            model="forge",
            window=100_000,
            forwarding=forwarding,
            **policy,
        )
        self.answers, self.forest = Answers(), Forest()
        self.transcript = Transcript(Stored())
        self.made: list[Made] = []

    def ask(
        self,
        messages: Sequence[Message],
        says: str | list[int],
        *,
        tools: Sequence[Message] = (),
        cut: bool = False,
        delivered: Delivery = Delivery.UNKNOWN,
        max_tokens: int = 100,
        constrained: bool = False,
        images: bool = False,
    ) -> Made:
        return asyncio.run(self._ask(messages, says, tools, cut, delivered, max_tokens, constrained, images))

    async def _ask(
        self,
        messages: Sequence[Message],
        says: str | list[int],
        tools: Sequence[Message],
        cut: bool,
        delivered: Delivery,
        max_tokens: int,
        constrained: bool,
        images: bool,
    ) -> Made:
        turn = Turn(
            messages=tuple(Raw(json.dumps(m).encode()) for m in messages),
            tools=tuple(Raw(json.dumps(t).encode()) for t in tools),
        )
        body: dict[str, Any] = {"messages": turn.messages, "max_tokens": max_tokens}
        if tools:
            body["tools"] = turn.tools
        self.engine.says, self.engine.cut = [says], cut
        call_id = 1000 + len(self.made)
        _, digests = self.transcript.identify(turn)
        asked = self.answers.asked("forge", turn, digests)
        served, fallback = None, None
        if self.policy.forwarding != "record":
            request = splice.Ask(
                asked=asked,
                body=body,
                constrained=constrained,
                images=images,
                answers=self.answers,
                forest=self.forest,
                policy=self.policy,
                attempt_id="at",
                request_id=str(call_id),
            )
            try:
                served = await splice.serve(self.engine, self.engine.template, request)
            except Unspliceable as error:
                fallback = error.reason
                self.engine.says = [says]
        result = (
            served.result if served else await self.engine.chat(body, request_id=str(call_id), affinity="at")
        )
        completion = from_message(
            result.message,
            id="x",
            created=0,
            finish_reason=result.finish_reason,
            prompt_tokens=result.usage_prompt,
            completion_tokens=result.usage_completion,
        )
        assert result.prompt_ids is not None and result.completion_ids is not None
        assert result.logprobs is not None
        placed = self.forest.add(call_id, result.prompt_ids, result.completion_ids, delivered)
        for confirmed in placed.confirmed:
            self._set(confirmed, Delivery.YES)
        splice.remember(self.answers, call_id, asked, served, result, completion)
        places = []
        if served is not None:
            assert self.engine.sent == result.prompt_ids.tolist()
            at = served.before
            while at is not None:
                places.append((at.call_id, at.index, at.place.start, at.place.end))
                at = at.before
        made = Made(
            call=Call(
                id=call_id,
                seq=len(self.made),
                prompt=result.prompt_ids,
                completion=result.completion_ids,
                logprobs=result.logprobs,
                versions=(VersionSpan(0, 0, result.completion_ids.size),),
                delivered=delivered,
                untrainable=None,
                temperature=1.0,
                finish_reason=result.finish_reason,
            ),
            answer=json.loads(msgspec.json.encode(as_message(completion))),
            spliced=served is not None,
            fallback=fallback,
            sent=result.prompt_ids.tolist(),
            rendered=self.engine.prompt(body),
            places=places[::-1],
        )
        self.made.append(made)
        return made

    def _set(self, call_id: int, delivered: Delivery) -> None:
        for made in self.made:
            if made.call.id == call_id:
                made.call = msgspec.structs.replace(made.call, delivered=delivered)

    def settle(self, made: Made, delivered: Delivery) -> None:
        """What the connection tells about an answer's delivery."""
        if delivered is Delivery.YES:
            self.forest.confirm_delivery(made.call.id)
        else:
            delivered = self.forest.deny_delivery(made.call.id)
        self._set(made.call.id, delivered)

    def cover(self) -> Cover:
        """The samples, with every answer delivered whose delivery is not known yet."""
        for made in self.made:
            if made.call.delivered is Delivery.UNKNOWN:
                self._set(made.call.id, Delivery.YES)
        return cover([made.call for made in self.made], 1_000_000)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def tool(text: str, id: str = "c1") -> Message:
    return {"role": "tool", "tool_call_id": id, "content": text}


def call(raw: str, name: str = "look") -> str:
    """What a Qwen3 model puts out for a tool call whose arguments it writes as ``raw``."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {raw}}}\n</tool_call>'


def think(text: str) -> str:
    return f"<think>\n{text}\n</think>\n\n"
