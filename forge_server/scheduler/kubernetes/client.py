"""Talks to the API server: raw answers of the official client, decoded by msgspec into the fields that are read.

Every request has a time limit of its own (the client's default would end a watch after 300 s); the watch has one on
both sides and one on silence, because a connection that is half open says nothing for ever. Credentials that the API
server does not take any more are read anew, once per request.
"""

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import yaml
from kubernetes.aio import client as k8s
from kubernetes.aio import config as k8s_config

from forge_server.domain.errors import ConfigError
from forge_server.scheduler.kubernetes.pod import Pod

ANSWER_S = 30.0
"""Seconds within which any answer but a watch must be complete."""

LOG_S = 5.0
"""Seconds that last words are waited for: the node that has them may be what is broken."""

BREATH_S = 0.1
"""Seconds between two looks at a watch: waking up for one change costs more than reading it."""

PAGE = 500
"""Pods per page of a list."""


class ApiError(Exception):
    """The API server refused, or did not answer (``status`` 0).

    ``reason`` is its word for it (``AlreadyExists``, ``Forbidden``, ``Expired``), ``retry_after`` seconds.
    """

    def __init__(self, status: int, reason: str, message: str, retry_after: float = 0.0) -> None:
        self.status, self.reason, self.message, self.retry_after = status, reason, message, retry_after
        super().__init__(f"{status or 'no answer'} {reason}: {message}".strip())

    @property
    def over_quota(self) -> bool:
        """Refused because the namespace's quota is used up: there will be room again."""
        return self.status == 403 and "exceeded quota" in self.message

    @property
    def unsettled(self) -> bool:
        """Refused because the cluster's controllers, which make accounts and count quotas, have not come round to it
        yet."""
        words = ("error looking up service account", "status unknown for quota")
        return self.status == 403 and any(word in self.message for word in words)

    @property
    def transient(self) -> bool:
        """Asking again later may help. That includes credentials, which others bring up to date."""
        passing = self.status in (0, 401, 408, 409, 429) or self.status >= 500
        return passing or self.over_quota or self.unsettled


class _ListMeta(msgspec.Struct, frozen=True, rename="camel"):
    resource_version: str = ""
    continue_: str = msgspec.field(default="", name="continue")


class PodList(msgspec.Struct, frozen=True):
    items: tuple[Pod, ...] = ()
    metadata: _ListMeta = _ListMeta()


class Refusal(msgspec.Struct, frozen=True):
    """The API server's ``Status`` object."""

    code: int = 0
    reason: str = ""
    message: str = ""


class Seen(msgspec.Struct, frozen=True):
    """One line of a watch. The pod of a bookmark has a resource version only."""

    type: str
    pod: Pod = msgspec.field(name="object")


class _Error(msgspec.Struct, frozen=True):
    object: Refusal


_POD = msgspec.json.Decoder(Pod)
_LIST = msgspec.json.Decoder(PodList)
_SEEN = msgspec.json.Decoder(Seen)
_ERROR = msgspec.json.Decoder(_Error)
_REFUSAL = msgspec.json.Decoder(Refusal)

Reload = Callable[[k8s.Configuration], Awaitable[None]]
"""Reads the credentials again, into the configuration that is in use."""


