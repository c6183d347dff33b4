"""``forge-server export``, ``drift`` and ``check --data``: read the database beside a server that may run."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast, get_args

import msgspec

from forge_server import settings as config_tree
from forge_server.commands import drift as explained
from forge_server.commands import show as out
from forge_server.domain.errors import ForgeError
from forge_server.export import reports
from forge_server.export.mappings import MAPPINGS
from forge_server.export.media import FOLDER as MEDIA
from forge_server.export.peers import export_peer
from forge_server.export.records import Run, find_run
from forge_server.export.tensorboard import export_figures
from forge_server.export.wandb_run import export_wandb
from forge_server.export.whole import ExportError
from forge_server.export.write import Format, export_run
from forge_server.store.database import Store

TRACKERS = {"tensorboard": export_figures, "wandb": export_wandb}
"""Formats of a run's figures, not of its samples."""


class DataViolations(ForgeError):
    """The recorded data breaks an invariant."""

    type = "data-violations"


@contextmanager
def _run(name: str, config: str | None) -> Iterator[tuple[Store, Run]]:
    settings = config_tree.load(config_tree.find_file(config))
    store = Store.open(settings.store_url, lock=False)
    try:
        yield store, find_run(store, name, settings.engine.max_model_len)
    finally:
        store.close()


def export(run: str, kind: str, path: str | None, min_reward: float | None, config: str | None) -> None:
    if (kind in MAPPINGS or kind in TRACKERS) and min_reward is not None:
        raise ExportError(
            "rollouts below a reward are part of their group's baseline and of a run's figures",
            where="--min-reward",
            mend=f"leave it out; it goes with {', '.join(get_args(Format))}",
        )
    with _run(run, config) as (store, found):
        if kind in TRACKERS:
            file, count = store.read_now(lambda c: TRACKERS[kind](c, found.id, Path(path or f"{run}.{kind}")))
            out.console.print(f"{file}: {count} figures")
            return
        if kind in MAPPINGS:
            report = export_peer(store, found, kind, Path(path or f"{run}.{kind}.jsonl"))
        else:
            target = Path(path or f"{run}.{'parquet' if kind == 'sft' else kind}")
            report = export_run(store, found, cast(Format, kind), target, min_reward=min_reward)
    out.console.print(
        f"{report.path}: {report.rows} samples of {report.rollouts} rollouts, "
        f"{report.trained_tokens} of {report.tokens} tokens trained"
        + (f", {report.images} images in {Path(report.path).parent / MEDIA}" if report.images else "")
    )
    for what, counts in (("left out", report.left_out), ("calls not trained", report.untrained)):
        if counts:
            out.console.print(f"{what}: {out.text(dict(counts))}")


def drift(run: str, config: str | None, as_json: bool) -> None:
    with _run(run, config) as (store, found):
        report = reports.drift(store, found)
    if as_json:
        print(msgspec.json.encode(report).decode())
        return
    explained.show(run, report)


def check(run: str, config: str | None, as_json: bool) -> None:
    """Raises DataViolations after printing them."""
    with _run(run, config) as (store, found):
        report = reports.check(store, found)
    if as_json:
        print(msgspec.json.encode(report).decode())
    else:
        for name, count in sorted(report.counts.items()):
            out.console.print(f"{count:>10}  {name}")
        for violation in report.violations[:50]:
            out.console.print(
                f"[red]{violation.invariant}[/] {violation.attempt_id} call {violation.call_id}: "
                f"{out.text(violation.what)}"
            )
    if report.violations:
        raise DataViolations(
            f"{len(report.violations)} violations of the invariants",
            where=f"run {run}",
            mend="do not train on this run; its rows tell which attempts are concerned",
        )
    if not as_json:
        out.console.print("the data holds: I1 to I4")
