"""The messages of one attempt's requests: what identifies a request, and what of it is new to the database.

A session sends its whole history with every turn. Each message is digested once: later turns find its digest
by a fast hash that serves within the attempt alone. Images are stored apart, by their own hash; a message is
known by the form that names them so.
"""

import hashlib
from collections.abc import Sequence

import msgspec
import xxhash
from msgspec import Raw

from forge_server.domain.turn import Turn
from forge_server.proxy.record import Rows
from forge_server.store import media, messages

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
        self._images: dict[bytes, tuple[str, ...]] = {}  # of the messages that show any
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

    def images(self, keys: tuple[bytes, ...]) -> tuple[str, ...]:
        """SHA-256 of the images that the turn with these entries shows, in order."""
        if not self._images:
            return ()
        return tuple(image for key in keys for image in self._images.get(key, ()))

    def pack(self, turn: Turn, keys: tuple[bytes, ...]) -> tuple[bytes, Rows]:
        """The packed request, and the rows of messages that are new here, images first."""
        latest, before = self._latest
        shared = _common(before, keys)
        entries: Sequence[Raw] = (*turn.tools, *turn.messages)
        fresh: dict[bytes, Raw] = {}
        files: dict[str, media.Image] = {}
        for key, entry in zip(keys[shared:], entries[shared:], strict=True):
            if key in self._stored or key in fresh:
                continue
            fresh[key], images = media.by_hash(entry) if key in self._images else (entry, ())
            files.update((image.sha256, image) for image in images)
        rows: Rows = [(media.INTERN, image.row) for image in files.values()]
        rows += [(messages.INTERN, messages.row(body, key)) for key, body in fresh.items()]
        return messages.pack(latest, shared, len(turn.tools), keys[shared:]), rows

    def committed(self, call_id: int, keys: tuple[bytes, ...]) -> None:
        """The request of ``call_id`` is in the database."""
        shared = _common(self._latest[1], keys)
        self._stored.add(keys[shared:])
        self._latest = (call_id, keys)

    def _digest(self, entry: Raw) -> bytes:
        quick = xxhash.xxh3_128_digest(entry)
        known = self._digests.get(quick)
        if known is None:
            body, images = media.by_hash(entry)
            known = self._digests[quick] = messages.digest(body)
            if images:
                self._images[known] = tuple(image.sha256 for image in images)
        return known


def _common(a: tuple[bytes, ...], b: tuple[bytes, ...]) -> int:
    count = 0
    for left, right in zip(a, b, strict=False):
        if left != right:
            break
        count += 1
    return count