class Pods:
    """The pods of one namespace. ``close`` it."""

    def __init__(self, api: k8s.ApiClient, namespace: str, reload: Reload | None = None) -> None:
        self.api, self.namespace, self._reload = api, namespace, reload
        self._core = k8s.CoreV1Api(api)

    @classmethod
    async def connect(cls, kubeconfig: str, context: str, namespace: str) -> "Pods":
        """``kubeconfig``: a file; empty: inside a cluster its account, else the user's own file.
        ``namespace`` empty: that of the context, or of the account. Raises ConfigError."""
        configuration = k8s.Configuration()
        where = kubeconfig or "[kubernetes]"
        reload: Reload | None = None
        try:
            _must_exist(kubeconfig)
            if not kubeconfig and _inside():
                k8s_config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
                found = _own_namespace()
            else:
                await _load(kubeconfig, context, configuration)
                found = _namespace_of(kubeconfig, context)
                reload = functools.partial(_load_again, kubeconfig, context)
            if not str(configuration.host).startswith(("https://", "http://")):
                raise ValueError(f"the server {configuration.host!r} is no URL")
            configuration.connection_pool_maxsize = 64
            api = k8s.ApiClient(configuration)
        except _READING as error:
            told = " ".join(str(error).split())[:300]
            raise ConfigError(
                f"no cluster can be reached with this configuration: {told}",
                where=where,
                mend="set [kubernetes] kubeconfig and context, or run inside the cluster",
            ) from None
        return cls(api, namespace or found or "default", reload)

    @property
    def server(self) -> str:
        return str(self.api.configuration.host)

    async def page(self, selector: str, after: str = "") -> PodList:
        """One page of the pods that match ``selector``; ``after`` is the page before's ``continue``."""
        data = await self.ask(
            self._core.list_namespaced_pod_without_preload_content,
            self.namespace,
            label_selector=selector,
            limit=PAGE,
            _continue=after or None,
        )
        return _LIST.decode(data)

    async def watch(
        self, selector: str, version: str, window_s: float, silence_s: float
    ) -> AsyncGenerator[list[Seen], None]:
        """Changes since ``version``, as they come in; first an empty list, when the watch is open. It just ends
        when the server ends it (after ``window_s``), is silent for ``silence_s``, or the connection breaks. Raises
        ApiError, with 410 when ``version`` is too old."""
        with _attributed():
            async with asyncio.timeout(ANSWER_S):
                response = await self._open(
                    self._core.list_namespaced_pod_without_preload_content,
                    window_s + 60.0,
                    self.namespace,
                    label_selector=selector,
                    watch=True,
                    resource_version=version,
                    allow_watch_bookmarks=True,
                    timeout_seconds=int(window_s),
                )
        rest = b""
        try:
            yield []
            while True:
                try:
                    async with asyncio.timeout(silence_s):
                        data = await response.content.readany()
                except (TimeoutError, aiohttp.ClientError, OSError):
                    return
                with _attributed():
                    *lines, rest = (rest + data).split(b"\n")
                    seen = [_seen(line) for line in lines if line]
                if not data:
                    return
                yield seen
                await _breathe(response)
        finally:
            response.close()

    async def create(self, manifest: dict[str, Any]) -> Pod:
        """Raises ApiError."""
        data = await self.ask(
            self._core.create_namespaced_pod_without_preload_content, self.namespace, manifest
        )
        return _POD.decode(data)

    async def get(self, name: str) -> Pod | None:
        """The pod, or None when there is none of this name. Raises ApiError."""
        try:
            data = await self.ask(
                self._core.read_namespaced_pod_without_preload_content, name, self.namespace
            )
        except ApiError as error:
            if error.status == 404:
                return None
            raise
        return _POD.decode(data)

    async def delete(self, name: str, grace_s: float, *, uid: str = "") -> bool:
        """Ask for the deletion; False when there is no such pod (with this ``uid``). Raises ApiError."""
        body: dict[str, Any] = {"gracePeriodSeconds": int(grace_s)}
        if uid:
            body["preconditions"] = {"uid": uid}
        try:
            await self.ask(
                self._core.delete_namespaced_pod_without_preload_content, name, self.namespace, body=body
            )
        except ApiError as error:
            if error.status in (404, 409):  # gone, or another pod has the name now
                return False
            raise
        return True

    async def log(self, name: str, container: str, limit_bytes: int) -> str:
        """The last lines of a container; empty when there are none to be had soon."""
        with contextlib.suppress(ApiError):
            data = await self.ask(
                self._core.read_namespaced_pod_log_without_preload_content,
                name,
                self.namespace,
                container=container,
                tail_lines=400,
                within=LOG_S,
            )
            return data[-limit_bytes:].decode("utf-8", "replace")
        return ""

    async def close(self) -> None:
        await self.api.close()  # type: ignore[no-untyped-call]

    async def ask(
        self, method: Callable[..., Awaitable[Any]], *given: Any, within: float = ANSWER_S, **named: Any
    ) -> bytes:
        """The answer to one request of the client's ``…_without_preload_content`` methods. Raises ApiError."""
        with _attributed():
            async with asyncio.timeout(within):
                response = await self._open(method, within, *given, **named)
                data: bytes = await response.read()
        return data

    async def _open(
        self, method: Callable[..., Awaitable[Any]], limit_s: float, *given: Any, **named: Any
    ) -> aiohttp.ClientResponse:
        """The response, whose status is good. Raises ApiError."""
        try:
            return await self._opened(method, limit_s, *given, **named)
        except ApiError as error:
            if error.status != 401 or self._reload is None:
                raise
            await self._reload(self.api.configuration)
        return await self._opened(method, limit_s, *given, **named)

    async def _opened(
        self, method: Callable[..., Awaitable[Any]], limit_s: float, *given: Any, **named: Any
    ) -> aiohttp.ClientResponse:
        with _attributed():
            response: aiohttp.ClientResponse = await method(*given, _request_timeout=limit_s, **named)
            if response.status < 300:
                return response
            data = await response.read()
        try:
            refusal = _REFUSAL.decode(data)
        except msgspec.MsgspecError:
            refusal = Refusal(message=data[:300].decode("utf-8", "replace"))
        wait = response.headers.get("Retry-After", "")
        raise ApiError(
            response.status, refusal.reason, refusal.message, float(wait) if wait.isdigit() else 0.0
        )


