"""The demo's folder: what it cannot be is said before anything is made, and a first try that failed bars no second."""

from pathlib import Path

import pytest

from forge_server.demo.folder import DemoFailed, Folder, wait_for
from forge_server.demo.run import run_demo
from forge_server.domain.errors import Conflict, EnvironmentMissing


def test_a_demo_whose_environments_could_not_be_made_may_be_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORGE_CACHE", "/proc/none")
    for _ in range(2):
        with pytest.raises(EnvironmentMissing, match="set FORGE_CACHE"):
            run_demo(tmp_path / "demo", 1)


def test_a_folder_that_cannot_be_is_told_before_the_environments_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORGE_CACHE", "/proc/none")
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for root in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / "loop", Path("/proc/none")):
        with pytest.raises(DemoFailed, match=f"^{root}: the folder cannot .*; choose another with --folder$"):
            run_demo(root, 1)


def test_a_folder_that_is_in_use_stays_as_it_is(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "demo")
    assert "hello" in folder.run("greeting", ["echo", "hello"])  # the demo has got so far, and is interrupted
    assert (folder.logs / "greeting.log").read_text() == "hello\n"
    with pytest.raises(Conflict, match="not empty; remove it, or choose another with --folder"):
        Folder(tmp_path / "demo")
    assert [file.name for file in folder.root.iterdir()] == ["logs"]


def test_what_was_waited_for_is_told() -> None:
    with pytest.raises(DemoFailed, match=r"waited 0 s for attempts .*full.*; see the logs folder"):
        wait_for(lambda: "attempts (the disk is full)", lambda: None, 0.0)
