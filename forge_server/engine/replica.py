"""One engine kept serving: brought up, given the right weights, watched, and brought up again when it
is lost."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import structlog

from forge_server.domain.engine import EngineUnavailable, Template
from forge_server.domain.errors import CheckpointError, EngineError, ForgeError
from forge_server.engine import scale_out
from forge_server.engine.checkpoint import Policy
from forge_server.engine.client import EngineClient
from forge_server.engine.control import EngineControl
from forge_server.engine.hosts import Address, Host

log = structlog.get_logger(__name__)

_WATCH_S = 2.0
_HEALTH_S = 10.0
_SILENT_LIMIT = 6  # unanswered health questions in a row
_BACKOFF_MAX_S = 60.0


class Replica:
    """Runs ``keep`` as a task. ``ready`` is True only while the engine serves the policy it should; ``template``
    is None unless it offers tokens in, tokens out.

    ``settle`` gives a found engine the current weights; ``agrees`` tells whether it still claims to
    serve them. Both are the pool's, which runs them one at a time with its swaps.
    """

    def __init__(
        self,
        host: Host,
        connect: Callable[[str], EngineClient],
        policy: Callable[[], Policy],
        settle: Callable[[EngineControl, Address], Awaitable[None]],
        agrees: Callable[[EngineControl], Awaitable[bool]],
        changed: Callable[[], None],
    ) -> None:
        self._host = host
        self._connect = connect
        self._policy = policy
        self._settle = settle
        self._agrees = agrees
        self._changed = changed
        self._doubted = asyncio.Event()
        self._condemned = ""
        self.client: EngineClient | None = None
        self.template: Template | None = None
        self.ready = False
        self.reason = "starting"

    def doubt(self) -> None:
        """A call has failed: look at once whether the engine still lives."""
        self._doubted.set()

    def condemn(self, reason: str) -> None:
        """The engine holds no known weights: end it and start afresh."""
        self._condemned = reason
        self.ready = False
        self._changed()
        self._doubted.set()

    async def keep(self) -> None:
        """For ever: up, settle, watch; with a growing pause between failures."""
        failures = 0
        while True:
            began = asyncio.get_running_loop().time()
            try:
                self.reason = await self._serve_or_discard()
            except Exception as error:  # a full disk, a bug: the engine must still come back
                self.reason = f"{type(error).__name__}: {error}"
                log.exception("engine supervision failed")
            lived = asyncio.get_running_loop().time() - began
            failures = 0 if lived > 5 * _BACKOFF_MAX_S else failures + 1
            pause = min(_BACKOFF_MAX_S, 0.25 * 2**failures)
            log.warning("engine lost", reason=self.reason, again_in_s=pause)
            await asyncio.sleep(pause)

    async def _serve_or_discard(self) -> str:
        try:
            return await self._serve_once()
        except CheckpointError as error:
            return str(error)  # another process would not help
        except ForgeError as error:
            await self._host.discard()
            return str(error)

    async def _serve_once(self) -> str:
        """Serve until the engine has to be settled again; the reason. Raises EngineError when it is lost."""
        self._condemned = ""
        address = await self._host.up(self._policy())
        client = self._connect(address.url)
        try:
            # first: to settling, an address without vLLM is an engine that only lacks weight updates
            await client.call("GET", "/health")
            self.template, lacks = await scale_out.probe(client)
            await self._settle(EngineControl(client), address)
            self.client, self.ready, self.reason = client, True, ""  # before a swap can come in between
            self._changed()
            log.info(
                "engine ready",
                url=address.url,
                version=self._policy().version,
                tokens_in_tokens_out=lacks or "offered",
            )
            return await self._watch(client)
        finally:
            self.client, self.ready = None, False
            self._changed()
            await client.close()

    async def _watch(self, client: EngineClient) -> str:
        """Return when the engine needs its weights again, with the reason. Raises EngineError when it
        is lost."""
        control = EngineControl(client)
        ended = asyncio.create_task(self._host.gone())
        silent = 0
        try:
            while True:
                self._doubted.clear()
                doubted = asyncio.create_task(self._doubted.wait())
                try:
                    await asyncio.wait(
                        {ended, doubted}, timeout=_WATCH_S, return_when=asyncio.FIRST_COMPLETED
                    )
                finally:
                    doubted.cancel()
                if self._condemned:
                    raise EngineError(self._condemned)
                if ended.done():
                    raise EngineError("the engine's process ended")
                try:
                    await client.call("GET", "/health", timeout_s=_HEALTH_S)
                    if not await self._agrees(control):
                        return "the engine does not serve the weights that it was given"
                    silent = 0
                except EngineUnavailable as error:
                    silent += 1
                    if error.http_status or not error.sent or silent >= _SILENT_LIMIT:
                        raise
        finally:
            ended.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await ended
