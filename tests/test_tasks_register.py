"""Registration: idempotent by digest, all or nothing, on both databases. Validation: gold, then nothing."""

import asyncio
import errno
import itertools
import os
import shutil
from pathlib import Path
from typing import Any, NoReturn

import pytest
import sqlalchemy as sa
from test_tasks_load import folder, line  # noqa: F401

from forge_server.client.schemas import TaskCreate
from forge_server.domain.errors import TaskError, TaskUnreadable
from forge_server.services.task_import import TaskImport
from forge_server.store import tables as t
from forge_server.store.database import Store
from forge_server.store.task_rows import TaskRows
from forge_server.tasks import load
from forge_server.tasks.register import Registered, register
from forge_server.tasks.task import Task
from forge_server.tasks.validate import NOTHING, Trial, validate

NUMBERS = itertools.count()


async def add(store: Store, tasks: list[Task], split: str = "train", taskset: str = "set") -> Registered:
    def write(connection: sa.Connection) -> Registered:
        return register(
            TaskRows(connection),
            tasks,
            taskset=taskset,
            split=split,
            now=5.0,
            new_id=lambda prefix: f"{prefix}-{next(NUMBERS)}",
        )

    return await store.write(write)


async def test_registering_again_changes_nothing(database_url: str) -> None:
    store = Store.open(database_url, create=True)
    try:
        tasks = load.from_lines([line(name=f"t{i:03}") for i in range(300)])
        assert await add(store, tasks) == Registered(created=300, unchanged=0)
        assert await add(store, tasks) == Registered(created=0, unchanged=300)
        more = [*tasks, *load.from_lines([line(name="new", split="test")])]
        assert await add(store, more) == Registered(created=1, unchanged=300)
        assert await add(store, tasks[:2], taskset="other", split="test") == Registered(
            created=2, unchanged=0
        )
        rows = await store.read(
            lambda c: c.execute(sa.select(t.tasks).order_by(t.tasks.c.name)).mappings().all()
        )
        assert {row["split"] for row in rows if row["taskset"] == "set" and row["name"] != "new"} == {"train"}
        assert [row["split"] for row in rows if row["name"] == "new"] == ["test"]
        for row in rows[:3]:
            assert load.from_row(row).digest == row["digest"]
    finally:
        store.close()


async def test_a_folder_whose_numbers_are_none_is_told_so(folder: Path, database_url: str) -> None:  # noqa: F811
    """Those of keys that are not ours are not ours to judge, and are kept as what JSON has for them."""
    store = Store.open(database_url, create=True)
    try:
        register_path = TaskImport(store)
        body = TaskCreate(taskset="set", path=str(folder))
        (folder / "task.toml").write_text("[metadata]\nmin_reward = nan\n")
        with pytest.raises(TaskError, match="min_reward is nan"):
            await register_path(body)
        (folder / "task.toml").write_text("[metadata]\nscore = nan\ncreated = 2026-01-02\n")
        assert (await register_path(body)).created == 1
        assert (await register_path(body)).unchanged == 1
        kept = await store.read(lambda c: c.execute(sa.select(t.tasks.c.definition)).scalar_one())
        assert kept == {"metadata": {"score": None, "created": "2026-01-02"}}
    finally:
        store.close()


async def test_changed_content_under_the_same_name_is_an_error_and_adds_nothing(database_url: str) -> None:
    store = Store.open(database_url, create=True)
    try:
        await add(store, load.from_lines([line()]))
        changed = load.from_lines([line(name="another"), line(instruction="Something else.")])
        with pytest.raises(TaskError, match="'copy-7' is registered with other content"):
            await add(store, changed)
        with pytest.raises(TaskError, match="'copy-7' is registered in split 'train', not 'test'"):
            await add(store, load.from_lines([line()]), split="test")
        count = await store.read(
            lambda c: c.execute(sa.select(sa.func.count()).select_from(t.tasks)).scalar_one()
        )
        assert count == 1
    finally:
        store.close()


