"""Every error of the control API is a problem document (RFC 9457) with a stable ``type``."""

from typing import Any

import msgspec
import structlog
from litestar import MediaType, Request, Response
from litestar.exceptions import HTTPException, ValidationException

from forge_server.client.schemas import Problem
from forge_server.domain.errors import ForgeError

log = structlog.get_logger(__name__)


def problem(status: int, slug: str, title: str, detail: str, instance: str = "") -> Response[bytes]:
    body = Problem(type=slug, title=title, status=status, detail=detail, instance=instance)
    return Response(msgspec.json.encode(body), status_code=status, media_type="application/problem+json")


def on_forge_error(request: Request[Any, Any, Any], error: ForgeError) -> Response[bytes]:
    return problem(error.status, error.type, error.what, str(error), request.url.path)


def on_http_error(request: Request[Any, Any, Any], error: HTTPException) -> Response[bytes]:
    detail = error.detail
    if isinstance(error, ValidationException) and error.extra:
        detail = f"{detail}: {error.extra}"
    slug = {401: "unauthorized", 404: "not-found", 405: "method-not-allowed", 413: "too-large"}.get(
        error.status_code, "invalid-request" if error.status_code < 500 else "error"
    )
    return problem(error.status_code, slug, error.detail or "error", detail, request.url.path)


def on_unexpected(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    log.exception("unexpected error", path=request.url.path, exc_info=error)
    return problem(
        500,
        "error",
        "unexpected error",
        f"{type(error).__name__}; the server's log tells more",
        request.url.path,
    )


HANDLERS: dict[Any, Any] = {
    ForgeError: on_forge_error,
    HTTPException: on_http_error,
    Exception: on_unexpected,
}

JSON = MediaType.JSON
