"""Where the images of a prompt are, and the bytes in which that is stored.

The engine puts a run of placeholder tokens where a prompt has an image, and ids alone do not tell two images
apart. What stands for which image is known only where it can be counted: as many runs of the placeholder as
images, in order. Everything else is unknown, and such a call is not trained.

A stored list is ``<I`` = its length, then ``<32s I I`` = SHA-256, offset and length of each span. Like the prompt
itself it is a delta: what ends within the tokens shared with the storage parent is the parent's.
"""

import struct
from collections.abc import Sequence

import numpy as np

from forge_server.domain.call import Ids
from forge_server.domain.media import Media, MediaSpan

_COUNT = struct.Struct("<I")
_SPAN = struct.Struct("<32sII")


def locate(prompt: Ids, placeholder: int | None, images: Sequence[str]) -> Media | None:
    """The spans of ``images`` (SHA-256, in order) in a prompt of P tokens; None when they cannot be told.

    ``placeholder`` is the id that the engine repeats for an image, None when that is not known.
    """
    if not images:
        return ()
    if placeholder is None:
        return None
    edges = np.diff(prompt == placeholder, prepend=False, append=False).nonzero()[0].reshape(-1, 2)
    if len(edges) != len(images):
        return None
    return tuple(
        MediaSpan(sha256, begin, end - begin)
        for sha256, (begin, end) in zip(images, edges.tolist(), strict=True)
    )


def inherited(media: Media, shared: int) -> Media:
    """Those that a prompt has from the first ``shared`` tokens of its storage parent."""
    return tuple(span for span in media if span.end <= shared)


def pack(media: Media, shared: int) -> bytes | None:
    """What is not inherited from the storage parent; None when that is nothing."""
    own = [span for span in media if span.end > shared]
    if not own:
        return None
    return _COUNT.pack(len(own)) + b"".join(
        _SPAN.pack(bytes.fromhex(span.sha256), span.offset, span.length) for span in own
    )


def unpack(data: bytes | None) -> Media:
    """What ``pack`` gave. Raises ValueError when the bytes are damaged."""
    if data is None:
        return ()
    if len(data) < _COUNT.size or len(data) != _COUNT.size + _COUNT.unpack_from(data)[0] * _SPAN.size:
        raise ValueError("the list of images does not have the length that it says")
    return tuple(
        MediaSpan(sha256.hex(), offset, length)
        for sha256, offset, length in _SPAN.iter_unpack(data[_COUNT.size :])
    )


def sound(media: Media, size: int) -> bool:
    """Whether the spans follow each other within ``size`` tokens."""
    at = 0
    for span in media:
        if span.offset < at or span.length < 1:
            return False
        at = span.end
    return at <= size
