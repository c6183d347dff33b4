"""Reads a run page by page: rollouts in order of their ids, attempts with all that was recorded of them.

Each page is a read of its own, so that a long export neither holds a snapshot of the database open nor the
run in memory. What has ended does not change, so pages agree with each other.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec
import sqlalchemy as sa

from forge_server.domain import policy
from forge_server.domain.errors import NotFound
from forge_server.store import media
from forge_server.store import tables as t
from forge_server.store.policy_rows import versions_in
from forge_server.store.recordings import call_rows
from forge_server.trajectory.attempt import Cut, cut
from forge_server.trajectory.check import CheckedAttempt, CheckedCall, StoredSample
from forge_server.trajectory.codec import CallRow, named

T = TypeVar("T")
PAGE = 500


class Reader(Protocol):
    """The store, as far as exports go."""

    def read_now(self, fn: Callable[[sa.Connection], T]) -> T:
        """Run ``fn`` on a read-only connection in this thread."""


class Run(msgspec.Struct, frozen=True):
    """``limit``: the longest sample in tokens, as the run's own samples are cut."""

    id: str
    name: str
    policy: str
    limit: int


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout and what its final attempt says."""

    id: str
    group_id: str | None
    task_id: str | None
    slot: int
    harness: str
    mode: str
    state: str
    outcome: str | None
    kind: str | None
    reward: float | None
    attempt_id: str | None
    not_trained: str


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """``batch_k``: the batch it was trained in; ``dropped``: why it is in none. Without either nobody has judged it:
    it came in while its run was paused or over, or its turn is to come. ``members`` by slot.
    """

    id: str
    step: int
    batch_k: int | None
    dropped: str
    members: tuple[Rollout, ...]


def find_run(reader: Reader, name: str, window: int) -> Run:
    """The run by name. ``window``: the engine's, the limit of a run that sets none. Raises NotFound."""
    query = sa.select(t.runs.c.id, t.runs.c.settings).where(t.runs.c.name == name)
    row = reader.read_now(lambda connection: connection.execute(query).one_or_none())
    if row is None:
        raise NotFound(f"there is no run {name!r}", mend="`forge-server run list` shows the runs")
    settings: dict[str, Any] = row.settings
    limit = int(settings.get("max_sample_tokens", 0)) or window
    return Run(row.id, name, str(settings.get("policy", "default")), limit)


def rollouts(reader: Reader, run: Run) -> Iterator[Rollout]:
    """Every rollout of the run."""
    r = t.rollouts.c
    after = ""
    while True:
        query = _rollouts(r.run_id == run.id, r.id > after).order_by(r.id).limit(PAGE)
        page = _rows(reader, query)
        yield from (Rollout(**row) for row in page)
        if len(page) < PAGE:
            return
        after = page[-1]["id"]


def groups(reader: Reader, run: Run) -> Iterator[Group]:
    """Every group of the run."""
    g, r = t.groups.c, t.rollouts.c
    after = ""
    while True:
        query = (
            sa.select(g.id, g.step, g.batch_k, g.dropped)
            .where(g.run_id == run.id, g.id > after)
            .order_by(g.id)
            .limit(PAGE)
        )
        page = _rows(reader, query)
        for group in page:
            members = _rows(reader, _rollouts(r.group_id == group["id"]).order_by(r.slot, r.id))
            yield Group(**group, members=tuple(Rollout(**row) for row in members))
        if len(page) < PAGE:
            return
        after = page[-1]["id"]


def usable(reader: Reader, run: Run, group: Group) -> frozenset[int] | None:
    """The policy versions whose tokens the run's own trainer could take in the group. None: all of them, since
    it took the group, or the run trains nothing.

    To be read after what they sampled: a run that goes on makes further ones.
    """
    if group.batch_k is not None:
        return None
    r = t.runs.c

    def read(connection: sa.Connection) -> frozenset[int] | None:
        query = sa.select(r.kind, r.base_version, r.settings).where(r.id == run.id)
        row = connection.execute(query).one()
        if row.kind != "train":
            return None
        versions = versions_in(connection, run.policy)
        lag = row.settings["max_staleness"] if row.settings.get("mode") == "async" else 0
        # drawn when one batch fewer was assembled; async may take it later, but older weights by then no more
        return policy.usable(versions, run.id, row.base_version, group.step - 1 - lag)

    return reader.read_now(read)


