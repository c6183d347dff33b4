"""Exports, drift and data check over a real database: what is written, what is left out and why."""

import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sqlalchemy as sa
from pyarrow import ipc
from test_trajectory_codec import rows_of
from test_trajectory_samples import SYSTEM, call, grow

from forge_server.domain.call import Call
from forge_server.domain.errors import NotFound
from forge_server.domain.sample import Sample
from forge_server.domain.states import Delivery, Untrainable
from forge_server.export import reports, write
from forge_server.export.records import Run, find_run
from forge_server.export.table import Words
from forge_server.export.whole import ExportError
from forge_server.export.write import export_run
from forge_server.store import tables as t
from forge_server.store.database import Store
from forge_server.trajectory.attempt import cut

WINDOW = 4096
_STRIDE = 100_000  # between call ids of two attempts


def straight() -> list[Call]:
    return [call(i, p, c) for i, (p, c) in enumerate(grow(3, SYSTEM))]


def broken() -> list[Call]:
    return [
        call(0, SYSTEM, [1, 2, 3]),
        call(1, [*SYSTEM, 9, 9, 9], [4], finish_reason="length"),
        call(2, [7, 7], [5], untrainable=Untrainable.CONSTRAINED),
        call(3, [7, 7], [6], delivered=Delivery.UNKNOWN),
    ]


ROLLOUTS: list[dict[str, Any]] = [
    {"id": "ro-01", "outcome": "completed", "kind": "ok", "reward": 1.0, "calls": straight()},
    {"id": "ro-02", "outcome": "policy_failure", "kind": "agent_timeout", "reward": 0.25, "calls": broken()},
    {"id": "ro-03", "outcome": "infra_failure", "kind": "engine_error", "reward": None, "calls": straight()},
    {
        "id": "ro-04",
        "outcome": "completed",
        "kind": "ok",
        "reward": 1.0,
        "calls": straight(),
        "hole": "call_missing",
    },
    {"id": "ro-05", "outcome": "completed", "kind": "ok", "reward": 1.0, "calls": straight(), "spoil": True},
    {
        "id": "ro-06",
        "outcome": "completed",
        "kind": "ok",
        "reward": 0.0,
        "calls": [call(0, [1], [2], delivered=Delivery.NO)],
    },
    {"id": "ro-07", "outcome": "completed", "kind": "ok", "reward": 1.0, "calls": straight(), "mode": "eval"},
    {"id": "ro-08", "outcome": None, "kind": None, "reward": None, "calls": [], "state": "active"},
    {"id": "ro-09", "outcome": "cancelled", "kind": "cancelled", "reward": None, "calls": []},
    {
        "id": "ro-10",
        "outcome": "completed",
        "kind": "ok",
        "reward": None,
        "calls": straight(),
        "mode": "record",
    },
]
LEFT_OUT = Counter(
    {
        "infra_failure": 1,
        "call_missing": 1,
        "corrupt_record": 1,
        "nothing_trainable": 1,
        "evaluation": 1,
        "rollout_active": 1,
        "cancelled": 1,
    }
)


def fill(connection: sa.Connection, model: Path) -> None:
    """One run of ten rollouts, as the server would have recorded it."""

    def put(table: sa.Table, **row: Any) -> None:
        connection.execute(sa.insert(table).values(row))

    put(
        t.runs,
        id="ru-1",
        name="first",
        kind="train",
        state="active",
        settings={"policy": "p"},
        created_at=1.0,
    )
    put(t.policies, name="p", version=0, state="live", path=str(model), created_at=1.0)
    task = {"instruction": "x", "definition": {}, "digest": "d", "created_at": 1.0}
    put(t.tasks, id="ta-1", taskset="set", name="one", **task)
    put(t.groups, id="gr-1", run_id="ru-1", task_id="ta-1", step=1, mode="train", size=9, created_at=1.0)
    for number, spec in enumerate(ROLLOUTS):
        state, mode = spec.get("state", "ended"), spec.get("mode", "train")
        attempt = spec["id"].replace("ro", "at")
        put(
            t.rollouts,
            id=spec["id"],
            run_id="ru-1",
            group_id=None if mode == "record" else "gr-1",
            task_id="ta-1",
            harness="react",
            mode=mode,
            state=state,
            outcome=spec["outcome"],
            kind=spec["kind"],
            reward=spec["reward"],
            final_attempt_id=attempt if state == "ended" else None,
            created_at=1.0,
        )
        put(
            t.attempts,
            id=attempt,
            rollout_id=spec["id"],
            number=1,
            state="ended" if state == "ended" else "running",
            backend="local",
            outcome=spec["outcome"],
            not_trained=spec.get("hole", ""),
            created_at=1.0,
        )
        record(connection, attempt, spec["calls"], number * _STRIDE, spoil=bool(spec.get("spoil")))


