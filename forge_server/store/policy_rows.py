"""Rows of ``policies`` as versions."""

import sqlalchemy as sa

from forge_server.domain.policy import Version
from forge_server.domain.states import PolicyState
from forge_server.store import tables as t


def versions_in(connection: sa.Connection, name: str) -> list[Version]:
    """Every version of the policy, oldest first."""
    query = sa.select(t.policies).where(t.policies.c.name == name).order_by(t.policies.c.version)
    return [
        Version(**{**row, "state": PolicyState(row["state"])}) for row in connection.execute(query).mappings()
    ]