def without_group(reader: Reader, run: Run) -> int:
    """How many rollouts of the run belong to no group: those that harnesses registered themselves."""
    r = t.rollouts.c
    query = sa.select(sa.func.count()).where(r.run_id == run.id, r.group_id.is_(None))
    return reader.read_now(lambda connection: connection.execute(query).scalar_one())


def cut_attempt(reader: Reader, attempt_id: str, limit: int) -> Cut:
    """The samples of one attempt."""
    rows: list[CallRow] = reader.read_now(lambda connection: call_rows(connection, attempt_id))
    return cut(rows, limit)


def attempts(reader: Reader, run: Run) -> Iterator[CheckedAttempt]:
    """Every attempt of the run, the failed ones too, with all its rows."""
    a, r = t.attempts.c, t.rollouts.c
    after = ""
    while True:
        query = (
            sa.select(a.id, a.state, a.outcome, a.not_trained, r.mode)
            .join(t.rollouts, r.id == a.rollout_id)
            .where(r.run_id == run.id, a.id > after)
            .order_by(a.id)
            .limit(PAGE)
        )
        page = _rows(reader, query)
        for row in page:
            yield reader.read_now(partial(_attempt, columns=row))
        if len(page) < PAGE:
            return
        after = page[-1]["id"]


def _rollouts(*where: sa.ColumnElement[bool]) -> sa.Select[Any]:
    r, a = t.rollouts.c, t.attempts.c
    return (
        sa.select(
            r.id,
            r.group_id,
            r.task_id,
            r.slot,
            r.harness,
            r.mode,
            r.state,
            r.outcome,
            r.kind,
            r.reward,
            r.final_attempt_id.label("attempt_id"),
            sa.func.coalesce(a.not_trained, "").label("not_trained"),
        )
        .outerjoin(t.attempts, a.id == r.final_attempt_id)
        .where(*where)
    )


def _rows(reader: Reader, query: sa.Select[Any]) -> Sequence[sa.RowMapping]:
    return reader.read_now(lambda connection: connection.execute(query).mappings().all())


def _attempt(connection: sa.Connection, columns: sa.RowMapping) -> CheckedAttempt:
    c, s, id = t.calls.c, t.samples.c, columns["id"]
    sizes = {
        row.id: row
        for row in connection.execute(
            sa.select(c.id, c.prompt_len, c.completion_len, c.began_at, c.ended_at, c.mode, c.flags).where(
                c.attempt_id == id
            )
        )
    }
    stored = connection.execute(
        sa.select(s.index, s.length, s.trained, s.prompt_len, s.call_ids)
        .where(s.attempt_id == id)
        .order_by(s.index)
    )
    rows = call_rows(connection, id)
    return CheckedAttempt(
        images=media.sound(connection, named(rows)),
        calls=tuple(
            CheckedCall(
                row=row,
                prompt_len=sizes[row.id].prompt_len,
                completion_len=sizes[row.id].completion_len,
                began_at=sizes[row.id].began_at,
                ended_at=sizes[row.id].ended_at,
                spliced=sizes[row.id].mode == "splice",
                fallback=(sizes[row.id].flags or {}).get("fallback"),
            )
            for row in rows
        ),
        samples=tuple(
            StoredSample(
                index=row["index"],
                length=row["length"],
                trained=row["trained"],
                prompt_len=row["prompt_len"],
                call_ids=tuple(row["call_ids"]),
            )
            for row in stored.mappings()
        ),
        **columns,
    )
