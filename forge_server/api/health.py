"""``/healthz``: the process answers. ``/readyz``: what a run needs is there, or what is missing and the mend."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from litestar import Response, get
from litestar.openapi import ResponseSpec

from forge_server.client.schemas import Check, Readiness

Probe = Callable[[], Awaitable[Check]]


def health_routes(probes: Sequence[Probe]) -> list[Any]:
    """``probes`` each give one line of ``/readyz``; the status is 200 only when all are ok."""

    @get("/healthz", summary="Liveness")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @get(
        "/readyz",
        summary="Readiness, one check per line",
        responses={503: ResponseSpec(Readiness, generate_examples=False, description="Something is missing")},
    )
    async def readyz() -> Response[Readiness]:
        checks = [await probe() for probe in probes]
        ready = all(check.ok for check in checks)
        return Response(Readiness(ready=ready, checks=checks), status_code=200 if ready else 503)

    return [healthz, readyz]
