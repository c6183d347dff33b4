"""``forge-server check``: one line per check, and the mend. Nothing is changed and nothing keeps running."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import msgspec

from forge_server import environments, logs
from forge_server import settings as config_tree
from forge_server.api.listeners import bind_tcp
from forge_server.app import load_specs, model_folder
from forge_server.client.schemas import Check
from forge_server.commands import data as recorded
from forge_server.commands import show as out
from forge_server.domain.errors import ForgeError
from forge_server.engine.client import EngineClient
from forge_server.engine.managed import running_engine
from forge_server.engine.probe import preflight
from forge_server.scheduler.sandbox import probe
from forge_server.services import data_folder
from forge_server.settings import Settings
from forge_server.store import schema


class NotReady(ForgeError):
    """A check failed."""

    type = "not-ready"


def check(config: str | None, data: str | None, as_json: bool) -> None:
    if data is not None:
        recorded.check(data, config, as_json)
        return
    settings = config_tree.load(config_tree.find_file(config))
    logs.configure("error", "console")
    checks = [Check("settings", True, str(config_tree.find_file(config) or "all defaults"))]
    checks += [*_server(settings), *_database(settings), *_sandbox(settings)]
    checks += [*_environments(settings), *_harnesses(settings), *_model(settings)]
    checks += asyncio.run(_engine(settings))
    if as_json:
        print(msgspec.json.encode(checks).decode())
    else:
        for line in checks:
            mark = "[green]ok[/]  " if line.ok else "[red]FAIL[/]"
            out.console.print(f"{mark} {line.name}: {out.text(line.detail)}", soft_wrap=True)
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
        install = specs[name].install
        done = install is None or environments.is_complete(environments.harness_recipe(name, install))
        yield Check(f"harness {name}", done, "installed" if done else f"run `forge-server env create {name}`")


def _model(settings: Settings) -> Iterator[Check]:
    if settings.engine.model:
        try:
            yield Check("model", True, str(model_folder(settings)))
        except ForgeError as error:
            yield Check("model", False, str(error))


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
