"""Runs the verifier over what the dead agent left, in a sandbox of its own, and reads its word.

The tests arrive only now, at ``/tests``; ``/logs/verifier`` exists only for the verifier. What it writes
there is read with suspicion: a number in ``reward.txt`` or ``{"reward": number}`` in ``reward.json``,
finite and of a sensible size, or the verdict is ``invalid``.
"""

from __future__ import annotations

import io
import json
import math
import os
import stat
import tarfile

TYPE_CHECKING = False  # without importing typing: every attempt would pay for it
if TYPE_CHECKING:
    from typing import Any

REWARD_LIMIT = 1000.0
FILE_LIMIT = 4096
DEPTH_LIMIT = 32  # of reward.json: what the server cannot read looks like a server that is away


class Verdict:
    """``status``: ok | crash | timeout | invalid | none, as the protocol names them."""

    def __init__(
        self,
        status: str,
        exit_code: int | None = None,
        *,
        value: float | None = None,
        error: str = "",
        detail: dict[str, Any] | None = None,
    ) -> None:
        self.status, self.exit_code, self.error = status, exit_code, error
        self.value, self.detail = value, detail


def unpack(data: bytes, into: str) -> None:
    """Extract the verifier's tar: files and folders only, none outside ``into``, readable by everybody."""
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for member in archive:
            path = os.path.normpath(member.name)
            if path.startswith(("/", "..")):
                raise ValueError(f"the verifier's archive leads outside: {member.name!r}")
            target = os.path.join(into, path)
            if member.isdir():
                os.makedirs(target, exist_ok=True)
                continue
            content = archive.extractfile(member) if member.isreg() else None
            if content is None:
                raise ValueError(f"the verifier's archive holds a special file: {member.name!r}")
            os.makedirs(os.path.dirname(target), exist_ok=True)
            with open(target, "wb") as file:
                file.write(content.read())
            os.chmod(target, 0o755 if member.mode & 0o111 else 0o644)


def verdict(logs: str, exit_code: int, removed: list[str]) -> Verdict:
    """What the verifier that ended with ``exit_code`` says, by the files it left in ``logs``.

    ``removed`` (see ``scrub``) goes into the reward's detail. The exit code alone decides nothing:
    verifiers are often test runners, which fail when a test does.
    """
    for name, parse in (("reward.txt", _text), ("reward.json", _json)):
        try:
            raw = _read(os.path.join(logs, name))
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            return Verdict("invalid", exit_code, error=f"{name}: {error}")
        try:
            value, detail = parse(raw)
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            return Verdict("invalid", exit_code, error=f"{name} is not a reward ({error}): {raw[:80]!r}")
        if not math.isfinite(value) or abs(value) > REWARD_LIMIT:
            what = f"{name}: {value} is not a finite number within ±{REWARD_LIMIT:g}"
            return Verdict("invalid", exit_code, error=what)
        if removed:
            # names that are no UTF-8 could not be sent
            detail["removed_before_verifying"] = [
                name.encode("utf-8", "backslashreplace").decode() for name in removed[:20]
            ]
        return Verdict("ok", exit_code, value=value, detail=detail)
    if exit_code != 0:
        return Verdict("crash", exit_code, error=f"the verifier ended with status {exit_code} and no reward")
    return Verdict("invalid", exit_code, error="the verifier wrote neither reward.txt nor reward.json")


def _text(raw: bytes) -> tuple[float, dict[str, Any]]:
    return float(raw.decode().strip()), {}


def _json(raw: bytes) -> tuple[float, dict[str, Any]]:
    data = json.loads(raw, parse_constant=_not_json)
    value = data["reward"]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError("reward is not a number")
    if _deep(data, DEPTH_LIMIT):
        raise ValueError("it is nested too deeply")
    return float(value), data


def _deep(value: Any, levels: int) -> bool:
    """Whether lists and objects are nested in more than so many ``levels``."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return inner is not None and (levels == 0 or any(_deep(one, levels - 1) for one in inner))


def _not_json(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _read(path: str) -> bytes:
    """A small regular file; no link is followed, no fifo is waited for."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_size > FILE_LIMIT:
            raise ValueError("not a small regular file")
        return os.read(fd, FILE_LIMIT)
    finally:
        os.close(fd)
