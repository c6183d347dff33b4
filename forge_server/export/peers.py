"""Writes a run as another trainer's rows, one JSON object a line, in memory of one group.

What is written is what our own trainer would be given: the trainable rollouts of complete groups with a
signal (``domain.batches``). A baseline over anything else would be a different one. The advantage is
computed here, once per rollout, for targets that want it.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from forge_server.domain.batches import Drop, EndedRollout, advantages, judge
from forge_server.domain.outcome import Outcome
from forge_server.export.mappings import MAPPINGS
from forge_server.export.mappings.source import TrainedRollout
from forge_server.export.records import (
    Group,
    Reader,
    Rollout,
    Run,
    cut_attempt,
    groups,
    usable,
    without_group,
)
from forge_server.export.report import ExportReport, left_out
from forge_server.export.whole import whole_file
from forge_server.trajectory.attempt import Cut


def export_peer(reader: Reader, run: Run, target: str, path: Path) -> ExportReport:
    """Write the rows of ``run`` for ``target``, a key of ``MAPPINGS``.

    Raises ExportError; then there is no file, or the one that was there before.
    """
    report = ExportReport(str(path))
    encoder = msgspec.json.Encoder()
    with whole_file(path) as part, part.open("wb") as file:
        for rollout in trained_rollouts(reader, run, report):
            for row in MAPPINGS[target](rollout):
                file.write(encoder.encode(row) + b"\n")
    return report


def trained_rollouts(reader: Reader, run: Run, report: ExportReport) -> Iterator[TrainedRollout]:
    """The rollouts that are trained, group by group; ``report`` counts them and those that are not."""
    trained_groups = 0
    for group in groups(reader, run):
        if group.dropped == Drop.STALE:  # in part by other weights, or by too old ones
            report.left_out[group.dropped] += len(group.members)
            continue
        kept = _trained(reader, run, group, report)
        for rollout, found, advantage in kept:
            yield TrainedRollout(
                id=rollout.id,
                group_id=str(rollout.group_id),
                task_id=str(rollout.task_id),
                harness=rollout.harness,
                slot=rollout.slot,
                number=report.rollouts,
                group_number=trained_groups,
                reward=float(rollout.reward or 0.0),
                advantage=advantage,
                samples=found.samples,
            )
            report.add(found)
        trained_groups += bool(kept)
    if alone := without_group(reader, run):
        report.left_out["no_group"] += alone


def _trained(
    reader: Reader, run: Run, group: Group, report: ExportReport
) -> list[tuple[Rollout, Cut, float]]:
    """The group's trainable rollouts with their advantages; none when it is not trained."""
    if any(rollout.outcome is None for rollout in group.members):
        report.left_out["group_incomplete"] += len(group.members)
        return []
    kept: list[tuple[Rollout, Cut, EndedRollout]] = []
    for rollout in group.members:
        reason, found = left_out(rollout), Cut()
        if not reason and rollout.attempt_id is not None:
            found = cut_attempt(reader, rollout.attempt_id, run.limit)
            reason = found.fault or ("" if found.samples or found.clipped else "nothing_trainable")
        if any(sample.media for sample in found.samples):
            reason = "media"  # these rows carry tokens only
        if not reason:
            judged = _judged(rollout, found)
            reason = "" if judged.valid else "no_reward"
        if reason:
            report.left_out[reason] += 1
        else:
            kept.append((rollout, found, judged))
    drop = judge([judged for _, _, judged in kept], usable(reader, run, group)) if kept else None
    if drop is not None:
        report.left_out[drop.value] += len(kept)
        return []
    scores = advantages([judged.reward or 0.0 for _, _, judged in kept])
    return [(rollout, found, score) for (rollout, found, _), score in zip(kept, scores, strict=True)]


def _judged(rollout: Rollout, found: Cut) -> EndedRollout:
    return EndedRollout(
        id=rollout.id,
        group_id=str(rollout.group_id),
        outcome=Outcome(str(rollout.outcome)),
        reward=rollout.reward,
        trained_tokens=found.trained_tokens,
        clipped_tokens=sum(found.clipped.values()),
        versions=found.versions,
    )
