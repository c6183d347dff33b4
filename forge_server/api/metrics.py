"""``GET /metrics`` for Prometheus, by the admin key like everything on this listener that tells about runs."""

from collections.abc import Awaitable, Callable
from typing import Any

from litestar import Response, get

from forge_server.api.auth import Guard

MEDIA_TYPE = "text/plain; version=0.0.4"

Render = Callable[[], Awaitable[bytes]]


def metrics_routes(render: Render, guard: Guard) -> list[Any]:
    @get(
        "/metrics",
        summary="Counters and gauges, in Prometheus's text format",
        guards=[guard],
        media_type=MEDIA_TYPE,
    )
    async def metrics() -> Response[bytes]:
        return Response(await render())

    return [metrics]
