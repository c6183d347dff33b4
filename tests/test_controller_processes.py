"""Processes that are found by what is in their environment."""

import os
import subprocess
from pathlib import Path

from forge_server.controller import processes


def test_a_process_that_becomes_another_program_is_found_at_any_moment(tmp_path: Path) -> None:
    """Between the two its environment is empty: who looks then would think that nobody is there."""
    script = tmp_path / "again"
    script.write_text('#!/bin/sh\n[ "$1" = 0 ] && exec sleep 300\nexec "$0" $(($1 - 1))\n')
    script.chmod(0o700)
    mark = f"FORGE_TRAINER_RUN=ru-{os.getpid()}-again"
    process = subprocess.Popen([script, "3000"], env={**os.environ, **dict([mark.split("=")])})
    try:
        looks = 0
        while not (command := Path(f"/proc/{process.pid}/cmdline").read_bytes()).startswith(b"sleep"):
            assert processes.with_environment(mark) == [process.pid], (looks, command)
            looks += 1
        assert looks > 10
    finally:
        process.kill()
        process.wait()
