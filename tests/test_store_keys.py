"""I10: a key says whose it is and cannot be guessed or made into another; the admin key is for its owner."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_server.domain.errors import StoreError
from forge_server.domain.ids import new_id
from forge_server.store import instance, keys
from forge_server.store.database import Store
from forge_server.store.keys import Claim

SECRET = bytes(range(32))
ATTEMPT = "at-0e7k2m9qx4d8s1h0a"


@pytest.mark.parametrize("scope", ["agent", "runner", "join"])
def test_a_key_proves_its_scope_and_its_attempt(scope: str) -> None:
    attempt = new_id("at")
    key = keys.attempt_key(SECRET, attempt, scope)  # type: ignore[arg-type]
    assert keys.verify(SECRET, key) == Claim(scope, attempt)
    assert keys.verify(bytes(32), key) is None


def test_a_trainers_key_proves_its_run() -> None:
    assert keys.verify(SECRET, keys.trainer_key(SECRET, "ru-1")) == Claim("trainer", "ru-1")


def test_i10_an_agents_key_does_not_become_a_runners() -> None:
    agent = keys.attempt_key(SECRET, ATTEMPT, "agent")
    assert keys.verify(SECRET, agent.replace("agent", "runner")) is None
    assert keys.verify(SECRET, agent.replace(ATTEMPT, new_id("at"))) is None
    assert agent.split("-")[-1] != keys.attempt_key(SECRET, ATTEMPT, "runner").split("-")[-1]


@given(st.one_of(st.text(max_size=80), st.text(max_size=40).map(lambda tail: f"fk-agent-{ATTEMPT}-{tail}")))
def test_nothing_else_is_a_key(text: str) -> None:
    assert keys.verify(SECRET, text) is None


def test_the_admin_key_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    file = tmp_path / "admin.key"
    key = keys.admin_key(file)
    assert keys.admin_key(file) == key and len(key) > 40
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o644)
    with pytest.raises(StoreError, match="read by others; chmod 600"):
        keys.admin_key(file)
    file.chmod(0o600)
    file.write_text("")
    with pytest.raises(StoreError, match="empty"):
        keys.admin_key(file)
    with pytest.raises(StoreError, match="cannot be written"):
        keys.admin_key(tmp_path / "nowhere" / "admin.key")


async def test_the_instance_stays_the_same(database_url: str) -> None:
    store = Store.open(database_url, create=True)
    first = await instance.load(store, 5.0)
    store.close()
    store = Store.open(database_url)
    assert await instance.load(store, 9.0) == first and len(first.secret) == 32
    assert await store.read(instance.last_alive) == 5.0
    await store.write(lambda connection: instance.beat(connection, 7.0))
    assert await store.read(instance.last_alive) == 7.0
    store.close()
