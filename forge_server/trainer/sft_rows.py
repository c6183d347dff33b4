"""Pre-tokenised rows for veRL's SFT trainer: recorded token ids and loss masks, never tokenised again (I2).

Loaded by veRL from this file's path, as its ``data.custom_cls``.
"""

from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.utils.data import Dataset


class TokenRows(Dataset):
    """Rows of a parquet file with columns ``tokens`` and ``loss_mask``.

    Rows longer than ``config.max_length`` are left out whole: cut short they would teach to stop nowhere.
    """

    def __init__(
        self, parquet_files: str, tokenizer: Any, config: Any, processor: Any = None, max_samples: int = -1
    ) -> None:
        rows = read_rows(parquet_files, int(config.max_length))
        self.rows = rows if max_samples < 0 else rows[:max_samples]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens, mask = self.rows[index]
        return {
            "input_ids": torch.tensor(tokens, dtype=torch.int64),
            "position_ids": torch.arange(len(tokens)),
            # Nothing predicts the first token; in veRL's packed loss its place belongs to the row before.
            "loss_mask": torch.tensor([0, *mask[1:]], dtype=torch.int64),
        }


def read_rows(path: str, max_length: int) -> list[tuple[list[int], list[int]]]:
    """(tokens, loss_mask) of the rows that fit and have something to train."""
    table: pa.Table = pq.read_table(path, columns=["tokens", "loss_mask"])
    pairs = zip(table["tokens"].to_pylist(), table["loss_mask"].to_pylist(), strict=True)
    rows = []
    for index, (tokens, mask) in enumerate(pairs):
        if len(tokens) != len(mask):
            raise ValueError(f"row {index}: {len(tokens)} tokens and a loss mask of {len(mask)}")
        if 2 <= len(tokens) <= max_length and any(mask[1:]):
            rows.append((tokens, mask))
    return rows
