"""``forge-server analyze``: a run as a report, on the console or as an HTML page."""

from pathlib import Path

import msgspec

from forge_server import settings as config_tree
from forge_server.commands import cost, drift
from forge_server.commands import show as out
from forge_server.domain.errors import ConfigError
from forge_server.export.records import find_run
from forge_server.services.analysis.gather import Analysis, analyse
from forge_server.services.analysis.page import render
from forge_server.store.database import Store

COLUMNS = (
    "name",
    "rollouts",
    "valid",
    "reward",
    "pass_at_1",
    "pass_at_k",
    "pass_hat_k",
    "calls",
    "seconds",
    "failures",
)

TASKS = 20
"""Shown on the console; the page shows more, ``--json`` all."""


def analyze(run: str, html: str | None, k: int | None, config: str | None, as_json: bool) -> None:
    """Reads the database beside a server that may run. Raises ConfigError, NotFound, StoreError."""
    settings = config_tree.load(config_tree.find_file(config))
    store = Store.open(settings.store_url, lock=False)
    try:
        found = analyse(store, find_run(store, run, settings.engine.max_model_len), settings.cost, k)
    finally:
        store.close()
    if html is not None:
        _write(Path(html), render(found))
    if as_json:
        print(msgspec.json.encode(found).decode())
    elif html is not None:
        out.console.print(f"{html}: {found.cost.ended} rollouts of {len(found.by_task)} tasks")
    else:
        _show(found)


def _write(file: Path, page: str) -> None:
    try:
        file.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"the report cannot be written ({error.strerror})", where=str(file), mend="choose another --html"
        ) from None


def _show(found: Analysis) -> None:
    run = found.run
    out.console.print(
        f"[bold]{out.text(run.name)}[/]: {run.kind} run, {run.state}, step {run.step}; k is {found.k}\n"
    )
    tasks = sorted(found.by_task, key=lambda row: (row.reward is None, row.reward or 0.0, row.name))
    shown = f"tasks, the lowest rewards of {len(tasks)}" if len(tasks) > TASKS else "tasks"
    for what, rows in (*found.by_harness.items(), (shown, tasks[:TASKS])):
        out.console.print(f"[bold]{what}[/]")
        out.rows(rows, COLUMNS, False, empty="no rollouts yet")
        out.console.print()
    out.console.print(f"ended: {out.text(found.failures)}")
    cost.show(found.cost)
    out.console.print()
    drift.show(run.name, found.drift)
