"""Images of requests: stored once each by the SHA-256 of the file, whatever message shows them.

A stored message says ``sha256:HEX`` where the request had a data URL. Rows are written with the first message
that shows the image, in one unit with it, and nothing removes them.
"""

import binascii
import hashlib
from collections.abc import Iterable
from typing import Any

import msgspec
import sqlalchemy as sa
from msgspec import Raw
from sqlalchemy.dialects import postgresql

from forge_server.store.tables import media
from forge_server.store.writer import Row

INTERN = postgresql.insert(media).on_conflict_do_nothing().inline()
"""Inserts into ``media`` what is not there yet (compiles for SQLite too, which has the same clause)."""

SCHEME = "sha256:"
_MARK = b'"image_url":{"url":"data:'  # as the dialects write it; inside a JSON string the quotes are escaped
_PAGE = 500


class Image(msgspec.Struct, frozen=True):
    """A file as a harness sent it; ``sha256`` is its name in hex."""

    sha256: str
    media_type: str
    data: bytes

    @property
    def row(self) -> Row:
        """The row of ``media``."""
        return {
            "sha256": bytes.fromhex(self.sha256),
            "media_type": self.media_type,
            "size": len(self.data),
            "data": self.data,
        }


def by_hash(message: Raw) -> tuple[Raw, tuple[Image, ...]]:
    """The message with references in place of its images, and the images in order. Without any it stays as it
    is, byte for byte.
    """
    if _MARK not in bytes(message):
        return message, ()
    value: dict[str, Any] = msgspec.json.decode(message)
    images: list[Image] = []
    parts: list[Any] = value["content"] if isinstance(value.get("content"), list) else []
    for part in parts:
        if isinstance(part, dict) and part.get("type") == "image_url":
            image = _image(part["image_url"]["url"])
            part["image_url"] = {"url": SCHEME + image.sha256}
            images.append(image)
    return Raw(msgspec.json.encode(value)), tuple(images)


def _image(url: str) -> Image:
    head, _, data = url.partition(",")
    file = binascii.a2b_base64(data)
    return Image(hashlib.sha256(file).hexdigest(), head.removeprefix("data:").partition(";")[0], file)


def file_of(connection: sa.Connection, sha256: str) -> bytes | None:
    """The file of an image, or None when it is not there."""
    query = sa.select(media.c.data).where(media.c.sha256 == bytes.fromhex(sha256))
    data = connection.execute(query).scalar_one_or_none()
    return None if data is None else bytes(data)


def sound(connection: sa.Connection, wanted: Iterable[str]) -> frozenset[str]:
    """Those of ``wanted`` that are there and have not changed: every file is hashed again."""
    left = sorted({bytes.fromhex(sha256) for sha256 in wanted})
    found = set()
    for begin in range(0, len(left), _PAGE):
        query = sa.select(media.c.sha256, media.c.data).where(media.c.sha256.in_(left[begin : begin + _PAGE]))
        for row in connection.execution_options(stream_results=True).execute(query):
            if hashlib.sha256(row.data).digest() == bytes(row.sha256):
                found.add(bytes(row.sha256).hex())
    return frozenset(found)
