"""Keys (invariant I10): HMACs of the instance's secret, so that nothing is stored and none can be guessed.

A key reads ``fk-SCOPE-SUBJECT-HEX``: it names its attempt (or run), so that routes without an attempt in
their path find it. A right key only proves who speaks; whether the attempt still lives is for the caller
to check.
"""

import functools
import hmac
import os
import secrets
from pathlib import Path
from typing import Literal

import msgspec

from forge_server.domain.errors import StoreError

Scope = Literal["agent", "runner", "join", "trainer"]
_SCOPES = ("agent", "runner", "join", "trainer")
_HEX = 32


class Claim(msgspec.Struct, frozen=True):
    """What a key proves: ``subject`` is an attempt id, or the run id for the scope ``trainer``."""

    scope: str
    subject: str


def attempt_key(secret: bytes, attempt_id: str, scope: Literal["agent", "runner", "join"]) -> str:
    """The key of an attempt: ``agent`` for inference, ``runner`` for its lifecycle, ``join`` to start
    once.
    """
    return _key(secret, scope, attempt_id)


def trainer_key(secret: bytes, run_id: str) -> str:
    """The key of a run's trainer."""
    return _key(secret, "trainer", run_id)


def verify(secret: bytes, key: str) -> Claim | None:
    """What ``key`` proves, or None when it is not one of ours. Takes the same time for every wrong key."""
    parts = key.split("-", 2)
    if len(parts) != 3 or parts[0] != "fk" or parts[1] not in _SCOPES:
        return None
    subject, _, given = parts[2].rpartition("-")
    if not subject or len(given) != _HEX or not given.isascii():
        return None
    if not hmac.compare_digest(given, _digest(secret, parts[1], subject)):
        return None
    return Claim(parts[1], subject)


def admin_key(path: Path) -> str:
    """The admin key in the file at ``path``, made (mode 0600) when missing. Raises StoreError."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return _read_admin_key(path)
    except OSError as error:
        raise StoreError(f"the admin key cannot be written ({error.strerror})", where=str(path)) from None
    key = f"fk-admin-{secrets.token_hex(24)}"
    with os.fdopen(fd, "w") as file:
        file.write(key + "\n")
        file.flush()
        os.fsync(file.fileno())
    return key


def _read_admin_key(path: Path) -> str:
    try:
        mode, key = path.stat().st_mode, path.read_text().strip()
    except OSError as error:
        raise StoreError(f"the admin key cannot be read ({error.strerror})", where=str(path)) from None
    if mode & 0o077:
        raise StoreError("the admin key can be read by others", where=str(path), mend=f"chmod 600 {path}")
    if not key:
        raise StoreError("the admin key is empty", where=str(path), mend="remove the file")
    return key


def _key(secret: bytes, scope: str, subject: str) -> str:
    return f"fk-{scope}-{subject}-{_digest(secret, scope, subject)}"


@functools.lru_cache(4096)  # an attempt shows the same key with every call
def _digest(secret: bytes, scope: str, subject: str) -> str:
    return hmac.digest(secret, f"{scope}|{subject}".encode(), "sha256").hex()[:_HEX]
