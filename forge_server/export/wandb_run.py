"""A run's figures as a run of Weights & Biases that waits to be uploaded: ``wandb sync`` takes it.

The library writes it, offline, in a folder that is thrown away but for the one file that matters: nothing is asked,
looked up, sent or told about this machine.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from forge_server import extras
from forge_server.export.figures import Figures, figures
from forge_server.export.whole import ExportError, make_folder, whole_file
from forge_server.store import tables as t

PROJECT = "forge-server"


def export_wandb(connection: Connection, run_id: str, folder: Path) -> tuple[Path, int]:
    """Write ``folder/offline-run-…/run-RUN.wandb``; the file and how many values it has.

    Raises ExportError, and ConfigError when the library is not installed.
    """
    extras.require("wandb", "wandb", wanted_by="--format wandb")
    run = connection.execute(sa.select(t.runs).where(t.runs.c.id == run_id)).one()
    found = figures(connection, run_id)
    stamp = time.strftime("%Y%m%d_%H%M%S", time.gmtime(run.created_at))
    path = folder / f"offline-run-{stamp}-{run_id}" / f"run-{run_id}.wandb"
    make_folder(path.parent)
    with tempfile.TemporaryDirectory(prefix="forge-wandb-") as scratch, whole_file(path) as target:
        shutil.copyfile(_written(Path(scratch), run, found), target)
    path.with_name(f"{path.name}.synced").unlink(missing_ok=True)  # what is new is not uploaded yet
    return path, sum(len(one.values) for one in found)


def _written(scratch: Path, run: Any, found: list[Figures]) -> Path:
    with _alone():
        import wandb

        settings = wandb.Settings(
            mode="offline",
            root_dir=str(scratch),
            console="off",
            silent=True,
            disable_code=True,
            disable_git=True,
            host=PROJECT,
            x_disable_meta=True,
            x_disable_stats=True,
            x_save_requirements=False,
        )
        try:
            with wandb.init(
                project=PROJECT,
                id=run.id,
                name=run.name,
                job_type=run.kind,
                config=run.settings,
                settings=settings,
            ) as made:
                for step, rows in groupby(found, key=lambda one: one.step):
                    made.log(_merged(list(rows)), step=step)
        except wandb.Error as error:
            raise ExportError(
                f"wandb: {error}", where=run.name, mend="--format tensorboard needs no library"
            ) from error
        finally:
            wandb.teardown()  # only then has its process written everything
    (file,) = scratch.glob("wandb/offline-run-*/run-*.wandb")
    return file


def _merged(rows: list[Figures]) -> dict[str, float]:
    """One step of all sources, at the time of its last figure."""
    values = {name: value for row in rows for name, value in row.values.items()}
    return values | {"_timestamp": max(row.at for row in rows)}


@contextmanager
def _alone() -> Iterator[None]:
    """The library hears nothing from the environment, but that it is not to report its errors to its makers, nor to
    start or praise another library of theirs."""
    before = dict(os.environ)
    for name in before:
        if "WANDB" in name:
            del os.environ[name]
    os.environ |= {"WANDB_ERROR_REPORTING": "false", "WANDB_DISABLE_WEAVE": "true"}
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
