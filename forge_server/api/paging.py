"""Cursor paging: rows in the order of a key that never changes; the cursor is the last key seen."""

import base64
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from litestar.params import QueryParameter

from forge_server.client.schemas import Page
from forge_server.domain.errors import InvalidRequest

Row = TypeVar("Row")
Limit = Annotated[int, QueryParameter(ge=1, le=1000)]
Since = Annotated[int, QueryParameter(ge=0, le=2**31 - 1)]
"""A step or a ``seq``: the greatest that their columns hold."""
Cursor = Annotated[str | None, QueryParameter(max_length=512)]


def decode_cursor(cursor: str | None) -> str | None:
    """The key after which the page starts, or None. Raises InvalidRequest for a cursor we did not make."""
    if cursor is None:
        return None
    try:
        return msgspec.json.decode(base64.b64decode(cursor.encode(), altchars=b"-_", validate=True), type=str)
    except (ValueError, msgspec.DecodeError):
        raise InvalidRequest(
            "the cursor is not one of ours", where="cursor", mend="start again without a cursor"
        ) from None


def page(rows: Sequence[Row], limit: int, key: Callable[[Row], str], view: Callable[[Row], Any]) -> Page:
    """``rows`` were read with ``limit + 1``; the surplus row only tells that there is a next page."""
    more = len(rows) > limit
    shown = rows[:limit]
    cursor = None
    if more:
        cursor = base64.urlsafe_b64encode(msgspec.json.encode(key(shown[-1]))).decode()
    return Page(items=[view(row) for row in shown], next_cursor=cursor, as_of=time.time())
