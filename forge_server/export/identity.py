"""Which tokenizer and chat template a run's ids belong to: ids of different ones must never be mixed."""

import hashlib
from pathlib import Path

import msgspec
import sqlalchemy as sa

from forge_server.domain.errors import ConfigError
from forge_server.export.records import Reader, Run
from forge_server.store import tables as t
from forge_server.trajectory.prefixes import ChatTemplate


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
    """Of a folder in Hugging Face format, or of a checkpoint that holds one."""
    folder = _inner(folder)
    tokenizer, template = folder / "tokenizer.json", chat_template(folder)
    return Identity(
        _sha(tokenizer.read_bytes()) if tokenizer.is_file() else "",
        _sha(template.text.encode()) if template else "",
    )


def chat_template(folder: Path) -> ChatTemplate | None:
    """The chat template of a folder in Hugging Face format, as vLLM picks it for requests with tools.

    None when there is none, or the files cannot be read.
    """
    try:
        config = msgspec.json.decode((folder / "tokenizer_config.json").read_bytes(), type=_TokenizerConfig)
    except (OSError, msgspec.MsgspecError):
        config = _TokenizerConfig()
    special = {name: _token(getattr(config, name)) for name in ("bos_token", "eos_token", "pad_token")}
    special = {name: token for name, token in special.items() if token}
    file, text = folder / "chat_template.jinja", config.chat_template
    try:
        text = file.read_text() if file.is_file() else text
    except (OSError, UnicodeDecodeError):
        return None
    if isinstance(text, list):
        named = {entry.name: entry.template for entry in text}
        text = named.get("tool_use") or named.get("default")
    return ChatTemplate(text, special) if text else None


class _Named(msgspec.Struct, frozen=True):
    name: str
    template: str


class _AddedToken(msgspec.Struct, frozen=True):
    content: str


class _TokenizerConfig(msgspec.Struct, frozen=True):
    chat_template: str | list[_Named] | None = None
    bos_token: str | _AddedToken | None = None
    eos_token: str | _AddedToken | None = None
    pad_token: str | _AddedToken | None = None


def _token(value: str | _AddedToken | None) -> str:
    return value.content if isinstance(value, _AddedToken) else value or ""


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def check_same(folder: Path, first: Path) -> None:
    """A policy whose versions began in folder ``first`` goes on with the tokenizer and template of ``folder``. Raises
    ConfigError when they are others: its recordings would be of two kinds. What is not there is not compared.
    """
    now, then = of_model(folder), of_model(first)
    other = ""
    if now.tokenizer_sha != then.tokenizer_sha and vocabulary(folder) != vocabulary(first):
        other = "tokenizer"
    elif now.template_sha and then.template_sha and now.template_sha != then.template_sha:
        other = "chat template"
    if other and then.tokenizer_sha:
        raise ConfigError(
            f"its {other} is not that of {first}, which the recorded policy began with",
            where=str(folder),
            mend="set [engine] model back, or keep the records of another model in another [store]",
        )


def vocabulary(folder: Path) -> dict[str, int]:
    """Id of every token, of a model folder's ``tokenizer.json``; empty when there is none that can be read. The file
    itself is another each time that it is saved."""
    try:
        found = msgspec.json.decode((_inner(folder) / "tokenizer.json").read_bytes(), type=_Tokenizer)
    except (OSError, msgspec.MsgspecError):
        return {}
    return found.model.vocab | {token.content: token.id for token in found.added_tokens}


class _Model(msgspec.Struct):
    vocab: dict[str, int]


class _Added(msgspec.Struct):
    id: int
    content: str


class _Tokenizer(msgspec.Struct):
    model: _Model
    added_tokens: list[_Added] = []


def _inner(folder: Path) -> Path:
    inner = folder / "huggingface"
    return inner if inner.is_dir() else folder
