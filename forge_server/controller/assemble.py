"""Makes batch k: one body, stored once, together with everything that says so (invariant I8).

The batch, its groups' ``batch_k``, the reasons of the dropped groups, the run's step, the samples and
the step's figures are one transaction: a kill leaves either all of it or none, and then it is made
again from the same rows.
"""

from collections.abc import Mapping, Sequence
from hashlib import sha256

import msgspec
import sqlalchemy as sa
from sqlalchemy import Connection

from forge_server.controller.ports import Events
from forge_server.controller.recordings import sample_rows
from forge_server.domain.batches import Drop, Selection
from forge_server.domain.cohort import Group
from forge_server.domain.errors import Conflict
from forge_server.domain.events import BatchAssembled
from forge_server.store import tables as t
from forge_server.store.step_metrics import put_metrics
from forge_server.trajectory.attempt import Cut
from forge_server.trajectory.batchfile import BatchRollout, write_batch


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What goes into batch ``k``. ``groups`` are those of the selection, ``cuts`` by attempt id."""

    run_id: str
    k: int
    seed: int
    groups: Sequence[Group]
    selection: Selection
    cuts: Mapping[str, Cut]
    figures: dict[str, float]


def body_of(plan: Plan) -> bytes:
    """The batch file: rollouts in order of group and slot. Equal plans give equal bytes."""
    attempt_of = {m.id: m.attempt_id or "" for group in plan.groups for m in group.members}
    rollouts = [
        BatchRollout(
            rollout_id=rollout.id,
            group_id=group_id,
            reward=rollout.reward or 0.0,
            samples=plan.cuts[attempt_of[rollout.id]].samples,
        )
        for group_id, kept in plan.selection.groups.items()
        for rollout in kept
    ]
    return write_batch(plan.run_id, plan.k, rollouts, plan.seed)


async def store_batch(events: Events, plan: Plan, body: bytes, at: float) -> None:
    """Store batch ``k`` for good. Raises Conflict when there is another batch ``k``."""
    rollout_ids = tuple(r.id for kept in plan.selection.groups.values() for r in kept)
    event = BatchAssembled(
        run_id=plan.run_id,
        k=plan.k,
        group_ids=tuple(plan.selection.groups),
        rollout_ids=rollout_ids,
        sha256=sha256(body).hexdigest(),
        body=body,
        stats=dict(plan.figures),
    )
    wanted = set(rollout_ids)

    def also(connection: Connection) -> None:
        drop_groups(connection, plan.selection.dropped)
        put_metrics(connection, plan.run_id, plan.k, "controller", plan.figures, at)
        for group in plan.groups:
            for member in group.members:
                if member.id in wanted and member.attempt_id is not None:
                    rows = sample_rows(member.id, member.attempt_id, plan.cuts[member.attempt_id])
                    if rows:  # one that lies wholly beyond the length limit has none
                        connection.execute(sa.insert(t.samples), rows)

    applied = await events.apply(event, also=also)
    if not applied.ok:
        raise Conflict(f"batch {plan.k} was not taken ({applied.refusal})", where=plan.run_id)


def drop_groups(connection: Connection, dropped: Mapping[str, Drop]) -> None:
    """Write down why groups are not trained."""
    for group_id, reason in dropped.items():
        connection.execute(sa.update(t.groups).where(t.groups.c.id == group_id).values(dropped=reason.value))
