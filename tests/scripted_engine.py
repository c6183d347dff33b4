"""An engine that speaks vLLM 0.32's interface on a real socket and whose policy is a Python function.

Prompts are rendered by Qwen3's chat template and tokenised by its tokenizer. A policy says what to answer; the
completion's ids are the tokenisation of the text that a Qwen3 model would have put out for it, the message in the
answer is what vLLM's parsers make of that text. So whatever drifts with the real thing drifts here.
"""

import asyncio
import base64
import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web
from qwen3 import END, Message, parse_answer, parse_prompt, qwen3, template_messages, template_tools

MODEL = "forge"


@dataclass(frozen=True)
class Call:
    """A tool call of the model. ``arguments`` as text: the raw JSON exactly as it is sampled."""

    name: str
    arguments: dict[str, Any] | str = field(default_factory=dict)

    @property
    def raw(self) -> str:
        if isinstance(self.arguments, str):
            return self.arguments
        return json.dumps(self.arguments, ensure_ascii=False)


@dataclass(frozen=True)
class Say:
    """One answer of the model. ``finish="length"``: it is cut off where it ends, without an end of turn.

    Without ``reasoning`` nothing is thought: the text has no think block at all. ``split``: one of its tokens comes
    as two, as no tokenizer would write them. ``raw``: the whole output text instead of everything else.
    """

    text: str = ""
    reasoning: str = ""
    calls: Sequence[Call] = ()
    finish: str = "stop"
    split: bool = False
    raw: str | None = None

    @property
    def output(self) -> str:
        """What the model puts out, without the end of turn."""
        if self.raw is not None:
            return self.raw
        thought = f"<think>\n{self.reasoning}\n</think>\n\n" if self.reasoning else ""
        calls = "\n".join(
            f'<tool_call>\n{{"name": {json.dumps(c.name)}, "arguments": {c.raw}}}\n</tool_call>'
            for c in self.calls
        )
        between = "\n" if self.text and calls else ""
        return f"{thought}{self.text}{between}{calls}"


@dataclass(frozen=True)
class Asked:
    """A request as the engine sees it. ``messages`` and ``tools`` in OpenAI's form, contents as text; in splice
    mode they are read back from the token ids (tool calls then have no ids of the harness)."""

    messages: list[Message]
    tools: list[Message]
    prompt: str
    route: str

    @property
    def system(self) -> str:
        return "\n".join(m["content"] or "" for m in self.messages if m["role"] == "system")

    @property
    def last_user(self) -> str:
        return next((m["content"] or "" for m in reversed(self.messages) if m["role"] == "user"), "")

    @property
    def last(self) -> str:
        """The text of the last message: mostly what a tool gave."""
        return (self.messages[-1]["content"] or "") if self.messages else ""

    @property
    def turn(self) -> int:
        """How many answers are in it already."""
        return sum(m["role"] == "assistant" for m in self.messages)

    @property
    def tool_names(self) -> list[str]:
        return [tool["function"]["name"] for tool in self.tools]


Policy = Callable[[Asked], Say]


@dataclass(frozen=True)
class Fault:
    """What goes wrong with one generation. ``drop``: the connection is reset without an answer. ``hold``: the answer
    waits for the event (``slow_s``: for so long). ``swap``: what samples is labelled so from ``at`` of
    the completion on, without anybody having told the engine to (``/weight_info`` says nothing of it)."""

    status: int = 0
    retry_after: float | None = None
    drop: bool = False
    slow_s: float = 0.0
    hold: threading.Event | None = None
    swap: str = ""
    at: float = 0.5


class Refused(Exception):
    """The request is at fault."""


@dataclass
class _Answer:
    prompt_ids: list[int]
    ids: list[int]
    finish: str
    spans: list[dict[str, Any]]


