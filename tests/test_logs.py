"""Logs never make whoever logs fail."""

import sys
from collections.abc import Iterator

import pytest
import structlog

from forge_server import logs


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    structlog.reset_defaults()


class _Broken:
    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")

    def flush(self) -> None:
        raise ValueError("I/O operation on closed file")

    def isatty(self) -> bool:
        return False


def test_a_log_that_cannot_be_written_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", _Broken())
    logs.configure("info", "json")
    structlog.get_logger("x").error("lost", why="the disk is full")


def test_lines_go_to_where_stderr_is_now(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info", "json")
    structlog.get_logger("x").info("told", n=1)
    structlog.get_logger("x").debug("not told")
    (line,) = capsys.readouterr().err.splitlines()
    assert '"event": "told"' in line and '"n": 1' in line
