"""The README's first command, shortened: the demo runs from nothing and its policy gets better. In a real terminal the
dashboard watches it."""

import contextlib
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forge_tui.plot import number
from forge_tui.words import short
from test_tui_terminal import Tmux, forge, tmux

from forge_server.client.http import ForgeClient
from forge_server.domain.errors import ForgeError

pytestmark = [pytest.mark.vllm, pytest.mark.verl, pytest.mark.sandbox, pytest.mark.timeout(2400)]

VERSIONS = 4
LIMIT_S = 2300.0


def test_the_demo_ends_with_a_better_policy(engine_env: Path, trainer_env: Path, tmp_path: Path) -> None:
    """Four versions instead of twelve. The full recipe on five seeds is `make prove-1`."""
    folder = tmp_path / "forge-demo"
    command = [sys.executable, "-m", "forge_server.cli"]
    words = ["demo", "--folder", str(folder), "--seed", "7", "--versions", str(VERSIONS)]
    printed = tmp_path / "printed"
    with printed.open("w") as out, subprocess.Popen([*command, *words], stdout=out, stderr=out) as demo:
        try:
            with tmux(tmp_path, 160, 50) as terminal:
                url, key = training(folder, demo)
                terminal.command(forge("tui", "--url", url, "--key", key))
                with ForgeClient(url, key) as client:
                    walk(terminal, client)
                demo.wait(LIMIT_S)
                terminal.until("The server does not answer")
                terminal.type("q")
                terminal.until(lambda text: text.rstrip().endswith("ready$"))
                terminal.command("echo $?")
                terminal.until(lambda text: "\n0\n" in text)
        finally:
            demo.send_signal(signal.SIGINT)  # ends what it has started, should it still be there
    told = printed.read_text()
    print(told)
    assert demo.returncode == 0, told
    assert "Reward per policy version" in told

    def cli(*given: str) -> str:
        return subprocess.run(
            [*command, *given], cwd=folder, capture_output=True, text=True, timeout=120, check=True
        ).stdout

    report = json.loads(cli("check", "--data", "demo", "--json"))
    assert report["violations"] == []
    assert report["counts"]["attempts.in_batches"] >= VERSIONS * 64
    cost = json.loads(cli("run", "show", "demo", "--cost", "--json"))["cost"]
    assert abs(sum(cost["loop"].values()) - cost["wall_s"]) <= 0.05 * cost["wall_s"]
    assert cost["loop"]["wait_s"] <= 0.05 * cost["wall_s"]  # what is in no phase of the loop
    assert cost["solved"] > 0 and cost["pod_hours"] > 0
    drift = json.loads(cli("drift", "demo", "--json"))
    assert drift["trained_calls"] > drift["samples"] > 0  # the harness only appends: calls merge into samples
    # the harness only appends; what breaks all the same was sampled in tokens that no tokenizer would have chosen
    assert drift["reasons"]["first"]["samples"] >= 0.95 * drift["samples"]
    gain = float(told.split("gain ")[1].split()[0])
    assert gain >= 0.1


def training(folder: Path, demo: "subprocess.Popen[bytes]") -> tuple[str, str]:
    """Address and key of the demo's server, once a step has been trained."""
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end and demo.poll() is None:
        with contextlib.suppress(FileNotFoundError, ForgeError):
            url = (folder / "forge-data" / "control.url").read_text().strip()
            key = (folder / "forge-data" / "admin.key").read_text().strip()
            with ForgeClient(url, key) as client:
                if any(step.source == "trainer" for step in client.metrics("demo")):
                    return url, key
        time.sleep(1.0)
    raise AssertionError("the demo has trained nothing")


def solved(text: str, before: int, client: ForgeClient) -> bool:
    """Whether the screen's number lies between what it was and what it is: several are solved every second."""
    shown = re.search(r"(\d+) of \d+ rollouts solved", text)
    return shown is not None and before <= int(shown[1]) <= client.cost("demo").solved


def walk(terminal: Tmux, client: ForgeClient) -> None:
    """Through all screens: each shows what the API says. What goes on meanwhile is asked for again."""

    def figure(source: str, name: str) -> str:
        return number([step.metrics[name] for step in client.metrics("demo") if step.source == source][-1])

    def ids() -> set[str]:
        return {short(row.id) for row in client.rollout_page(limit=200, run="demo").items}

    def healthy(text: str) -> bool:
        found = client.overview()
        assert found.run is not None and found.policy is not None
        return all(
            fact in text
            for fact in (
                " demo ▶ active ",
                "● live",
                f" v{found.policy.version} ",
                f"step {found.run.step}/{VERSIONS} ",
                f"now {figure('controller', 'reward/mean')} ",
                f"held-out {figure('eval', 'reward/mean')}",
                f"/{found.in_flight} in flight",
            )
        )

    terminal.until(healthy)
    terminal.type("2")
    terminal.until(lambda text: "sorted by created" in text and len(ids() & set(text.split())) > 10)
    terminal.type("o")
    shown = terminal.until(lambda text: "outcome:completed" in text and "✔ completed" in text)
    assert "▶ running" not in shown
    terminal.type("Enter")
    shown = terminal.until("Reward and evidence")
    rollout = client.rollout(shown.split()[0]).rollout
    assert rollout.outcome == "completed" and rollout.task is not None
    assert f"reward {rollout.reward:.2f}" in shown and f"{rollout.task} in react" in shown
    terminal.until("verifier said")
    terminal.type("2")
    terminal.until("Which number is in ")
    terminal.type("Escape")  # alone: with the next key it would be another
    terminal.until("sorted by created")
    terminal.type("3")
    terminal.until(
        lambda text: (
            f"Reward {figure('controller', 'reward/mean')} " in text
            and f"Gradient norm {figure('trainer', 'grad_norm')} " in text
            and all(f"v{policy.version} " in text for policy in client.policies())
        )
    )
    terminal.type("4")
    terminal.until(lambda text: "1 harnesses" in text and "▌react" in text)
    terminal.type("5")
    tasks = {each.name for each in client.compare("demo", "task")}
    terminal.until(lambda text: len(tasks & set(text.replace("▌", " ").split())) > 10)
    before = client.cost("demo").solved
    terminal.type("6")
    terminal.until(lambda text: "attempts are in flight" in text and solved(text, before, client))
    terminal.type("7")
    terminal.until(
        lambda text: (
            {str(event.id) for event in client.history(limit=200).items} & set(text.split())
            and len(ids() & set(text.split())) > 10
        )
    )
    terminal.type("1")
    terminal.until(healthy)
