"""``GET /runs/{run}/cost``: what a run has cost, and where its time went. Reckoned at most every few seconds."""

import asyncio
import time
from typing import Any

from litestar import get
from litestar.params import FromPath
from sqlalchemy import Connection

from forge_server.api import views
from forge_server.client.cost import Cost
from forge_server.evaluation.cost import Prices, cost_of
from forge_server.store import rows
from forge_server.store.database import Store

FRESH_S = 10.0
KEPT = 64


def cost_routes(store: Store, prices: Prices) -> list[Any]:
    known: dict[str, tuple[float, Cost]] = {}
    one_at_a_time = asyncio.Lock()

    @get("/runs/{run:str}/cost", summary="What it has cost, and where its time went")
    async def cost(run: FromPath[str]) -> Cost:
        async with one_at_a_time:
            at, found = known.get(run, (0.0, None))
            if found is None or time.monotonic() - at > FRESH_S:
                found = await store.read(lambda c: read(c, run, prices))
                if len(known) >= KEPT:
                    known.clear()
                known[run] = (time.monotonic(), found)
            return found

    return [cost]


def read(connection: Connection, run: str, prices: Prices) -> Cost:
    """Of a run by id or name. Raises NotFound."""
    row = rows.by_id(connection, rows.RunRow, views.run_row(connection, run).id)
    assert row is not None
    return cost_of(connection, row, prices, time.time())
