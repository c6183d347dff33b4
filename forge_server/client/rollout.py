"""Register a rollout from outside: ``with rollout(client, task=...) as r: ... r.reward(1.0)``."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal

import httpx

from forge_server.client.http import ForgeClient, ServerUnreachable
from forge_server.client.schemas import Registration, RolloutCreate
from forge_server.domain.errors import ForgeError

BEATS_PER_TTL = 3

AWAY_S = 120.0
"""How long a server that restarts, or whose database is in trouble, is waited for."""

LONGEST_PAUSE_S = 2.0


class ExternalRollout:
    """A registered rollout: where its harness calls (``base_url``, ``agent_key``) and how it is scored.

    With ``ttl_s`` a thread sends heartbeats until the rollout is finished; ``stop`` is set, with ``stop_reason``, when
    the server wants no more of it (a budget is used up, a person cancelled it).
    """

    def __init__(
        self, registration: Registration, *, ttl_s: float | None = None, timeout_s: float = 60.0
    ) -> None:
        self.registration = registration
        self._http = httpx.Client(
            base_url=registration.base_url,
            headers={"authorization": f"Bearer {registration.runner_key}"},
            timeout=timeout_s,
            trust_env=False,
            verify=registration.base_url.startswith(
                "https"
            ),  # reading certificates costs more than the rollout
        )
        self.finished = self._rewarded = False
        self._away_since: float | None = None
        self.stop, self.stop_reason = threading.Event(), ""
        self._over = threading.Event()
        self._heart: threading.Thread | None = None
        if ttl_s is not None:
            self._heart = threading.Thread(target=self._beat, args=(ttl_s / BEATS_PER_TTL,), daemon=True)
            self._heart.start()

    @property
    def base_url(self) -> str:
        """Base of the OpenAI-like APIs, for clients that add ``/chat/completions`` or ``/responses``."""
        return f"{self.registration.base_url}/v1"

    @property
    def agent_key(self) -> str:
        return self.registration.agent_key

    def _post(self, path: str, body: dict[str, Any]) -> None:
        """Whatever is posted here may be said twice: it is sent again until the server has been away for ``AWAY_S``.
        A second thing that is to be said to it then waits no more. Raises ServerUnreachable and ForgeError.
        """
        pause = 0.1
        while True:
            try:
                response = self._http.post(f"{self._http.base_url}{path}", json=body)
            except httpx.TransportError as error:
                trouble = error.__class__.__name__
            else:
                if response.status_code != 503:
                    break
                trouble = f"503: {response.text[:300]}"
            now = time.monotonic()
            if self._away_since is None:
                self._away_since = now
            if now + pause > self._away_since + AWAY_S:
                raise ServerUnreachable(
                    f"no forge-server took {path} for {AWAY_S:g} s ({trouble})",
                    where=self.registration.base_url,
                    mend="check that it runs",
                )
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
        self._away_since = None
        if response.status_code >= 400:
            raise ForgeError(f"the server answered {response.status_code} to {path}: {response.text[:300]}")

    def _beat(self, every_s: float) -> None:
        while not self._over.wait(every_s):
            try:
                answer = self._http.post(
                    f"{self._http.base_url}heartbeat", json={"phase": "running"}, timeout=every_s
                )
                orders = answer.json() if answer.status_code == 200 else {}
            except (httpx.HTTPError, ValueError):
                continue  # a server that is away is waited for
            if answer.status_code == 409:
                self._told_to_stop("ended")
                return
            if orders.get("action") == "stop":
                self._told_to_stop(str(orders.get("reason", "")))

    def _told_to_stop(self, reason: str) -> None:
        if not self.stop.is_set():
            self.stop_reason = reason
            self.stop.set()

    def reward(
        self, value: float, *, call_id: int | None = None, detail: dict[str, Any] | None = None
    ) -> None:
        """Score the rollout; no model call is accepted afterwards."""
        self._post("seal", {"reason": "reward"})
        self._post(
            "reward", {"value": value, "source": "external", "call_id": call_id, "detail": detail or {}}
        )
        self._rewarded = self._rewarded or call_id is None  # one call's is not the rollout's

    def finish(self, exit_code: int = 0, error: str | None = None) -> None:
        """End the rollout; idempotent."""
        verifier = {"status": "ok", "exit_code": 0} if self._rewarded else {"status": "none"}
        self._post("finish", {"exit_code": exit_code, "verifier": verifier, "runner_error": error or ""})
        self.finished = True

    def close(self) -> None:
        self._over.set()
        if self._heart is not None:
            self._heart.join()
        self._http.close()


@contextmanager
def rollout(
    client: ForgeClient,
    *,
    task: str | None = None,
    run: str | None = None,
    harness: str = "external",
    mode: Literal["record", "eval", "train"] = "record",
    ttl_s: float | None = 120.0,
) -> Iterator[ExternalRollout]:
    """Register, run the body, finish. An exception in the body finishes the rollout with that error, and is raised.

    When this process is gone for ``ttl_s`` the rollout is lost; None: only its agent clock ends it.
    """
    body = RolloutCreate(task=task, run=run, harness=harness, mode=mode, ttl_s=ttl_s)
    external = ExternalRollout(client.register(body), ttl_s=ttl_s)
    try:
        yield external
    except BaseException as error:
        if not external.finished:
            with suppress(ForgeError):  # the body's own error is the one to be told
                external.finish(exit_code=1, error=f"{type(error).__name__}: {error}")
        raise
    else:
        if not external.finished:
            external.finish()
    finally:
        external.close()
