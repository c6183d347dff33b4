"""The composition root: builds every service and both listeners, starts and stops them in order.

The only module that knows all parts. Start: lock and migrate the database, settle what the last life left,
then engine, proxy, scheduler, controller. Stop goes the other way round and leaves nothing running that must not
outlive the server. A part that fails for good ends the server with its reason.
"""

import asyncio
import contextlib
import os
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
from litestar import Litestar, Router
from litestar.config.compression import CompressionConfig
from litestar.openapi.config import OpenAPIConfig

from forge_server import __version__, environments, extras
from forge_server.api import idempotent, problem
from forge_server.api.auth import admin_guard
from forge_server.api.catalog import catalog_routes
from forge_server.api.compare import compare_routes
from forge_server.api.cost import cost_routes
from forge_server.api.events import event_routes
from forge_server.api.health import health_routes
from forge_server.api.idempotent import Idempotency
from forge_server.api.inspect import inspect_routes
from forge_server.api.listeners import bind_tcp, bind_unix, serving
from forge_server.api.metrics import metrics_routes
from forge_server.api.openapi import Described
from forge_server.api.overview import overview_routes
from forge_server.api.pod import pod_routes
from forge_server.api.rollouts import rollout_routes
from forge_server.api.runs import check_harnesses, run_routes
from forge_server.api.strict import refuse_unknown_parameters
from forge_server.api.trainer import trainer_routes
from forge_server.assets import folder as asset_folder
from forge_server.assets import stage_package
from forge_server.client.schemas import Check
from forge_server.controller.bell import Bells
from forge_server.controller.cohort import Cohorts
from forge_server.controller.keeper import Keeper
from forge_server.controller.launcher import AttachLauncher, Launcher, TrainerJob
from forge_server.controller.local_trainer import LocalLauncher
from forge_server.controller.loop import Controller
from forge_server.controller.policies import Policies
from forge_server.controller.rounds import Rounds
from forge_server.controller.runs import Runs, going_runs
from forge_server.controller.steering import Steering
from forge_server.controller.steps import Steps
from forge_server.controller.swap import Swapper
from forge_server.controller.trainer_link import TrainerLink
from forge_server.domain import events as e
from forge_server.domain.errors import ConfigError, ForgeError, SpecError
from forge_server.engine.attach import AttachedHost
from forge_server.engine.checkpoint import Policy
from forge_server.engine.hosts import Host
from forge_server.engine.managed import ManagedHost, ManagedSpec
from forge_server.engine.model_facts import ModelFacts, facts_of
from forge_server.engine.pool import EnginePool
from forge_server.evaluation.round import Evaluation
from forge_server.export.identity import check_same
from forge_server.harness.load import load_all
from forge_server.harness.spec import Spec
from forge_server.lifecycle.apply import Lifecycle
from forge_server.proxy.calls import Calls
from forge_server.proxy.connection import ConnectionProtocol
from forge_server.proxy.hold import Gate
from forge_server.proxy.routes import InferenceRoutes
from forge_server.proxy.sessions import Sessions
from forge_server.scheduler.backend import Backend
from forge_server.scheduler.local import LocalBackend, LocalOptions
from forge_server.scheduler.plans import PlanOptions, Plans
from forge_server.scheduler.scheduler import Options, Scheduler
from forge_server.scheduler.ticks import Ticks
from forge_server.services.conversations import conversations, log_tails
from forge_server.services.data_folder import DataFolder
from forge_server.services.engine_watch import EngineWatch
from forge_server.services.event_lines import log_event
from forge_server.services.event_tally import EventTally
from forge_server.services.external import ExternalRollouts
from forge_server.services.lookups import CallPolicies, TaskFiles
from forge_server.services.metrics import Metrics, Parts
from forge_server.services.news import News
from forge_server.services.settling import Settling
from forge_server.services.task_import import TaskImport
from forge_server.services.vocabulary import Vocabulary
from forge_server.settings import Settings
from forge_server.store import events as event_log
from forge_server.store import instance, keys
from forge_server.store.database import Store

