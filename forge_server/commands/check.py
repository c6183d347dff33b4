"""``forge-server check``: one line per check, and the mend. Nothing is changed and nothing keeps running."""

import asyncio
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import msgspec
from rich.table import Table

from forge_server import environments, logs
from forge_server import settings as config_tree
from forge_server.api.listeners import bind_tcp
from forge_server.app import check_telemetry, imageless, load_specs, model_folder
from forge_server.client.schemas import Check
from forge_server.commands import data as recorded
from forge_server.commands import show as out
from forge_server.domain.errors import ConfigError, ForgeError
from forge_server.engine.client import EngineClient
from forge_server.engine.managed import running_engine
from forge_server.engine.probe import preflight
from forge_server.export.identity import chat_template
from forge_server.scheduler.sandbox import probe
from forge_server.services import data_folder
from forge_server.settings import Settings
from forge_server.store import schema
from forge_server.trajectory.prefixes import ChatTemplate, Finding, findings


class NotReady(ForgeError):
    """A check failed."""

    type = "not-ready"


def check(config: str | None, data: str | None, as_json: bool, probe: bool) -> None:
    if data is not None:
        recorded.check(data, config, as_json)
        return
    settings = config_tree.load(config_tree.find_file(config))
    logs.configure("error", "console")
    checks = [Check("settings", True, str(config_tree.find_file(config) or "all defaults"))]
    checks += [*_server(settings), *_database(settings)]
    if settings.scheduler.backend == "local":
        checks += _sandbox(settings)
    checks += [*_environments(settings), *_harnesses(settings), *_model(settings), *_telemetry(settings)]
    template, found = _chat_template(settings)
    checks += template
    checks += asyncio.run(_engine(settings))
    checks += _cluster(settings, probe)
    if as_json:
        checks += [Check(f"chat template: {f.case}", True, _told(f)) for f in found]
        print(msgspec.json.encode(checks).decode())
    else:
        for line in checks:
            mark = "[green]ok[/]  " if line.ok else "[red]FAIL[/]"
            out.console.print(f"{mark} {line.name}: {out.text(line.detail)}", soft_wrap=True)
        _print_prefixes(found)
    failed = [line.name for line in checks if not line.ok]
    if failed:
        raise NotReady(f"not ready: {', '.join(failed)}", mend="see the lines above")


def _server(settings: Settings) -> Iterator[Check]:
    """The data folder can be written and the ports are free, unless a server of this folder has them."""
    try:
        owner = data_folder.holder(settings.data_dir)
    except ForgeError as error:
        yield Check("data folder", False, str(error))
        return
    if owner is not None:
        yield Check("data folder", True, f"{settings.data_dir}, in use by the server of process {owner}")
        return
    yield Check("data folder", True, str(settings.data_dir))
    server = settings.server
    for key, host, port in (
        ("port", server.host, server.port),
        ("control_port", server.control_host, server.control_port),
    ):
        try:
            bind_tcp(host, port, f"[server] {key}").close()
            yield Check(key, True, f"{host}:{port} is free" if port else "a free one is taken")
        except ForgeError as error:
            yield Check(key, False, str(error))


def _database(settings: Settings) -> Iterator[Check]:
    url = settings.store_url
    try:
        found, head = schema.current(url), schema.head()
    except ForgeError as error:
        missing = url.startswith("sqlite:///") and not Path(url.removeprefix("sqlite:///")).exists()
        yield Check("database", missing, "made at the first start" if missing else str(error))
        return
    if found is None:
        yield Check("database", True, "empty: made at the first start")
    elif found == head:
        yield Check("database", True, f"revision {found}")
    else:
        yield Check("database", False, f"revision {found}, not {head}; run `forge-server db upgrade`")


def _sandbox(settings: Settings) -> Iterator[Check]:
    try:
        yield Check("sandbox", True, str(probe(settings.local.min_sandbox)))
    except ForgeError as error:
        yield Check("sandbox", False, str(error))


def _cluster(settings: Settings, probe: bool) -> list[Check]:
    if settings.scheduler.backend != "kubernetes" and settings.trainer.launcher != "kubernetes":
        if probe:
            raise ConfigError("there is no cluster to probe", mend='set [scheduler] backend = "kubernetes"')
        return []
    from forge_server.services import cluster_check

    return asyncio.run(cluster_check.check(settings, probe=probe))


