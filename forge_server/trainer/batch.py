"""Reads batch k: the safetensors body that the server assembled once and serves byte-identical ever after
(I8).

A row is one contiguous token sequence; the rows of a rollout follow each other. ``loss_mask[i]`` and
``logprobs[i]`` speak of token i. What does not hold is an error here, never a quietly different update.
"""

import hashlib
import json
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from safetensors.numpy import load

from forge_server.trainer.errors import BatchInvalid

SCHEMA = "1"


@dataclass(frozen=True)
class Row:
    """One training row; arrays have one entry per token."""

    tokens: np.ndarray
    loss_mask: np.ndarray
    logprobs: np.ndarray
    prompt_len: int
    rollout: int
    temperature: float

    @property
    def trained(self) -> int:
        return int(self.loss_mask.sum())


@dataclass(frozen=True)
class Batch:
    """Rows in the server's order, and per rollout its group and reward."""

    run: str
    k: int
    rows: list[Row]
    rollout_group: np.ndarray
    rollout_reward: np.ndarray
    min_version: int
    max_version: int

    @property
    def rollouts(self) -> int:
        return len(self.rollout_group)

    def trained_per_rollout(self) -> list[int]:
        """Trained tokens of each rollout; the same however it was cut into rows."""
        counts = [0] * self.rollouts
        for row in self.rows:
            counts[row.rollout] += row.trained
        return counts


def read(body: bytes, *, k: int, sha256: str | None = None) -> Batch:
    """Decode and check batch ``k``. Raises BatchInvalid."""
    if sha256 is not None and hashlib.sha256(body).hexdigest() != sha256:
        raise BatchInvalid(f"batch {k}: the body does not have the digest the server announced")
    try:
        arrays = load(body)
        meta = _metadata(body)
    except Exception as error:
        raise BatchInvalid(f"batch {k}: not a safetensors body: {error}") from error
    if meta.get("schema") != SCHEMA:
        raise BatchInvalid(f"batch {k}: schema {meta.get('schema')!r}, this trainer reads {SCHEMA!r}")
    if int(meta["k"]) != k:
        raise BatchInvalid(f"batch {k}: the body says it is batch {meta['k']}")
    try:
        batch = Batch(
            run=meta["run"],
            k=k,
            rows=_rows(arrays),
            rollout_group=arrays["rollout_group"],
            rollout_reward=arrays["rollout_reward"].astype(np.float32),
            min_version=int(meta["min_version"]),
            max_version=int(meta["max_version"]),
        )
    except KeyError as error:
        raise BatchInvalid(f"batch {k}: {error} is missing") from None
    _check(batch)
    return batch


def _metadata(body: bytes) -> dict[str, str]:
    size = int.from_bytes(body[:8], "little")
    header = json.loads(body[8 : 8 + size])
    return dict(header.get("__metadata__", {}))


def _rows(arrays: dict[str, np.ndarray]) -> list[Row]:
    spans = list(pairwise(arrays["row_offsets"].tolist()))
    if not spans or spans[0][0] != 0 or spans[-1][1] != len(arrays["tokens"]):
        raise BatchInvalid("row_offsets do not cover the tokens")
    return [
        Row(
            tokens=arrays["tokens"][start:end],
            loss_mask=arrays["loss_mask"][start:end],
            logprobs=arrays["logprobs"][start:end],
            prompt_len=int(arrays["prompt_len"][index]),
            rollout=int(arrays["rollout"][index]),
            temperature=float(arrays["row_temperature"][index]),
        )
        for index, (start, end) in enumerate(spans)
    ]


def _check(batch: Batch) -> None:
    def wrong(what: str) -> BatchInvalid:
        return BatchInvalid(f"batch {batch.k}: {what}")

    seen: set[int] = set()
    previous = -1
    for index, row in enumerate(batch.rows):
        if not 0 < row.prompt_len < len(row.tokens):
            raise wrong(f"row {index} has {len(row.tokens)} tokens and a prompt of {row.prompt_len}")
        if row.loss_mask[: row.prompt_len].any():
            raise wrong(f"row {index} trains tokens of its prompt")
        if not np.isin(row.loss_mask, (0, 1)).all():
            raise wrong(f"row {index} has a loss mask that is neither 0 nor 1")
        if not np.isfinite(row.logprobs[row.loss_mask == 1]).all():
            raise wrong(f"row {index} trains tokens whose sampling logprob is not a number")
        if not row.temperature > 0:
            raise wrong(
                f"row {index} was sampled at temperature {row.temperature}: greedy tokens have no gradient"
            )
        if not 0 <= row.rollout < batch.rollouts:
            raise wrong(f"row {index} belongs to rollout {row.rollout} of {batch.rollouts}")
        if row.rollout != previous and row.rollout in seen:
            raise wrong(f"the rows of rollout {row.rollout} are not contiguous")
        previous = row.rollout
        seen.add(row.rollout)
    if not sum(row.trained for row in batch.rows):
        raise wrong("no token to train")
    if not np.isfinite(batch.rollout_reward).all():
        raise wrong("a reward is not a number")
    groups, sizes = np.unique(batch.rollout_group, return_counts=True)
    if (sizes < 2).any():
        raise wrong(f"group {groups[sizes < 2][0]} has a single rollout, so it has no baseline")
