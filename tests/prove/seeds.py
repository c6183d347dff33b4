"""The demo on several seeds, and the control with learning rate 0: does the policy really get better?

    python tests/prove/seeds.py [--seeds 1 2 3 4 5] [--folder FOLDER] [--out FILE]

Each seed is one ``forge-server demo`` in a folder of its own, one after the other; the figures are read from
the database that it leaves. Gain: held-out reward of the last version less that of version 0, paired by task.
All seeds but one must gain 0.2 or more within 25 minutes each, and the control less than 0.05; else exit
status 1. FILE gets one JSON line per demo, whatever came out of it. Hours, on two cores.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import sqlalchemy as sa

from forge_server import environments
from forge_server import settings as config_tree
from forge_server.api import views
from forge_server.client.schemas import StepMetrics
from forge_server.demo import summary
from forge_server.store import tables as t

RUN = "demo"
GAIN, MINUTES, CONTROL_GAIN = 0.2, 25.0, 0.05
MAY_MISS = 1
"""So many of the seeds may gain less; with five seeds four must reach the limit."""


class Result(msgspec.Struct, kw_only=True):
    """One demo. Intervals are 95 %. ``error``: why there are no figures."""

    seed: int
    control: bool
    minutes: float
    before: float | None = None
    before_interval: tuple[float, float] | None = None
    after: float | None = None
    after_interval: tuple[float, float] | None = None
    gain: float | None = None
    gain_interval: tuple[float, float] | None = None
    tasks: int = 0
    curve: list[tuple[int, float]] = []
    error: str = ""

    @property
    def passed(self) -> bool:
        if self.gain is None:
            return False
        return self.gain < CONTROL_GAIN if self.control else self.gain >= GAIN and self.minutes <= MINUTES


def measure(folder: Path, *, seed: int, control: bool, minutes: float) -> Result:
    """The figures of the demo in ``folder``. Raises ValueError when it was not measured twice."""
    engine = sa.create_engine(config_tree.load(folder / "forge.toml", {}).store_url)
    try:
        with engine.connect() as connection:
            run = views.run_row(connection, RUN)
            steps = sa.select(t.step_metrics).where(t.step_metrics.c.run_id == run.id)
            steps = steps.order_by(t.step_metrics.c.step)
            metrics = [
                StepMetrics(step=row.step, source=row.source, metrics=row.metrics, at=row.at)
                for row in connection.execute(steps)
            ]
            wanted = sa.select(t.rollouts).where(t.rollouts.c.run_id == run.id)
            rollouts = views.rollout_views(connection, connection.execute(wanted).all())
    finally:
        engine.dispose()
    rounds = [m.metrics for m in metrics if m.source == "eval"]
    if len(rounds) < 2:
        raise ValueError(f"{len(rounds)} held-out rounds instead of two or more")
    first, last = rounds[0], rounds[-1]
    gain = summary.gain_of(rollouts, int(first["version"] or 0), int(last["version"] or 0))
    if gain is None:
        raise ValueError("no held-out task was measured under both versions")
    return Result(
        seed=seed,
        control=control,
        minutes=minutes,
        before=first["reward/mean"],
        before_interval=_interval(first),
        after=last["reward/mean"],
        after_interval=_interval(last),
        gain=gain.gain,
        gain_interval=(gain.low, gain.high),
        tasks=gain.tasks,
        curve=summary.curve(metrics),
    )


def _interval(metrics: dict[str, float | None]) -> tuple[float, float]:
    return metrics["reward/low95"] or 0.0, metrics["reward/high95"] or 0.0


def demo(folder: Path, seed: int, control: bool) -> Result:
    """Run one demo to its end; its output goes to ``FOLDER.log``."""
    command = [sys.executable, "-m", "forge_server.cli", "demo", "--folder", str(folder), "--seed", str(seed)]
    log = folder.with_suffix(".log")
    began = time.monotonic()
    with log.open("wb") as output:
        done = subprocess.run(
            [*command, *(["--control"] if control else [])], stdout=output, stderr=subprocess.STDOUT
        )
    minutes = (time.monotonic() - began) / 60
    try:
        if done.returncode != 0:
            raise ValueError(f"exit status {done.returncode}; see {log}")
        return measure(folder, seed=seed, control=control, minutes=minutes)
    except Exception as error:  # one demo that failed is a result, and the others still count
        return Result(seed=seed, control=control, minutes=minutes, error=f"{type(error).__name__}: {error}")


def told(result: Result) -> str:
    """A result for people: figures, then the reward curve of its training tasks."""
    name = f"seed {result.seed}" + (", control (learning rate 0)" if result.control else "")
    if result.gain is None:
        return f"{name}: FAILED after {result.minutes:.1f} min: {result.error}"
    lines = [
        f"{name}: held-out {_figure(result.before, result.before_interval)} -> "
        f"{_figure(result.after, result.after_interval)}, gain {_figure(result.gain, result.gain_interval)}, "
        f"{result.tasks} tasks, {result.minutes:.1f} min: {'passed' if result.passed else 'MISSED'}"
    ]
    return "\n".join([*lines, *summary.plot(result.curve)])


def _figure(value: float | None, interval: tuple[float, float] | None) -> str:
    low, high = interval or (0.0, 0.0)
    return f"{value:.3f} [{low:.3f}, {high:.3f}]"


def verdict(results: Sequence[Result]) -> bool:
    """Whether the seeds and the control came out as they must."""
    seeds = [result for result in results if not result.control]
    controls = [result for result in results if result.control]
    needed = max(1, len(seeds) - MAY_MISS)
    reached = sum(result.passed for result in seeds)
    print(f"\n{reached} of {len(seeds)} seeds gained {GAIN} within {MINUTES:g} minutes; needed: {needed}")
    print(f"{sum(c.passed for c in controls)} of {len(controls)} controls gained less than {CONTROL_GAIN}")
    return reached >= needed and bool(controls) and all(control.passed for control in controls)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--folder", type=Path, help="work here (default: a new temporary folder)")
    parser.add_argument("--out", type=Path, help="JSON lines (default: results.jsonl in the folder)")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="forge-seeds-"))
    folder.mkdir(parents=True, exist_ok=True)
    out = options.out or folder / "results.jsonl"
    for name in environments.OWN:
        environments.ensure(name)  # installs are not counted
    print(f"working in {folder}, results in {out}, {os.cpu_count()} cores", flush=True)
    plan = [*((seed, False) for seed in options.seeds), (options.seeds[0], True)]
    results = []
    with out.open("a") as lines:
        for seed, control in plan:
            result = demo(folder / (f"control-{seed}" if control else f"seed-{seed}"), seed, control)
            results.append(result)
            row = msgspec.to_builtins(result) | {"passed": result.passed}
            lines.write(json.dumps(row) + "\n")
            lines.flush()
            print(f"\n{told(result)}", flush=True)
    return 0 if verdict(results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
