"""The text of single tokens, from the model folder's ``tokenizer.json``: for people who look at samples."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from forge_server.export.identity import vocabulary


class Vocabulary:
    """Read at first use, since most servers are never asked. Without a file that can be read every answer is
    None."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._pieces: dict[int, str] | None = None

    def __call__(self, ids: Sequence[int]) -> list[str] | None:
        if self._pieces is None:
            found = vocabulary(self._folder) if self._folder is not None else {}
            self._pieces = {id: _text(token) for token, id in found.items()}
        return [self._pieces.get(id, "�") for id in ids] if self._pieces else None


def _text(token: str) -> str:
    """Byte-level tokens are written in stand-ins for bytes, others with a mark for the space."""
    table = _bytes()
    if all(character in table for character in token):
        return bytes(table[character] for character in token).decode("utf-8", "replace")
    return token.replace("▁", " ")


@cache
def _bytes() -> dict[str, int]:
    """Which character stands for which byte in byte-level vocabularies (GPT-2's table)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}
