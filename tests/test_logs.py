"""Logs never make whoever logs fail."""

import json
import sys
from collections.abc import Iterator

import pytest
import structlog

from forge_server import logs
from forge_server.domain.events import EventRow
from forge_server.services import event_lines


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


def test_state_changes_are_lines_with_their_ids(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    logs.configure("info", "json")
    monkeypatch.setattr(
        event_lines, "log", structlog.get_logger()
    )  # a logger keeps how it was first configured
    ids = {"run_id": "ru-1", "rollout_id": "ro-1", "attempt_id": "at-1"}
    for number, (kind, outcome) in enumerate(
        [("attempt_running", ""), ("attempt_ended", "completed"), ("attempt_ended", "infra_failure")]
    ):
        event_lines.log_event(
            EventRow(id=number, at=1.0, kind=kind, data={"outcome": outcome, "kind": "ok"}, **ids)
        )
    event_lines.log_event(
        EventRow(id=9, at=1.0, kind="run_paused", data={"reason": "no_signal"}, run_id="ru-1")
    )
    lost, paused = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert (lost["level"], lost["event"], lost["outcome"]) == ("warning", "attempt_ended", "infra_failure")
    assert (lost["run"], lost["rollout"], lost["attempt"]) == ("ru-1", "ro-1", "at-1")
    assert (paused["event"], paused["reason"], paused["run"]) == ("run_paused", "no_signal", "ru-1")
    assert "rollout" not in paused
