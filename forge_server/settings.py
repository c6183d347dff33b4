"""The one settings tree: ``forge.toml`` overlaid by ``FORGE_SECTION__KEY`` environment variables.

Frozen after loading. Unknown sections and keys are errors that name the nearest known one. An empty file is
valid. Relative paths are relative to the folder of the file.
"""

import difflib
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, get_args, get_type_hints

import msgspec

from forge_server.domain.errors import ConfigError
from forge_server.domain.run import RunSettings, check_sizes

Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Count = Annotated[int, msgspec.Meta(ge=1, le=10**9)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
Price = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Gpus = Annotated[int, msgspec.Meta(ge=0, le=100_000)]


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of every table of ``forge.toml``."""


class ServerSettings(Section, frozen=True):
    """``[server]``: where to listen and where to keep files."""

    host: str = "127.0.0.1"
    port: Port = 8400
    """Pod-facing listener: inference and runner lifecycle only. 0 picks a free port."""
    control_host: str = "127.0.0.1"
    control_port: Port = 8401
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
    served_model: Name = "forge"
    """The model name that vLLM serves and that every call is pinned to."""
    policy: Name = "default"
    """Name of the policy this engine serves; versions are counted per policy."""
    dtype: str = "auto"
    max_model_len: Count = 32768
    """Window in tokens: prompt and completion."""
    max_num_seqs: Count = 64
    tool_call_parser: str = "hermes"
    """vLLM's ``--tool-call-parser``; empty: no tool calls."""
    reasoning_parser: str = ""
    flags: tuple[str, ...] = ()
    """``managed``: further vLLM flags, verbatim."""
    env: dict[str, str] = {}
    """``managed``: further environment variables of the engine process."""
    start_timeout_s: Seconds = 900.0
    request_timeout_s: Seconds = 1800.0
    logprob_tolerance: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 0.0
    """Largest difference between the engine's and the trainer's probe logprobs; 0: 1e-3 for float32, else 0.1."""


class ProxySettings(Section, frozen=True):
    """``[proxy]``: the pod-facing inference API."""

    max_body_mb: Count = 64
    max_hold_s: Seconds = 600.0
    """Longest time that a call is held during a weight update before it gets 503 with Retry-After."""
    drain_s: Seconds = 300.0
    """Longest wait for calls in flight before a weight update aborts them (they are resampled)."""
    keepalive_after_s: Seconds = 60.0
    grammar: Literal["lift", "enforce"] = "lift"


class SchedulerSettings(Section, frozen=True):
    """``[scheduler]``: where attempts run, how many, and how long each may take to start and to stop."""

    backend: Literal["local", "kubernetes"] = "local"
    in_flight: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 8
    startup_s: Seconds = 120.0
    heartbeat_s: Seconds = 5.0
    heartbeat_lost_s: Seconds = 60.0
    grace_s: Seconds = 5.0
    """Between TERM and KILL of a harness."""
    verify_s: Seconds = 120.0
    """Verifier time limit of tasks that state none."""
    breaker: Count = 20
    """This many consecutive infra failures of a run stop launching."""


class KubernetesSettings(Section, frozen=True):
    """``[kubernetes]``: attempts as pods of a cluster, and trainers as its Jobs."""

    kubeconfig: str = ""
    """A file; empty: the pod's own account when the server runs in the cluster, else the user's usual file."""
    context: str = ""
    """Of the kubeconfig; empty: its current one."""
    namespace: str = ""
    """Empty: that of the context, or of the account."""
    pod_url: str = ""
    """The pod-facing listener as pods reach it; empty: ``[server] host``, when that is an address they can reach."""
    control_url: str = ""
    """The control listener as trainer Jobs reach it; empty: ``[server] control_host``, likewise."""
    image: str = ""
    """Image of tasks that name none."""
    runner_image: str = ""
    """Brings the runner into every pod."""
    harness_images: dict[str, str] = {}
    """Harness -> image that brings the runner and that harness."""
    templates: str = ""
    """A folder whose templates go before ours of the same name."""
    pull_policy: Literal["IfNotPresent", "Always", "Never"] = "IfNotPresent"
    pull_secrets: tuple[str, ...] = ()
    runtime_class: str = ""
    """Of attempts, such as ``gvisor``."""
    priority_class: str = ""
    node_selector: dict[str, str] = {}
    tolerations: tuple[dict[str, Any], ...] = ()
    cpu: str = "100m"
    """CPU request of an attempt; it has no CPU limit."""
    memory_mb: Count = 2048
    """Memory request and limit of an attempt; task and spec go before it."""
    disk_mb: Count = 10240
    """What an attempt may write to its node's disk; beyond it is evicted. What is copied into it counts."""
    image_volumes: bool = True
    """Mount the runner's image instead of copying it, where the API server has image volumes. False for nodes whose
    container runtime has not."""
    create_per_s: Seconds = 20.0
    """Pods created per second, at most."""
    keep_failed_s: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 0.0
    """Failed pods are left to be looked at for so long."""
    unschedulable_s: Seconds = 60.0
    image_s: Seconds = 60.0
    """Longest wait for an image that cannot be pulled, or a container that cannot be made."""
    trainer_image: str = ""
    """With veRL in it, for ``[trainer] launcher = "kubernetes"``."""
    volume: str = "forge-server"
    """The PersistentVolumeClaim with the data folder and the model, shared with trainers."""
    volume_path: str = "/var/lib/forge"
    """Where server and trainers mount it."""


class LocalSettings(Section, frozen=True):
    """``[local]``: attempts as sandboxed processes on this machine."""

    min_sandbox: Literal["none", "user", "namespaces"] = "namespaces"
    memory_mb: Count = 2048
    disk_mb: Count = 10240
    """What an attempt may write to this machine's disk; beyond it is stopped."""
    pids: Count = 256
    allow_binds: tuple[str, ...] = ()
    """Further folders that every sandbox sees, read-only."""


class TrainerSettings(Section, frozen=True):
    """``[trainer]``: the veRL worker processes."""

    launcher: Literal["local", "kubernetes", "attach"] = "local"
    nproc: Count = 1
    """Worker processes; with ``kubernetes``, of each pod."""
    nodes: Count = 1
    """``kubernetes``: pods of the Job."""
    threads: Annotated[int, msgspec.Meta(ge=0)] = 0
    """OMP threads of each worker; 0: veRL's own choice."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    overrides: tuple[str, ...] = ()
    """veRL Hydra overrides for every run, before the run's own."""
    lease_s: Seconds = 60.0


class HarnessSettings(Section, frozen=True):
    """``[harness]``: further folders with harness specs."""

    paths: tuple[str, ...] = ()


class CostSettings(Section, frozen=True):
    """``[cost]``: what an hour costs, so that runs can be priced."""

    currency: str = "USD"
    gpu_hour: Price = 0.0
    engine_gpus: Gpus = 1
    """GPUs that the engine has while a run goes on."""
    trainer_gpus: Gpus = 1
    """GPUs that a trainer has while its session lasts; 0: it shares the engine's."""
    pod_hour: dict[str, Price] = {}
    """Backend -> price of one attempt for an hour: ``local``, ``kubernetes``."""


class TelemetrySettings(Section, frozen=True):
    """``[telemetry]``: traces for OpenTelemetry."""

    otlp_endpoint: str = ""
    """A collector that takes OTLP over HTTP; empty: none."""


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
    kubernetes: KubernetesSettings = KubernetesSettings()
    trainer: TrainerSettings = TrainerSettings()
    harness: HarnessSettings = HarnessSettings()
    cost: CostSettings = CostSettings()
    telemetry: TelemetrySettings = TelemetrySettings()
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
    where = str(file) if file else "environment"
    data = _read(file) if file else {}
    if "folder" in data:
        raise _unknown_key("folder", [], where)
    origin = _overlay(data, environ, where)
    data["folder"] = str(file.parent.resolve()) if file else os.getcwd()
    try:
        settings = msgspec.convert(data, Settings)
    except msgspec.ValidationError as error:
        raise _explain(str(error), where, origin) from None
    _check(settings, where)
    return settings


def run_tables(file: Path) -> list[dict[str, Any]]:
    """The ``[[run]]`` tables of a TOML file, as they stand there but checked. Raises ConfigError."""
    tables: list[dict[str, Any]] = _read(file).get("run", [])
    if not tables:
        raise ConfigError("there is no [[run]] table", where=str(file), mend="add one")
    parse_runs(tables, str(file))
    return tables


def parse_runs(tables: list[dict[str, Any]], where: str) -> tuple[RunSettings, ...]:
    """``[[run]]`` tables that came from ``where``. Raises ConfigError."""
    try:
        runs = msgspec.convert({"run": tables}, Settings).run
    except msgspec.ValidationError as error:
        raise _explain(str(error), where, {}) from None
    _check_runs(runs, where)
    return runs


def _read(file: Path) -> dict[str, Any]:
    where = str(file)
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            "there is no such file", where=where, mend="run `forge-server init` to write one"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"not valid TOML: {error}", where=where, mend="mend that line") from None
    except UnicodeDecodeError:
        raise ConfigError("not UTF-8 text", where=where, mend="save it as UTF-8") from None
    except OSError as error:
        raise ConfigError(f"cannot be read ({error.strerror})", where=where, mend="check the path") from None


