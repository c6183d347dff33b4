"""``forge-server harness …``"""

import msgspec
import yaml

from forge_server import settings as config_tree
from forge_server.app import load_specs
from forge_server.commands import show as out
from forge_server.domain.errors import NotFound
from forge_server.harness.spec import Spec


def _specs(config: str | None) -> dict[str, Spec]:
    return load_specs(config_tree.load(config_tree.find_file(config)))


def listing(config: str | None, as_json: bool) -> None:
    out.rows(list(_specs(config).values()), ("name", "api", "summary"), as_json, empty="no harness specs found")


def show(name: str, config: str | None) -> None:
    specs = _specs(config)
    if name not in specs:
        raise NotFound(f"there is no harness {name!r}", mend=f"known: {', '.join(sorted(specs))}")
    print(yaml.safe_dump(msgspec.to_builtins(specs[name]), sort_keys=False, allow_unicode=True), end="")
