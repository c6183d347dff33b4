"""Writes a run's samples as the canonical table, in memory that does not grow with the run.

Only valid, trainable rows are written; what is left out is counted with its reason.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Literal

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import ipc

from forge_server.export import table
from forge_server.export.identity import identity
from forge_server.export.media import MediaFolder
from forge_server.export.records import Reader, Run, cut_attempt, rollouts
from forge_server.export.report import ExportReport, left_out
from forge_server.export.whole import whole_file
from forge_server.trajectory.attempt import Cut

Format = Literal["parquet", "arrow", "jsonl", "sft"]
ROW_GROUP_TOKENS = 1 << 21
"""Tokens gathered before they are written: some 30 MB."""

Write = Callable[[pa.RecordBatch], None]


def export_run(
    reader: Reader, run: Run, form: Format, path: Path, *, min_reward: float | None = None
) -> ExportReport:
    """Write the samples of ``run``; with ``min_reward`` only of rollouts that got that much.

    Raises ExportError; then there is no file, or the one that was there before.
    """
    report = ExportReport(str(path))
    whose = identity(reader, run)
    schema = table.sft_schema(whose) if form == "sft" else table.schema(whose)
    words = table.Words()
    images = MediaFolder(reader, path)
    with whole_file(path) as part, _WRITERS[form](part, schema) as write:
        for rows in _gather(_rows(reader, run, min_reward, report, blind=form == "sft")):
            for row in rows:
                images.add(row.sample.media)
            write(table.batch(rows, schema, words))
    report.images = len(images)
    return report


def _rows(
    reader: Reader, run: Run, min_reward: float | None, report: ExportReport, *, blind: bool
) -> Iterator[table.Row]:
    """``blind``: rollouts that show images are left out, since what reads the rows gets tokens only."""
    for rollout in rollouts(reader, run):
        reason = left_out(rollout, min_reward)
        found = Cut()
        if not reason and rollout.attempt_id is not None:
            found = cut_attempt(reader, rollout.attempt_id, run.limit)
            reason = found.fault or ("" if found.samples else "nothing_trainable")
        if blind and any(sample.media for sample in found.samples):
            reason = "media"
        if reason:
            report.left_out[reason] += 1
            continue
        report.add(found)
        for sample in found.samples:
            yield table.Row(
                sample=sample,
                n_samples=len(found.samples),
                rollout_tokens=found.trained_tokens,
                rollout_id=rollout.id,
                group_id=rollout.group_id,
                task_id=rollout.task_id,
                harness=rollout.harness,
                reward=rollout.reward,
                kind=rollout.kind or "",
            )


def _gather(rows: Iterator[table.Row]) -> Iterator[list[table.Row]]:
    """Rows in portions of ``ROW_GROUP_TOKENS``."""
    portion: list[table.Row] = []
    tokens = 0
    for row in rows:
        portion.append(row)
        tokens += row.sample.tokens.size
        if tokens >= ROW_GROUP_TOKENS:
            yield portion
            portion, tokens = [], 0
    if portion:
        yield portion


@contextmanager
def _parquet(path: Path, schema: pa.Schema) -> Iterator[Write]:
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        yield writer.write_batch


@contextmanager
def _arrow(path: Path, schema: pa.Schema) -> Iterator[Write]:
    options = ipc.IpcWriteOptions(emit_dictionary_deltas=True)
    with pa.OSFile(str(path), "wb") as sink, ipc.new_file(sink, schema, options=options) as writer:
        yield writer.write_batch


@contextmanager
def _jsonl(path: Path, schema: pa.Schema) -> Iterator[Write]:
    """One object a line, and the table's metadata in each, since there is no other place."""
    metadata = {key.decode(): value.decode() for key, value in schema.metadata.items()}
    encoder = msgspec.json.Encoder()
    with path.open("wb") as file:

        def write(batch: pa.RecordBatch) -> None:
            for i in range(batch.num_rows):
                (row,) = batch.slice(i, 1).to_pylist()
                file.write(encoder.encode({**metadata, **row}) + b"\n")

        yield write


_WRITERS: dict[Format, Callable[[Path, pa.Schema], AbstractContextManager[Write]]] = {
    "parquet": _parquet,
    "sft": _parquet,
    "arrow": _arrow,
    "jsonl": _jsonl,
}