if TYPE_CHECKING:  # its client takes most of a second to load
    from forge_server.scheduler.kubernetes.backend import KubernetesBackend
    from forge_server.services.telemetry.traces import Traces

log = structlog.get_logger(__name__)

EVENTS_KEPT_S = 14 * 24 * 3600.0


class Listening:
    """The bound sockets and where they are. Raises ConfigError."""

    def __init__(self, settings: Settings, unix_path: Path) -> None:
        server = settings.server
        self.unix_path = unix_path
        with contextlib.ExitStack() as undo:
            self.pod = bind_tcp(server.host, server.port, "[server] port")
            undo.callback(self.pod.close)
            self.control = bind_tcp(server.control_host, server.control_port, "[server] control_port")
            undo.callback(self.control.close)
            self.unix = bind_unix(unix_path)
            undo.pop_all()

    @property
    def pod_url(self) -> str:
        return _url(self.pod)

    @property
    def control_url(self) -> str:
        return _url(self.control)

    def close(self) -> None:
        for sock in (self.pod, self.control, self.unix):
            sock.close()
        self.unix_path.unlink(missing_ok=True)


def _url(sock: socket.socket) -> str:
    """The address as a process on this machine reaches it."""
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{host}:{port}"


class _NoEngine:
    """``[engine] kind = "none"``: every call waits for nothing and is told why."""

    reason = 'not configured: add [engine] kind = "managed" and model = "FOLDER" to forge.toml'
    ready = False
    serving = (0, 0)

    template = None

    async def _away(self, *args: Any, **kwargs: Any) -> Any:
        from forge_server.domain.engine import EngineUnavailable

        raise EngineUnavailable(f"the engine is {self.reason}")

    chat = count_tokens = render = generate = message = detokenize = _away

    async def swap(self, path: Path, version: int, manifest_sha256: str) -> Any:
        raise ConfigError(f"the engine is {self.reason}")

    def moved(self, version: int, path: Path) -> None:
        """Nothing serves it."""

    async def version(self) -> int | None:
        return None

    def start(self) -> None:
        """Nothing to start."""

    async def close(self, *, keep_engine: bool = False) -> None:
        """Nothing to close."""


def model_folder(settings: Settings) -> Path:
    """The folder of the initial weights. Raises ConfigError."""
    folder = settings.path(settings.engine.model)
    if not ((folder / "config.json").exists() or (folder / "huggingface" / "config.json").exists()):
        raise ConfigError(
            "there is no model (config.json) in this folder",
            where=str(folder),
            mend="set [engine] model to a Hugging Face folder",
        )
    return folder


def _untrainable(facts: ModelFacts) -> str:
    """Why a run with such a model must not train it; empty when it may."""
    if not facts.sense:
        return ""
    return (
        f"the model is multimodal ({facts.sense}) and batches carry no pixels: what it sees would be missing from its "
        "training, so it can be recorded, evaluated and exported, but not trained"
    )


def check_telemetry(settings: Settings) -> None:
    """Raises ConfigError when traces are wanted and what makes them is not installed."""
    if settings.telemetry.otlp_endpoint:
        module = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
        extras.require("otel", module, wanted_by="[telemetry] otlp_endpoint")


def load_specs(settings: Settings) -> dict[str, Spec]:
    """The built-in harness specs and those of ``[harness] paths``."""
    return load_all([asset_folder("harness_specs"), *(settings.path(p) for p in settings.harness.paths)])


