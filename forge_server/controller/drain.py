"""``sync`` mode: a whole cohort is drawn from the last update, waited for, and trained before the next
one.

What other weights have sampled, because a person or another run put them live while this one was paused, is no part
of it: such groups are dropped and drawn again.
"""

from collections.abc import Sequence

from forge_server.controller.generation import Workshop
from forge_server.controller.runs import Run
from forge_server.domain import policy
from forge_server.domain.batches import Drop, Move, foreign, next_move, select
from forge_server.domain.policy import Version


async def generate(workshop: Workshop, run: Run, versions: Sequence[Version], live: int) -> bool:
    """Draw, wait, and assemble batch ``run.step + 1``: in further rounds while too few groups have a
    signal."""
    k, settings, cohorts = run.step + 1, run.settings, workshop.cohorts
    groups = [group for group in await cohorts.open_groups(run.id) if group.step == k]
    first = min((group.round for group in groups), default=None)
    if all(group.round == first for group in groups) and len(groups) < settings.groups:
        # numbers go on after rounds without a signal, whose groups were dropped
        round = first if first is not None else await cohorts.last_round(run.id, k) + 1
        await cohorts.draw(run.id, settings, "train", k, round, settings.groups - len(groups), live)
        return True
    complete = [group for group in groups if group.complete]
    rollouts = await workshop.look_at(run, complete)
    usable = policy.usable(versions, run.id, run.base_version, run.step)
    stale = [group for group in complete if foreign(rollouts[group.id], usable)]
    if stale:
        await workshop.drop(stale, Drop.STALE)
        return True
    if len(complete) < len(groups):
        return False
    selection = select(rollouts)
    rounds, found = len({group.round for group in groups}), len(selection.groups)
    move = next_move(found, settings.groups, rounds, settings.max_generation_batches)
    if move is Move.DRAW:
        round = max(group.round for group in groups) + 1
        await cohorts.draw(run.id, settings, "train", k, round, settings.groups - found, live)
    elif move is Move.NO_SIGNAL:
        await workshop.pause_without_signal(run, groups, rollouts, selection, versions)
    else:
        await workshop.assemble(run, groups, rollouts, selection, versions)
    return True