def find_file(explicit: str | None) -> Path | None:
    """The settings file: the one given, else ``FORGE_CONFIG``, else ``forge.toml`` here, else none."""
    if explicit:
        return Path(explicit)
    if named := os.environ.get("FORGE_CONFIG"):
        return Path(named)
    here = Path("forge.toml")
    return here if here.exists() else None


def _overlay(data: dict[str, Any], environ: Mapping[str, str], where: str) -> dict[str, str]:
    """Put ``FORGE_SECTION__KEY=value`` over the file's values; returns ``section.key`` -> variable.

    Values are TOML, or plain strings.
    """
    origin = {}
    for name, text in sorted(environ.items()):
        if not name.startswith("FORGE_") or "__" not in name:
            continue
        section, _, key = name.removeprefix("FORGE_").lower().partition("__")
        variable = f"environment variable {name}"
        if section == "run":
            raise ConfigError(
                "runs are not set by environment variables", where=variable, mend="write a [[run]] table"
            )
        kind = get_type_hints(Settings).get(section)
        if not (isinstance(kind, type) and issubclass(kind, Section)):
            raise _unknown_key(section, [], variable)
        hints = get_type_hints(kind)
        if key not in hints:
            raise _unknown_key(key, [section], variable)
        table = data.setdefault(section, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{section}: a table is expected", where=where, mend=f"write [{section}]")
        table[key] = text if _is_text(hints[key]) else _toml_value(text)
        origin[f"{section}.{key}"] = variable
    return origin


def _is_text(hint: Any) -> bool:
    return hint is str or all(isinstance(value, str) for value in get_args(hint) or (0,))


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text


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


def _explain(message: str, where: str, origin: Mapping[str, str]) -> ConfigError:
    """What msgspec says about a value, as our error; ``origin`` tells which values came from elsewhere."""
    if match := _UNKNOWN.search(message):
        at = match["at"] or "$"
        path = [p for p in re.split(r"[.\[]", at.lstrip("$")) if p and not p.endswith("]")]
        return _unknown_key(match["key"], path, where)
    match = _AT.match(message)
    at = ((match["at"] if match else None) or "$").removeprefix("$").removeprefix(".")
    what = match["what"] if match else message
    mend = "write [[run]]" if at == "run" else "mend the value"
    if what.startswith("Invalid enum value") and (known := _choices(at)):
        mend = f"one of: {', '.join(known)}"
    for word, toml in (
        ("`object`", "`table`"),
        ("Object", "table"),
        ("`array`", "`list`"),
        ("`str`", "`text`"),
    ):
        what = what.replace(word, toml)
    what = what[:1].lower() + what[1:]
    return ConfigError(f"{at}: {what}" if at else what, where=origin.get(at, where), mend=mend)


def _choices(at: str) -> list[str]:
    """The values that the key at the dotted path may have, if it has a closed set."""
    *path, key = re.sub(r"\[\d+\]", "", at).split(".")
    hint = get_type_hints(_struct_at(path)).get(key)
    return [value for value in get_args(hint) if isinstance(value, str)]


def _check(settings: Settings, where: str) -> None:
    engine = settings.engine
    if engine.kind == "attach" and not engine.url.startswith(("http://", "https://")):
        raise ConfigError(
            f"[engine] kind is attach but url is {engine.url or 'empty'}",
            where=where,
            mend='add url = "http://…"',
        )
    if engine.kind == "attach" and engine.url.rstrip("/").endswith("/v1"):
        raise ConfigError(f"[engine] url is {engine.url}", where=where, mend="write it without /v1")
    if engine.kind == "managed" and not engine.model:
        raise ConfigError(
            "[engine] kind is managed but model is empty",
            where=where,
            mend='add model = "FOLDER" (HF format)',
        )
    if (url := settings.telemetry.otlp_endpoint) and not url.startswith(("http://", "https://")):
        raise ConfigError(
            f"[telemetry] otlp_endpoint is {url!r}", where=where, mend='write "http://HOST:4318"'
        )
    _check_cluster(settings, where)
    _check_runs(settings.run, where)


_WITHIN = ("", "0.0.0.0", "::", "localhost")


def _check_cluster(settings: Settings, where: str) -> None:
    """What backend and launcher need of ``[kubernetes]``."""
    server, kubernetes = settings.server, settings.kubernetes
    pods = settings.scheduler.backend == "kubernetes"
    jobs = settings.trainer.launcher == "kubernetes"
    for wanted, key, why in (
        (pods, "runner_image", '[scheduler] backend = "kubernetes"'),
        (jobs, "trainer_image", '[trainer] launcher = "kubernetes"'),
    ):
        if wanted and not getattr(kubernetes, key):
            raise ConfigError(f"{why} needs [kubernetes] {key}", where=where, mend=f'add {key} = "IMAGE"')
    for wanted, key, host, what in (
        (pods, "pod_url", server.host, "host"),
        (jobs, "control_url", server.control_host, "control_host"),
    ):
        url = getattr(kubernetes, key)
        if url and not re.fullmatch(r"http://[^/?#@\s]+", url):
            raise ConfigError(f"kubernetes.{key} is {url!r}", where=where, mend='write "http://HOST:PORT"')
        if wanted and not url and (host in _WITHIN or host.startswith("127.")):
            raise ConfigError(
                f"nothing tells how pods reach this server: [kubernetes] {key} is empty and [server] {what} is {host}",
                where=where,
                mend=f'add {key} = "http://HOST:PORT"',
            )
    shared = PurePosixPath(kubernetes.volume_path)
    if jobs and not settings.data_dir.is_relative_to(shared):
        raise ConfigError(
            f"the data folder {settings.data_dir} is not in [kubernetes] volume_path {shared}, which trainers share",
            where=where,
            mend="put [server] data_dir there",
        )


def _check_runs(runs: tuple[RunSettings, ...], where: str) -> None:
    for index, run in enumerate(runs):
        try:
            check_sizes(run)
        except ValueError as error:
            raise ConfigError(f"run[{index}]: {error}", where=where, mend="mend the value") from None
    names = [run.name for run in runs]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two [[run]] tables are named {name!r}", where=where, mend="rename one")
