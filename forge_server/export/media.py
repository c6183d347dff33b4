"""The images that exported rows name, as files ``media/SHA256`` beside the rows."""

from functools import partial
from pathlib import Path

from forge_server.domain.media import Media
from forge_server.export.records import Reader
from forge_server.export.whole import ExportError
from forge_server.store.media import file_of

FOLDER = "media"


class MediaFolder:
    """Writes each image once; what lies there already under its hash is left alone. Without images no folder is
    made.
    """

    def __init__(self, reader: Reader, beside: Path) -> None:
        self._reader, self._folder = reader, beside.parent / FOLDER
        self._written: set[str] = set()

    def __len__(self) -> int:
        return len(self._written)

    def add(self, media: Media) -> None:
        """Raises OSError, or ExportError for an image that the database does not have."""
        for sha256 in {span.sha256 for span in media} - self._written:
            path = self._folder / sha256
            if not path.exists():
                data = self._reader.read_now(partial(file_of, sha256=sha256))
                if data is None:
                    raise ExportError(
                        f"image {sha256} is not in the database",
                        mend="`forge-server check --data RUN` tells what else is missing",
                    )
                self._folder.mkdir(exist_ok=True)
                part = path.with_name(f".{sha256}.part")
                part.write_bytes(data)
                part.replace(path)
            self._written.add(sha256)
