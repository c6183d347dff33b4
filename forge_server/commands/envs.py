"""``forge-server env …``"""

from forge_server import environments
from forge_server import settings as config_tree
from forge_server.app import load_specs
from forge_server.commands import show as out
from forge_server.domain.errors import NotFound


def create(name: str, config: str | None) -> None:
    """The engine's, the trainer's or a harness's environment; says where and how large first."""
    if name in ("engine", "trainer"):
        environments.create(name)
        return
    specs = load_specs(config_tree.load(config_tree.find_file(config)))
    if name not in specs:
        raise NotFound(
            f"there is no environment {name!r}", mend=f"known: engine, trainer, {', '.join(specs)}"
        )
    install = specs[name].install
    if install is None:
        print(f"{name} ships with forge-server: nothing to install")
        return
    print(environments.ensure_harness(name, install))


def listing(as_json: bool) -> None:
    out.rows(
        environments.list_(),
        ("name", "complete", "size_mb", "path"),
        as_json,
        empty="nothing installed yet: forge-server env create engine",
    )


def remove(name: str) -> None:
    environments.remove(name)
    print(f"removed {name}")
