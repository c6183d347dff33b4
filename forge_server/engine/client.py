"""Talks HTTP to one vLLM.

Owns the connections. Cancelling a call closes its connection, on which vLLM aborts the generation. A
connection that dies unused in the pool (the server closes idle ones) costs one silent retry; nothing
else is retried here.
"""

from types import SimpleNamespace
from typing import Any

import aiohttp
import msgspec
from yarl import URL

from forge_server.domain.engine import ChatResult, EngineUnavailable
from forge_server.engine import answers

_KEEPALIVE_S = 4.0  # vLLM closes idle connections after 5 s: be first
_CONNECT_S = 10.0


class EngineClient:
    """One vLLM at ``url`` (without ``/v1``) that serves ``model``."""

    def __init__(self, url: str, model: str, *, api_key: str = "", timeout_s: float = 1800.0) -> None:
        self.url = url.rstrip("/")
        self.model = model
        self._timeout_s = timeout_s
        self._chat_url = URL(f"{self.url}/v1/chat/completions", encoded=True)
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._session: aiohttp.ClientSession | None = None

    async def chat(
        self, body: dict[str, Any], *, request_id: str, known: ChatResult | None = None
    ) -> ChatResult:
        """One whole chat completion with token ids and logprobs; ``body`` is an OpenAI chat body.

        Raises EngineRefused (the request is at fault) or EngineUnavailable.
        """
        forced = {"model": self.model, "stream": False, "return_token_ids": True, "logprobs": True}
        payload = msgspec.json.encode({**body, **forced})
        headers = {**self._headers, "X-Request-Id": request_id}
        status, data = await self._send("POST", self._chat_url, payload, headers, self._timeout_s)
        if status != 200:
            raise answers.failure(status, data)
        return answers.chat_result(data, known)

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
        url = URL(self.url + path).with_query(query or {})
        payload = msgspec.json.encode(body) if body is not None else b""
        status, data = await self._send(method, url, payload, self._headers, timeout_s)
        if status != 200:
            raise answers.failure(status, data)
        try:
            return msgspec.json.decode(data) if data else None
        except msgspec.MsgspecError:
            raise EngineUnavailable(
                f"{path} answered something that is not JSON",
                where=self.url,
                mend="check that [engine] url points at vLLM",
                sent=True,
            ) from None

    async def close(self) -> None:
        """Close every connection; calls in flight fail."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _send(
        self, method: str, url: URL, payload: bytes, headers: dict[str, str], timeout_s: float
    ) -> tuple[int, bytes]:
        session = self._session or self._open()
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=timeout_s)
        retried = False
        while True:
            seen = SimpleNamespace(reused=False, answered=False)
            try:
                async with session.request(
                    method, url, data=payload, headers=headers, timeout=timeout, trace_request_ctx=seen
                ) as response:
                    seen.answered = True
                    return response.status, await response.read()
            except aiohttp.ConnectionTimeoutError:
                raise self._away(f"no connection within {_CONNECT_S:g} s", False) from None
            except TimeoutError:  # also aiohttp's own, a ClientError too
                raise self._away(f"no answer within {timeout_s:g} s", True) from None
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
                if seen.reused and not seen.answered and not retried:
                    retried = True
                    continue
                sent = not isinstance(error, aiohttp.ClientConnectorError)
                raise self._away(str(error) or "it closed the connection", sent) from None
            except aiohttp.ClientError as error:
                raise self._away(str(error) or type(error).__name__, True) from None

    def _away(self, why: str, sent: bool) -> EngineUnavailable:
        return EngineUnavailable(
            f"the engine is away ({why})", where=self.url, mend="see the engine's log", sent=sent
        )

    def _open(self) -> aiohttp.ClientSession:
        trace = aiohttp.TraceConfig()
        trace.on_connection_reuseconn.append(_mark_reused)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            read_bufsize=2**18,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding"),
            trace_configs=[trace],
        )
        return self._session


async def _mark_reused(
    session: aiohttp.ClientSession, context: SimpleNamespace, params: aiohttp.TraceConnectionReuseconnParams
) -> None:
    context.trace_request_ctx.reused = True