async def build_engine(settings: Settings, policy: Policy) -> EnginePool | _NoEngine:
    """The engine pool as configured; environments are made when missing. Raises EnvironmentMissing."""
    engine = settings.engine
    if engine.kind == "none":
        return _NoEngine()
    host: Host
    if engine.kind == "attach":
        host = AttachedHost(engine.url)
    else:
        environment = await asyncio.to_thread(environments.ensure, "engine")
        staged = stage_package("engine_ext", settings.data_dir / "staged" / "engine")
        folder = settings.data_dir / "engine"
        folder.mkdir(parents=True, exist_ok=True)
        host = ManagedHost(
            ManagedSpec(
                python=environment / "bin" / "python",
                staged=staged,
                folder=folder,
                served_model=engine.served_model,
                dtype=engine.dtype,
                max_model_len=engine.max_model_len,
                max_num_seqs=engine.max_num_seqs,
                cpu=not environments.has_cuda(),
                tool_call_parser=engine.tool_call_parser,
                reasoning_parser=engine.reasoning_parser,
                flags=engine.flags,
                env=engine.env,
                start_timeout_s=engine.start_timeout_s,
            )
        )
    return EnginePool(
        [host],
        model=engine.served_model,
        policy=policy,
        api_key=engine.api_key,
        request_timeout_s=engine.request_timeout_s,
        drain_s=settings.proxy.drain_s,
        start_timeout_s=engine.start_timeout_s,
        tolerance=engine.logprob_tolerance,
    )


def build_launcher(settings: Settings) -> Launcher:
    """How trainers are started on this machine, or by a person."""
    trainer = settings.trainer
    if trainer.launcher == "attach":
        return AttachLauncher(trainer.device, trainer.nproc)

    async def environment() -> Path:
        return await asyncio.to_thread(environments.ensure, "trainer")

    return LocalLauncher(
        environment,
        settings.data_dir / "staged" / "trainer",
        nproc=trainer.nproc,
        device=trainer.device,
        threads=trainer.threads,
    )


def imageless(settings: Settings, specs: Mapping[str, Spec]) -> frozenset[str]:
    """The harnesses that no pod can run, because nothing brings what they install."""
    if settings.scheduler.backend == "local":
        return frozenset()
    known = settings.kubernetes.harness_images
    return frozenset(name for name, spec in specs.items() if spec.install is not None and name not in known)


