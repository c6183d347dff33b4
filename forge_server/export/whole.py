"""A file that has its name only when it is whole, and its bytes are on the disk by then."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa

from forge_server.domain.errors import ForgeError


class ExportError(ForgeError):
    """The file cannot be written."""

    type = "export"


def make_folder(folder: Path) -> None:
    """With those above it. Raises ExportError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ExportError(str(error), where=str(folder), mend="choose another place") from error


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Where to write. On the way out that file becomes ``path``.

    Raises ExportError; then there is no file, or the one that was there before.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        yield part
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(path)
    except (OSError, pa.ArrowException) as error:
        raise ExportError(str(error), where=str(path), mend="free space or choose another place") from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)
