"""``forge-server run …``"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from forge_server import settings as config_tree
from forge_server.client.http import ForgeClient
from forge_server.client.schemas import RunPatch
from forge_server.commands import cost, curves
from forge_server.commands import show as out
from forge_server.commands.source import reading
from forge_server.domain import mixture
from forge_server.domain.errors import InvalidRequest

COLUMNS = ("name", "id", "kind", "state", "step", "rollouts", "reason")


def create(file: str, url: str | None, key: str | None) -> None:
    tables = config_tree.run_tables(Path(file))
    with ForgeClient(url, key) as client:
        for table in tables:
            view = client.create_run(table)
            out.console.print(f"{view.name}  {view.id}  {view.state}")


def listing(url: str | None, key: str | None, as_json: bool) -> None:
    with reading(url, key) as source:
        out.rows(source.runs(), COLUMNS, as_json, empty="no runs yet; add a \\[\\[run]] to forge.toml")


def show(run: str, url: str | None, key: str | None, *, as_json: bool, with_cost: bool, plot: bool) -> None:
    if plot and as_json:
        raise InvalidRequest("--plot draws for people", mend="leave out --plot or --json")
    with reading(url, key) as source:
        view = source.run(run)
        metrics = source.metrics(view.id)
        spent = source.cost(view.id) if with_cost else None
        attempts = list(source.all_events(view.id, curves.ATTEMPTS)) if plot else []
    if as_json:
        out.one({"run": view, "metrics": metrics} | ({"cost": spent} if spent else {}), True)
        return
    out.one(view, False)
    if plot:
        curves.show(metrics, attempts)
    for step in () if plot else metrics:
        shown = {name: value for name, value in step.metrics.items() if value is not None}
        out.console.print(f"[bold]step {step.step} {step.source}[/]  {out.text(shown)}", soft_wrap=True)
    if spent is not None:
        cost.show(spent)


def change(run: str, n: int | None, harnesses: Sequence[str], url: str | None, key: str | None) -> None:
    weights = mixture.read(harnesses) or None
    if n is None and weights is None:
        raise InvalidRequest(
            "nothing is to be changed", mend="give --in-flight N or --harness NAME=WEIGHT, as often as needed"
        )
    with ForgeClient(url, key) as client:
        view = client.patch_run(run, RunPatch(in_flight=n, harnesses=weights))
    if weights:
        out.console.print(f"{view.name}  groups are drawn in {mixture.shares(view.harnesses)} from now on")
    if n is not None:
        out.console.print(f"{n} attempts in flight, of all runs together")


def evaluate(run: str, url: str | None, key: str | None) -> None:
    with ForgeClient(url, key) as client:
        found = client.evaluate_run(run)
    what = f"{found.tasks} tasks of split {found.split}, {found.k} rollouts each"
    out.console.print(f"{run}  version {found.version} of step {found.step} is measured: {out.text(what)}")


def checkpoint(run: str, url: str | None, key: str | None) -> None:
    with ForgeClient(url, key) as client:
        out.console.print(f"{run}  {client.checkpoint_run(run).detail}")


def act(run: str, action: Literal["pause", "resume", "cancel"], url: str | None, key: str | None) -> None:
    with ForgeClient(url, key) as client:
        view = client.patch_run(run, RunPatch(action=action))
        out.console.print(f"{view.name}  {view.state}  {out.text(view.reason)}")
