"""``forge-server policy …``"""

from forge_server.client.http import ForgeClient
from forge_server.commands import show as out
from forge_server.commands.source import reading
from forge_server.domain.errors import NotFound

COLUMNS = ("name", "version", "state", "step", "parent_version", "created_at", "live_at", "reason")


def listing(url: str | None, key: str | None, as_json: bool) -> None:
    with reading(url, key) as source:
        out.rows(source.policies(), COLUMNS, as_json, empty="no policy yet: configure [engine] model")


def show(version: int, url: str | None, key: str | None, as_json: bool) -> None:
    with reading(url, key) as source:
        for view in source.policies():
            if view.version == version:
                out.one(view, as_json)
                return
    raise NotFound(f"there is no version {version}", mend="`forge-server policy list` shows them")


def activate(version: int, url: str | None, key: str | None) -> None:
    with ForgeClient(url, key, timeout_s=900.0) as client:
        view = client.activate(version)
        out.console.print(f"{view.name} version {view.version} is {view.state}")
