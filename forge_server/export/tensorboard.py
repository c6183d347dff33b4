"""A run's figures as an event file of TensorBoard, which other trackers read too.

The format is small enough to be written here: records with a length and two checksums, each an ``Event`` message
of protocol buffers with a step, a time and scalars. It needs no library of either.
"""

import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

from sqlalchemy import Connection

from forge_server.export.figures import Figures, figures
from forge_server.export.whole import make_folder, whole_file

_POLYNOMIAL = 0x82F63B78  # Castagnoli's, reversed


def _table() -> tuple[int, ...]:
    entries = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
        entries.append(value)
    return tuple(entries)


_TABLE = _table()


def export_figures(connection: Connection, run_id: str, folder: Path) -> tuple[Path, int]:
    """Write ``folder/events.out.tfevents.RUN``; the file and how many values it has. Raises ExportError."""
    events = figures(connection, run_id)
    path = folder / f"events.out.tfevents.{run_id}"
    make_folder(folder)
    begun = events[0].at if events else 0.0
    with whole_file(path) as target:
        target.write_bytes(b"".join(_records(events, begun)))
    return path, sum(len(event.values) for event in events)


def _records(events: Iterable[Figures], begun: float) -> Iterator[bytes]:
    yield _record(_double(1, begun) + _bytes(3, b"brain.Event:2"))
    for event in events:
        scalars = b"".join(
            _bytes(1, _bytes(1, name.encode()) + _key(2, 5) + struct.pack("<f", value))
            for name, value in event.values.items()
        )
        yield _record(_double(1, event.at) + _key(2, 0) + _varint(event.step) + _bytes(5, scalars))


def _record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + _checksum(length) + data + _checksum(data)


def _checksum(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def _key(field: int, kind: int) -> bytes:
    return _varint(field << 3 | kind)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _bytes(field: int, data: bytes) -> bytes:
    return _key(field, 2) + _varint(len(data)) + data


def _double(field: int, value: float) -> bytes:
    return _key(field, 1) + struct.pack("<d", value)
