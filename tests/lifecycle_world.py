"""A store, a lifecycle and a clock that only moves when told, for the tests of the lifecycle."""

from typing import Any

from forge_server.domain import events as e
from forge_server.domain.events import Applied, EventRow
from forge_server.domain.states import CallEnd
from forge_server.lifecycle.apply import Lifecycle
from forge_server.store import instance, rows
from forge_server.store import tables as t
from forge_server.store.database import Store
from forge_server.store.rows import AttemptRow, RolloutRow, RunRow


class World:
    def __init__(self, store: Store, breaker_after: int = 12) -> None:
        self.now = 1_000.0
        self.store = store
        self.lifecycle = Lifecycle(store, clock=lambda: self.now, breaker_after=breaker_after)
        self.heard: list[EventRow] = []
        self.lifecycle.subscribe(self.heard.append)
        self._calls = 0

    async def lived(self, seconds: float) -> None:
        """Time passes, and the server lives."""
        self.now += seconds
        await self.store.write(lambda connection: instance.beat(connection, self.now))

    async def apply(self, event: e.Event) -> Applied:
        return await self.lifecycle.apply(event)

    async def run(
        self, rollouts: int = 1, max_attempts: int = 3, mode: Any = "train", **settings: Any
    ) -> None:
        await self.apply(e.RunCreated(run_id="ru", name="r", kind="train", settings=settings))
        await self.store.insert(
            t.tasks,
            {
                "id": "ta",
                "name": "t",
                "taskset": "s",
                "digest": "d",
                "instruction": "i",
                "definition": {},
                "min_reward": -1.0,
                "created_at": 0.0,
            },
        )
        members = tuple(
            e.RolloutCreated(
                rollout_id=f"ro{n}",
                run_id="ru",
                harness="react",
                mode=mode,
                task_id="ta",
                group_id="gr",
                slot=n,
                max_attempts=max_attempts,
            )
            for n in range(rollouts)
        )
        await self.apply(
            e.GroupCreated(group_id="gr", run_id="ru", task_id="ta", step=1, mode=mode, rollouts=members)
        )

    async def start(self, attempt: str, rollout: str = "ro0", backend: Any = "local") -> None:
        for event in (
            e.AttemptQueued(attempt_id=attempt, rollout_id=rollout, backend=backend),
            e.AttemptLaunching(attempt_id=attempt, startup_s=60),
            e.AttemptLaunched(attempt_id=attempt, handle={"pid": 1}),
            e.RunnerJoined(attempt_id=attempt, nonce="n"),
            e.HarnessStarted(attempt_id=attempt, agent_s=600),
        ):
            assert (await self.apply(event)).applied

    async def call(self, attempt: str, seq: int, end: CallEnd | None = CallEnd.OK, error: str = "") -> None:
        self._calls += 1
        await self.store.insert(
            t.calls,
            {
                "id": self._calls,
                "attempt_id": attempt,
                "seq": seq,
                "dialect": "chat",
                "mode": "record",
                "request_digest": b"x" * 16,
                "began_at": self.now,
                "end": end,
                "error": error or None,
            },
        )

    async def finish(self, attempt: str, reward: float | None = 1.0, **finish: Any) -> Applied:
        await self.apply(e.AttemptSealed(attempt_id=attempt))
        await self.apply(e.VerifierFetched(attempt_id=attempt, verify_s=120))
        if reward is not None:
            await self.apply(e.RewardReported(attempt_id=attempt, value=reward, source="verifier"))
        finish.setdefault("verifier", e.VerifierReport(status="ok"))
        finish.setdefault("exit_code", 0)
        return await self.apply(e.RunnerFinished(attempt_id=attempt, **finish))

    async def attempt(self, id: str) -> AttemptRow:
        row = await self.store.read(lambda c: rows.by_id(c, AttemptRow, id))
        assert row is not None
        return row

    async def rollout(self, id: str = "ro0") -> RolloutRow:
        row = await self.store.read(lambda c: rows.by_id(c, RolloutRow, id))
        assert row is not None
        return row

    async def run_row(self) -> RunRow:
        row = await self.store.read(lambda c: rows.by_id(c, RunRow, "ru"))
        assert row is not None
        return row

    def kinds(self) -> list[str]:
        return [row.kind for row in self.heard]
