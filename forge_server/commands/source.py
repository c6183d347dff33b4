"""Where the read-only commands read: the server, or its database when no server runs."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from forge_server import settings as config_tree
from forge_server.client.http import ForgeClient, ServerUnreachable
from forge_server.domain.errors import ForgeError
from forge_server.services.reading import StoreReader
from forge_server.store.database import Store


@contextmanager
def reading(url: str | None, key: str | None) -> Iterator[ForgeClient | StoreReader]:
    """The server at ``url`` if one is named, else the one of the folder, else the folder's database.

    Raises ServerUnreachable when there is neither.
    """
    with ForgeClient(url, key) as client:
        away = None if url or os.environ.get("FORGE_URL") else _away(client)
        if away is None:
            yield client
            return
    settings = config_tree.load(config_tree.find_file(None))
    try:
        store = Store.open(settings.store_url, lock=False)
    except ForgeError as error:
        raise ServerUnreachable(
            f"{away.what}, and the database cannot be read ({error.what})", where=away.where, mend=away.mend
        ) from None
    try:
        yield StoreReader(store, settings.cost)
    finally:
        store.close()


def _away(client: ForgeClient) -> ServerUnreachable | None:
    try:
        client.ready()
    except ServerUnreachable as error:
        return error
    return None
