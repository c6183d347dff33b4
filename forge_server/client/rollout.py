"""Register a rollout from outside: ``with rollout(client, task=...) as r: ... r.reward(1.0)``."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import httpx

from forge_server.client.http import ForgeClient
from forge_server.client.schemas import Registration, RolloutCreate
from forge_server.domain.errors import ForgeError


class ExternalRollout:
    """A registered rollout: where its harness calls (``base_url``, ``agent_key``) and how it is scored."""

    def __init__(self, registration: Registration, *, timeout_s: float = 60.0) -> None:
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

    def _post(self, path: str, body: dict[str, Any]) -> None:
        response = self._http.post(f"{self._http.base_url}{path}", json=body)
        if response.status_code >= 400:
            raise ForgeError(f"the server answered {response.status_code} to {path}: {response.text[:300]}")

    def reward(
        self, value: float, *, call_id: int | None = None, detail: dict[str, Any] | None = None
    ) -> None:
        """Score the rollout; no model call is accepted afterwards."""
        self._post("seal", {"reason": "reward"})
        self._post(
            "reward", {"value": value, "source": "external", "call_id": call_id, "detail": detail or {}}
        )
        self._rewarded = True

    def finish(self, exit_code: int = 0, error: str | None = None) -> None:
        """End the rollout; idempotent."""
        verifier = {"status": "ok", "exit_code": 0} if self._rewarded else {"status": "none"}
        self._post("finish", {"exit_code": exit_code, "verifier": verifier, "runner_error": error or ""})
        self.finished = True

    def close(self) -> None:
        self._http.close()


@contextmanager
def rollout(
    client: ForgeClient,
    *,
    task: str | None = None,
    run: str | None = None,
    harness: str = "external",
    mode: Literal["record", "eval", "train"] = "record",
) -> Iterator[ExternalRollout]:
    """Register, run the body, finish. An exception in the body finishes the rollout with that error."""
    external = ExternalRollout(client.register(RolloutCreate(task=task, run=run, harness=harness, mode=mode)))
    try:
        yield external
        if not external.finished:
            external.finish()
    except BaseException as error:
        if not external.finished:
            external.finish(exit_code=1, error=f"{type(error).__name__}: {error}")
        raise
    finally:
        external.close()
