"""The event file for TensorBoard: its framing and fields, read back by a decoder of its own."""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from api_rig import rig

from forge_server.commands.data import export
from forge_server.export.tensorboard import crc32c
from forge_server.export.whole import ExportError
from forge_server.store import tables as t


@pytest.mark.parametrize(
    ("data", "crc"),
    [(b"", 0), (b"123456789", 0xE3069283), (bytes(32), 0x8A9136AA), (b"\xff" * 32, 0x62A8AB43)],
)
def test_the_checksum_is_castagnolis(data: bytes, crc: int) -> None:
    """Check values of RFC 3720."""
    assert crc32c(data) == crc


def masked(data: bytes) -> int:
    crc = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def records(data: bytes) -> Iterator[bytes]:
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        assert struct.unpack("<I", data[8:12])[0] == masked(data[:8])
        body, data = data[12 : 12 + length], data[12 + length :]
        assert struct.unpack("<I", data[:4])[0] == masked(body)
        data = data[4:]
        yield body


def fields(data: bytes) -> list[tuple[int, Any]]:
    """Number and value of each field of a message of protocol buffers."""

    def varint(at: int) -> tuple[int, int]:
        value = shift = 0
        while True:
            byte = data[at]
            value, shift, at = value | (byte & 0x7F) << shift, shift + 7, at + 1
            if byte < 0x80:
                return value, at

    found: list[tuple[int, Any]] = []
    at = 0
    while at < len(data):
        key, at = varint(at)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, at = varint(at)
            found.append((number, value))
        elif kind == 2:
            length, at = varint(at)
            found.append((number, data[at : at + length]))
            at += length
        else:
            size, form = {1: (8, "<d"), 5: (4, "<f")}[kind]
            found.append((number, struct.unpack(form, data[at : at + size])[0]))
            at += size
    return found


async def test_figures_are_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with rig(tmp_path) as api:
        run = await api.create_run("r")

        def rows(c: sa.Connection) -> None:
            for step, source, metrics in (
                (1, "controller", {"reward/mean": 0.25, "nothing": None}),
                (1, "trainer", {"loss": -0.5, "lr": 1e-5}),
                (300, "trainer", {"loss": 0.125}),
            ):
                c.execute(
                    sa.insert(t.step_metrics).values(
                        run_id=run["id"], step=step, source=source, metrics=metrics, at=1000.5 + step
                    )
                )

        await api.server.store.write(rows)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "forge.toml").touch()
    export("r", "tensorboard", None, None, None)
    assert "4 figures" in capsys.readouterr().out
    (file,) = (tmp_path / "r.tensorboard").iterdir()
    assert file.name.startswith("events.out.tfevents.")
    first, *events = [dict(fields(record)) for record in records(file.read_bytes())]
    assert first == {1: 1001.5, 3: b"brain.Event:2"}
    told = []
    for event in events:
        for number, summary in fields(event[5]):
            assert number == 1
            value = dict(fields(summary))
            told.append((event[2], event[1], value[1].decode(), value[2]))
    assert told == [
        (1, 1001.5, "controller/reward/mean", 0.25),
        (1, 1001.5, "trainer/loss", -0.5),
        (1, 1001.5, "trainer/lr", pytest.approx(1e-5)),
        (300, 1300.5, "trainer/loss", 0.125),
    ]
    export("r", "tensorboard", "again", None, None)
    assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()
    with pytest.raises(ExportError, match="min-reward"):
        export("r", "tensorboard", None, 0.5, None)
    with pytest.raises(ExportError):
        export("r", "tensorboard", str(file), None, None)
