"""``forge-server run …``"""

import tomllib
from pathlib import Path

from forge_server.client.http import ForgeClient
from forge_server.client.schemas import RunPatch
from forge_server.commands import show as out
from forge_server.domain.errors import ConfigError

COLUMNS = ("name", "id", "kind", "state", "step", "rollouts", "reason")


def create(file: str, url: str | None, key: str | None) -> None:
    try:
        tables = tomllib.loads(Path(file).read_text()).get("run", [])
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"not valid TOML: {error}", where=file, mend="mend that line") from None
    if not tables:
        raise ConfigError("there is no [[run]] table", where=file, mend="add one")
    with ForgeClient(url, key) as client:
        for table in tables:
            view = client.create_run(table)
            out.console.print(f"{view.name}  {view.id}  {view.state}")


def listing(url: str | None, key: str | None, as_json: bool) -> None:
    with ForgeClient(url, key) as client:
        out.rows(client.runs(), COLUMNS, as_json, empty="no runs yet; add a \\[\\[run]] to forge.toml")


def show(run: str, url: str | None, key: str | None, as_json: bool) -> None:
    with ForgeClient(url, key) as client:
        view = client.run(run)
        metrics = client.metrics(view.id)
    if as_json:
        out.one({"run": view, "metrics": metrics}, True)
        return
    out.one(view, False)
    for step in metrics:
        shown = {name: value for name, value in step.metrics.items() if value is not None}
        out.console.print(f"[bold]step {step.step} {step.source}[/]  {out.text(shown)}", soft_wrap=True)


def act(run: str, action: str, url: str | None, key: str | None) -> None:
    with ForgeClient(url, key) as client:
        view = client.patch_run(run, RunPatch(action=action))
        out.console.print(f"{view.name}  {view.state}  {view.reason}")
