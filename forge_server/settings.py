"""The one settings tree: ``forge.toml`` overlaid by ``FORGE_SECTION__KEY`` environment variables.

Frozen after loading. Unknown sections and keys are errors that name the nearest known one. An empty file is
valid. Relative paths are relative to the folder of the file.
"""

import difflib
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import msgspec

from forge_server.domain.errors import ConfigError
from forge_server.domain.run import RunSettings


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of every table of ``forge.toml``."""


class ServerSettings(Section, frozen=True):
    """``[server]``: where to listen and where to keep files."""

    host: str = "127.0.0.1"
    port: int = 8400
    """Pod-facing listener: inference and runner lifecycle only. 0 picks a free port."""
    control_host: str = "127.0.0.1"
    control_port: int = 8401
    """Control listener: API, metrics, trainer link."""
    data_dir: str = "forge-data"
    """Database, checkpoints, keys, logs."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["auto", "console", "json"] = "auto"


class StoreSettings(Section, frozen=True):
    """``[store]``: ``sqlite:///PATH`` or ``postgresql+psycopg://...``; empty: SQLite in the data folder."""

    url: str = ""


class EngineSettings(Section, frozen=True):
    """``[engine]``: the inference server."""

    kind: Literal["none", "attach", "managed"] = "none"
    url: str = ""
    """``attach``: the base URL of a running vLLM, without ``/v1``."""
    api_key: str = ""
    model: str = ""
    """The folder with the initial weights (version 0)."""
    served_model: str = "forge"
    """The model name that vLLM serves and that every call is pinned to."""
    policy: str = "default"
    """Name of the policy this engine serves; versions are counted per policy."""
    dtype: str = "auto"
    max_model_len: int = 32768
    """Window in tokens: prompt and completion."""
    max_num_seqs: int = 64
    tool_call_parser: str = "hermes"
    """vLLM's ``--tool-call-parser``; empty: no tool calls."""
    reasoning_parser: str = ""
    flags: tuple[str, ...] = ()
    """``managed``: further vLLM flags, verbatim."""
    env: dict[str, str] = {}
    """``managed``: further environment variables of the engine process."""
    start_timeout_s: float = 900.0
    request_timeout_s: float = 1800.0
    logprob_tolerance: float = 0.0
    """Largest difference between the engine's and the trainer's probe logprobs; 0: 1e-3 for float32, else 0.1."""


class ProxySettings(Section, frozen=True):
    """``[proxy]``: the pod-facing inference API."""

    max_body_mb: int = 64
    max_hold_s: float = 600.0
    """Longest time that a call is held during a weight update before it gets 503 with Retry-After."""
    drain_s: float = 300.0
    """Longest wait for calls in flight before a weight update aborts them (they are resampled)."""
    keepalive_after_s: float = 60.0
    grammar: Literal["lift", "enforce"] = "lift"


class SchedulerSettings(Section, frozen=True):
    """``[scheduler]``: how many attempts, and how long each may take to start and to stop."""

    in_flight: int = 8
    startup_s: float = 120.0
    heartbeat_s: float = 5.0
    heartbeat_lost_s: float = 60.0
    grace_s: float = 5.0
    """Between TERM and KILL of a harness."""
    verify_s: float = 120.0
    """Verifier time limit of tasks that state none."""
    breaker: int = 20
    """This many consecutive infra failures of a run stop launching."""


class LocalSettings(Section, frozen=True):
    """``[local]``: attempts as sandboxed processes on this machine."""

    min_sandbox: Literal["none", "user", "namespaces"] = "namespaces"
    memory_mb: int = 2048
    pids: int = 256
    allow_binds: tuple[str, ...] = ()
    """Further folders that every sandbox sees, read-only."""


class TrainerSettings(Section, frozen=True):
    """``[trainer]``: the veRL worker processes."""

    launcher: Literal["local", "attach"] = "local"
    nproc: int = 1
    threads: int = 0
    """OMP threads of each worker; 0: veRL's own choice."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    overrides: tuple[str, ...] = ()
    """veRL Hydra overrides for every run, before the run's own."""
    lease_s: float = 60.0


class HarnessSettings(Section, frozen=True):
    """``[harness]``: further folders with harness specs."""

    paths: tuple[str, ...] = ()


class SecuritySettings(Section, frozen=True):
    """``[security]``: the admin key; empty: made at first start and kept in the data folder with mode 0600."""

    admin_key: str = ""


class Settings(Section, frozen=True, kw_only=True):
    """The whole tree."""

    server: ServerSettings = ServerSettings()
    store: StoreSettings = StoreSettings()
    engine: EngineSettings = EngineSettings()
    proxy: ProxySettings = ProxySettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    local: LocalSettings = LocalSettings()
    trainer: TrainerSettings = TrainerSettings()
    harness: HarnessSettings = HarnessSettings()
    security: SecuritySettings = SecuritySettings()
    run: tuple[RunSettings, ...] = ()
    folder: str = "."
    """Folder of the file (filled in by ``load``; not a key of the file)."""

    @property
    def data_dir(self) -> Path:
        return (Path(self.folder) / self.server.data_dir).resolve()

    @property
    def store_url(self) -> str:
        return self.store.url or f"sqlite:///{self.data_dir / 'forge.db'}"

    def path(self, text: str) -> Path:
        """A path of the file, relative to its folder."""
        return (Path(self.folder) / text).resolve()


