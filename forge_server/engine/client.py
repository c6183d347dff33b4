"""Talks HTTP to one vLLM.

Owns the connections. Cancelling a call closes its connection, on which vLLM aborts the generation. A
connection that dies unused in the pool (the server closes idle ones) costs one silent retry; nothing
else is retried here.
"""

from collections.abc import Sequence
from typing import Any
from urllib.parse import urlencode, urlsplit

import msgspec

from forge_server.domain.engine import ChatResult, EngineUnavailable
from forge_server.engine import answers
from forge_server.engine.wire import Lost, Wire

_KEEPALIVE_S = 4.0  # vLLM closes idle connections after 5 s: be first


class EngineClient:
    """One vLLM at ``url`` (without ``/v1``) that serves ``model``."""

    def __init__(self, url: str, model: str, *, api_key: str = "", timeout_s: float = 1800.0) -> None:
        self.url = url.rstrip("/")
        self.model = model
        self._timeout_s = timeout_s
        self._prefix = urlsplit(self.url).path
        headers = {"Content-Type": "application/json"}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        self._wire = Wire(self.url, headers, idle_s=_KEEPALIVE_S)

    async def chat(
        self, body: dict[str, Any], *, request_id: str, known: ChatResult | None = None
    ) -> ChatResult:
        """One whole chat completion with token ids and logprobs; ``body`` is an OpenAI chat body.

        Raises EngineRefused (the request is at fault) or EngineUnavailable.
        """
        forced = {"model": self.model, "stream": False, "return_token_ids": True, "logprobs": True}
        payload = msgspec.json.encode({**body, **forced})
        data = await self.post("/v1/chat/completions", payload, request_id=request_id)
        return answers.chat_result(data, known)

    async def count_tokens(self, messages: Sequence[Any], tools: Sequence[Any]) -> int:
        """Tokens of the prompt that the chat template makes of these, the opening of the answer included.

        Raises as ``chat`` does.
        """
        body: dict[str, Any] = {"model": self.model, "messages": messages, "add_generation_prompt": True}
        if tools:
            body["tools"] = tools
        count: int = (await self.call("POST", "/tokenize", body))["count"]
        return count

    async def models(self) -> list[dict[str, Any]]:
        """The entries of ``/v1/models``."""
        data: list[dict[str, Any]] = (await self.call("GET", "/v1/models"))["data"]
        return data

    async def call(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        query: dict[str, str] | None = None,
        timeout_s: float = 60.0,
    ) -> Any:
        """Any other endpoint; its JSON, or None for an empty answer. Raises as ``chat`` does."""
        target = f"{path}?{urlencode(query)}" if query else path
        payload = msgspec.json.encode(body) if body is not None else b""
        status, data = await self._send(method, target, payload, timeout_s)
        if status != 200:
            raise answers.failure(status, data, names_model="model" in (body or ()))
        try:
            return msgspec.json.decode(data) if data else None
        except msgspec.MsgspecError:
            raise EngineUnavailable(
                f"{path} answered something that is not JSON",
                where=self.url,
                mend="check that [engine] url points at vLLM",
                sent=True,
            ) from None

    async def post(self, path: str, payload: bytes, *, request_id: str) -> bytes:
        """The 200 answer to JSON ``payload``, sent as part of call ``request_id``. Raises as ``chat`` does."""
        headers = {"X-Request-Id": request_id}
        status, data = await self._send("POST", path, payload, self._timeout_s, headers)
        if status != 200:
            raise answers.failure(status, data)
        return data

    async def close(self) -> None:
        """Close every connection; calls in flight fail."""
        self._wire.close()

    async def _send(
        self,
        method: str,
        target: str,
        payload: bytes,
        timeout_s: float,
        headers: dict[str, str] | None = None,
    ) -> tuple[int, bytes]:
        retried = False
        while True:
            try:
                return await self._wire.exchange(method, self._prefix + target, payload, timeout_s, headers)
            except TimeoutError:
                raise self._away(f"no answer within {timeout_s:g} s", True) from None
            except Lost as lost:
                if lost.stale and not retried:
                    retried = True
                    continue
                # what went out on the kept connection may have been what the engine died of
                sent = lost.sent or (retried and method == "POST")
                raise self._away(str(lost), sent) from None

    def _away(self, why: str, sent: bool) -> EngineUnavailable:
        return EngineUnavailable(
            f"the engine is away ({why})", where=self.url, mend="see the engine's log", sent=sent
        )
