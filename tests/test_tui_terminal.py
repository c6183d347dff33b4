"""The dashboard in a real terminal (tmux) beside a real server: what a person sees and types."""

import contextlib
import shlex
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from test_cli_up import FORGE, QUIET, environ, up

from forge_server.client.http import ForgeClient
from forge_server.client.rollout import rollout

LIMIT_S = 180.0


class Tmux:
    """One window of a tmux server of its own."""

    def __init__(self, folder: Path, columns: int, rows: int) -> None:
        self._name = f"forge-{uuid.uuid4().hex[:8]}"
        shell = environ() | {"LANG": "C.UTF-8"}
        self._run("-f", "/dev/null", "new-session", "-d", "-x", str(columns), "-y", str(rows), "-c", str(folder),
                  "bash --norc --noprofile", environ=shell)  # fmt: skip

    def _run(self, *words: str, environ: dict[str, str] | None = None) -> str:
        done = subprocess.run(
            ["tmux", "-L", self._name, *words],
            check=True,
            capture_output=True,
            text=True,
            env=environ,
            timeout=150,
        )
        return done.stdout

    def type(self, *keys: str) -> None:
        """Names of keys as tmux has them."""
        self._run("send-keys", *keys)

    def command(self, text: str) -> None:
        self._run("send-keys", "-l", text)
        self.type("Enter")

    def screen(self) -> str:
        return self._run("capture-pane", "-p")

    def until(self, holds: str | Callable[[str], bool]) -> str:
        """What is shown once it holds ``holds``."""
        end = time.monotonic() + LIMIT_S
        while True:
            shown = self.screen()
            if holds in shown if isinstance(holds, str) else holds(shown):
                return shown
            assert time.monotonic() < end, shown
            time.sleep(0.1)

    def pid(self) -> int:
        """The process of the window: its shell, or what that has become."""
        return int(self._run("display-message", "-p", "#{pane_pid}"))

    def close(self) -> None:
        self._run("kill-server")


@contextlib.contextmanager
def tmux(folder: Path, columns: int = 100, rows: int = 30) -> Iterator[Tmux]:
    made = Tmux(folder, columns, rows)
    try:
        made.command("PS1='ready$ '; clear")
        made.until(lambda text: text.strip() == "ready$")
        yield made
    finally:
        made.close()


def forge(*words: str) -> str:
    return shlex.join([*FORGE, *words])


def test_a_live_server_is_watched_and_steered(tmp_path: Path) -> None:
    with tmux(tmp_path) as terminal:
        with up(tmp_path) as server:
            folder = tmp_path / "forge-data"
            url = (folder / "control.url").read_text().strip()
            with ForgeClient(url, (folder / "admin.key").read_text().strip()) as client:
                terminal.command(forge("tui"))  # finds the server by ./forge.toml
                terminal.until("Nothing has run yet")
                with rollout(client, harness="mine") as one:
                    terminal.until("external")
                    terminal.type("2")
                    terminal.until(one.registration.rollout_id[-8:])
                    terminal.until(lambda text: "mine" in text and "● live" in text)
                    one.reward(1.0)
                terminal.until("harness no call")  # for it made none
                terminal.type("Enter")
                terminal.until("Reward and evidence")
                terminal.until("external said 1")
                terminal.type("6")
                terminal.until("no log lines")
                terminal.type("Escape")
                terminal.until("sorted by")
                terminal.type("p")
                terminal.until("Pause run external?")
                terminal.type("y")
                terminal.until("external is paused")
                assert client.run("external").state == "paused"
                terminal.type("7")
                terminal.until("run paused")
            server.send_signal(signal.SIGTERM)
            server.communicate(timeout=LIMIT_S)
            terminal.until("The server does not answer")
        with up(tmp_path):  # on another port: the dashboard does not guess, it says what to do
            assert "forge-server up" in terminal.screen()
        terminal.type("q")
        terminal.until(lambda text: text.rstrip().endswith("ready$"))
        terminal.command("echo $?")
        terminal.until(lambda text: "\n0\n" in text)


def test_up_with_the_dashboard_is_two_processes_and_leaves_none(tmp_path: Path) -> None:
    (tmp_path / "forge.toml").write_text(QUIET)
    with tmux(tmp_path, 80, 24) as terminal:
        terminal.command(forge("up", "--tui"))
        terminal.until("Nothing has run yet")
        address = tmp_path / "forge-data" / "control.url"
        pid = int((tmp_path / "forge-data" / "server.lock").read_text())
        assert Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[3:4] == [b"up"]
        terminal.type("q")
        terminal.until(lambda text: text.rstrip().endswith("ready$"))
        assert not address.exists()
        assert not Path(f"/proc/{pid}").exists()
        assert "stopping" in (tmp_path / "forge-data" / "server.log").read_text()


def test_what_keeps_the_server_from_starting_is_told(tmp_path: Path) -> None:
    (tmp_path / "forge.toml").write_text(QUIET + '[engine]\nkind = "managed"\nmodel = "absent"\n')
    with tmux(tmp_path, 200) as terminal:
        terminal.command(forge("up", "--tui"))
        terminal.until("there is no model")
    with up(tmp_path):
        done = subprocess.run(
            [*FORGE, "up", "--tui"],
            cwd=tmp_path,
            env=environ(),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert done.returncode == 2 and "runs here already" in done.stderr


def test_without_a_terminal_it_says_so(tmp_path: Path) -> None:
    done = subprocess.run(
        [*FORGE, "tui", "--url", "http://127.0.0.1:9"], capture_output=True, text=True, timeout=LIMIT_S, env=environ(),
        stdin=subprocess.DEVNULL, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 1 and "needs a terminal" in done.stderr
