"""The typed client of the control API, synchronous, on httpx. Errors of the server come back as ForgeError."""

import os
import socket
import tomllib
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar
from urllib.parse import quote

import httpx
import msgspec

from forge_server.client import schemas as s
from forge_server.client.cost import Cost
from forge_server.domain.errors import ConfigError, ForgeError, Unauthorized

T = TypeVar("T")
PAGE = 500


class ServerUnreachable(ForgeError):
    """No forge-server answers at the URL."""

    type, status = "server-unreachable", 503


class WrongServer(ServerUnreachable):
    """Something answers, but no forge-server, or one of another version."""

    type = "wrong-server"


class ApiError(ForgeError):
    """The server refused; ``type`` and ``status`` are the problem's."""

    def __init__(self, problem: s.Problem) -> None:
        super().__init__(problem.detail or problem.title)
        self.type = problem.type
        self.status = problem.status
        self.exit_code = 2 if problem.status == 400 else 1


def locate(url: str | None = None, key: str | None = None) -> tuple[str, str]:
    """URL and admin key: the arguments, else ``FORGE_URL`` / ``FORGE_KEY``, else what belongs to the settings
    file here: the running server's address and key in its data folder, else what the file says.

    Raises ConfigError when the file cannot be read.
    """
    url = url or os.environ.get("FORGE_URL")
    key = key or os.environ.get("FORGE_KEY")
    if not (url and key):
        file = Path(os.environ.get("FORGE_CONFIG", "forge.toml"))
        server, security = _table(file, "server"), _table(file, "security")
        data_dir = file.parent / str(server.get("data_dir", "forge-data"))
        port = f"{server.get('control_host', '127.0.0.1')}:{server.get('control_port', 8401)}"
        url = url or _content(data_dir / "control.url") or f"http://{port}"
        key = key or str(security.get("admin_key", "")) or _content(data_dir / "admin.key")
    return url, key


def _table(file: Path, name: str) -> dict[str, Any]:
    """A section of the settings file with its environment variables over it; enough to find a server."""
    try:
        found = tomllib.loads(file.read_text()).get(name, {}) if file.exists() else {}
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot be read ({error})", where=str(file), mend="mend it, or give --url"
        ) from None
    prefix = f"FORGE_{name.upper()}__"
    over = {key[len(prefix) :].lower(): text for key, text in os.environ.items() if key.startswith(prefix)}
    return (found if isinstance(found, dict) else {}) | over


def _word(text: str) -> str:
    """``text`` as one word of a path."""
    return quote(text, safe="")


