"""``forge-server db …``"""

from forge_server import settings as config_tree
from forge_server.store import schema


def _url(config: str | None) -> str:
    settings = config_tree.load(config_tree.find_file(config))
    if not settings.store.url:
        settings.data_dir.mkdir(parents=True, exist_ok=True)
    return settings.store_url


def upgrade(config: str | None) -> None:
    url = _url(config)
    schema.upgrade(url)
    print(f"schema is at {schema.current(url)}")


def current(config: str | None) -> None:
    print(schema.current(_url(config)) or "no schema yet: run `forge-server db upgrade`")


def downgrade(revision: str, config: str | None) -> None:
    url = _url(config)
    schema.downgrade(url, revision)
    print(f"schema is at {schema.current(url) or 'nothing'}")
