"""The typed client of the control API, synchronous, on httpx. Errors of the server come back as ForgeError."""

import os
import tomllib
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
import msgspec

from forge_server.client import schemas as s
from forge_server.domain.errors import ForgeError, Unauthorized

T = TypeVar("T")


class ServerUnreachable(ForgeError):
    """No forge-server answers at the URL."""

    type, status = "server-unreachable", 503


class ApiError(ForgeError):
    """The server refused; ``type`` and ``status`` are the problem's."""

    def __init__(self, problem: s.Problem) -> None:
        super().__init__(problem.detail or problem.title)
        self.type = problem.type
        self.status = problem.status


def locate(url: str | None = None, key: str | None = None) -> tuple[str, str]:
    """URL and admin key: the arguments, else ``FORGE_URL`` / ``FORGE_KEY``, else those of ``./forge.toml``."""
    url = url or os.environ.get("FORGE_URL")
    key = key or os.environ.get("FORGE_KEY")
    file = Path(os.environ.get("FORGE_CONFIG", "forge.toml"))
    server: dict[str, Any] = {}
    if file.exists():
        data = tomllib.loads(file.read_text())
        server = data.get("server", {})
        key = key or data.get("security", {}).get("admin_key")
    data_dir = file.parent / server.get("data_dir", "forge-data")
    address = data_dir / "control.url"
    if not url and address.exists():
        url = address.read_text().strip()
    if not url:
        url = f"http://{server.get('control_host', '127.0.0.1')}:{server.get('control_port', 8401)}"
    if not key and (data_dir / "admin.key").exists():
        key = (data_dir / "admin.key").read_text().strip()
    return url, key or ""


class ForgeClient:
    """Talks to ``/api/v1`` of one server. Use as a context manager, or call ``close``."""

    def __init__(self, url: str | None = None, key: str | None = None, *, timeout_s: float = 60.0) -> None:
        self.url, self._key = locate(url, key)
        self._http = httpx.Client(
            base_url=self.url,
            headers={"authorization": f"Bearer {self._key}"},
            timeout=timeout_s,
            trust_env=False,
        )

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def call(self, method: str, path: str, kind: type[T], body: Any = None, **params: Any) -> T:
        """One request. Raises ServerUnreachable, Unauthorized or ApiError."""
        headers = {"content-type": "application/json"}
        if method == "POST":
            headers["idempotency-key"] = uuid.uuid4().hex
        try:
            response = self._http.request(
                method,
                path,
                content=None if body is None else msgspec.json.encode(body),
                params={k: v for k, v in params.items() if v is not None},
                headers=headers,
            )
        except httpx.HTTPError as error:
            raise ServerUnreachable(
                f"no forge-server answers ({error.__class__.__name__})",
                where=self.url,
                mend="start it with `forge-server up`, or give --url",
            ) from None
        if response.status_code >= 400:
            raise self._problem(response)
        if kind is type(None):
            return None
        return msgspec.json.decode(response.content, type=kind)

    def _problem(self, response: httpx.Response) -> ForgeError:
        try:
            problem = msgspec.json.decode(response.content, type=s.Problem)
        except msgspec.DecodeError:
            problem = s.Problem("error", response.reason_phrase, response.status_code, response.text[:300])
        if problem.status == 401:
            return Unauthorized(
                "the server does not accept this key",
                where=self.url,
                mend="give FORGE_KEY or run in its folder",
            )
        return ApiError(problem)

    def _pages(self, path: str, kind: type[T], limit: int | None, **params: Any) -> Iterator[T]:
        cursor: str | None = None
        left = limit
        while True:
            page = self.call("GET", path, s.Page, cursor=cursor, **params)
            for item in page.items:
                if left is not None:
                    if left == 0:
                        return
                    left -= 1
                yield msgspec.convert(item, kind)
            cursor = page.next_cursor
            if cursor is None:
                return

    # --- state of the server
    def ready(self) -> s.Readiness:
        response = self._http.get("/readyz")
        return msgspec.json.decode(response.content, type=s.Readiness)

    # --- runs
    def create_run(self, settings: dict[str, Any]) -> s.RunView:
        return self.call("POST", "/api/v1/runs", s.RunView, s.RunCreate(settings))

    def runs(self) -> list[s.RunView]:
        return list(self._pages("/api/v1/runs", s.RunView, None))

    def run(self, id_or_name: str) -> s.RunView:
        return self.call("GET", f"/api/v1/runs/{id_or_name}", s.RunView)

    def patch_run(self, id_or_name: str, patch: s.RunPatch) -> s.RunView:
        return self.call("PATCH", f"/api/v1/runs/{id_or_name}", s.RunView, patch)

    def metrics(self, run: str) -> list[s.StepMetrics]:
        return self.call("GET", f"/api/v1/runs/{run}/metrics", list[s.StepMetrics])

    # --- tasks
    def create_tasks(self, body: s.TaskCreate) -> s.TasksCreated:
        return self.call("POST", "/api/v1/tasks", s.TasksCreated, body)

    def tasks(self, taskset: str | None = None, limit: int | None = None) -> Iterator[s.TaskView]:
        return self._pages("/api/v1/tasks", s.TaskView, limit, taskset=taskset)

    # --- rollouts
    def register(self, body: s.RolloutCreate) -> s.Registration:
        return self.call("POST", "/api/v1/rollouts", s.Registration, body)

    def rollouts(
        self, run: str | None = None, state: str | None = None, limit: int | None = None
    ) -> Iterator[s.RolloutView]:
        return self._pages("/api/v1/rollouts", s.RolloutView, limit, run=run, state=state)

    def rollout(self, rollout_id: str) -> s.RolloutDetail:
        return self.call("GET", f"/api/v1/rollouts/{rollout_id}", s.RolloutDetail)

    def calls(self, rollout_id: str, messages: bool = False) -> list[s.CallView]:
        return self.call(
            "GET", f"/api/v1/rollouts/{rollout_id}/calls", list[s.CallView], messages=str(messages).lower()
        )

    def samples(self, rollout_id: str) -> list[s.SampleView]:
        return self.call("GET", f"/api/v1/rollouts/{rollout_id}/samples", list[s.SampleView])

    def logs(self, rollout_id: str) -> list[s.LogView]:
        return self.call("GET", f"/api/v1/rollouts/{rollout_id}/logs", list[s.LogView])

    def rollout_action(self, rollout_id: str, action: str) -> s.RolloutDetail:
        """``action``: cancel | retry."""
        return self.call("POST", f"/api/v1/rollouts/{rollout_id}/{action}", s.RolloutDetail, {})

    # --- policies
    def policies(self) -> list[s.PolicyView]:
        return self.call("GET", "/api/v1/policies", list[s.PolicyView])

    def activate(self, version: int) -> s.PolicyView:
        return self.call("POST", f"/api/v1/policies/{version}/activate", s.PolicyView, {})
