"""Which row is trained where: mini-batches of whole rollouts, balanced over the ranks (I11).

A rollout goes to one mini-batch, chosen by its number of *trained* tokens: that number, and so the mini-
batch, does not depend on how the rollout was cut into rows. Within a mini-batch rows are spread over the
ranks by length, which changes no gradient, since the loss is normalised over the whole mini-batch. veRL wants
the same number of rows in every mini-batch of every rank: the rest is padding rows of two tokens and no loss.
"""

from dataclasses import dataclass

import numpy as np
from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions

from forge_server.trainer.batch import Batch, Row

PADDING = Row(
    tokens=np.zeros(2, np.int32),
    loss_mask=np.zeros(2, np.uint8),
    logprobs=np.zeros(2, np.float32),
    prompt_len=1,
    rollout=-1,
    temperature=1.0,
)


@dataclass(frozen=True)
class Layout:
    """``places[rank]``: row indices in training order, -1 for padding; mini-batches are equal slices."""

    mini_batches: int
    places: list[list[int]]

    @property
    def padding(self) -> int:
        return sum(index < 0 for rank in self.places for index in rank)


def arrange(batch: Batch, *, mini_batches: int, ranks: int) -> Layout:
    """Lay ``batch`` out in at most ``mini_batches`` optimiser steps over ``ranks`` data-parallel ranks."""
    trained = batch.trained_per_rollout()
    rollouts = [rollout for rollout, count in enumerate(trained) if count]
    parts = min(mini_batches, len(rollouts))
    split = get_seqlen_balanced_partitions([trained[r] for r in rollouts], parts, equal_size=False)
    rows_of: dict[int, list[int]] = {}
    for index, row in enumerate(batch.rows):
        rows_of.setdefault(row.rollout, []).append(index)
    cells = [
        _spread([index for position in part for index in rows_of[rollouts[position]]], batch, ranks)
        for part in split
    ]
    height = max(len(rows) for cell in cells for rows in cell)
    places = [
        [index for cell in cells for index in cell[rank] + [-1] * (height - len(cell[rank]))]
        for rank in range(ranks)
    ]
    return Layout(mini_batches=parts, places=places)


def _spread(rows: list[int], batch: Batch, ranks: int) -> list[list[int]]:
    """``rows`` over ``ranks``, balanced in tokens; with fewer rows than ranks, some stay empty."""
    if len(rows) <= ranks:
        return [[index] for index in rows] + [[] for _ in range(ranks - len(rows))]
    lengths = [len(batch.rows[index].tokens) for index in rows]
    return [
        [rows[position] for position in part]
        for part in get_seqlen_balanced_partitions(lengths, ranks, equal_size=False)
    ]
