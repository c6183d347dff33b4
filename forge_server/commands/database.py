"""``forge-server db …``"""

from forge_server import settings as config_tree
from forge_server.domain.errors import StoreError
from forge_server.services import data_folder
from forge_server.store import schema


def _url(config: str | None) -> str:
    return config_tree.load(config_tree.find_file(config)).store_url


def upgrade(config: str | None) -> None:
    settings = config_tree.load(config_tree.find_file(config))
    if not settings.store.url:
        data_folder.make(settings.data_dir)
    schema.upgrade(settings.store_url)
    print(f"schema is at {schema.current(settings.store_url)}")


def current(config: str | None) -> None:
    print(schema.current(_url(config)) or "no schema yet: run `forge-server db upgrade`")


def downgrade(revision: str, config: str | None) -> None:
    url = _url(config)
    if schema.current(url) is None:
        raise StoreError("there is no schema to take back", mend="`forge-server db upgrade` makes one")
    schema.downgrade(url, revision)
    print(f"schema is at {schema.current(url) or 'nothing'}")
