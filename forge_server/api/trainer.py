"""The trainer link's routes: ``/runs/{run_id}/trainer/…``, opened by the run's own trainer key
(invariant I10)."""

from collections.abc import Callable
from typing import Any

from litestar import Response, Router, get, post
from litestar.connection import ASGIConnection
from litestar.handlers.base import BaseRouteHandler
from litestar.params import FromPath, FromQuery, JSONBody

from forge_server.api.auth import bearer
from forge_server.controller.trainer_link import (
    CheckpointReply,
    CheckpointReport,
    Heartbeat,
    HeartbeatReply,
    MetricsReport,
    SessionReply,
    SessionRequest,
    TrainerLink,
)
from forge_server.domain.errors import Unauthorized
from forge_server.store import keys

Verify = Callable[[str], keys.Claim | None]
"""What a key proves, or None."""


def trainer_routes(link: TrainerLink, verify: Verify) -> list[Any]:
    """Handlers below the API's prefix. Errors are problem documents: 409 is "fenced off", 410 "run
    ended"."""

    def guard(connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler) -> None:
        claim = verify(bearer(connection))
        run_id = connection.path_params.get("run_id")
        if claim is None or claim.scope != "trainer" or claim.subject != run_id:
            raise Unauthorized(
                "the trainer key is missing or not of this run",
                where="Authorization",
                mend="start the trainer with the FORGE_TRAINER_KEY of its run",
            )

    @post("/sessions", summary="Open a session; every older one is fenced off", status_code=200)
    async def sessions(run_id: FromPath[str], data: JSONBody[SessionRequest]) -> SessionReply:
        return await link.open_session(run_id, data)

    @post("/heartbeat", summary="Renew the lease", status_code=200)
    async def heartbeat(run_id: FromPath[str], data: JSONBody[Heartbeat]) -> HeartbeatReply:
        return await link.heartbeat(run_id, data)

    @get("/batches/{k:int}", summary="Batch k as safetensors; 204 when it is not there yet")
    async def batches(run_id: FromPath[str], k: FromPath[int], session: FromQuery[str]) -> Response[bytes]:
        batch = await link.batch(run_id, k, session)
        if batch is None:
            return Response(b"", status_code=204)
        return Response(
            batch.body,
            media_type="application/octet-stream",
            headers={"X-Batch-Sha256": batch.sha256},
        )

    @post("/steps/{k:int}/metrics", summary="The trainer's figures of step k", status_code=204)
    async def metrics(run_id: FromPath[str], k: FromPath[int], data: JSONBody[MetricsReport]) -> None:
        await link.metrics(run_id, k, data)

    @post("/checkpoints", summary="Checkpoint k becomes a policy version", status_code=200)
    async def checkpoints(run_id: FromPath[str], data: JSONBody[CheckpointReport]) -> CheckpointReply:
        return await link.checkpoint(run_id, data)

    return [
        Router(
            "/runs/{run_id:str}/trainer",
            route_handlers=[sessions, heartbeat, batches, metrics, checkpoints],
            guards=[guard],
        )
    ]
