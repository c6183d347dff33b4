"""Checkpoint folders: what a policy version is made of, and whether its files are whole.

A checkpoint is ``FOLDER/{huggingface/, manifest.json}``; version 0 may be a bare Hugging Face folder
without a manifest. Everything that can be known from the files is checked before the engine is touched.
"""

import hashlib
from pathlib import Path

import msgspec

from forge_server.domain.errors import CheckpointError


class Policy(msgspec.Struct, frozen=True):
    """Weights that the engine serves or is to serve. ``manifest_sha256`` empty: there is no manifest;
    ``path`` None: whatever an attached engine was started with."""

    version: int
    path: Path | None
    manifest_sha256: str = ""

    @property
    def label(self) -> str:
        """What the engine is told it serves; read back to recognise it after a restart of either side."""
        return f"forge-{self.version}-{self.manifest_sha256[:12]}"

    @property
    def weights(self) -> Path | None:
        """The Hugging Face folder."""
        if self.path is None:
            return None
        inner = self.path / "huggingface"
        return inner if inner.is_dir() else self.path


def version_of(label: str) -> int | None:
    """The version in a label that a Policy made; None for any other text."""
    prefix, _, rest = label.partition("-")
    number = rest.partition("-")[0]
    return int(number) if prefix == "forge" and number.isdigit() else None


class FileEntry(msgspec.Struct, frozen=True):
    sha256: str
    size: int


class Probe(msgspec.Struct, frozen=True):
    """``logprobs[i]`` is log p(token i | tokens before) at temperature 1; the first is 0."""

    token_ids: list[int]
    logprobs: list[float]


class Manifest(msgspec.Struct, frozen=True):
    """``manifest.json`` as the trainer writes it; ``files`` are relative to the checkpoint folder."""

    schema: int
    files: dict[str, FileEntry]
    tensors: dict[str, dict[str, object]]
    probe: Probe


class Checkpoint(msgspec.Struct, frozen=True):
    """A policy whose files have been read and found whole."""

    policy: Policy
    weights: Path
    manifest_path: Path | None
    probe: Probe | None


def read(policy: Policy) -> Checkpoint:
    """Check every file of ``policy`` against its manifest (reads them all). Raises CheckpointError."""
    weights = policy.weights
    if policy.path is None or weights is None:
        raise CheckpointError(
            f"the folder of version {policy.version} is not known", mend="set [engine] model to the folder"
        )
    if not weights.is_dir():
        raise _fault(policy.path, "there is no such folder")
    if not policy.manifest_sha256:
        return Checkpoint(policy, weights, None, None)
    path = policy.path / "manifest.json"
    manifest = _manifest(policy, path)
    for name, entry in manifest.files.items():
        _check_file(policy.path, name, entry)
    known = {(policy.path / name).resolve() for name in manifest.files}
    for file in sorted(weights.glob("*.safetensors")):
        if file.resolve() not in known:  # the engine would load it too
            raise _fault(policy.path, f"{file.name} is not in the manifest")
    return Checkpoint(policy, weights, path, manifest.probe)


def _manifest(policy: Policy, path: Path) -> Manifest:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise _fault(path, f"cannot be read ({error.strerror})") from error
    if hashlib.sha256(raw).hexdigest() != policy.manifest_sha256:
        raise _fault(path, "is not the manifest that was announced (sha256 differs)")
    try:
        manifest = msgspec.json.decode(raw, type=Manifest)
    except msgspec.MsgspecError as error:
        raise _fault(path, f"is no manifest ({error})") from None
    probe = manifest.probe
    if manifest.schema != 1:
        raise _fault(path, f"has schema {manifest.schema}, this server reads 1")
    if len(probe.token_ids) < 2 or len(probe.token_ids) != len(probe.logprobs):
        raise _fault(path, "has no usable probe: it needs two ids or more and one logprob each")
    return manifest


def _check_file(folder: Path, name: str, entry: FileEntry) -> None:
    file = folder / name
    if not file.resolve().is_relative_to(folder.resolve()):
        raise _fault(folder, f"the manifest names {name}, which lies outside")
    try:
        size = file.stat().st_size
        if size != entry.size:
            raise _fault(folder, f"{name} has {size} bytes, the manifest says {entry.size}")
        with file.open("rb") as handle:
            digest = hashlib.file_digest(handle, "sha256").hexdigest()
    except OSError as error:
        raise _fault(folder, f"{name} cannot be read ({error.strerror})") from error
    if digest != entry.sha256:
        raise _fault(folder, f"{name} is corrupt (sha256 differs from the manifest)")


def _fault(where: Path, what: str) -> CheckpointError:
    return CheckpointError(what, where=str(where), mend="export the checkpoint again")