class ScriptedEngine:
    """State is public. ``asked``: every generation in order. ``faults``: by number of the generation, from 0, those
    that failed included. ``log``: one entry a request. Without ``vision`` it refuses images."""

    def __init__(
        self,
        policy: Policy | None = None,
        *,
        window: int = 131_072,
        scale_out: bool = True,
        vision: bool = False,
    ) -> None:
        self.policy: Policy = policy or (lambda asked: Say("ok"))
        self.window = window
        self.scale_out = scale_out
        self.vision = vision
        self.dev_mode = True
        self.split_tokens = False
        self.faults: dict[int, Fault] = {}
        self.asked: list[Asked] = []
        self.generations = 0
        self.log: list[str] = []
        self.label = self.sampled = "default"
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.resumed = asyncio.Event()
        self.resumed.set()
        self.loaded: Path | None = None
        self.url = ""
        self.arrived = threading.Event()
        self.aborted = 0
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    # --- life -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def serving(self, host: str = "127.0.0.1") -> Iterator["ScriptedEngine"]:
        """Listen on a free port, in a thread of its own."""
        qwen3()
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, name="scripted-engine", daemon=True)
        thread.start()
        runner = asyncio.run_coroutine_threadsafe(self._listen(host), loop).result(30)
        try:
            yield self
        finally:
            asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(30)
            loop.call_soon_threadsafe(loop.stop)
            thread.join(30)
            loop.close()

    async def _listen(self, host: str) -> web.AppRunner:
        app = web.Application(middlewares=[self._guard], client_max_size=1 << 30)
        post, get = app.router.add_post, app.router.add_get
        get("/health", self._empty)
        get("/version", self._fixed({"version": "0.32.0"}))
        get("/v1/models", self._models)
        get("/openapi.json", self._openapi)
        post("/v1/chat/completions", self._chat)
        post("/v1/completions", self._completions)
        post("/tokenize", self._tokenize)
        post("/detokenize", self._detokenize)
        if self.scale_out:
            post("/v1/chat/completions/render", self._render)
            post("/v1/chat/completions/derender", self._derender)
            post("/inference/v1/generate", self._generate)
        else:
            for path in (
                "/v1/chat/completions/render",
                "/v1/chat/completions/derender",
                "/inference/v1/generate",
            ):
                post(path, self._forbidden)
        if self.dev_mode:
            get("/weight_info", self._weight_info)
            post("/update_weight_version", self._set_label)
            post("/pause", self._pause)
            post("/resume", self._resume)
            get("/is_paused", self._is_paused)
            post("/collective_rpc", self._rpc)
            post("/reset_prefix_cache", self._fixed({"success": True}))
            post("/reset_mm_cache", self._empty)
            post("/reset_encoder_cache", self._empty)
        self._app = app
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, host, 0)
        await site.start()
        self.url = f"http://{host}:{runner.addresses[0][1]}"
        return runner

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.log.append(f"{request.method} {request.path_qs}")
        try:
            response: web.StreamResponse = await handler(request)
            return response
        except web.HTTPNotFound:
            return _json({"detail": "Not Found"}, status=404)
        except web.HTTPException as error:
            return _error(error.status, error.reason)
        except (Refused, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            return _error(400, str(error) or repr(error))

    # --- generation -------------------------------------------------------------------------------------------------

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()

        def work(fault: Fault) -> dict[str, Any]:
            messages, tools = (
                template_messages(self._seen(body["messages"])),
                template_tools(body.get("tools")),
            )
            text = qwen3().render(messages, tools, **_template_options(body))
            prompt = qwen3().encode(text)
            asked = Asked(_readable(messages), tools or [], text, "chat")
            limit = body.get("max_completion_tokens") or body.get("max_tokens")
            answers = [self._answer(asked, prompt, limit, fault) for _ in range(body.get("n") or 1)]
            return _completion(body, answers, request.headers.get("x-request-id"), bool(tools))

        return await self._generation(request, work)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()

        def work(fault: Fault) -> dict[str, Any]:
            prompt = list(body["token_ids"])
            if not prompt or min(prompt) < 0 or max(prompt) >= 151_936:
                raise Refused("Token id out of vocabulary")
            text = qwen3().decode(prompt)
            messages, tools = parse_prompt(text)
            sampling = body.get("sampling_params") or {}
            asked = Asked(messages, tools, text, "generate")
            answers = [
                self._answer(asked, prompt, sampling.get("max_tokens"), fault)
                for _ in range(sampling.get("n") or 1)
            ]
            named = body.get("request_id") or request.headers.get("x-request-id") or _serial()
            return _generated(body, prompt, answers, f"generate-tokens-{named}")

        return await self._generation(request, work)

    async def _generation(
        self, request: web.Request, work: Callable[[Fault], dict[str, Any]]
    ) -> web.StreamResponse:
        with self._lock:
            number, self.generations = self.generations, self.generations + 1
        fault = self.faults.get(number, Fault())
        self.arrived.set()
        await self.resumed.wait()
        self._running += 1
        self._idle.clear()
        try:
            return await self._sample(request, fault, work)
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    async def _sample(
        self, request: web.Request, fault: Fault, work: Callable[[Fault], dict[str, Any]]
    ) -> web.StreamResponse:
        if fault.hold is not None:
            await asyncio.to_thread(fault.hold.wait, 600)
        if fault.slow_s:
            await asyncio.sleep(fault.slow_s)
        if fault.drop:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if fault.status:
            headers = {} if fault.retry_after is None else {"Retry-After": f"{fault.retry_after:g}"}
            return _error(fault.status, "scripted trouble", headers)
        return _json(await asyncio.to_thread(work, fault))

    def _answer(self, asked: Asked, prompt: list[int], limit: int | None, fault: Fault) -> _Answer:
        room = self.window - len(prompt)
        if room <= 0 or (limit and asked.route == "chat" and limit > room):
            wanted = f" and at least {limit} output tokens" if limit else ""
            raise Refused(
                f"This model's maximum context length is {self.window} tokens. However, your request has "
                f"{len(prompt)} input tokens{wanted}. Please reduce the length of the input messages."
            )
        with self._lock:
            self.asked.append(asked)
        try:
            say = self.policy(asked)
        except Exception as error:
            raise Refused(f"the policy failed: {error!r}") from error
        ids = qwen3().encode(say.output)
        if say.split or self.split_tokens:
            ids = qwen3().split_one(ids)
        finish = say.finish
        if finish == "stop":
            ids = [*ids, qwen3().end_id]
        most = min(limit or room, room)
        if len(ids) > most:
            ids, finish = ids[:most], "length"
        return _Answer(prompt, ids, finish, self._spans(len(ids), fault))

    def _spans(self, count: int, fault: Fault) -> list[dict[str, Any]]:
        if not fault.swap:
            return [{"version": self.sampled, "start": 0, "end": count}]
        cut = min(max(int(count * fault.at), 0), count)
        before, self.sampled = self.sampled, fault.swap
        spans = [
            {"version": before, "start": 0, "end": cut},
            {"version": fault.swap, "start": cut, "end": count},
        ]
        return [span for span in spans if span["start"] != span["end"]]

    def _seen(self, messages: list[Message]) -> list[Message]:
        """With ``vision`` an image is a run of placeholders, as many as its bytes want, like Qwen2-VL's."""
        return [_pads_for(message) for message in messages] if self.vision else messages

    # --- rendering and back -----------------------------------------------------------------------------------------

    async def _render(self, request: web.Request) -> web.Response:
        body = await request.json()
        text = qwen3().render(
            template_messages(self._seen(body["messages"])),
            template_tools(body.get("tools")),
            **_template_options(body),
        )
        ids = await asyncio.to_thread(qwen3().encode, text)
        limit = body.get("max_completion_tokens") or body.get("max_tokens")
        sampling = {
            "temperature": body.get("temperature", 1.0),
            "top_p": body.get("top_p", 1.0),
            "seed": body.get("seed"),
            "stop": [],
            "stop_token_ids": [],
            "max_tokens": limit or self.window - len(ids),
            "logprobs": (body.get("top_logprobs") or 0) if body.get("logprobs") else None,
            "skip_special_tokens": not body.get("tools"),
            "output_kind": 2,
        }
        return _json(
            {
                "request_id": f"chatcmpl-{request.headers.get('x-request-id') or _serial()}",
                "token_ids": ids,
                "token_offsets": None,
                "features": None,
                "content_parts": None,
                "sampling_params": sampling,
                "model": MODEL,
                "reasoning_ended": False,
                "reasoning_parser_kwargs": {"chat_template_kwargs": _template_options(body)},
                "return_token_ids": None,
                "output_mode": "tokens",
                "stream": False,
                "stream_options": None,
                "cache_salt": None,
                "priority": 0,
                "kv_transfer_params": None,
            }
        )

    async def _derender(self, request: web.Request) -> web.Response:
        body = await request.json()
        chat = body.get("chat_request")
        if chat is None:
            raise Refused("chat_request is required when a tool or reasoning parser is configured")
        given, choices = body["generate_response"], []
        for choice in given["choices"]:
            if not choice.get("token_ids"):
                raise Refused(f"choice {choice['index']} has empty or null token_ids")
            message = parse_answer(qwen3().decode(choice["token_ids"]), tools=bool(chat.get("tools")))
            made = {
                "index": choice["index"],
                "message": _whole(message),
                "logprobs": _derendered_logprobs(choice.get("logprobs")),
                "finish_reason": choice.get("finish_reason"),
                "stop_reason": choice.get("stop_reason"),
                "token_ids": choice["token_ids"] if chat.get("return_token_ids") else None,
            }
            choices.append(made)
        count = sum(len(choice["token_ids"]) for choice in given["choices"])
        prompt = body.get("prompt_tokens") or 0
        return _json(
            {
                "id": given.get("request_id", ""),
                "object": "chat.completion",
                "created": int(time.time()),
                "model": body.get("model") or MODEL,
                "choices": choices,
                "usage": {
                    "prompt_tokens": prompt,
                    "completion_tokens": count,
                    "total_tokens": prompt + count,
                },
                "prompt_logprobs": None,
                "prompt_token_ids": None,
                "kv_transfer_params": None,
            }
        )

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        if "messages" in body:
            text = qwen3().render(
                template_messages(self._seen(body["messages"])),
                template_tools(body.get("tools")),
                add_generation_prompt=body.get("add_generation_prompt", True),
            )
        else:
            text = body["prompt"]
        ids = await asyncio.to_thread(qwen3().encode, text)
        strings = [qwen3().tokenizer.id_to_token(i) for i in ids] if body.get("return_token_strs") else None
        return _json({"count": len(ids), "max_model_len": self.window, "tokens": ids, "token_strs": strings})

    async def _detokenize(self, request: web.Request) -> web.Response:
        return _json({"prompt": qwen3().decode((await request.json())["tokens"])})

    async def _completions(self, request: web.Request) -> web.Response:
        """What the weight swap's probe asks: logprobs of a prompt, those of the loaded checkpoint's manifest."""
        ids = (await request.json())["prompt"]
        values = [-logprob_size(at, i) for at, i in enumerate(ids)]
        manifest = self.loaded / "manifest.json" if self.loaded else None
        if manifest and manifest.exists():
            values = json.loads(manifest.read_text())["probe"]["logprobs"][: len(ids)]
        entries = [None, *({str(i): {"logprob": v}} for i, v in zip(ids[1:], values[1:], strict=True))]
        return _json({"choices": [{"index": 0, "text": "", "prompt_logprobs": entries}]})

    # --- the rest ---------------------------------------------------------------------------------------------------

    async def _models(self, request: web.Request) -> web.Response:
        entry = {"id": MODEL, "object": "model", "owned_by": "vllm", "root": MODEL, "parent": None}
        return _json({"object": "list", "data": [{**entry, "max_model_len": self.window}]})

    async def _openapi(self, request: web.Request) -> web.Response:
        paths: dict[str, Any] = {}
        for route in self._app.router.routes():
            if route.resource is not None and route.method != "HEAD" and route.handler != self._forbidden:
                paths.setdefault(route.resource.canonical, {})[route.method.lower()] = {}
        return _json({"openapi": "3.1.0", "info": {"title": "FastAPI"}, "paths": paths})

    async def _forbidden(self, request: web.Request) -> web.Response:
        return _error(403, "start the server with --enable-scale-out")

    async def _empty(self, request: web.Request) -> web.Response:
        return web.Response()

    @staticmethod
    def _fixed(value: dict[str, Any]) -> Any:
        async def handler(request: web.Request) -> web.Response:
            return _json(value)

        return handler

    async def _weight_info(self, request: web.Request) -> web.Response:
        return _json({"weight_version": self.label})

    async def _set_label(self, request: web.Request) -> web.Response:
        self.label = self.sampled = (await request.json())["new_version"]
        return _json({"success": True})

    async def _pause(self, request: web.Request) -> web.Response:
        self.resumed.clear()
        if request.query.get("mode") == "wait":
            await self._idle.wait()
        return _json({"status": "paused"})

    async def _resume(self, request: web.Request) -> web.Response:
        self.resumed.set()
        return _json({"status": "resumed"})

    async def _is_paused(self, request: web.Request) -> web.Response:
        return _json({"is_paused": not self.resumed.is_set()})

    async def _rpc(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body["method"] == "forge_describe":
            result: dict[str, Any] = {"path": "", "dtype": "float32", "tensors": 1}
        elif body["method"] == "forge_check_checkpoint":
            result = {"fault": ""}
        else:
            weights = Path(body["args"][0])
            self.loaded = weights.parent if weights.name == "huggingface" else weights
            result = {"path": str(weights)}
        return _json({"results": [result]})


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """Without spaces, as vLLM writes it."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return web.Response(text=text, status=status, headers=headers, content_type="application/json")


def _pads_for(message: Message) -> Message:
    """The message with text in the place of its images."""
    if not isinstance(message.get("content"), list):
        return message
    parts = []
    for part in message["content"]:
        if part.get("type") == "image_url":
            head, _, data = part["image_url"]["url"].partition(",")
            if not head.startswith("data:image/"):
                raise ValueError("no image is fetched from elsewhere")
            count = 4 + len(base64.b64decode(data, validate=True)) % 8
            part = {"type": "text", "text": f"<|vision_start|>{'<|image_pad|>' * count}<|vision_end|>"}
        parts.append(part)
    return {**message, "content": parts}


def _readable(messages: list[Message]) -> list[Message]:
    """Template messages in OpenAI's form: arguments as text."""
    out = []
    for message in messages:
        message = {key: value for key, value in message.items() if key != "reasoning_content"}
        if "tool_calls" in message:
            message["tool_calls"] = [
                {
                    **call,
                    "function": {
                        **call["function"],
                        "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
                    },
                }
                for call in message["tool_calls"]
            ]
        out.append(message)
    return out


def _template_options(body: dict[str, Any]) -> dict[str, Any]:
    options = dict(body.get("chat_template_kwargs") or {})
    options["add_generation_prompt"] = body.get("add_generation_prompt", True)
    return options


def logprob_size(at: int, token: int) -> float:
    """How unlikely token ``token`` at place ``at`` is said to be: made up, but always the same. Exact in float32."""
    digest = hashlib.blake2b(f"{at}:{token}".encode(), digest_size=2).digest()
    return (int.from_bytes(digest, "little") % 1023 + 1) / 256


def _completion(
    body: dict[str, Any], answers: list[_Answer], request_id: str | None, tools: bool
) -> dict[str, Any]:
    choices = []
    for index, answer in enumerate(answers):
        ids = answer.ids[:-1] if answer.finish == "stop" else answer.ids
        message = parse_answer(qwen3().decode(ids), tools=tools and body.get("tool_choice", "auto") != "none")
        finish = "tool_calls" if answer.finish == "stop" and message.get("tool_calls") else answer.finish
        at = len(answer.prompt_ids)
        content = [
            {
                "token": qwen3().decode([i]),
                "logprob": -logprob_size(at + k, i),
                "bytes": None,
                "top_logprobs": [],
            }
            for k, i in enumerate(answer.ids)
        ]
        choices.append(
            {
                "index": index,
                "message": _whole(message),
                "logprobs": {"content": content} if body.get("logprobs") else None,
                "finish_reason": finish,
                "stop_reason": None,
                "token_ids": answer.ids if body.get("return_token_ids") else None,
            }
        )
    count, prompt = sum(len(a.ids) for a in answers), len(answers[0].prompt_ids)
    return {
        "id": f"chatcmpl-{request_id or _serial()}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": body.get("model") or MODEL,
        "choices": choices,
        "usage": {"prompt_tokens": prompt, "total_tokens": prompt + count, "completion_tokens": count},
        "prompt_logprobs": None,
        "prompt_token_ids": answers[0].prompt_ids if body.get("return_token_ids") else None,
    }


def _generated(
    body: dict[str, Any], prompt: list[int], answers: list[_Answer], request_id: str
) -> dict[str, Any]:
    choices = []
    wants = (body.get("sampling_params") or {}).get("logprobs") is not None
    for index, answer in enumerate(answers):
        text = body.get("output_mode") == "text"
        content = [
            {
                **({"token": qwen3().decode([i]), "bytes": None} if text else {"token_id": i, "rank": 1}),
                "logprob": -logprob_size(len(prompt) + k, i),
                "top_logprobs": [],
            }
            for k, i in enumerate(answer.ids)
        ]
        choice = {
            "index": index,
            "finish_reason": answer.finish,
            "stop_reason": None,
            "token_ids": answer.ids,
            "routed_experts": None,
            "weight_versions": answer.spans,
            "logprobs": {"content": content} if wants else None,
        }
        if text:
            ids = answer.ids[:-1] if answer.finish == "stop" else answer.ids
            choice["text"] = qwen3().decode(ids)
        choices.append(choice)
    count = sum(len(a.ids) for a in answers)
    return {
        "request_id": request_id,
        "model": body.get("model") or MODEL,
        "created": int(time.time()),
        "usage": {
            "prompt_tokens": len(prompt),
            "total_tokens": len(prompt) + count,
            "completion_tokens": count,
        },
        "prompt_logprobs": None,
        "prompt_token_ids": prompt if body.get("return_token_ids") else None,
        "mm_placeholders": None,
        "kv_transfer_params": None,
        "output_mode": body.get("output_mode") or "tokens",
        "choices": choices,
    }


def _derendered_logprobs(given: dict[str, Any] | None) -> dict[str, Any] | None:
    if given is None or given.get("content") is None:
        return None
    content = [
        {
            "token": qwen3().decode([e["token_id"]]),
            "logprob": e["logprob"],
            "bytes": None,
            "top_logprobs": [],
        }
        for e in given["content"]
    ]
    return {"content": content}


def _whole(message: Message) -> Message:
    """With the fields that vLLM always puts in."""
    rest = {"refusal": None, "annotations": None, "audio": None, "function_call": None, "reasoning": None}
    return {**rest, **message}


def _serial() -> str:
    return hashlib.blake2b(str(time.time_ns()).encode(), digest_size=8).hexdigest()


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    kind = {400: "BadRequestError", 404: "NotFoundError", 429: "RateLimitError"}.get(
        status, "InternalServerError"
    )
    body = {"error": {"message": message, "type": kind, "param": None, "code": status}}
    return _json(body, status=status, headers=headers)


__all__ = ["END", "MODEL", "Asked", "Call", "Fault", "Policy", "Say", "ScriptedEngine", "logprob_size"]
