"""Messages of requests and answers: stored once each by content, requests as deltas between calls.

``messages`` holds every distinct message, tool or answer by the digest of its JSON. ``call_messages.request``
holds what a request shares with an earlier one of the attempt, and the digests of the rest: a session of T
turns costs O(T), not O(T^2). Layout: ``<q I I`` = the call that it continues (0: none), number of shared
entries, number of tools; then 16 bytes per further entry. Entries are the tools, then the messages.
"""

import hashlib
import struct
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa
import zstandard
from msgspec import Raw
from sqlalchemy.dialects import postgresql

from forge_server.store.tables import call_messages, calls, messages
from forge_server.store.writer import Row

INTERN = postgresql.insert(messages).on_conflict_do_nothing().inline()
"""Inserts into ``messages`` what is not there yet (compiles for SQLite too, which has the same clause)."""

_HEAD = struct.Struct("<qII")
_DIGEST = 16
_LEVEL = 3
_PAGE = 500


class _Zstd(threading.local):
    def __init__(self) -> None:
        self.compress = zstandard.ZstdCompressor(level=_LEVEL).compress
        self.decompress = zstandard.ZstdDecompressor().decompress


_zstd = _Zstd()


def digest(body: bytes | Raw) -> bytes:
    """16 bytes that identify a message by its JSON."""
    return hashlib.blake2b(body, digest_size=_DIGEST).digest()


def row(body: bytes | Raw, key: bytes) -> Row:
    """The row of ``messages`` for the JSON ``body`` with the digest ``key``."""
    return {"digest": key, "body": _zstd.compress(body)}


def value(body: bytes) -> Any:
    """The JSON value in ``messages.body``."""
    return msgspec.json.decode(_zstd.decompress(body))


def pack(continues: int, shared: int, tools: int, further: Sequence[bytes]) -> bytes:
    """``call_messages.request`` of a request that shares its first entries with the call ``continues``."""
    return _HEAD.pack(continues if shared else 0, shared, tools) + b"".join(further)


def request_of(connection: sa.Connection, call_id: int) -> tuple[list[Any], list[Any]] | None:
    """(tools, messages) of a call's request; None when the call is not recorded."""
    found = _keys_of(connection, call_id)
    if found is None:
        return None
    tools, keys = found
    stored = connection.execute(sa.select(messages).where(messages.c.digest.in_(set(keys))))
    bodies = {bytes(row.digest): value(row.body) for row in stored}
    entries = [bodies[key] for key in keys]
    return entries[:tools], entries[tools:]


def response_of(connection: sa.Connection, call_id: int) -> dict[str, Any] | None:
    """The assistant message that answered a call; None when there is none."""
    body = connection.execute(
        sa.select(messages.c.body)
        .join(call_messages, call_messages.c.response == messages.c.digest)
        .where(call_messages.c.call_id == call_id)
    ).scalar_one_or_none()
    return None if body is None else value(body)


def requests_of(connection: sa.Connection, attempt_id: str) -> dict[int, tuple[int, list[bytes]]]:
    """By call of the attempt: how many tools its request has, and the digests of tools and messages."""
    rows = connection.execute(
        sa.select(call_messages.c.call_id, call_messages.c.request)
        .join(calls, calls.c.id == call_messages.c.call_id)
        .where(calls.c.attempt_id == attempt_id)
        .order_by(call_messages.c.call_id)
    )
    found: dict[int, tuple[int, list[bytes]]] = {}
    for row in rows:  # a request continues an earlier one
        continues, shared, tools, further = _unpack(row.request)
        if continues and continues not in found:
            continue
        before = found[continues][1][:shared] if continues else []
        found[row.call_id] = (tools, before + further)
    return found


def bodies_of(connection: sa.Connection, digests: Iterable[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """(digest, JSON) of those entries that are stored."""
    wanted = list(digests)
    for at in range(0, len(wanted), _PAGE):
        query = sa.select(messages).where(messages.c.digest.in_(wanted[at : at + _PAGE]))
        for row in connection.execute(query):
            yield bytes(row.digest), _zstd.decompress(row.body)


def _keys_of(connection: sa.Connection, call_id: int) -> tuple[int, list[bytes]] | None:
    """(number of tools, digests of all entries), along the chain of calls that each continues."""
    attempt = sa.select(calls.c.attempt_id).where(calls.c.id == call_id).scalar_subquery()
    rows = connection.execute(
        sa.select(call_messages.c.call_id, call_messages.c.request)
        .join(calls, calls.c.id == call_messages.c.call_id)
        .where(calls.c.attempt_id == attempt, calls.c.id <= call_id)
    )
    packed = {row.call_id: row.request for row in rows}
    links = []
    at = call_id
    while at:
        if at not in packed:
            return None
        links.append(_unpack(packed[at]))
        at = links[-1][0]
    keys: list[bytes] = []
    for _, shared, _, further in reversed(links):
        keys[shared:] = further
    return links[0][2], keys


def _unpack(packed: bytes) -> tuple[int, int, int, list[bytes]]:
    continues, shared, tools = _HEAD.unpack_from(packed)
    rest = packed[_HEAD.size :]
    return continues, shared, tools, [rest[i : i + _DIGEST] for i in range(0, len(rest), _DIGEST)]