class Server:
    """One running server. Use ``running``."""

    def __init__(
        self,
        settings: Settings,
        specs: dict[str, Spec],
        listening: Listening,
        store: Store,
        who: instance.Instance,
    ) -> None:
        self.settings, self.specs = settings, specs
        self.listening, self.store, self.instance = listening, store, who
        self.admin_key = settings.security.admin_key or keys.admin_key(settings.data_dir / "admin.key")
        self.lifecycle = Lifecycle(store, breaker_after=settings.scheduler.breaker)
        self.policies = Policies(store, self.lifecycle, settings.engine.policy)
        self.gate = Gate()
        self.sessions = Sessions(store, CallPolicies(store, settings, self.specs))
        self.lifecycle.subscribe(self.sessions.on_event)
        self.news = News()
        self.lifecycle.subscribe(self.news)
        self.tally = EventTally()
        self.lifecycle.subscribe(self.tally)
        self.lifecycle.subscribe(log_event)
        self.spans: Counter[str] = Counter()
        self.traces = self._traces()
        self.tasks = TaskFiles(store)
        self.plans = Plans(
            store,
            self.specs,
            self.tasks,
            PlanOptions(
                model=settings.engine.served_model,
                window=settings.engine.max_model_len,
                heartbeat_s=settings.scheduler.heartbeat_s,
                verify_s=settings.scheduler.verify_s,
                grace_s=settings.scheduler.grace_s,
                pids=settings.local.pids,
                memory_mb=(
                    settings.local.memory_mb
                    if settings.scheduler.backend == "local"
                    else settings.kubernetes.memory_mb
                ),
            ),
        )
        self.bells = Bells()
        self.link = TrainerLink(
            store,
            self.lifecycle,
            self.bells,
            lambda run_id: settings.data_dir / "checkpoints" / run_id,
            lambda version, folder: self.engine.moved(version, folder),
            overrides=settings.trainer.overrides,
            lease_s=settings.trainer.lease_s,
        )
        self.ticks = Ticks()
        self.pods: KubernetesBackend | None = None
        self._closing = contextlib.AsyncExitStack()
        self._stopping = False
        self._background: list[asyncio.Task[None]] = []
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    # --- parts that need a running loop -----------------------------------------------------------------

    async def open(self) -> None:
        """Settle what the last life left, then build what depends on it."""
        self.backend = await self._backend()
        self.launcher = await self._launcher()
        found = await self.lifecycle.recover()
        if found.downtime_s or found.lost_attempts or found.lost_calls:
            log.info(
                "recovered",
                downtime_s=round(found.downtime_s, 1),
                lost_attempts=len(found.lost_attempts),
                lost_calls=found.lost_calls,
                adopted=len(found.adopted_attempts),
            )
        settings = self.settings
        facts = ModelFacts()
        if settings.engine.model:
            facts = facts_of(model_folder(settings))
            await self.policies.open(model_folder(settings))
            check_same(model_folder(settings), Path((await self.policies.get(0)).path))
        serving = await self.policies.serving()
        policy = Policy(0, None)
        if serving is not None:
            policy = Policy(serving.version, Path(serving.path), serving.manifest_sha256)
        self.engine = await build_engine(settings, policy)
        self.calls = Calls(
            store=self.store,
            engine=self.engine,
            gate=self.gate,
            versions=self.policies,
            budget_exceeded=self._budget_exceeded,
            engine_gave_up=self._engine_gave_up,
            placeholder=facts.placeholder,
        )
        self.scheduler = Scheduler(
            self.store,
            Settling(self.lifecycle, self.sessions),
            self.backend,
            self.plans,
            self.instance.secret,
            Options(
                in_flight=await self.store.read(
                    lambda c: instance.in_flight(c, settings.scheduler.in_flight)
                ),
                startup_s=settings.scheduler.startup_s,
                heartbeat_lost_s=settings.scheduler.heartbeat_lost_s,
                stop_grace_s=settings.scheduler.grace_s,
            ),
        )
        self.watch: EngineWatch | None = None
        if not isinstance(self.engine, _NoEngine):
            self.watch = EngineWatch(
                self.engine, self.gate, self.lifecycle.apply, lambda ready: self.scheduler.suspend(not ready)
            )
            await self.watch.look()  # before a listener opens: whoever asked a former life waits at the gate
        cohorts = Cohorts(self.store, self.lifecycle)
        evaluation = Evaluation(self.store, cohorts)
        swapper = Swapper(
            self.policies, self.lifecycle, self.engine, self.gate, drain_s=settings.proxy.drain_s
        )
        self.controller = Controller(
            self.store,
            self.lifecycle,
            self.bells,
            self.policies,
            swapper,
            Rounds(self.store, self.lifecycle, cohorts, self.policies, evaluation),
            lambda: Steps(
                self.store,
                self.lifecycle,
                cohorts,
                self.policies,
                swapper,
                self.link,
                evaluation,
                window=settings.engine.max_model_len,
            ),
            self._keeper,
            self.launcher.sweep,
        )
        self.runs = Runs(
            self.store,
            self.lifecycle,
            settings.engine.policy,
            self.controller.follow,
            untrainable=_untrainable(facts),
        )
        self.steering = Steering(
            self.store,
            self.lifecycle,
            lambda run: check_harnesses(run, self.specs, imageless(settings, self.specs)),
        )
        self.external = ExternalRollouts(
            self.store,
            self.lifecycle,
            self.instance.secret,
            self._pod_url,
            self.runs.create,
            self.tasks.instruction,
            lambda: max(self.policies.current, 0),
            settings.engine.policy,
        )

    def _traces(self) -> "Traces | None":
        """Whoever tells a collector of what happens, if there is one."""
        endpoint = self.settings.telemetry.otlp_endpoint
        if not endpoint:
            return None
        from forge_server.services.telemetry import traces

        made = traces.traces(self.store, endpoint, self.instance.id, self.spans)
        self.lifecycle.subscribe(made)
        return made

    async def _backend(self) -> Backend:
        """Where attempts run. Raises ConfigError."""
        settings = self.settings
        if settings.scheduler.backend == "kubernetes":
            from forge_server.services import cluster

            pods = await cluster.connect(settings)
            self.pods = await cluster.backend(settings, pods, self.instance.id, self._pod_url())
            return self.pods
        return LocalBackend(
            LocalOptions(
                instance=self.instance.id,
                pod_url=f"unix:{self.listening.unix_path}",
                folder=settings.data_dir / "local",
                min_sandbox=settings.local.min_sandbox,
                disk_mb=settings.local.disk_mb,
                show=settings.local.allow_binds,
            ),
            self._harness_home,
        )

    def _pod_url(self) -> str:
        """The pod-facing listener as harnesses reach it, in pods or elsewhere."""
        if self.settings.scheduler.backend == "kubernetes" and self.settings.kubernetes.pod_url:
            return self.settings.kubernetes.pod_url.rstrip("/")
        return self.listening.pod_url

    async def _launcher(self) -> Launcher:
        """How trainers are started. Raises ConfigError."""
        settings = self.settings
        if settings.trainer.launcher == "kubernetes":
            from forge_server.services import cluster

            pods = await cluster.connect(settings)
            self._closing.push_async_callback(pods.close)
            return cluster.launcher(settings, pods, self.instance.id)
        return build_launcher(settings)

    def _keeper(self, run_id: str, changed: Callable[[], None]) -> Keeper:
        control_url = self.listening.control_url
        if self.settings.trainer.launcher == "kubernetes":
            control_url = self.settings.kubernetes.control_url or control_url
        job = TrainerJob(
            run_id=run_id,
            url=f"{control_url.rstrip('/')}/api/v1/runs/{run_id}/trainer",
            key=keys.trainer_key(self.instance.secret, run_id),
            folder=self.settings.data_dir / "trainer" / run_id,
        )
        lease_s = self.settings.trainer.lease_s
        return Keeper(self.store, self.launcher, job, changed, lease_s=lease_s)

    def _harness_home(self, harness: str) -> Path | None:
        spec = self.specs.get(harness)
        if spec is None:
            raise SpecError(f"there is no harness {harness!r}", mend="`forge-server harness list` shows them")
        return environments.ensure_harness(harness, spec.install) if spec.install else None

    async def _budget_exceeded(self, attempt_id: str, kind: Any) -> None:
        await self.lifecycle.apply(e.BudgetExceeded(attempt_id=attempt_id, kind=kind))

    async def _engine_gave_up(self, attempt_id: str) -> None:
        await self.lifecycle.apply(e.StopRequested(attempt_id=attempt_id, reason="engine_error"))

    # --- listeners ----------------------------------------------------------------------------------------

    def pod_app(self) -> InferenceRoutes:
        """The pod-facing listener: inference, and the runner's routes behind it."""
        routes = pod_routes(
            Settling(self.lifecycle, self.sessions),
            self.sessions,
            self.plans,
            self.store,
            self.instance.secret,
        )
        runner = Litestar(
            routes,
            openapi_config=None,
            logging_config=None,
            exception_handlers=problem.HANDLERS,
            request_max_body_size=8 << 20,
        )
        return InferenceRoutes(
            sessions=self.sessions,
            calls=self.calls,
            keys=self._agent_key,
            model=self.settings.engine.served_model,
            max_body=self.settings.proxy.max_body_mb << 20,
            keepalive_after_s=self.settings.proxy.keepalive_after_s,
            otherwise=runner,
        )

    def _agent_key(self, key: str) -> str | None:
        claim = keys.verify(self.instance.secret, key)
        return claim.subject if claim is not None and claim.scope == "agent" else None

    def control_app(self) -> Litestar:
        """The control listener: API, health, trainer link, OpenAPI."""
        idempotency = Idempotency(self.store)
        probes = self._probes()

        async def set_in_flight(n: int) -> None:
            configured = self.settings.scheduler.in_flight
            await self.store.write(lambda c: instance.set_in_flight(c, n, configured))
            self.scheduler.set_in_flight(n)

        api = Router(
            "/",
            route_handlers=[
                *run_routes(
                    self.store,
                    self.runs,
                    self.steering,
                    self.specs,
                    idempotency,
                    set_in_flight,
                    imageless(self.settings, self.specs),
                ),
                *rollout_routes(self.store, self.external, idempotency, conversations, log_tails),
                *inspect_routes(
                    self.store,
                    Vocabulary(
                        self.settings.path(self.settings.engine.model) if self.settings.engine.model else None
                    ),
                    self.settings.engine.max_model_len,
                ),
                *compare_routes(self.store),
                *overview_routes(
                    self.store,
                    probes,
                    self.news,
                    self.gate,
                    lambda: self.scheduler.in_flight,
                    self.settings.engine.policy,
                    self.settings.scheduler.breaker,
                ),
                *catalog_routes(
                    self.store,
                    TaskImport(self.store),
                    self.controller.activate,
                    self.settings.engine.policy,
                    idempotency,
                ),
                *event_routes(self.store, self.news),
                *cost_routes(self.store, self.settings.cost),
            ],
            guards=[admin_guard(self.admin_key)],
            before_request=refuse_unknown_parameters,
        )
        metrics = Metrics(
            Parts(
                store=self.store,
                gate=self.gate,
                calls=self.calls.tally,
                events=self.tally,
                scheduler=self.scheduler,
                engine=self.engine,
                policy=self.settings.engine.policy,
                spans=self.spans,
            )
        )
        trainer = trainer_routes(self.link, lambda key: keys.verify(self.instance.secret, key))
        return Litestar(
            [
                *health_routes(probes),
                *metrics_routes(metrics.render, admin_guard(self.admin_key)),
                Router("/api/v1", route_handlers=[api, *trainer]),
            ],
            openapi_config=OpenAPIConfig(
                title="forge-server",
                version=__version__,
                path="/schema",
                render_plugins=[Described(path="/openapi.json")],
            ),
            compression_config=CompressionConfig(
                "gzip",
                minimum_size=2048,
                gzip_compress_level=1,  # half of the bytes go at a tenth of the price
                exclude=["/events$", "/trainer/"],  # a stream is not kept back, batches do not shrink
            ),
            logging_config=None,
            exception_handlers=problem.HANDLERS,
            request_max_body_size=64 << 20,
        )

    def _probes(self) -> list[Callable[[], Awaitable[Check]]]:
        async def database() -> Check:
            try:
                await self.store.read(lambda c: c.exec_driver_sql("SELECT 1").scalar())
                return Check("database", True)
            except ForgeError as error:
                return Check("database", False, str(error))

        async def engine() -> Check:
            return Check("engine", self.engine.ready, self.engine.reason)

        async def attempts() -> Check:
            under_way = f"{len(self.scheduler.live)} of {self.scheduler.in_flight} in flight"
            full = "" if self.pods is not None else self.backend.full  # a full cluster is no fault
            return Check("attempts", not full, full or under_way)

        probes: list[Callable[[], Awaitable[Check]]] = [database, engine, attempts]
        if (pods := self.pods) is not None:

            async def cluster() -> Check:
                return Check(
                    "cluster", not pods.blind, pods.trouble or pods.full or "pods are seen and can be made"
                )

            probes.append(cluster)
        return probes

    # --- life -------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Raises ForgeError; what was started by then is ended by ``stop``."""
        for run in self.settings.run:
            await self.runs.check(run)
        self._keep("deliveries", self.sessions.run())
        if self.watch is not None:
            self._keep("engine watch", self.watch.run())
        if self.traces is not None:
            self._keep("traces", self.traces.run())
        self.scheduler.suspend(True)
        await self._pause_unknown()
        await self.scheduler.start()
        await self.controller.start()
        for run in self.settings.run:
            await self.runs.create(run)
        self.engine.start()
        self.ticks.every(instance.BEAT_S, "liveness", self.lifecycle.beat)
        self.ticks.every(1.0, "deadlines", self.scheduler.sweep)
        self.ticks.every(10.0, "reconcile", self.scheduler.reconcile)
        self.ticks.every(3600.0, "retention", self._retention)
        self.ticks.start()

    async def _pause_unknown(self) -> None:
        """Runs of an earlier start whose harness is not here any more: every launch of theirs would fail."""
        without_image = imageless(self.settings, self.specs)
        for run in await self.store.read(going_runs):
            try:
                check_harnesses(run.settings, self.specs, without_image)
            except SpecError as error:
                log.error("the run pauses", run=run.id, reason=str(error))
                await self.runs.pause(run.id, str(error))

    async def stop(self, *, keep_engine: bool = False) -> None:
        """Launch nothing more, end what must not outlive us, write what is queued."""
        self._stopping = True
        self.ticks.stop()
        self.link.close()
        self.news.close()
        await _stopped(self.controller.stop())
        await _stopped(self.scheduler.stop())
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await _stopped(self.sessions.close())
        await _stopped(self.engine.close(keep_engine=keep_engine))
        if self.traces is not None:
            await _stopped(self.traces.close())
        await _stopped(self._closing.aclose())

    def _keep(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self.ended)
        self._background.append(task)

    def ended(self, task: asyncio.Task[None]) -> None:
        """A task that should never end has ended: the server cannot be trusted any more."""
        if not self._stopping and not self.failed.done():
            error = None if task.cancelled() else task.exception()
            self.failed.set_exception(error or RuntimeError(f"{task.get_name()} has ended"))

    async def _retention(self) -> None:
        now = time.time()
        await self.store.write(lambda c: event_log.prune(c, now - EVENTS_KEPT_S))
        await self.store.write(lambda c: idempotent.prune(c, now - idempotent.KEPT_S))


