"""Bytes of one call's tokens, and back.

A blob is ``format byte + zstd frame`` of: four uint32 counts (prompt delta, completion, logprobs, version
spans), then int32 prompt delta, int32 completion, float32 logprobs, int32 x 3 spans; all little-endian. The
delta is what the prompt has beyond the tokens it shares with its storage parent's prompt + completion, so
that a session which grows costs what it adds. The frame carries a checksum, and a BLAKE2b digest of the
full prompt proves each rebuilt prompt (invariant I2).
"""

import hashlib
import struct
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress

import msgspec
import numpy as np
import zstandard

from forge_server.domain.call import Call, Ids, Logprobs, VersionSpan
from forge_server.domain.errors import ForgeError
from forge_server.domain.media import Media
from forge_server.domain.states import Delivery, Untrainable
from forge_server.trajectory import media

FORMAT = 1
_COUNTS = struct.Struct("<4I")
_LEVEL = 3
_MAX_PLAIN = 1 << 30  # no call has a gigabyte of tokens: a larger size in a frame's header is damage


class CorruptRecord(ForgeError):
    """Stored tokens cannot be read back, or are not those that were stored."""

    type = "corrupt-record"

    def __init__(self, call_id: int, what: str) -> None:
        self.call_id = call_id
        super().__init__(what, where=f"call {call_id}", mend="its attempt is not trained")


class CallRow(msgspec.Struct, frozen=True, kw_only=True):
    """What is read of one call: columns of ``calls``, and of ``call_tokens`` (None when it has no tokens)."""

    id: int
    seq: int
    end: str | None
    delivered: str
    untrainable: str | None
    label: str
    forest_key: str
    storage_parent_id: int | None
    prefix_len: int | None
    finish_reason: str | None
    temperature: float | None
    data: bytes | None
    prompt_digest: bytes | None
    media: bytes | None = None


class Tokens(msgspec.Struct, frozen=True):
    """The content of a blob; ``logprobs`` is empty when the engine gave none."""

    prompt_delta: Ids
    completion: Ids
    logprobs: Logprobs
    versions: tuple[VersionSpan, ...]


class _Zstd(threading.local):
    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)
        self.decompressor = zstandard.ZstdDecompressor()


_zstd = _Zstd()


def digest(prompt: Ids) -> bytes:
    """16 bytes that identify a prompt's ids."""
    return hashlib.blake2b(np.ascontiguousarray(prompt, "<i4").data, digest_size=16).digest()


class PromptDigests:
    """Digests of one session's prompts: of a prompt that continues the one before, only the rest is hashed."""

    def __init__(self) -> None:
        self._prompt: Ids = np.empty(0, "<i4")
        self._hash = hashlib.blake2b(digest_size=16)

    def of(self, prompt: Ids) -> bytes:
        """What ``digest`` gives."""
        known = self._prompt.size
        if not np.array_equal(prompt[:known], self._prompt):
            known, self._hash = 0, hashlib.blake2b(digest_size=16)
        self._hash.update(np.ascontiguousarray(prompt[known:], "<i4").data)
        self._prompt = prompt
        return self._hash.digest()


def encode(
    prompt: Ids, shared: int, completion: Ids, logprobs: Logprobs | None, versions: Sequence[VersionSpan]
) -> bytes:
    """The blob of a call whose first ``shared`` prompt tokens are those of its storage parent."""
    delta = np.ascontiguousarray(prompt[shared:], "<i4")
    answer = np.ascontiguousarray(completion, "<i4")
    chances = np.ascontiguousarray(() if logprobs is None else logprobs, "<f4")
    spans = np.asarray([(s.version, s.start, s.end) for s in versions], "<i4")
    counts = _COUNTS.pack(delta.size, answer.size, chances.size, len(versions))
    plain = b"".join((counts, delta.data, answer.data, chances.data, spans.tobytes()))
    return bytes((FORMAT,)) + _zstd.compressor.compress(plain)


