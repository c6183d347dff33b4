"""Every error of the control API is a problem document (RFC 9457) with a stable ``type``."""

from typing import Any

import msgspec
import sqlalchemy as sa
import structlog
from litestar import Request, Response
from litestar.exceptions import HTTPException, ValidationException

from forge_server.client.schemas import Problem
from forge_server.domain.errors import ForgeError

log = structlog.get_logger(__name__)

MEDIA_TYPE = "application/problem+json"
_Request = Request[Any, Any, Any]
_SLUGS = {401: "unauthorized", 404: "not-found", 405: "method-not-allowed", 413: "too-large"}


def problem(
    status: int, slug: str, title: str, detail: str, instance: str = "", headers: dict[str, str] | None = None
) -> Response[bytes]:
    body = Problem(type=slug, title=title, status=status, detail=detail, instance=instance)
    return Response(
        msgspec.json.encode(body),
        status_code=status,
        media_type=MEDIA_TYPE,
        headers=headers or {},
    )


def on_forge_error(request: _Request, error: ForgeError) -> Response[bytes]:
    return problem(error.status, error.type, error.what, str(error), request.url.path)


def on_http_error(request: _Request, error: HTTPException) -> Response[bytes]:
    title = detail = error.detail or "error"
    if error.status_code == 404:
        detail = f"there is no {request.url.path}"
    elif error.status_code == 405:
        detail = f"{request.url.path} takes no {request.method}"
    elif isinstance(error, ValidationException) and error.extra:
        title, detail = "the request is not valid", _faults(error.extra)
    slug = _SLUGS.get(error.status_code, "invalid-request" if error.status_code < 500 else "error")
    return problem(error.status_code, slug, title, detail, request.url.path, error.headers)


def on_data_error(request: _Request, error: sa.exc.DataError | OverflowError) -> Response[bytes]:
    """What the database cannot hold (a NUL character, a number out of its range) is the request's fault. SQLite's
    driver tells of such a number by an OverflowError."""
    detail = str(error.orig if isinstance(error, sa.exc.DataError) else error).strip().splitlines()[0]
    return problem(400, "invalid-request", "a value cannot be stored", detail, request.url.path)


def on_recursion_error(request: _Request, error: RecursionError) -> Response[bytes]:
    """Bodies are decoded level by level."""
    detail = "the body is nested too deeply"
    return problem(400, "invalid-request", "the request is not valid", detail, request.url.path)


def on_unexpected(request: _Request, error: Exception) -> Response[bytes]:
    log.exception("unexpected error", path=request.url.path, exc_info=error)
    detail = f"{type(error).__name__}; the server's log tells more"
    return problem(500, "error", "unexpected error", detail, request.url.path)


HANDLERS: dict[Any, Any] = {
    ForgeError: on_forge_error,
    HTTPException: on_http_error,
    sa.exc.DataError: on_data_error,
    OverflowError: on_data_error,
    RecursionError: on_recursion_error,
    Exception: on_unexpected,
}


def _faults(extra: Any) -> str:
    """``where: what`` of each fault that Litestar lists."""
    faults = extra if isinstance(extra, list) else [extra]
    return "; ".join(
        f"{_place(fault)}: {_what(fault)}" if isinstance(fault, dict) else str(fault) for fault in faults
    )


def _place(fault: dict[str, Any]) -> str:
    """A trailing underscore only keeps a parameter apart from Litestar's own names."""
    key = str(fault.get("key", "")).rstrip("_")
    return "body" if key in ("", "data") else key


def _what(fault: dict[str, Any]) -> str:
    message = str(fault.get("message", ""))
    return "a JSON body is needed" if message == "'data'" else message