def _seen(line: bytes) -> Seen:
    """Raises ApiError for a line that ends the watch."""
    if line.startswith(b'{"type":"ERROR"'):
        refusal = _ERROR.decode(line).object
        raise ApiError(refusal.code, refusal.reason, refusal.message)
    return _SEEN.decode(line)


async def _load(kubeconfig: str, context: str, configuration: k8s.Configuration) -> None:
    await k8s_config.load_kube_config(  # type: ignore[no-untyped-call]
        config_file=kubeconfig or None,
        context=context or None,
        client_configuration=configuration,
        persist_config=False,
    )


_READING: tuple[type[Exception], ...] = (
    k8s_config.ConfigException,
    yaml.YAMLError,
    OSError,
    ValueError,
    LookupError,
    TypeError,
)
"""What reading a kubeconfig may raise."""


async def _load_again(kubeconfig: str, context: str, configuration: k8s.Configuration) -> None:
    """A file that is wrong by now leaves the credentials as they are."""
    fresh = k8s.Configuration()
    with contextlib.suppress(*_READING):
        await _load(kubeconfig, context, fresh)
        configuration.api_key = fresh.api_key


async def _breathe(response: aiohttp.ClientResponse) -> None:
    """Let changes gather in the kernel, where they cost nothing, so that they are read together."""
    connection = response.connection
    if connection is not None and connection.protocol is not None:  # else the answer is complete
        limit = getattr(connection.transport, "set_read_buffer_limits", None)
        if limit is not None:  # TLS would go on reading for itself
            limit(1, 0)
        connection.protocol.pause_reading()
        await asyncio.sleep(BREATH_S)
        connection.protocol.resume_reading()


def _must_exist(kubeconfig: str) -> None:
    if kubeconfig and not Path(kubeconfig).is_file():
        raise FileNotFoundError("there is no such file")


_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


def _inside() -> bool:
    """Whether this process runs in a pod with an account."""
    return _ACCOUNT.exists()


def _own_namespace() -> str:
    return (_ACCOUNT / "namespace").read_text().strip()


def _namespace_of(kubeconfig: str, context: str) -> str:
    contexts, active = k8s_config.list_kube_config_contexts(  # type: ignore[no-untyped-call]
        config_file=kubeconfig or None
    )
    chosen = next((c for c in contexts if c["name"] == context), active)
    namespace: str = chosen.get("context", {}).get("namespace", "") if chosen else ""
    return namespace


@contextlib.contextmanager
def _attributed() -> Iterator[None]:
    """Trouble of the connection, and answers that are no JSON of Kubernetes, as ApiError."""
    try:
        yield
    except TimeoutError:
        raise ApiError(0, "Timeout", "the API server did not answer in time") from None
    except (aiohttp.ClientError, OSError) as error:
        raise ApiError(0, type(error).__name__, str(error)[:300]) from None
    except msgspec.MsgspecError as error:
        raise ApiError(0, "NotKubernetes", f"the answer cannot be read: {error}") from None
