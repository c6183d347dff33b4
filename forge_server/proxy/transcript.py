"""The messages of one attempt's requests: what identifies a request, and what of it is new to the database.

A session sends its whole history with every turn. Each message is digested once: later turns find its digest
by a fast hash that serves within the attempt alone.
"""

import hashlib
from collections.abc import Sequence

import msgspec
import xxhash
from msgspec import Raw

from forge_server.domain.turn import Turn
from forge_server.proxy.ports import Row
from forge_server.store import messages

_REMEMBERED = 50_000


class Stored:
    """Digests of messages that are in the database; nothing removes messages from it while the server
    runs."""

    def __init__(self) -> None:
        self._keys: dict[bytes, None] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def add(self, keys: Sequence[bytes]) -> None:
        self._keys.update(dict.fromkeys(keys))
        while len(self._keys) > _REMEMBERED:
            del self._keys[next(iter(self._keys))]


class Transcript:
    """The messages that the attempt has sent, and its latest stored request. ``stored`` is shared by all
    attempts."""

    def __init__(self, stored: Stored) -> None:
        self._digests: dict[bytes, bytes] = {}
        self._stored = stored
        self._latest: tuple[int, tuple[bytes, ...]] = (0, ())

    def identify(self, turn: Turn) -> tuple[bytes, tuple[bytes, ...]]:
        """16 bytes that two requests share when they ask the same, and the digests of the turn's entries."""
        keys = tuple(self._digest(entry) for entry in (*turn.tools, *turn.messages))
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
        whole = hashlib.blake2b(b"".join(keys), digest_size=16)
        whole.update(msgspec.json.encode(rest))
        return whole.digest(), keys

    def pack(self, turn: Turn, keys: tuple[bytes, ...]) -> tuple[bytes, list[Row]]:
        """The packed request, and the rows of messages that are new here."""
        latest, before = self._latest
        shared = _common(before, keys)
        entries: Sequence[Raw] = (*turn.tools, *turn.messages)
        fresh = {
            key: messages.row(entry, key)
            for key, entry in zip(keys[shared:], entries[shared:], strict=True)
            if key not in self._stored
        }
        return messages.pack(latest, shared, len(turn.tools), keys[shared:]), list(fresh.values())

    def committed(self, call_id: int, keys: tuple[bytes, ...]) -> None:
        """The request of ``call_id`` is in the database."""
        shared = _common(self._latest[1], keys)
        self._stored.add(keys[shared:])
        self._latest = (call_id, keys)

    def _digest(self, entry: Raw) -> bytes:
        quick = xxhash.xxh3_128_digest(entry)
        known = self._digests.get(quick)
        if known is None:
            known = self._digests[quick] = messages.digest(entry)
        return known


def _common(a: tuple[bytes, ...], b: tuple[bytes, ...]) -> int:
    count = 0
    for left, right in zip(a, b, strict=False):
        if left != right:
            break
        count += 1
    return count
