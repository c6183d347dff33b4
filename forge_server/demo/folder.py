"""The demo's folder: what lies where, its forge.toml, and the programs that work in it.

``forge-server up`` runs here as a process of its own, exactly as a user would start it; the demo talks to
it through the public API and the command line. Whatever is started here is ended here.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from forge_server.assets import stage_package
from forge_server.client.http import ForgeClient, ServerUnreachable
from forge_server.demo.recipe import Recipe
from forge_server.domain.errors import Conflict, ForgeError

FORGE = (sys.executable, "-m", "forge_server.cli")
_STOP_S = 60.0

_SETTINGS = """\
# Written by `forge-server demo`. Every command works in this folder; `forge-server up` starts the server.

[server]
port = 0                     # any free port; the commands find it by forge-data/control.url
control_port = 0

[engine]
kind = "managed"
model = "warm"               # version 0: the tiny model, warm-started on the teacher's traces
dtype = "float32"
max_model_len = {window}
max_num_seqs = 32

[scheduler]
in_flight = {in_flight}

[trainer]
threads = 1                  # the model is too small to share
"""


class DemoFailed(ForgeError):
    """A step of the demo did not succeed."""

    type = "demo-failed"


class Folder:
    """``root`` and the files in it, of which there is none yet. Raises Conflict when the folder is in use already,
    DemoFailed when it cannot be.
    """

    def __init__(self, root: Path) -> None:
        try:
            root.mkdir(parents=True, exist_ok=True)
            used = any(root.iterdir())
            with tempfile.TemporaryFile(dir=root):  # before minutes are spent on what is to be written there
                pass
        except OSError as error:
            raise DemoFailed(
                f"the folder cannot be made or written ({error.strerror})",
                where=str(root),
                mend="choose another with --folder",
            ) from None
        if used:
            raise Conflict(
                "the folder is not empty",
                where=str(root),
                mend="remove it, or choose another with --folder",
            )
        self.root = root.resolve()
        self.data = self.root / "forge-data"
        self.settings = self.root / "forge.toml"
        self.untrained = self.root / "untrained"
        self.traces = self.root / "traces.parquet"
        self.warm = self.root / "warm"
        self.logs = self.root / "logs"
        self._staged = self.root / "staged"

    def write_settings(self, recipe: Recipe) -> None:
        text = _SETTINGS.format(window=recipe.model.window, in_flight=recipe.learning.in_flight)
        self.settings.write_text(text)

    def add_run(self, table: Mapping[str, Any]) -> None:
        """Append a ``[[run]]`` to forge.toml. Values are strings, numbers, lists of strings, or one nested
        table.
        """
        lines = ["", "[[run]]"]
        nested = {key: value for key, value in table.items() if isinstance(value, dict)}
        for key, value in table.items():
            if key not in nested:
                lines.append(f"{key} = {json.dumps(value)}")
        for name, values in nested.items():
            lines += [f"[run.{name}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
        with self.settings.open("a") as file:
            file.write("\n".join(lines) + "\n")

    def _log(self, name: str) -> Path:
        self.logs.mkdir(exist_ok=True)
        return self.logs / f"{name}.log"

    # --- programs of other environments -----------------------------------------------------------------

    def command(self, environment: Path, module: str, *arguments: str) -> list[str]:
        return [str(environment / "bin" / "python"), "-W", "ignore", "-m", module, *arguments]

    def environ(self, package: str) -> dict[str, str]:
        """The environment of a program in our staged ``package``, which needs neither network nor many
        threads.
        """
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("FORGE_", "PYTHON"))}
        return inherited | {
            "PYTHONPATH": str(stage_package(package, self._staged / package)),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }

    def run(
        self,
        name: str,
        command: list[str],
        environ: Mapping[str, str] | None = None,
        line: Callable[[str], None] = lambda _: None,
    ) -> str:
        """Run to the end; its output, which also goes to ``logs/NAME.log``. ``line`` sees each line as it
        comes. Raises DemoFailed with the last lines.
        """
        log = self._log(name)
        output = []
        with (
            log.open("w") as errors,
            subprocess.Popen(
                command, cwd=self.root, env=environ, stdout=subprocess.PIPE, stderr=errors, text=True
            ) as process,
        ):
            assert process.stdout is not None
            try:
                for text in process.stdout:
                    output.append(text)
                    line(text)
            except BaseException:
                process.kill()
                raise
        with log.open("a") as file:
            file.writelines(output)
        if process.returncode != 0:
            raise DemoFailed(f"{name} ended with {process.returncode}: {_last_lines(log)}", where=str(log))
        return "".join(output)

    def cli(self, *words: str) -> str:
        """The output of one ``forge-server`` command in this folder."""
        return self.run(f"cli-{words[0]}", [*FORGE, *words])

    @contextlib.contextmanager
    def background(
        self, name: str, command: list[str], environ: Mapping[str, str]
    ) -> Iterator[Callable[[], None]]:
        """A program that runs for the length of the block. Yields a check that raises DemoFailed once it
        has ended.
        """
        log = self._log(name)
        with log.open("a") as output:
            process = subprocess.Popen(
                command, cwd=self.root, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )

        def check() -> None:
            if process.poll() is not None:
                raise DemoFailed(
                    f"{name} ended with {process.returncode}: {_last_lines(log)}", where=str(log)
                )

        try:
            yield check
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(_STOP_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    @contextlib.contextmanager
    def server(self, limit_s: float, **overlay: str) -> Iterator[tuple[ForgeClient, Callable[[], None]]]:
        """``forge-server up`` with a ready engine. ``overlay`` are FORGE_* variables over forge.toml."""
        environ = {k: v for k, v in os.environ.items() if not k.startswith("FORGE_") or k == "FORGE_CACHE"}
        with self.background("server", [*FORGE, "up"], environ | overlay) as check:
            address = self.data / "control.url"
            wait_for(lambda: "" if address.exists() else "the server to answer", check, 60.0)
            with ForgeClient(
                address.read_text().strip(), (self.data / "admin.key").read_text().strip()
            ) as client:
                wait_for(lambda: _missing(client), check, limit_s)
                yield client, check


def wait_for(missing: Callable[[], str], check: Callable[[], None], limit_s: float) -> None:
    """Look again and again until nothing is ``missing``. Raises DemoFailed after ``limit_s`` seconds, and what
    ``check`` raises.
    """
    end = time.monotonic() + limit_s
    while what := missing():
        check()
        if time.monotonic() > end:
            raise DemoFailed(f"waited {limit_s:g} s for {what}", mend="see the logs folder")
        time.sleep(0.2)


def _missing(client: ForgeClient) -> str:
    """What the server is not ready for, in its own words."""
    try:
        checks = client.ready().checks
    except (ServerUnreachable, OSError):
        return "the server to answer"
    return "; ".join(f"{check.name} ({check.detail})" for check in checks if not check.ok)


def _last_lines(log: Path, count: int = 5) -> str:
    with log.open(errors="replace") as file:
        return " | ".join(line.strip() for line in deque(file, count))
