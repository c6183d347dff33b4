"""Images that travel in a request: checked, and brought into the one form that the engine and the record get.

Only what was sent in the request itself can be recorded and shown again, so an address elsewhere is refused; that
the engine then fetches nothing on behalf of a harness is the other reason.
"""

import binascii
import re

import xxhash

from forge_server.proxy.dialects.reading import bad, unsupported

MAX_BYTES = 20 * 1024 * 1024
"""The largest image that is taken, in bytes of the file; providers take 5 to 20 MB."""

TYPES = ("image/png", "image/jpeg", "image/gif", "image/webp", "image/bmp")
_DATA = re.compile(r"data:([^;,]{1,100});base64,", re.IGNORECASE)
_REMEMBERED = 4096

_sound: dict[bytes, None] = {}
"""Digests of data that has been decoded once: a session sends its images again with every call."""


def of_url(url: object, param: str) -> str:
    """The data URL of an image that came as a URL. Raises ``Refusal``."""
    if not isinstance(url, str):
        raise bad(f"{param}: the URL of an image is not a string", param=param)
    if not url[:5].lower() == "data:":
        raise unsupported(
            "an image that is not a data:image/ URL (what the model has seen could not be recorded)",
            param=param,
            instead="send the image itself",
        )
    head = _DATA.match(url)
    if head is None:
        raise bad(f"{param}: the image is not data:TYPE;base64,DATA", param=param)
    return of_base64(head[1], url[head.end() :], param)


def of_base64(media_type: str, data: str, param: str) -> str:
    """The data URL of an image that came as base64, which may be wrapped into lines or lack its padding. Raises
    ``Refusal``."""
    kind = media_type.strip().lower().replace("image/jpg", "image/jpeg")
    if kind not in TYPES:
        raise unsupported(
            f"an image of type {media_type[:100]!r}",
            param=param,
            instead=f"one of {', '.join(TYPES)} is",
        )
    if not data.isascii():
        raise bad(f"{param}: the image is not base64", param=param)
    if len(data) > MAX_BYTES // 3 * 4 + 4:  # before anything is done with it
        data = "".join(data.split())
        if len(data) > MAX_BYTES // 3 * 4 + 4:
            raise bad(f"{param}: the image is larger than {MAX_BYTES >> 20} MiB", param=param)
    seen = xxhash.xxh3_128_digest(data.encode())
    if seen not in _sound:
        clean = "".join(data.split())
        clean += "=" * (-len(clean) % 4)
        try:
            size = len(binascii.a2b_base64(clean, strict_mode=True))
        except binascii.Error as error:
            raise bad(f"{param}: the image is not base64 ({error})", param=param) from None
        if not size:
            raise bad(f"{param}: the image is empty", param=param)
        if clean != data:
            return f"data:{kind};base64,{clean}"
        _sound[seen] = None
        while len(_sound) > _REMEMBERED:
            del _sound[next(iter(_sound))]
    return f"data:{kind};base64,{data}"
