"""``Idempotency-Key`` of creating POSTs: the same key and body give the first answer again.

The key with another body is a Conflict. The answer is stored after the act; a crash in between repeats the act,
which every creating act here tolerates (runs and tasks are known by name; a registered rollout that nobody uses
ends by its time to live or its agent clock).
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from hashlib import blake2b
from typing import Annotated, Any, TypeVar

import msgspec
import sqlalchemy as sa
from litestar.params import HeaderParameter

from forge_server.domain.errors import Conflict
from forge_server.store import tables as t
from forge_server.store.database import Store

T = TypeVar("T")
IdempotencyKey = Annotated[str | None, HeaderParameter(name="Idempotency-Key", max_length=128)]

KEPT_S = 7 * 24 * 3600.0


class Idempotency:
    """Runs acts at most once per (key, route)."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._busy: dict[tuple[str, str], tuple[asyncio.Lock, int]] = {}

    async def run(self, key: str | None, route: str, body: Any, act: Callable[[], Awaitable[T]]) -> T:
        if not key:
            return await act()
        digest = blake2b(msgspec.json.encode(body), digest_size=16).digest()
        async with self._alone(key, route):
            known = await self._store.read(
                lambda c: c.execute(
                    sa.select(t.idempotency.c.body_digest, t.idempotency.c.response).where(
                        t.idempotency.c.key == key, t.idempotency.c.route == route
                    )
                ).one_or_none()
            )
            if known is not None:
                if bytes(known.body_digest) != digest:
                    raise Conflict(
                        "this Idempotency-Key was used with another body",
                        where=route,
                        mend="use a new key for a new request",
                    )
                return msgspec.json.decode(known.response)  # type: ignore[no-any-return]
            answer = await act()
            await self._store.insert(
                t.idempotency,
                {
                    "key": key,
                    "route": route,
                    "body_digest": digest,
                    "status": 201,
                    "response": msgspec.json.encode(answer),
                    "at": time.time(),
                },
            )
            return answer

    @asynccontextmanager
    async def _alone(self, key: str, route: str) -> AsyncIterator[None]:
        """Twins wait for each other; the lock goes with the last one that wants it."""
        name = (key, route)
        lock, wanting = self._busy.get(name, (asyncio.Lock(), 0))
        self._busy[name] = (lock, wanting + 1)
        try:
            async with lock:
                yield
        finally:
            lock, wanting = self._busy.pop(name)
            if wanting > 1:
                self._busy[name] = (lock, wanting - 1)


def prune(connection: sa.Connection, before: float) -> None:
    """Forget the answers given before ``before``."""
    connection.execute(sa.delete(t.idempotency).where(t.idempotency.c.at < before))