def record(connection: sa.Connection, attempt: str, calls: list[Call], base: int, *, spoil: bool) -> None:
    for row, c in zip(rows_of(calls), calls, strict=True):
        columns = msgspec.structs.asdict(row)
        tokens = {name: columns.pop(name) for name in ("data", "prompt_digest", "media")}
        columns["id"] += base
        if row.storage_parent_id is not None:
            columns["storage_parent_id"] += base
        columns |= {
            "attempt_id": attempt,
            "dialect": "chat",
            "mode": "record",
            "request_digest": b"",
            "began_at": 1.0,
            "ended_at": 2.0,
            "prompt_len": c.prompt.size,
            "completion_len": c.completion.size,
        }
        connection.execute(sa.insert(t.calls).values(columns))
        if spoil:
            tokens["prompt_digest"] = b"?" * 16
        connection.execute(sa.insert(t.call_tokens).values(call_id=columns["id"], **tokens))


@pytest.fixture
async def store(database_url: str, tmp_path: Path) -> AsyncIterator[Store]:
    model = tmp_path / "model"
    model.mkdir()
    (model / "tokenizer.json").write_text("{}")
    (model / "chat_template.jinja").write_text("{{ messages }}")
    opened = Store.open(database_url, create=True)
    await opened.write(lambda connection: fill(connection, model))
    yield opened
    opened.close()


@pytest.fixture
def run(store: Store) -> Run:
    return find_run(store, "first", WINDOW)


def expected() -> list[tuple[str, Sample]]:
    """The samples of the rollouts that may be written, straight from the calls."""
    out = []
    for spec in (ROLLOUTS[0], ROLLOUTS[1], ROLLOUTS[9]):
        out += [(spec["id"], sample) for sample in cut(rows_of(spec["calls"]), WINDOW).samples]
    return out


def same(rows: list[dict[str, Any]]) -> None:
    """``rows`` hold exactly the expected samples."""
    wanted = expected()
    assert [row["rollout_id"] for row in rows] == [id for id, _ in wanted]
    for row, (_, sample) in zip(rows, wanted, strict=True):
        for name in ("tokens", "loss_mask", "logprobs", "versions"):
            assert np.array_equal(np.asarray(row[name], getattr(sample, name).dtype), getattr(sample, name))
        assert [(s["prompt_end"], s["end"], s["owned"], s["finish"]) for s in row["call_spans"]] == [
            (s.prompt_end, s.end, s.owned, s.finish_reason) for s in sample.spans
        ]
        assert [s["start"] for s in row["call_spans"]] == [0, *(s.end for s in sample.spans[:-1])]
        assert (row["prompt_len"], row["sample_index"]) == (sample.prompt_len, sample.index)
        assert (row["min_version"], row["max_version"]) == (sample.min_version, sample.max_version)
        assert row["valid"] is True and row["advantage"] is None and row["mm"] == []


def test_parquet_holds_every_valid_sample_and_says_what_is_left_out(
    store: Store, run: Run, tmp_path: Path
) -> None:
    path = tmp_path / "out.parquet"
    report = export_run(store, run, "parquet", path)
    read = pq.read_table(path)
    rows = read.to_pylist()
    same(rows)
    assert report.left_out == LEFT_OUT
    assert (report.rows, report.rollouts) == (4, 3)
    assert report.trained_tokens == sum(sum(row["loss_mask"]) for row in rows) == 60 + 4 + 60
    assert report.untrained == Counter({"constrained": 1, "delivery_unknown": 1})
    assert {row["failure_kind"] for row in rows} == {"ok", "agent_timeout"}
    assert [row["reward"] for row in rows] == [1.0, 0.25, 0.25, None]
    assert [row["group_id"] for row in rows] == ["gr-1", "gr-1", "gr-1", None]
    assert [row["n_samples"] for row in rows] == [1, 2, 2, 1]
    for rollout in {row["rollout_id"] for row in rows}:
        mine = [row for row in rows if row["rollout_id"] == rollout]
        weight = sum(row["loss_weight"] * sum(row["loss_mask"]) for row in mine)
        assert weight == pytest.approx(1.0)  # every rollout weighs the same, however it was cut
    metadata = {key.decode(): value.decode() for key, value in read.schema.metadata.items()}
    assert metadata["schema_version"] == "1"
    assert len(metadata["tokenizer_sha"]) == len(metadata["template_sha"]) == 64
    assert metadata["tokenizer_sha"] != metadata["template_sha"]
    kinds = {field.name: str(field.type) for field in read.schema}
    assert kinds["tokens"].startswith("large_list<") and "int32" in kinds["tokens"]
    assert kinds["loss_weight"] == "float" and kinds["sample_index"] == "int16"
    assert kinds["harness"].startswith("dictionary<values=string")


