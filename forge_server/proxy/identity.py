"""Who is calling: the key of a request, wherever its dialect puts it."""

from collections.abc import Iterable

from forge_server.proxy.dialects.base import Refusal

Headers = dict[bytes, bytes]


def headers_of(pairs: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Lower-case header names to values; of repeated ones the last counts."""
    return dict(pairs)


def key_of(headers: Headers) -> str:
    """The key in ``Authorization: Bearer``, ``x-api-key`` or ``x-goog-api-key``. Raises ``Refusal`` 401."""
    authorization = headers.get(b"authorization", b"")
    if authorization[:7].lower() == b"bearer ":
        key = authorization[7:].strip()
    else:
        key = headers.get(b"x-api-key") or headers.get(b"x-goog-api-key") or b""
    if not key:
        raise Refusal(401, "invalid_api_key", "no key: send the attempt's key as a bearer token or x-api-key")
    return key.decode("latin-1")
