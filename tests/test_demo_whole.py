"""The README's first command, shortened: the demo runs from nothing and its policy gets better."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.verl, pytest.mark.sandbox, pytest.mark.timeout(2400)]

VERSIONS = 6


def test_the_demo_ends_with_a_better_policy(engine_env: Path, trainer_env: Path, tmp_path: Path) -> None:
    """Six versions instead of twelve. The full recipe on five seeds is `make prove-1`."""
    folder = tmp_path / "forge-demo"
    command = [sys.executable, "-m", "forge_server.cli"]
    words = ["demo", "--folder", str(folder), "--seed", "7", "--versions", str(VERSIONS)]
    done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=2300, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Reward per policy version" in done.stdout

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
    gain = float(done.stdout.split("gain ")[1].split()[0])
    assert gain >= 0.1
