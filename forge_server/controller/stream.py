"""``async`` mode: generation goes on while the trainer works; complete groups carry over to later
batches.

Staleness is bounded where groups are admitted: those in flight and ready, and the batches that the live weights have
not learnt from, are never more than ``(max_staleness + 1)`` batches. What is too old all the same is dropped, and
counted by length.
"""

from collections.abc import Sequence

from forge_server.controller.generation import Workshop
from forge_server.controller.runs import Run
from forge_server.domain import policy
from forge_server.domain.batches import Selection, foreign, select
from forge_server.domain.policy import Version


async def generate(workshop: Workshop, run: Run, versions: Sequence[Version], live: int) -> bool:
    """Draw up to the bound; assemble batch ``run.step + 1`` once the one before it is trained."""
    settings, cohorts = run.settings, workshop.cohorts
    groups = await cohorts.open_groups(run.id)
    complete = [group for group in groups if group.complete]
    rollouts = await workshop.look_at(run, complete)
    usable = policy.usable(versions, run.id, run.base_version, run.step - settings.max_staleness)
    if live not in usable:
        # the next one is on its way from the trainer: what is sampled until then would be too old
        return False
    selection = select(rollouts, usable)
    ready, at_trainer = len(selection.groups), run.step - await cohorts.trained(run.id)

    # what other weights sampled says nothing of what these can learn from
    silent = sum(not foreign(rollouts[group_id], usable) for group_id in selection.dropped)
    exhausted = silent >= settings.max_generation_batches * settings.groups
    if not at_trainer:
        if ready >= settings.groups or (ready and exhausted):
            first = dict(list(selection.groups.items())[: settings.groups])
            chosen = Selection(groups=first, dropped=selection.dropped)
            taken = [group for group in complete if group.id in first or group.id in chosen.dropped]
            await workshop.assemble(run, taken, rollouts, chosen, versions)
            return True
        if exhausted:
            await workshop.pause_without_signal(run, complete, rollouts, selection, versions)
            return True

    if exhausted:
        return False  # a smaller batch or a pause follows when the trainer is through with the one before
    good = len(groups) - len(selection.dropped)  # ready or still in flight
    age = run.step - next((run.step_of(version) for version in versions if version.version == live), 0)
    bound = (
        settings.max_staleness + 1 - age
    ) * settings.groups  # what is drawn now is sampled by what is live
    wanted = min(bound, (settings.steps - run.step) * settings.groups) - good
    if wanted > 0:
        await cohorts.draw(run.id, settings, "train", run.step + 1, 0, wanted, live)
    return False
