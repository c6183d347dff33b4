"""``run show --plot``: curves on a terminal of 80 columns, and plain text everywhere else."""

import io
import math
from pathlib import Path

import pytest
import sqlalchemy as sa
from api_rig import rig
from rich.cells import cell_len
from rich.console import Console
from test_cli_commands import Forge, forge

from forge_server.client.schemas import EventView
from forge_server.commands import curves
from forge_server.commands import show as out
from forge_server.store import tables as t

__all__ = ["forge"]

BRAILLE = {chr(code) for code in range(0x2800, 0x2900)}


async def recorded(folder: Path, steps: int) -> None:
    """A run ``r`` that took so many steps, with two attempts, in the database of ``forge.toml`` there."""
    async with rig(folder) as api:
        run = (await api.create_run("r"))["id"]

        def rows(c: sa.Connection) -> None:
            for step in range(1, steps + 1):
                for source, metrics in (
                    ("controller", {"reward/mean": 1 - 1 / step, "seconds/train": 3.0}),
                    ("trainer", {"loss": -0.5 / step, "grad_norm": None}),
                ):
                    row = {"run_id": run, "step": step, "source": source, "at": 1.0 * step}
                    c.execute(sa.insert(t.step_metrics).values(metrics=metrics, **row))
            c.execute(
                sa.insert(t.step_metrics).values(
                    run_id=run, step=steps, source="eval", metrics={"reward/mean": 0.75}, at=1.0
                )
            )
            for at, kind, attempt in (
                (10.0, "attempt_launching", "at-1"),
                (20.0, "attempt_launching", "at-2"),
                (30.0, "attempt_ended", "at-1"),
                (50.0, "attempt_ended", "at-2"),
            ):
                row = {"run_id": run, "attempt_id": attempt, "at": at, "kind": kind}
                c.execute(sa.insert(t.events).values(data={}, **row))

        await api.server.store.write(rows)
    (folder / "forge.toml").touch()


async def test_curves_are_drawn(tmp_path: Path, forge: Forge, monkeypatch: pytest.MonkeyPatch) -> None:
    await recorded(tmp_path, 30)
    said = forge("run", "show", "r", "--plot").fine()
    assert "\x1b" not in said
    drawn = said[said.index("Reward") :].splitlines()
    assert 76 < max(map(cell_len, drawn)) <= 80 and all(line == line.rstrip() for line in drawn)
    titles = " ".join(line for line in drawn if "──" in line)
    for title in ("Reward 0.967", "Held-out reward 0.75", "Loss -0.0167", "In flight, over time 1"):
        assert title in titles
    assert "Gradient norm" not in titles and "step 1 controller" not in said
    assert {letter for line in drawn for letter in line} & BRAILLE
    assert forge("run", "show", "r", "--plot", "--json").failed(2, "--plot")
    terminal = Console(file=io.StringIO(), force_terminal=True, width=150, highlight=False)
    monkeypatch.setattr(out, "console", terminal)
    forge("run", "show", "r", "--plot").fine()
    painted = terminal.file.getvalue()
    assert "\x1b[1;2mReward" in painted and "48;2;" not in painted  # the terminal keeps its background
    assert "Loss" in next(line for line in painted.splitlines() if "Held-out" in line)  # three columns


async def test_a_run_without_steps_says_so(tmp_path: Path, forge: Forge) -> None:
    async with rig(tmp_path) as api:
        await api.create_run("r")
    (tmp_path / "forge.toml").touch()
    assert "This run has trained no step." in forge("run", "show", "r", "--plot").fine()


def event(at: float, kind: str, attempt: str) -> EventView:
    return EventView(
        id=1, at=at, kind=kind, data={}, run_id="ru-1", rollout_id="ro-1", attempt_id=f"at-{attempt}"
    )


def test_attempts_in_flight() -> None:
    started = [event(0.0, "attempt_launching", "1"), event(30.0, "attempt_launching", "2")]
    ended = [event(90.0, "attempt_ended", "1"), event(120.0, "attempt_ended", "2")]
    before = event(10.0, "attempt_ended", "0")
    found = curves.in_flight([*ended[::-1], started[1], before, started[0]])
    assert found == [1.0] * 30 + [2.0] * 60 + [1.0] * 30 and len(found) == curves.SLOTS
    means = curves.in_flight(
        [event(1.0, "attempt_ended", "1"), event(0.5, "attempt_launching", "2"), started[0]]
    )
    assert math.fsum(means) / curves.SLOTS == pytest.approx(1.5)
    assert curves.in_flight([]) == curves.in_flight([before]) == curves.in_flight(started[:1]) == []
