"""The engine as the rest of the server knows it: one policy, served by one or several replicas.

Owns which policy is served. Swaps and the settling of replicas that come up run one at a time, so that no
replica is ever ready with other weights than the rest (I9).
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from forge_server.domain.call import Ids
from forge_server.domain.engine import (
    ChatResult,
    EngineUnavailable,
    Generated,
    Rendered,
    SwapReport,
    Template,
)
from forge_server.domain.errors import EngineError
from forge_server.engine import scale_out, weights
from forge_server.engine.checkpoint import Policy, version_of
from forge_server.engine.client import EngineClient
from forge_server.engine.control import EngineControl
from forge_server.engine.hosts import Address, Host
from forge_server.engine.probe import Check, preflight
from forge_server.engine.replica import Replica

T = TypeVar("T")


class EnginePool:
    """``hosts`` give the replicas; each serves model name ``model`` and, once ready, ``policy``."""

    def __init__(
        self,
        hosts: Sequence[Host],
        *,
        model: str,
        policy: Policy,
        api_key: str = "",
        request_timeout_s: float = 1800.0,
        drain_s: float = 300.0,
        start_timeout_s: float = 900.0,
        tolerance: float = 0.0,
    ) -> None:
        self._hosts = hosts
        self._model = model
        self._policy = policy
        self._api_key = api_key
        self._request_timeout_s = request_timeout_s
        self._drain_s = drain_s
        self._start_timeout_s = start_timeout_s
        self._tolerance = tolerance
        self._lock = asyncio.Lock()
        self._any_ready = asyncio.Event()
        self._replicas = [
            Replica(host, self._connect, lambda: self._policy, self._settle, self._agrees, self._notify)
            for host in hosts
        ]
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self) -> None:
        """Bring the replicas up, in the background."""
        for replica in self._replicas:
            self._spawn(replica.keep())

    async def close(self, *, keep_engine: bool = False) -> None:
        """Stop watching, and end the managed engines unless ``keep_engine``: a next server may adopt them."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if not keep_engine:
            await asyncio.gather(*(host.discard() for host in self._hosts))

    @property
    def ready(self) -> bool:
        """Whether at least one replica serves the current policy."""
        return any(replica.ready for replica in self._replicas)

    @property
    def serving(self) -> tuple[int, int]:
        """Replicas that serve the current policy, and all that should."""
        return sum(replica.ready for replica in self._replicas), len(self._replicas)

    @property
    def reason(self) -> str:
        """Why it is not ready; empty when it is."""
        if self.ready:
            return ""
        return "; ".join(replica.reason for replica in self._replicas)

    async def wait_ready(self, timeout_s: float) -> None:
        """Return when it is ready. Raises EngineError with the reason after ``timeout_s``."""
        try:
            await asyncio.wait_for(self._any_ready.wait(), timeout_s)
        except TimeoutError:
            raise EngineError(
                f"the engine is not ready after {timeout_s:g} s ({self.reason})", mend="see the engine's log"
            ) from None

    async def chat(
        self,
        body: dict[str, Any],
        *,
        request_id: str,
        affinity: str = "",
        known: ChatResult | None = None,
    ) -> ChatResult:
        """One chat completion; see ``EngineClient.chat``."""
        return await self._ask(
            affinity or request_id, lambda client: client.chat(body, request_id=request_id, known=known)
        )

    @property
    def template(self) -> Template | None:
        """What the chat template puts around an answer; None unless every ready replica offers ``render``,
        ``generate`` and ``derender``."""
        found = [replica.template for replica in self._replicas if replica.ready]
        return found[0] if found and all(template == found[0] for template in found) else None

    async def render(
        self, body: dict[str, Any], *, request_id: str, affinity: str, known: tuple[bytes, Ids] | None = None
    ) -> Rendered:
        """See ``scale_out.render``."""
        return await self._ask(
            affinity,
            lambda client: scale_out.render(client, body, request_id=request_id, known=known),
        )

    async def generate(
        self, prompt: bytes, rendered: Rendered, max_tokens: int, *, request_id: str, affinity: str
    ) -> Generated:
        """See ``scale_out.generate``."""
        return await self._ask(
            affinity,
            lambda client: scale_out.generate(client, prompt, rendered, max_tokens, request_id=request_id),
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
        """See ``scale_out.message``."""
        return await self._ask(
            affinity,
            lambda client: scale_out.message(
                client, found, rendered, body, prompt_tail, request_id=request_id
            ),
        )

    async def detokenize(self, ids: Sequence[int]) -> str:
        """See ``scale_out.detokenize``; the first ready replica is asked."""
        return await scale_out.detokenize(self._first(), ids)

    async def _ask(self, key: str, act: Callable[[EngineClient], Awaitable[T]]) -> T:
        """Calls of equal ``key`` (the attempt) go to the same replica while it lives, for its prefix cache.

        A replica that could not even be reached is passed over; what may have been sent is not sent again.
        """
        unreachable = EngineUnavailable(
            f"the engine is not ready ({self.reason})", mend="it is brought up again"
        )
        for replica in self._ranked(key):
            client = replica.client
            if client is None or not replica.ready:
                continue
            try:
                return await act(client)
            except EngineUnavailable as error:
                replica.doubt()
                if error.sent:
                    raise
                unreachable = error
        raise unreachable

    async def count_tokens(self, messages: Sequence[Any], tools: Sequence[Any]) -> int:
        """See ``EngineClient.count_tokens``; the first ready replica is asked."""
        return await self._first().count_tokens(messages, tools)

    async def models(self) -> list[dict[str, Any]]:
        """What the first ready replica serves. Raises EngineUnavailable."""
        return await self._first().models()

    async def check(self) -> list[Check]:
        """The preflight of the first ready replica. Raises EngineUnavailable."""
        return await preflight(self._first())

    @property
    def current(self) -> int:
        """The version that every ready replica serves; changes at the end of a swap."""
        return self._policy.version

    async def version(self) -> int | None:
        """The version that the replicas say they serve; None when none is up, or they do not agree."""
        labels = {await EngineControl(client).label() for client in self._clients()}
        return version_of(labels.pop() or "") if len(labels) == 1 else None

    def moved(self, version: int, path: Path) -> None:
        """The weights of ``version`` were written again, to ``path``: they are read there when they are next needed."""
        if version == self._policy.version:
            self._policy = msgspec.structs.replace(self._policy, path=path)

    async def swap(self, path: Path, version: int, manifest_sha256: str) -> SwapReport:
        """Serve the checkpoint ``path`` as ``version``; see ``weights.swap``.

        Goes through to its end even when the caller is cancelled: half a swap is nobody's wish.
        """
        await self.wait_ready(self._start_timeout_s)
        return await asyncio.shield(self._spawn(self._swap(Policy(version, path, manifest_sha256))))

    async def _swap(self, policy: Policy) -> SwapReport:
        async with self._lock:
            serving = [r for r in self._replicas if r.ready and r.client is not None]
            controls = [EngineControl(r.client) for r in serving if r.client is not None]
            if not controls:
                raise EngineError(f"the engine was lost just before the swap ({self.reason})")
            try:
                report = await weights.swap(
                    controls, policy, self._policy, drain_s=self._drain_s, tolerance=self._tolerance
                )
            except weights.EngineLost as error:
                for replica in serving:
                    replica.condemn(error.what)
                raise
            self._policy = policy
            return report

    async def _settle(self, control: EngineControl, address: Address) -> None:
        async with self._lock:
            await weights.settle(control, self._policy, loaded=address.loaded, tolerance=self._tolerance)

    async def _agrees(self, control: EngineControl) -> bool:
        async with self._lock:
            label = await control.label()
            if label is None:  # it holds what it was started with
                return self._policy.version == 0
            return label == self._policy.label

    def _ranked(self, key: str) -> list[Replica]:
        """Rendezvous hashing: when a replica goes, only its own keys move."""
        if len(self._replicas) == 1:
            return self._replicas

        def score(index: int) -> bytes:
            return hashlib.blake2b(f"{index}:{key}".encode(), digest_size=8).digest()

        order = sorted(range(len(self._replicas)), key=score, reverse=True)
        return [self._replicas[index] for index in order]

    def _clients(self) -> list[EngineClient]:
        return [r.client for r in self._replicas if r.ready and r.client is not None]

    def _first(self) -> EngineClient:
        clients = self._clients()
        if not clients:
            raise EngineUnavailable(f"the engine is not ready ({self.reason})", mend="it is brought up again")
        return clients[0]

    def _connect(self, url: str) -> EngineClient:
        return EngineClient(url, self._model, api_key=self._api_key, timeout_s=self._request_timeout_s)

    def _notify(self) -> None:
        if self.ready:
            self._any_ready.set()
        else:
            self._any_ready.clear()

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