_UNKNOWN = re.compile(r"Object contains unknown field `(?P<key>[^`]*)`(?: - at `(?P<at>[^`]*)`)?")
_AT = re.compile(r"^(?P<what>.*?)(?: - at `(?P<at>[^`]*)`)?$", re.DOTALL)


def load(file: Path | None, environ: Mapping[str, str] = os.environ) -> Settings:
    """Read ``file`` (None: no file, all defaults) and the environment. Raises ConfigError."""
    data: dict[str, Any] = {}
    where = str(file) if file else "environment"
    if file is not None:
        try:
            data = tomllib.loads(file.read_text())
        except FileNotFoundError:
            raise ConfigError(
                "there is no such file", where=where, mend="run `forge-server init` to write one"
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot be read ({error})", where=where, mend="check the path") from error
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"not valid TOML: {error}", where=where, mend="mend that line") from error
    if "folder" in data:
        raise _unknown_key("folder", [], where)
    _overlay(data, environ)
    data["folder"] = str(file.parent.resolve()) if file else os.getcwd()
    try:
        settings = msgspec.convert(data, Settings)
    except msgspec.ValidationError as error:
        raise _explain(str(error), where) from None
    _check(settings, where)
    return settings


def find_file(explicit: str | None) -> Path | None:
    """The settings file: the one given, else ``FORGE_CONFIG``, else ``forge.toml`` here, else none."""
    if explicit:
        return Path(explicit)
    if named := os.environ.get("FORGE_CONFIG"):
        return Path(named)
    here = Path("forge.toml")
    return here if here.exists() else None


def _overlay(data: dict[str, Any], environ: Mapping[str, str]) -> None:
    """Put ``FORGE_SECTION__KEY=value`` over the file's values. Values are TOML, or plain strings."""
    for name, text in sorted(environ.items()):
        if not name.startswith("FORGE_") or "__" not in name:
            continue
        section, _, key = name.removeprefix("FORGE_").lower().partition("__")
        hints = get_type_hints(Settings)
        kind = hints.get(section)
        if not (isinstance(kind, type) and issubclass(kind, Section)):
            raise _unknown_key(section, [], f"environment variable {name}")
        fields = get_type_hints(kind)
        if key not in fields:
            raise _unknown_key(key, [section], f"environment variable {name}")
        value: Any = text
        if fields[key] is not str and not (
            get_args(fields[key]) and isinstance(get_args(fields[key])[0], str)
        ):
            try:
                value = tomllib.loads(f"v = {text}")["v"]
            except tomllib.TOMLDecodeError:
                value = text
        data.setdefault(section, {})[key] = value


def _struct_at(path: list[str]) -> type[msgspec.Struct]:
    kind: Any = Settings
    for part in path:
        hint = get_type_hints(kind).get(part)
        args = [a for a in get_args(hint) if isinstance(a, type) and issubclass(a, msgspec.Struct)]
        kind = args[0] if args else hint
        if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
            return Settings
    return kind  # type: ignore[no-any-return]


def _unknown_key(key: str, path: list[str], where: str) -> ConfigError:
    known = [f for f in _struct_at(path).__struct_fields__ if f != "folder"]
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.4)
    table = ".".join(path)
    what = f"unknown key {key!r}" + (f" in [{table}]" if table else "")
    mend = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
    return ConfigError(what, where=where, mend=mend)


def _explain(message: str, where: str) -> ConfigError:
    if match := _UNKNOWN.search(message):
        at = match["at"] or "$"
        path = [p for p in re.split(r"[.\[]", at.lstrip("$")) if p and not p.endswith("]")]
        return _unknown_key(match["key"], path, where)
    match = _AT.match(message)
    at = (match["at"] if match else None) or "$"
    what = match["what"] if match else message
    return ConfigError(
        f"{at.removeprefix('$.')}: {what[:1].lower()}{what[1:]}", where=where, mend="mend the value"
    )


def _check(settings: Settings, where: str) -> None:
    engine = settings.engine
    if engine.kind == "attach" and not engine.url:
        raise ConfigError(
            "[engine] kind is attach but url is empty", where=where, mend='add url = "http://…"'
        )
    if engine.kind == "managed" and not engine.model:
        raise ConfigError(
            "[engine] kind is managed but model is empty",
            where=where,
            mend='add model = "FOLDER" (HF format)',
        )
    names = [run.name for run in settings.run]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two [[run]] tables are named {name!r}", where=where, mend="rename one")
    if settings.scheduler.in_flight < 1:
        raise ConfigError("[scheduler] in_flight must be at least 1", where=where, mend="raise it")
