"""Which tokenizer and chat template a run's ids belong to: ids of different ones must never be mixed."""

import hashlib
from pathlib import Path

import msgspec
import sqlalchemy as sa

from forge_server.export.records import Reader, Run
from forge_server.store import tables as t


class Identity(msgspec.Struct, frozen=True):
    """sha256 in hex; empty when the model's folder is not on this machine."""

    tokenizer_sha: str = ""
    template_sha: str = ""


def identity(reader: Reader, run: Run) -> Identity:
    """That of the run's first policy version; every later one has the same."""
    p = t.policies.c
    query = sa.select(p.path).where(p.name == run.policy).order_by(p.version).limit(1)
    path = reader.read_now(lambda connection: connection.execute(query).scalar_one_or_none())
    return of_model(Path(path)) if path else Identity()


def of_model(folder: Path) -> Identity:
    """Of a folder in Hugging Face format."""
    tokenizer, template = folder / "tokenizer.json", folder / "chat_template.jinja"
    return Identity(_sha(tokenizer), _sha(template) or _sha(folder / "tokenizer_config.json"))


def _sha(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""
