"""The admin key of the control API, as a Litestar guard (invariant I10: no other key opens these routes)."""

import hmac
from collections.abc import Callable
from typing import Any

from litestar.connection import ASGIConnection
from litestar.handlers.base import BaseRouteHandler

from forge_server.domain.errors import Unauthorized

Guard = Callable[[ASGIConnection[Any, Any, Any, Any], BaseRouteHandler], None]


def bearer(connection: ASGIConnection[Any, Any, Any, Any]) -> str:
    """The Bearer key of the request, or an empty string."""
    scheme, _, key = connection.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def admin_guard(admin_key: str) -> Guard:
    """A guard that raises Unauthorized unless the request carries the admin key."""

    def guard(connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler) -> None:
        if not hmac.compare_digest(bearer(connection).encode(), admin_key.encode()):
            raise Unauthorized(
                "the admin key is missing or wrong",
                where="Authorization",
                mend="send `Authorization: Bearer KEY` with the key of DATA_DIR/admin.key",
            )

    return guard