def _environments(settings: Settings) -> Iterator[Check]:
    wanted = []
    if settings.engine.kind == "managed":
        wanted.append("engine")
    if settings.trainer.launcher == "local" and any(run.kind == "train" for run in settings.run):
        wanted.append("trainer")
    for name in wanted:
        done = environments.is_complete(environments.recipe(name))
        detail = str(environments.path_of(name)) if done else f"run `forge-server env create {name}`"
        yield Check(f"environment {name}", done, detail)


def _harnesses(settings: Settings) -> Iterator[Check]:
    try:
        specs = load_specs(settings)
    except ForgeError as error:
        yield Check("harness specs", False, str(error))
        return
    yield Check("harness specs", True, ", ".join(sorted(specs)))
    for name in sorted({name for run in settings.run for name, _ in run.mixture}):
        if name not in specs:
            yield Check(f"harness {name}", False, f"there is no such spec; known: {', '.join(sorted(specs))}")
            continue
        if settings.scheduler.backend == "kubernetes":
            mend = f'add [kubernetes] harness_images = {{{name} = "IMAGE"}}'
            lacks = name in imageless(settings, specs)
            yield Check(f"harness {name}", not lacks, mend if lacks else "brought by an image")
            continue
        install = specs[name].install
        done = install is None or environments.is_complete(environments.harness_recipe(name, install))
        yield Check(f"harness {name}", done, "installed" if done else f"run `forge-server env create {name}`")


def _model(settings: Settings) -> Iterator[Check]:
    if settings.engine.model:
        try:
            yield Check("model", True, str(model_folder(settings)))
        except ForgeError as error:
            yield Check("model", False, str(error))


def _telemetry(settings: Settings) -> Iterator[Check]:
    if endpoint := settings.telemetry.otlp_endpoint:
        try:
            check_telemetry(settings)
            yield Check("telemetry", True, f"traces go to {endpoint}")
        except ForgeError as error:
            yield Check("telemetry", False, str(error))


def _chat_template(settings: Settings) -> tuple[list[Check], tuple[Finding, ...]]:
    """Whether there is a template, and which histories it keeps; a break costs time, so it is no failure."""
    engine = settings.engine
    if not engine.model:
        return [], ()
    folder = settings.path(engine.model)
    if not (folder / "config.json").exists():
        folder = folder / "huggingface"
    template = chat_template(folder)
    for flag, value in pairwise(engine.flags):
        if flag == "--chat-template" and Path(value).is_file():
            template = ChatTemplate(Path(value).read_text(), template.special if template else {})
    if template is None:
        return [Check("chat template", True, f"none in {folder}: histories are not looked at")], ()
    try:
        found = findings(template)
    except ValueError as error:
        return [Check("chat template", False, str(error))], ()
    broken = sum(f.extends is False for f in found)
    applies = sum(f.extends is not None for f in found)
    detail = f"record mode cuts {broken} of {applies} histories into samples; --json shows where they part"
    return [Check("chat template", True, detail if broken else "keeps every history")], found


def _told(found: Finding) -> str:
    if found.extends is None:
        return f"not looked at: {found.why}"
    if found.extends:
        return "extends"
    return (
        f"breaks: {found.written!r} was written, the next prompt has {found.rendered!r}; {found.cost}; "
        f"kept by {found.mend}"
    )


def _print_prefixes(found: tuple[Finding, ...]) -> None:
    if not found:
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("chat template, when", "record mode", "what it costs", "kept by"):
        table.add_column(column, overflow="fold")
    for each in found:
        word = {True: "extends", False: "[yellow]breaks[/]", None: "-"}[each.extends]
        table.add_row(each.case, word, out.text(each.cost or each.why), each.mend)
    out.console.print()
    out.console.print(table)


async def _engine(settings: Settings) -> list[Check]:
    engine = settings.engine
    if engine.kind == "none":
        return [Check("engine", False, "not configured; add [engine] kind and model to forge.toml")]
    url = engine.url if engine.kind == "attach" else running_engine(settings.data_dir / "engine")
    if url is None:
        return [
            Check("engine", True, "managed: started by `forge-server up`; run check beside it to probe it")
        ]
    client = EngineClient(url, engine.served_model, api_key=engine.api_key)
    try:
        return [
            Check(c.name, c.ok, c.found + (f"; {c.mend}" if c.mend and not c.ok else ""))
            for c in await preflight(client)
        ]
    finally:
        await client.close()