async def test_registering_again_finds_what_moved_and_gives_what_failed_another_chance(
    folder: Path,  # noqa: F811
    database_url: str,
) -> None:
    store = Store.open(database_url, create=True)
    try:
        there = load.load(folder)
        await add(store, [*there, *load.from_lines([line(), line(name="other")])])
        await add(store, there, taskset="other")
        failed = {"state": "failed", "reason": "bad_spec, seen in rollout ro-1"}
        which = t.tasks.c.name.in_(["hello", "copy-7"])
        await store.write(lambda c: c.execute(sa.update(t.tasks).where(which).values(failed)))

        async def rows(taskset: str = "set") -> dict[str, Any]:
            query = sa.select(t.tasks).where(t.tasks.c.taskset == taskset)
            return {row["name"]: row for row in await store.read(lambda c: c.execute(query).mappings().all())}

        before = await rows()
        moved = folder.parent / "elsewhere" / folder.name
        shutil.move(folder, moved)
        with pytest.raises(TaskUnreadable, match="import the task from where it is now"):
            load.from_row(before["hello"])
        again = [*load.load(moved), *load.from_lines([line(), line(name="other")])]
        wrong = load.from_lines([line(name="other", instruction="Something else.")])
        with pytest.raises(TaskError, match="other content"):
            await add(store, [*again[:2], *wrong])
        assert await rows() == before
        assert await add(store, again) == Registered(created=0, unchanged=3, renewed=2)
        after = await rows()
        assert {(row["state"], row["reason"]) for row in after.values()} == {("ready", "")}
        assert {name: row["id"] for name, row in after.items()} == {
            name: row["id"] for name, row in before.items()
        }
        for row in after.values():
            assert load.from_row(row).digest == row["digest"]
        assert (await rows("other"))["hello"]["state"] == "failed"
        assert await add(store, again) == Registered(created=0, unchanged=3, renewed=0)
        assert await rows() == after
    finally:
        store.close()


@pytest.mark.parametrize("broken", ["gone", "empty", "listing", "reading", "looking"])
def test_files_that_cannot_be_read_now_are_no_fault_of_the_task(
    folder: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    broken: str,
) -> None:
    (task,) = load.load(folder)
    row = {"name": task.name, "path": task.path, "definition": task.definition, "digest": task.digest}

    def fail(path: Any, *args: Any, **options: Any) -> NoReturn:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    with monkeypatch.context() as patch:
        if broken in ("gone", "empty"):
            shutil.move(folder, folder.parent / "away")
            if broken == "empty":  # as where a disk is mounted
                folder.mkdir()
        elif broken == "listing":
            patch.setattr(os, "scandir", fail)
        elif broken == "reading":
            patch.setattr(Path, "read_bytes", fail)
        else:
            patch.setattr(Path, "is_file", fail)
        told = "gone or empty" if broken in ("gone", "empty") else "Permission denied"
        with pytest.raises(TaskUnreadable, match=told):
            load.from_row(row)
    if broken in ("gone", "empty"):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.move(folder.parent / "away", folder)
    assert load.from_row(row).digest == task.digest
    (folder / "tests" / "test.sh").unlink()
    with pytest.raises(TaskError) as changed:
        load.from_row(row)
    assert not isinstance(changed.value, TaskUnreadable)


class FakeTrials:
    """Answers with what the test decides for gold and for nothing."""

    def __init__(self, gold: Trial, idle: Trial) -> None:
        self.gold, self.idle, self.scripts = gold, idle, []

    async def run(self, task: Task, script: str) -> Trial:
        await asyncio.sleep(0)
        self.scripts.append(script)
        return self.idle if script == NOTHING else self.gold


OK_1, OK_0 = Trial("ok", 1.0), Trial("ok", 0.0)


@pytest.mark.parametrize(
    ("gold", "idle", "fault"),
    [
        (OK_1, OK_0, None),
        (OK_0, OK_0, "the gold solution gets 0.0"),
        (OK_1, OK_1, "doing nothing passes"),
        (Trial("crash", error="status 2"), OK_0, "with the gold solution the verifier says crash: status 2"),
        (
            OK_1,
            Trial("invalid", error="no reward"),
            "when nothing is done the verifier says invalid: no reward",
        ),
        (OK_1, Trial("ok", -5.0), "less than the declared minimum 0"),
    ],
)
async def test_validation_wants_gold_to_pass_and_nothing_to_fail(
    gold: Trial, idle: Trial, fault: str | None
) -> None:
    (task,) = load.from_lines([line()])
    trials = FakeTrials(gold, idle)
    found = await validate(task, trials)
    assert trials.scripts == [task.gold_script, NOTHING]
    if fault is None:
        assert found.faults == () and (found.gold_reward, found.idle_reward) == (1.0, 0.0)
    else:
        (only,) = found.faults
        assert fault in only


async def test_a_task_without_gold_cannot_be_shown_to_be_solvable() -> None:
    (task,) = load.from_lines([line(verify={"script": "true"})])
    found = await validate(task, FakeTrials(OK_1, OK_0))
    assert found.gold_reward is None and "no gold solution" in found.faults[0]