def decode(call_id: int, data: bytes) -> Tokens:
    """The content of a blob; ``CorruptRecord`` if it is damaged."""
    if data[:1] != bytes((FORMAT,)):
        raise CorruptRecord(call_id, f"token format {data[:1].hex() or 'missing'} is not known")
    try:
        if zstandard.frame_content_size(data[1:]) > _MAX_PLAIN:
            raise CorruptRecord(call_id, "token blob claims an impossible size")
        plain = _zstd.decompressor.decompress(data[1:])
    except zstandard.ZstdError as error:
        raise CorruptRecord(call_id, f"token blob is damaged ({error})") from error
    if len(plain) < _COUNTS.size:
        raise CorruptRecord(call_id, "token blob is cut short")
    n_delta, n_completion, n_logprobs, n_spans = _COUNTS.unpack_from(plain)
    if len(plain) != _COUNTS.size + 4 * (n_delta + n_completion + n_logprobs + 3 * n_spans):
        raise CorruptRecord(call_id, "token blob's counts do not match its length")
    words = np.frombuffer(plain, "<i4", offset=_COUNTS.size)
    delta, completion, chances, spans = np.split(
        words, np.cumsum((n_delta, n_completion, n_logprobs), dtype=np.int64)
    )
    return Tokens(
        prompt_delta=delta,
        completion=completion,
        logprobs=chances.view("<f4"),
        versions=tuple(VersionSpan(*row) for row in spans.reshape(-1, 3).tolist()),
    )


def decode_attempt(rows: Iterable[CallRow]) -> list[Call]:
    """The calls of one attempt, full prompts rebuilt and verified, in ``seq`` order.

    Rows without tokens (a call that the engine never answered) are left out. A storage parent may have a
    later ``seq`` than its child: of two concurrent calls the one admitted later may have ended first.
    """
    stored = sorted((row for row in rows if row.data is not None), key=lambda row: row.seq)
    by_id = {row.id: row for row in stored}
    calls: dict[int, Call] = {}
    for row in stored:
        chain: list[CallRow] = []  # the row and those of its storage ancestors that are not rebuilt yet
        at: CallRow | None = row
        while at is not None and at.id not in calls:
            chain.append(at)
            if len(chain) > len(stored):
                raise CorruptRecord(row.id, "its storage parents form a circle")
            if at.storage_parent_id is None:
                break
            parent = by_id.get(at.storage_parent_id)
            if parent is None:
                raise CorruptRecord(at.id, f"its storage parent {at.storage_parent_id} is missing")
            at = parent
        for link in reversed(chain):
            calls[link.id] = _rebuild(link, calls)
    return sorted(calls.values(), key=lambda call: call.seq)


def named(rows: Iterable[CallRow]) -> set[str]:
    """SHA-256 of the images that the rows name; what is damaged names none (``decode_attempt`` tells of it)."""
    found: set[str] = set()
    for row in rows:
        with suppress(ValueError):
            found.update(span.sha256 for span in media.unpack(row.media))
    return found


def _rebuild(row: CallRow, calls: dict[int, Call]) -> Call:
    assert row.data is not None
    tokens = decode(row.id, row.data)
    shared = row.prefix_len or 0
    prompt = tokens.prompt_delta
    if row.storage_parent_id is not None:
        parent = calls[row.storage_parent_id]
        if shared > parent.prompt.size + parent.completion.size:
            raise CorruptRecord(row.id, f"shares {shared} tokens with a storage parent that is shorter")
        tail = parent.completion[: max(0, shared - parent.prompt.size)]
        prompt = np.concatenate((parent.prompt[:shared], tail, prompt))
    if digest(prompt) != row.prompt_digest:
        raise CorruptRecord(row.id, "the rebuilt prompt does not match its digest")
    try:
        delivered = Delivery(row.delivered)
        untrainable = None if row.untrainable is None else Untrainable(row.untrainable)
    except ValueError as error:
        raise CorruptRecord(row.id, str(error)) from error
    return Call(
        id=row.id,
        seq=row.seq,
        prompt=prompt,
        completion=tokens.completion,
        logprobs=tokens.logprobs,
        versions=tokens.versions,
        delivered=delivered,
        untrainable=untrainable,
        temperature=1.0 if row.temperature is None else row.temperature,
        finish_reason=row.finish_reason or "",
        forest_key=row.forest_key,
        label=row.label,
        media=_media(row, calls, prompt.size),
    )


def _media(row: CallRow, calls: dict[int, Call], size: int) -> Media:
    """The images of a prompt of ``size`` tokens: those of the storage parent as far as it goes, and its own."""
    before: Media = ()
    if row.storage_parent_id is not None:
        before = media.inherited(calls[row.storage_parent_id].media, row.prefix_len or 0)
    try:
        found = before + media.unpack(row.media)
    except ValueError as error:
        raise CorruptRecord(row.id, str(error)) from error
    if not media.sound(found, size):
        raise CorruptRecord(row.id, "its images lie outside of its prompt, or over each other")
    return found