def test_many_row_groups_read_back_as_one_table(
    store: Store, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write, "ROW_GROUP_TOKENS", 1)
    export_run(store, run, "parquet", tmp_path / "out.parquet")
    assert pq.ParquetFile(tmp_path / "out.parquet").num_row_groups == 4
    same(pq.read_table(tmp_path / "out.parquet").to_pylist())
    export_run(store, run, "arrow", tmp_path / "out.arrow")
    with pa.OSFile(str(tmp_path / "out.arrow")) as file:
        reader = ipc.open_file(file)
        assert reader.num_record_batches == 4
        same(reader.read_all().to_pylist())


def test_a_word_may_come_up_after_the_first_row_group(tmp_path: Path) -> None:
    """The first image, group or task of a run, late in it."""
    words, schema = Words(), pa.schema([("word", pa.dictionary(pa.int32(), pa.string()))])
    batches: list[list[str | None]] = [[None], ["a", None], ["b", "a"]]
    with write._arrow(tmp_path / "out.arrow", schema) as add:
        for values in batches:
            add(pa.record_batch([words.encode("word", values)], schema=schema))
    with pa.OSFile(str(tmp_path / "out.arrow")) as file:
        read = ipc.open_file(file).read_all()["word"].to_pylist()
    assert read == [None, "a", None, "b", "a"]


def test_jsonl_holds_the_same_rows(store: Store, run: Run, tmp_path: Path) -> None:
    export_run(store, run, "jsonl", tmp_path / "out.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    same(rows)
    assert rows[0]["schema_version"] == "1" and len(rows[0]["tokenizer_sha"]) == 64


def test_sft_keeps_what_earned_enough(store: Store, run: Run, tmp_path: Path) -> None:
    report = export_run(store, run, "sft", tmp_path / "out.parquet", min_reward=0.5)
    read = pq.read_table(tmp_path / "out.parquet")
    assert read.column_names == ["tokens", "loss_mask", "rollout_id", "sample_index", "reward"]
    (row,) = read.to_pylist()
    (_, sample), *_ = expected()
    assert row["tokens"] == sample.tokens.tolist() and row["loss_mask"] == sample.loss_mask.tolist()
    assert report.left_out["below_min_reward"] == 3


def test_a_limit_of_the_run_goes_before_the_window(store: Store, run: Run, tmp_path: Path) -> None:
    short = msgspec.structs.replace(run, limit=65)
    report = export_run(store, short, "parquet", tmp_path / "out.parquet")
    rows = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert max(len(row["tokens"]) for row in rows) <= 65
    assert any(row["truncated"] for row in rows) and report.clipped_tokens == 80


def test_a_run_without_samples_is_an_empty_table(store: Store, run: Run, tmp_path: Path) -> None:
    report = export_run(store, run, "parquet", tmp_path / "out.parquet", min_reward=9.0)
    assert report.rows == 0 and pq.read_table(tmp_path / "out.parquet").num_rows == 0


def test_a_file_that_cannot_be_written_is_named_and_the_old_one_stays(
    store: Store, run: Run, tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match="missing"):
        export_run(store, run, "parquet", tmp_path / "missing" / "out.parquet")
    old = tmp_path / "out.jsonl"
    old.write_text("old")
    (tmp_path / ".out.jsonl.part").mkdir()
    with pytest.raises(ExportError, match=r"out\.jsonl"):
        export_run(store, run, "jsonl", old)
    assert old.read_text() == "old"


def test_an_unknown_run_is_named(store: Store) -> None:
    with pytest.raises(NotFound, match="'nothing'"):
        find_run(store, "nothing", WINDOW)


def test_pages_meet_without_a_gap(store: Store, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from forge_server.export import records

    monkeypatch.setattr(records, "PAGE", 3)
    assert [r.id for r in records.rollouts(store, run)] == [spec["id"] for spec in ROLLOUTS]
    assert len(list(records.attempts(store, run))) == len(ROLLOUTS)


def test_the_drift_report_of_a_run(store: Store, run: Run) -> None:
    report = reports.drift(store, run)
    assert report.attempts == 8  # the live one and the one without a call are not in it
    assert report.faults == {"corrupt_record": 1}
    assert report.samples == 1 + 2 + 1 + 1 + 0 + 1 + 1


def test_the_data_check_of_a_run_finds_the_damage_and_nothing_else(store: Store, run: Run) -> None:
    report = reports.check(store, run)
    assert [(v.invariant, v.attempt_id) for v in report.violations] == [("I2", "at-05")]
    assert report.counts["attempts"] == 10 and report.counts["calls"] == 6 * 3 + 4 + 1
