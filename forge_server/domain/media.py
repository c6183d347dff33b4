"""Images in a prompt: which of its tokens stand for which image."""

import msgspec


class MediaSpan(msgspec.Struct, frozen=True):
    """Tokens ``[offset, offset + length)`` of a prompt stand for the image with this SHA-256 (hex)."""

    sha256: str
    offset: int
    length: int

    @property
    def end(self) -> int:
        return self.offset + self.length


Media = tuple[MediaSpan, ...]
"""In order of their offsets, without overlap."""
