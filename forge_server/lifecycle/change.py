"""One transaction of the lifecycle: typed reads, compare-and-set steps, and the event rows they leave.

Every step of a state machine passes through ``move_attempt``, ``move_rollout`` or ``move_run``, which
refuse steps that the machine does not have and updates that lost a race (``Stale``).
"""

from typing import Any

import sqlalchemy as sa

from forge_server.domain.events import EventRow
from forge_server.domain.states import ATTEMPT_STEPS, AttemptState, RolloutState, RunState
from forge_server.store import events, rows
from forge_server.store import tables as t
from forge_server.store.rows import AttemptRow, RolloutRow, RunRow

_ROLLOUT_STEPS: dict[RolloutState, frozenset[RolloutState]] = {
    RolloutState.PENDING: frozenset({RolloutState.ACTIVE, RolloutState.ENDED}),
    RolloutState.ACTIVE: frozenset({RolloutState.PENDING, RolloutState.ENDED}),
    RolloutState.ENDED: frozenset(),
}
_RUN_OVER = frozenset({RunState.COMPLETED, RunState.CANCELLED, RunState.FAILED})


class Stale(Exception):
    """The row has moved on since it was read in this transaction: begin again."""


class Change:
    """Lives as long as its transaction. ``now`` is the one moment at which everything in it happens."""

    def __init__(self, connection: sa.Connection, now: float, breaker_after: int) -> None:
        self.connection, self.now, self.breaker_after = connection, now, breaker_after
        self.rows: list[EventRow] = []

    def run(self, run_id: str) -> RunRow | None:
        return rows.by_id(self.connection, RunRow, run_id)

    def rollout(self, rollout_id: str) -> RolloutRow | None:
        return rows.by_id(self.connection, RolloutRow, rollout_id)

    def attempt(self, attempt_id: str) -> AttemptRow | None:
        return rows.by_id(self.connection, AttemptRow, attempt_id)

    def rollout_of(self, attempt: AttemptRow) -> RolloutRow:
        rollout = self.rollout(attempt.rollout_id)
        assert rollout is not None  # a foreign key
        return rollout

    def live_attempt_of(self, rollout: RolloutRow) -> AttemptRow | None:
        query = rows.select(AttemptRow).where(
            t.attempts.c.rollout_id == rollout.id, t.attempts.c.state != AttemptState.ENDED
        )
        found = rows.fetch(self.connection, AttemptRow, query)
        return found[0] if found else None

    def set_attempt(self, attempt: AttemptRow, **values: Any) -> None:
        """Change columns of an attempt without a step of its state machine."""
        self._compare_and_set(t.attempts, attempt, values)

    def move_attempt(self, attempt: AttemptRow, to: AttemptState, **values: Any) -> None:
        if to not in ATTEMPT_STEPS[attempt.state]:
            raise AssertionError(f"an attempt cannot go from {attempt.state} to {to}")
        self._compare_and_set(t.attempts, attempt, {**values, "state": to.value})

    def move_rollout(self, rollout: RolloutRow, to: RolloutState, **values: Any) -> None:
        if to not in _ROLLOUT_STEPS[rollout.state]:
            raise AssertionError(f"a rollout cannot go from {rollout.state} to {to}")
        self._compare_and_set(t.rollouts, rollout, {**values, "state": to.value})

    def move_run(self, run: RunRow, to: RunState, **values: Any) -> None:
        if run.state in _RUN_OVER:
            raise AssertionError(f"a run cannot go from {run.state} to {to}")
        done = self.connection.execute(
            sa.update(t.runs)
            .where(t.runs.c.id == run.id, t.runs.c.state == run.state)
            .values(**values, state=to.value)
        )
        if done.rowcount != 1:
            raise Stale

    def emit(
        self,
        kind: str,
        /,
        *,
        run_id: str | None = None,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
        **data: Any,
    ) -> None:
        """Append the event of a state change; ``data`` is what a reader of the stream wants to see of it."""
        self.rows.append(
            events.append(
                self.connection,
                at=self.now,
                kind=kind,
                data=data,
                run_id=run_id,
                rollout_id=rollout_id,
                attempt_id=attempt_id,
            )
        )

    def emit_attempt(self, kind: str, attempt: AttemptRow, rollout: RolloutRow, /, **data: Any) -> None:
        self.emit(kind, run_id=rollout.run_id, rollout_id=rollout.id, attempt_id=attempt.id, **data)

    def emit_rollout(self, kind: str, rollout: RolloutRow, /, **data: Any) -> None:
        self.emit(kind, run_id=rollout.run_id, rollout_id=rollout.id, **data)

    def _compare_and_set(self, table: sa.Table, row: AttemptRow | RolloutRow, values: dict[str, Any]) -> None:
        done = self.connection.execute(
            sa.update(table)
            .where(table.c.id == row.id, table.c.state == row.state, table.c.epoch == row.epoch)
            .values(**values, epoch=row.epoch + 1)
        )
        if done.rowcount != 1:
            raise Stale