async def _stopped(part: Awaitable[None]) -> None:
    """One part that does not stop cleanly must not keep the others from stopping."""
    try:
        await part
    except Exception:
        log.exception("a part of the server did not stop cleanly")


def _examined(settings: Settings) -> dict[str, Spec]:
    """What can be told wrong before anything is touched. Raises ConfigError and SpecError."""
    specs = load_specs(settings)
    for run in settings.run:
        check_harnesses(run, specs, imageless(settings, specs))
    if settings.engine.model:
        model_folder(settings)
    check_telemetry(settings)
    return specs


@contextlib.asynccontextmanager
async def running(settings: Settings) -> AsyncIterator[Server]:
    """A server that runs for the length of the block. Raises ForgeError; then nothing was started."""
    specs = _examined(settings)
    async with contextlib.AsyncExitStack() as stack:
        folder = stack.enter_context(DataFolder(settings.data_dir))
        listening = stack.enter_context(contextlib.closing(Listening(settings, folder.socket)))
        store = await asyncio.to_thread(Store.open, settings.store_url, create=True)
        stack.push_async_callback(asyncio.to_thread, store.close)
        folder.hide_database()
        server = Server(settings, specs, listening, store, await instance.load(store))
        await server.open()
        to_pods, to_people = [listening.pod, listening.unix], [listening.control]
        await stack.enter_async_context(
            serving(server.pod_app(), to_pods, ended=server.ended, protocol=ConnectionProtocol)
        )
        await stack.enter_async_context(serving(server.control_app(), to_people, ended=server.ended))
        stack.push_async_callback(server.stop)
        await server.start()
        folder.tell(listening.control_url)
        yield server


async def serve(settings: Settings, stop: asyncio.Event) -> None:
    """Run until ``stop`` is set; a start that is under way then is given up. Raises what made it fail."""
    starting = asyncio.current_task()
    assert starting is not None

    async def give_up() -> None:
        await stop.wait()
        starting.cancel()

    giving_up = asyncio.create_task(give_up())
    try:
        async with running(settings) as server:
            giving_up.cancel()
            log.info(
                "up",
                pid=os.getpid(),
                pods=server.listening.pod_url,
                control=server.listening.control_url,
                data=str(settings.data_dir),
                instance=server.instance.id,
            )
            stopped = asyncio.create_task(stop.wait())
            ends: set[asyncio.Future[Any]] = {stopped, server.failed}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            stopped.cancel()
            log.info("stopping")
            if server.failed.done():
                server.failed.result()
    except asyncio.CancelledError:
        if not stop.is_set() or starting.uncancel():
            raise
        log.info("stopped while starting")
    finally:
        giving_up.cancel()


__all__ = ["Server", "build_engine", "load_specs", "model_folder", "running", "serve"]
