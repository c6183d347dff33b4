"""Is this folder the checkpoint that was reported, of that run and that step?

Whether its files are whole and fit the model is for the engine to say, which reads them anyway.
"""

from hashlib import sha256
from pathlib import Path

import msgspec

from forge_server.domain.errors import CheckpointError


class Manifest(msgspec.Struct, frozen=True):
    """What the controller reads of ``manifest.json``."""

    step: int
    run: str


def identify(folder: Path, manifest_sha256: str, run_id: str, step: int) -> None:
    """Raise CheckpointError unless ``folder`` holds the reported manifest, of this run and step."""
    path = folder / "manifest.json"
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"the manifest cannot be read ({error.strerror})", where=str(path)) from None
    if sha256(raw).hexdigest() != manifest_sha256:
        raise CheckpointError("the manifest is not the one that was reported", where=str(path))
    try:
        manifest = msgspec.json.decode(raw, type=Manifest)
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"the manifest is malformed ({error})", where=str(path)) from None
    if (manifest.run, manifest.step) != (run_id, step):
        raise CheckpointError(
            f"it is of run {manifest.run} step {manifest.step}, not of {run_id} step {step}", where=str(path)
        )
