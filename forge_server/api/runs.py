"""Runs: create, list, show; pause, resume, cancel, set N or the mixture; evaluate and save now; metrics."""

from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, Protocol

from litestar import get, patch, post
from litestar.params import FromPath, JSONBody

from forge_server.api import views
from forge_server.api.idempotent import Idempotency, IdempotencyKey
from forge_server.api.paging import Cursor, Limit, Since, decode_cursor
from forge_server.client import schemas as s
from forge_server.controller.runs import read_run
from forge_server.domain.errors import InvalidRequest, SpecError
from forge_server.domain.run import EXTERNAL, RunSettings
from forge_server.settings import parse_runs
from forge_server.store.database import Store


class Runs(Protocol):
    """What the controller offers to people."""

    async def create(self, settings: RunSettings) -> str:
        """Create the run or resume the one of that name; the id. Raises Conflict naming the changed key."""

    async def pause(self, run_id: str, reason: str) -> None: ...

    async def resume(self, run_id: str) -> None: ...

    async def cancel(self, run_id: str) -> None: ...


class Steering(Protocol):
    """What a person asks of a run that goes on. Each raises NotFound, and Conflict saying why it cannot be."""

    async def mix(self, run_id: str, weights: Mapping[str, float]) -> None:
        """Raises InvalidRequest and SpecError, too."""

    async def evaluate(self, run_id: str) -> s.EvaluationAsked:
        """Raises TaskError, too."""

    async def save(self, run_id: str) -> s.SaveAsked: ...


def check_harnesses(run: RunSettings, known: Collection[str], imageless: Collection[str] = ()) -> None:
    """Raises SpecError naming a harness of the run that there is no spec for, or no image where one is needed."""
    for name, _ in run.mixture:
        if name != EXTERNAL and name not in known:
            raise SpecError(
                f"there is no harness {name!r}",
                where=f"run {run.name}",
                mend=f"`forge-server harness list` shows them: {', '.join(sorted(known))}",
            )
        if name in imageless:
            raise SpecError(
                f"no image brings the harness {name!r} into pods",
                where=f"run {run.name}",
                mend=f'add [kubernetes] harness_images = {{{name} = "IMAGE"}}',
            )


def run_routes(
    store: Store,
    runs: Runs,
    steering: Steering,
    harnesses: Collection[str],
    idempotency: Idempotency,
    set_in_flight: Callable[[int], Awaitable[None]],
    imageless: Collection[str],
) -> list[Any]:
    @post("/runs", summary="Create a run, or resume the one of that name", status_code=201)
    async def create(data: JSONBody[s.RunCreate], idempotency_key: IdempotencyKey = None) -> s.RunView:
        async def act() -> s.RunView:
            (settings,) = parse_runs([data.settings], "settings")
            check_harnesses(settings, harnesses, imageless)
            return await view(await runs.create(settings))

        return await idempotency.run(idempotency_key, "POST /runs", data, act)

    @get("/runs", summary="All runs, newest first")
    async def listing(cursor: Cursor = None, limit: Limit = 100) -> s.Page:
        after = decode_cursor(cursor)
        return await store.read(lambda c: views.runs(c, after, limit))

    @get("/runs/{run:str}", summary="One run by id or name")
    async def show(run: FromPath[str]) -> s.RunView:
        return await view(run)

    @patch("/runs/{run:str}", summary="Pause, resume, cancel; set the number in flight or the mixture")
    async def change(run: FromPath[str], data: JSONBody[s.RunPatch]) -> s.RunView:
        if data.action is None and data.in_flight is None and data.harnesses is None:
            raise InvalidRequest("nothing is to be changed", mend="give action, in_flight or harnesses")
        found = (await view(run)).id
        if data.harnesses is not None:
            await steering.mix(found, data.harnesses)
        if data.action == "pause":
            await runs.pause(found, "paused by a person")
        elif data.action == "resume":
            row = await store.read(lambda c: read_run(c, found))
            if row is not None and not row.over:
                check_harnesses(row.settings, harnesses, imageless)
            await runs.resume(found)
        elif data.action == "cancel":
            await runs.cancel(found)
        if data.in_flight is not None:
            await set_in_flight(data.in_flight)
        return await view(found)

    @post("/runs/{run:str}/evaluate", summary="Evaluate the live policy now", status_code=200)
    async def evaluate(run: FromPath[str], idempotency_key: IdempotencyKey = None) -> s.EvaluationAsked:
        found = (await view(run)).id
        route = f"POST /runs/{found}/evaluate"
        return await idempotency.run(idempotency_key, route, None, lambda: steering.evaluate(found))

    @post(
        "/runs/{run:str}/checkpoint",
        summary="Save the trainer's full state with its next step",
        status_code=200,
    )
    async def checkpoint(run: FromPath[str], idempotency_key: IdempotencyKey = None) -> s.SaveAsked:
        found = (await view(run)).id
        route = f"POST /runs/{found}/checkpoint"
        return await idempotency.run(idempotency_key, route, None, lambda: steering.save(found))

    @get("/runs/{run:str}/metrics", summary="Metrics of every step, by source")
    async def metrics(run: FromPath[str], since: Since = 0) -> list[s.StepMetrics]:
        return await store.read(lambda c: views.step_metrics(c, run, since))

    async def view(run: str) -> s.RunView:
        return await store.read(lambda c: views.run_view(c, views.run_row(c, run)))

    return [create, listing, show, change, evaluate, checkpoint, metrics]
