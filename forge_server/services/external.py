"""Rollouts that a harness registers itself, and what people do to rollouts.

A registered rollout has one attempt of the backend ``external``: nothing is launched, its clocks and keys are
those of any other attempt. Without a run it joins the run ``external``, which is made at need.
"""

from collections.abc import Awaitable, Callable

import sqlalchemy as sa

from forge_server.client.schemas import Registration, RolloutCreate
from forge_server.domain import events as e
from forge_server.domain.errors import Conflict, NotFound
from forge_server.domain.ids import new_id
from forge_server.domain.run import EXTERNAL, RunSettings
from forge_server.domain.states import RunState
from forge_server.lifecycle.apply import Lifecycle
from forge_server.store import keys
from forge_server.store import tables as t
from forge_server.store.database import Store


class ExternalRollouts:
    """``base_url`` is the pod-facing listener as harnesses elsewhere reach it."""

    def __init__(
        self,
        store: Store,
        lifecycle: Lifecycle,
        secret: bytes,
        base_url: Callable[[], str],
        create_run: Callable[[RunSettings], Awaitable[str]],
        instruction: Callable[[str], Awaitable[str]],
        version: Callable[[], int],
        policy: str,
    ) -> None:
        self._store, self._lifecycle, self._secret = store, lifecycle, secret
        self._base_url, self._create_run, self._instruction = base_url, create_run, instruction
        self._version, self._policy = version, policy

    async def register(self, body: RolloutCreate) -> Registration:
        """A rollout whose attempt may make calls at once. Raises NotFound and Conflict."""
        run_id, seconds = await self._run(body)
        task_id = await self._task(body.task) if body.task else None
        rollout_id, attempt_id = new_id("ro"), new_id("at")
        registered = e.RolloutRegistered(
            rollout=e.RolloutCreated(
                rollout_id=rollout_id,
                run_id=run_id,
                harness=body.harness,
                mode=body.mode,
                task_id=task_id,
                external=True,
                max_attempts=1,
                policy_version=self._version(),
            ),
            attempt_id=attempt_id,
            agent_s=seconds,
            ttl_s=body.ttl_s,
        )
        applied = await self._lifecycle.apply(registered)
        if not applied.ok:
            raise await self._not_taken(run_id)
        return Registration(
            rollout_id=rollout_id,
            attempt_id=attempt_id,
            base_url=f"{self._base_url()}/a/{attempt_id}",
            agent_key=keys.attempt_key(self._secret, attempt_id, "agent"),
            runner_key=keys.attempt_key(self._secret, attempt_id, "runner"),
            instruction=await self._instruction(task_id) if task_id else None,
        )

    async def cancel(self, rollout_id: str) -> None:
        await self._apply(e.RolloutCancelled(rollout_id=rollout_id, reason="cancelled by a person"))

    async def retry(self, rollout_id: str) -> None:
        await self._apply(e.RolloutRetried(rollout_id=rollout_id))

    async def _apply(self, event: e.Event) -> None:
        applied = await self._lifecycle.apply(event)
        if applied.refusal is e.Refusal.UNKNOWN:
            raise NotFound("there is no such run or rollout")
        if not applied.ok:
            raise Conflict(f"refused: {applied.refusal}", mend="`forge-server rollout show` tells its state")

    async def _run(self, body: RolloutCreate) -> tuple[str, float]:
        """Run id and the agent clock in seconds."""
        if body.run is None:
            settings = RunSettings(
                name=EXTERNAL, kind="record", policy=self._policy, taskset=EXTERNAL, harness=EXTERNAL
            )
            return await self._create_run(settings), settings.max_seconds

        def read(connection: sa.Connection) -> tuple[str, float] | None:
            query = sa.select(t.runs.c.id, t.runs.c.settings).where(
                sa.or_(t.runs.c.id == body.run, t.runs.c.name == body.run)
            )
            row = connection.execute(query).one_or_none()
            return None if row is None else (row.id, float(row.settings["max_seconds"]))

        found = await self._store.read(read)
        if found is None:
            raise NotFound(
                f"there is no run {body.run!r}", where="run", mend="`forge-server run list` shows them"
            )
        return found

    async def _not_taken(self, run_id: str) -> Conflict:
        """Why the run takes no rollout, and the way out."""
        query = sa.select(t.runs.c.name, t.runs.c.state).where(t.runs.c.id == run_id)
        run = await self._store.read(lambda c: c.execute(query).one())
        mend = "resume it, or name another with `run`"
        if run.state != RunState.PAUSED:
            mend = (
                'a name is used once: create a run of kind "record" with harness "external" under another name, '
                "and name it with `run`"
            )
        return Conflict(f"the run takes no rollouts: it is {run.state}", where=f"run {run.name}", mend=mend)

    async def _task(self, name_or_id: str) -> str:
        def read(connection: sa.Connection) -> list[str]:
            query = sa.select(t.tasks.c.id).where(
                sa.or_(t.tasks.c.id == name_or_id, t.tasks.c.name == name_or_id)
            )
            return list(connection.execute(query).scalars())

        found = await self._store.read(read)
        if not found:
            raise NotFound(f"there is no task {name_or_id!r}", where="task")
        if len(found) > 1:
            raise Conflict(f"several tasks are named {name_or_id!r}", where="task", mend="give the task's id")
        return found[0]
