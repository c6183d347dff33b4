"""Which messages made up each request, stored once each (content-addressed) and as deltas between calls.

``messages`` holds every distinct message, tool or answer by the digest of its JSON. ``call_messages.request``
holds what a request shares with an earlier one of the attempt and the digests of the rest: a session of T
turns costs O(T), not O(T^2). Layout: ``<q I I`` = call that it continues (0: none), number of shared entries,
number of tools; then 16 bytes per further entry. Entries are the tools, then the messages.
"""

import hashlib
import struct
import threading
from collections.abc import Sequence
from typing import Any

import msgspec
import sqlalchemy as sa
import zstandard
from msgspec import Raw
from sqlalchemy.dialects import postgresql

from forge_server.domain.turn import Turn
from forge_server.proxy.ports import Row
from forge_server.store.tables import call_messages, messages

INTERN = postgresql.insert(messages).on_conflict_do_nothing().inline()
"""Insert into ``messages`` what is not there yet (compiles for SQLite too, which has the same clause)."""

_HEAD = struct.Struct("<qII")
_DIGEST = 16
_LEVEL = 3


class _Zstd(threading.local):
    def __init__(self) -> None:
        self.compress = zstandard.ZstdCompressor(level=_LEVEL).compress
        self.decompress = zstandard.ZstdDecompressor().decompress


_zstd = _Zstd()


def digest(body: bytes | Raw) -> bytes:
    """16 bytes that identify a message by its JSON."""
    return hashlib.blake2b(body, digest_size=_DIGEST).digest()


def message_row(body: bytes | Raw, key: bytes) -> Row:
    """The row of ``messages``."""
    return {"digest": key, "body": _zstd.compress(body)}


def unpack_body(body: bytes) -> Any:
    """The JSON value in a row of ``messages``."""
    return msgspec.json.decode(_zstd.decompress(body))


class Transcript:
    """The messages that one attempt has stored, and its latest request."""

    def __init__(self) -> None:
        self._stored: set[bytes] = set()
        self._latest: tuple[int, tuple[bytes, ...]] = (0, ())

    def identify(self, turn: Turn) -> tuple[bytes, tuple[bytes, ...]]:
        """The digest of what the turn asks, whatever else its body said, and those of its entries."""
        keys = tuple(digest(entry) for entry in (*turn.tools, *turn.messages))
        rest = (
            len(turn.tools),
            turn.tool_choice,
            turn.parallel_tool_calls,
            turn.response_format,
            turn.stop,
            turn.max_tokens,
            turn.model,
            turn.stream,
            turn.asked,
        )
        whole = hashlib.blake2b(b"".join(keys), digest_size=_DIGEST)
        whole.update(msgspec.json.encode(rest))
        return whole.digest(), keys

    def pack(self, turn: Turn, keys: tuple[bytes, ...]) -> tuple[bytes, list[Row]]:
        """The packed request, and the rows of messages that are new here."""
        parent, before = self._latest
        shared = _common(before, keys) if parent else 0
        packed = _HEAD.pack(parent if shared else 0, shared, len(turn.tools)) + b"".join(keys[shared:])
        entries: Sequence[Raw] = (*turn.tools, *turn.messages)
        rows = {
            key: message_row(entry, key)
            for key, entry in zip(keys[shared:], entries[shared:], strict=True)
            if key not in self._stored
        }
        return packed, list(rows.values())

    def stored(self, call_id: int, keys: tuple[bytes, ...]) -> None:
        """The request of ``call_id`` is in the database."""
        self._stored.update(keys)
        self._latest = (call_id, keys)


def unpack_request(packed: bytes) -> tuple[int, int, int, tuple[bytes, ...]]:
    """(call that it continues or 0, shared entries, tools, digests of the other entries)."""
    parent, shared, tools = _HEAD.unpack_from(packed)
    rest = packed[_HEAD.size :]
    return parent, shared, tools, tuple(rest[i : i + _DIGEST] for i in range(0, len(rest), _DIGEST))


def request_of(connection: sa.Connection, call_id: int) -> tuple[list[Any], list[Any]] | None:
    """(tools, messages) of a call's request, read back; None when there is no such call."""
    found = _keys_of(connection, call_id)
    if found is None:
        return None
    tools, keys = found
    rows = connection.execute(sa.select(messages).where(messages.c.digest.in_(set(keys))))
    bodies = {bytes(row.digest): unpack_body(row.body) for row in rows}
    entries = [bodies[key] for key in keys]
    return entries[:tools], entries[tools:]


def _keys_of(connection: sa.Connection, call_id: int) -> tuple[int, list[bytes]] | None:
    """(number of tools, digests of all entries), following the chain of calls that each continues."""
    links = []
    at = call_id
    while at:
        packed = connection.execute(
            sa.select(call_messages.c.request).where(call_messages.c.call_id == at)
        ).scalar_one_or_none()
        if packed is None:
            return None
        links.append(unpack_request(packed))
        at = links[-1][0]
    keys: list[bytes] = []
    for _, shared, _, rest in reversed(links):
        keys[shared:] = rest
    return links[0][2], keys


def _common(a: tuple[bytes, ...], b: tuple[bytes, ...]) -> int:
    count = 0
    for left, right in zip(a, b, strict=False):
        if left != right:
            break
        count += 1
    return count