def _content(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


class EventStream:
    """Iterates over batches of events, an empty one with every sign of life; ends when the server stops.

    ``close`` may be called from another thread: a blocked iteration ends.
    """

    def __init__(self, response: httpx.Response) -> None:
        self._response, self._closed = response, False

    def __iter__(self) -> Iterator[list[s.EventView]]:
        rest = b""
        try:
            for chunk in self._response.iter_raw():
                *whole, rest = (rest + chunk).split(b"\r\n\r\n")
                yield [_event(data) for each in whole if (data := each.partition(b"data: ")[2])]
        except httpx.HTTPError:
            if not self._closed:
                raise

    def close(self) -> None:
        self._closed = True
        found = self._response.extensions["network_stream"].get_extra_info("socket")
        if found is not None:
            with suppress(OSError):
                found.shutdown(socket.SHUT_RDWR)


def _event(data: bytes) -> s.EventView:
    return msgspec.json.decode(data, type=s.EventView)


class ForgeClient:
    """Talks to ``/api/v1`` of one server. Use as a context manager, or call ``close``."""

    def __init__(self, url: str | None = None, key: str | None = None, *, timeout_s: float = 60.0) -> None:
        self.url, admin_key = locate(url, key)
        if admin_key and not (admin_key.isascii() and admin_key.isprintable() and " " not in admin_key):
            raise ConfigError("the admin key is no key", where="FORGE_KEY", mend="give the one of admin.key")
        headers = {"authorization": f"Bearer {admin_key}"} if admin_key else {}
        try:
            self._http = httpx.Client(base_url=self.url, headers=headers, timeout=timeout_s, trust_env=False)
        except httpx.InvalidURL as error:
            raise ConfigError(f"not a URL ({error})", where=self.url, mend="give http://HOST:PORT") from None

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def call(self, method: str, path: str, kind: type[T], body: Any = None, /, **params: Any) -> T:
        """One request. Raises ServerUnreachable, Unauthorized or ApiError."""
        response = self._send(method, path, body, params)
        if response.status_code >= 400:
            raise self._problem(response)
        return self._decoded(response, kind)

    def _send(self, method: str, path: str, body: Any, params: dict[str, Any]) -> httpx.Response:
        headers = {"content-type": "application/json"}
        if method == "POST":
            headers["idempotency-key"] = uuid.uuid4().hex
        try:
            return self._http.request(
                method,
                path,
                content=None if body is None else msgspec.json.encode(body),
                params={k: v for k, v in params.items() if v is not None},
                headers=headers,
            )
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None

    def _unreachable(self, error: httpx.HTTPError) -> ServerUnreachable:
        return ServerUnreachable(
            f"no forge-server answers ({error.__class__.__name__})",
            where=self.url,
            mend="start it with `forge-server up`, or give --url",
        )

    def _decoded(self, response: httpx.Response, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(response.content, type=kind)
        except msgspec.MsgspecError:
            raise WrongServer(
                "what answers is no forge-server, or one of another version",
                where=self.url,
                mend="give --url",
            ) from None

    def _problem(self, response: httpx.Response) -> ForgeError:
        problem = self._decoded(response, s.Problem)
        if problem.status == 401:
            return Unauthorized(
                "the server does not accept this key",
                where=self.url,
                mend="give --key or FORGE_KEY, or run in the folder of its forge.toml",
            )
        return ApiError(problem)

    def _pages(self, path: str, kind: type[T], limit: int | None, **params: Any) -> Iterator[T]:
        cursor: str | None = None
        left = limit
        while True:
            size = PAGE if left is None else min(left, PAGE)
            page = self.call("GET", path, s.Page, cursor=cursor, limit=size, **params)
            yield from (msgspec.convert(item, kind) for item in page.items)
            cursor = page.next_cursor
            if left is not None:
                left -= len(page.items)
            if cursor is None or left == 0:
                return

    # --- state of the server
    def ready(self) -> s.Readiness:
        """Raises ServerUnreachable."""
        return self._decoded(self._send("GET", "/readyz", None, {}), s.Readiness)

    # --- runs
    def create_run(self, settings: dict[str, Any]) -> s.RunView:
        return self.call("POST", "/api/v1/runs", s.RunView, s.RunCreate(settings))

    def runs(self) -> list[s.RunView]:
        return list(self._pages("/api/v1/runs", s.RunView, None))

    def run(self, id_or_name: str) -> s.RunView:
        return self.call("GET", f"/api/v1/runs/{_word(id_or_name)}", s.RunView)

    def patch_run(self, id_or_name: str, patch: s.RunPatch) -> s.RunView:
        return self.call("PATCH", f"/api/v1/runs/{_word(id_or_name)}", s.RunView, patch)

    def evaluate_run(self, id_or_name: str) -> s.EvaluationAsked:
        """Have the live policy measured now."""
        return self.call("POST", f"/api/v1/runs/{_word(id_or_name)}/evaluate", s.EvaluationAsked, {})

    def checkpoint_run(self, id_or_name: str) -> s.SaveAsked:
        """Have the trainer save its full state with its next step."""
        return self.call("POST", f"/api/v1/runs/{_word(id_or_name)}/checkpoint", s.SaveAsked, {})

    def metrics(self, run: str, since: int = 0) -> list[s.StepMetrics]:
        """Of the steps from ``since`` on."""
        return self.call("GET", f"/api/v1/runs/{_word(run)}/metrics", list[s.StepMetrics], since=since)

    def compare(
        self, run: str, by: Literal["task", "harness"], mode: str | None = None, k: int | None = None
    ) -> list[s.Comparison]:
        path = f"/api/v1/runs/{_word(run)}/compare"
        return self.call("GET", path, list[s.Comparison], by=by, mode=mode, k=k)

    def overview(self, run: str | None = None) -> s.Overview:
        """Of a run, or of the one that matters most at the moment."""
        return self.call("GET", "/api/v1/overview", s.Overview, run=run)

    def cost(self, run: str) -> Cost:
        return self.call("GET", f"/api/v1/runs/{_word(run)}/cost", Cost)

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

    def rollout_page(self, cursor: str | None = None, limit: int = 100, **filters: Any) -> s.RolloutPage:
        """One page; ``filters`` are the route's parameters."""
        return self.call("GET", "/api/v1/rollouts", s.RolloutPage, cursor=cursor, limit=limit, **filters)

    def rollout(self, rollout_id: str) -> s.RolloutDetail:
        return self.call("GET", f"/api/v1/rollouts/{_word(rollout_id)}", s.RolloutDetail)

    def calls(self, rollout_id: str, messages: bool = False) -> list[s.CallView]:
        return self.call(
            "GET",
            f"/api/v1/rollouts/{_word(rollout_id)}/calls",
            list[s.CallView],
            messages=str(messages).lower(),
        )

    def samples(self, rollout_id: str) -> list[s.SampleView]:
        return self.call("GET", f"/api/v1/rollouts/{_word(rollout_id)}/samples", list[s.SampleView])

    def turns(
        self, rollout_id: str, since: int = 0, limit: int = 100, attempt: str | None = None
    ) -> list[s.Turn]:
        path = f"/api/v1/rollouts/{_word(rollout_id)}/turns"
        return self.call("GET", path, list[s.Turn], since=since, limit=limit, attempt=attempt)

    def segments(self, rollout_id: str, attempt: str | None = None) -> s.SegmentsView:
        path = f"/api/v1/rollouts/{_word(rollout_id)}/segments"
        return self.call("GET", path, s.SegmentsView, attempt=attempt)

    def tokens(
        self, rollout_id: str, index: int, offset: int = 0, limit: int = 4096, attempt: str | None = None
    ) -> s.TokensView:
        path = f"/api/v1/rollouts/{_word(rollout_id)}/segments/{index}/tokens"
        return self.call("GET", path, s.TokensView, offset=offset, limit=limit, attempt=attempt)

    def logs(self, rollout_id: str) -> list[s.LogView]:
        return self.call("GET", f"/api/v1/rollouts/{_word(rollout_id)}/logs", list[s.LogView])

    def rollout_action(self, rollout_id: str, action: Literal["cancel", "retry"]) -> s.RolloutDetail:
        return self.call("POST", f"/api/v1/rollouts/{_word(rollout_id)}/{action}", s.RolloutDetail, {})

    # --- events
    def history(self, cursor: str | None = None, limit: int = 100, **filters: Any) -> s.EventPage:
        """Events, newest first; ``filters`` are the route's parameters."""
        return self.call("GET", "/api/v1/events/history", s.EventPage, cursor=cursor, limit=limit, **filters)

    def all_events(self, run: str, kinds: str) -> Iterator[s.EventView]:
        """Every event of the run that is kept, newest first; ``kinds`` with commas between."""
        return self._pages("/api/v1/events/history", s.EventView, None, run=run, kinds=kinds)

    @contextmanager
    def events(
        self, since: int | None = None, *, run: str | None = None, every: float = 0.0
    ) -> Iterator[EventStream]:
        """Every event after number ``since`` (None: from now on), as they are committed; ``every``: gathered for so
        many seconds. Raises as ``call`` does."""
        params = {"since": since, "run": run, "every": every}
        timeout = httpx.Timeout(30.0 + every, connect=10.0)
        try:
            with self._http.stream(
                "GET",
                "/api/v1/events",
                params={k: v for k, v in params.items() if v is not None},
                headers={"accept-encoding": "identity"},  # what is gathered for a frame would come late
                timeout=timeout,
            ) as response:
                if response.status_code >= 400:
                    response.read()
                    raise self._problem(response)
                yield EventStream(response)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None

    # --- policies
    def policies(self) -> list[s.PolicyView]:
        return self.call("GET", "/api/v1/policies", list[s.PolicyView])

    def activate(self, version: int) -> s.PolicyView:
        return self.call("POST", f"/api/v1/policies/{version}/activate", s.PolicyView, {})
