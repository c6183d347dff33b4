"""A server in this process with many rollouts, in which something happens all the time; for ``tui.py``.

    python benchmarks/tui_server.py FOLDER --rollouts 10000 --events 200

Rollouts of external harnesses are admitted, run and ended by the lifecycle itself, so that every event is a real one.
"""

import argparse
import asyncio
import time

import sqlalchemy as sa

from forge_server import logs
from forge_server.app import Server, running
from forge_server.domain import events as e
from forge_server.domain import ids
from forge_server.domain.ids import new_id
from forge_server.settings import LocalSettings, ServerSettings, Settings
from forge_server.store import tables as t

RUN = "ru-bench0000000000"
TASKS, IN_FLIGHT, CALLS = 40, 64, 4
AGO_S = 7200.0
ENDS = (("completed", "ok", 1.0), ("completed", "ok", 0.0), ("policy_failure", "agent_timeout", 0.0),
        ("infra_failure", "pod_lost", None))  # fmt: skip


def seed(connection: sa.Connection, rollouts: int) -> None:
    """A run whose rollouts have ended, two hours' worth."""
    now = time.time()
    settings = {"name": "bench", "kind": "train", "taskset": "s", "harness": "react", "n": 8, "steps": 1000}
    connection.execute(
        sa.insert(t.runs),
        {
            "id": RUN, "name": "bench", "kind": "train", "state": "active", "settings": settings, "step": 150,
            "created_at": now - AGO_S,
        },
    )  # fmt: skip
    connection.execute(
        sa.insert(t.tasks),
        [
            {"id": f"ta-{i}", "name": f"task-{i}", "taskset": "s", "digest": str(i), "definition": {},
             "instruction": "do it", "created_at": now - AGO_S}
            for i in range(TASKS)
        ],
    )  # fmt: skip
    rows, attempts, calls = [], [], []
    for n in range(rollouts):
        at = now - AGO_S + n * (AGO_S - 60) / rollouts
        outcome, kind, reward = ENDS[n % len(ENDS)]
        rollout, attempt = (f"{ids.first_id(prefix, at)}{n:08d}" for prefix in ("ro", "at"))
        rows.append(
            {"id": rollout, "run_id": RUN, "task_id": f"ta-{n % TASKS}", "harness": ("react", "codex")[n % 2],
             "mode": "train", "state": "ended", "attempts": 1, "outcome": outcome, "kind": kind, "reward": reward,
             "final_attempt_id": attempt, "created_at": at, "ended_at": at + 50}
        )  # fmt: skip
        attempts.append(
            {"id": attempt, "rollout_id": rollout, "number": 1, "state": "ended", "backend": "external",
             "outcome": outcome, "kind": kind, "reward": reward, "created_at": at, "ended_at": at + 50}
        )  # fmt: skip
        calls += [
            {"id": (ids.first_call_id(at + 5 * seq)) + n % 4000, "attempt_id": attempt, "seq": seq, "dialect": "chat",
             "mode": "record", "request_digest": b"", "began_at": at, "ended_at": at + 3, "end": "ok",
             "prompt_len": 900, "completion_len": 120, "engine_ms": 2900.0}
            for seq in range(CALLS)
        ]  # fmt: skip
    connection.execute(sa.insert(t.rollouts), rows)
    connection.execute(sa.insert(t.attempts), attempts)
    connection.execute(sa.insert(t.calls), calls)
    connection.execute(
        sa.insert(t.step_metrics),
        [
            {"run_id": RUN, "step": step, "source": source, "at": now, "metrics": {
                f"figure/{i}": step / (i + 1) for i in range(60)} | {"reward/mean": step / 150, "pass_rate": 0.4}}
            for step in range(1, 151)
            for source in ("controller", "trainer")
        ],
    )  # fmt: skip


async def happen(server: Server, rate: float) -> None:
    """``rate`` events a second, in lanes of rollouts that go through their lives."""
    lanes = 48
    began, told = time.monotonic(), 0

    async def state(event: e.Event) -> None:
        nonlocal told
        applied = await server.lifecycle.apply(event)
        told += len(applied.rows)
        await asyncio.sleep(max(0.0, began + told / rate - time.monotonic()))

    async def lane(number: int) -> None:
        n = number
        while True:
            rollout, attempt = new_id("ro"), new_id("at")
            await state(
                e.RolloutCreated(
                    rollout_id=rollout, run_id=RUN, harness="react", mode="train", task_id=f"ta-{n % TASKS}",
                    external=True,
                )
            )  # fmt: skip
            await state(e.AttemptQueued(attempt_id=attempt, rollout_id=rollout, backend="external"))
            await state(e.RunnerJoined(attempt_id=attempt, nonce="0" * 32))
            await state(e.HarnessStarted(attempt_id=attempt, agent_s=600))
            await state(e.AttemptSealed(attempt_id=attempt, reason="exited"))
            await state(e.RewardReported(attempt_id=attempt, value=1.0, source="external"))
            await state(
                e.RunnerFinished(
                    attempt_id=attempt, exit_code=0, verifier=e.VerifierReport(status="ok", exit_code=0)
                )
            )
            n += lanes

    await asyncio.gather(*(lane(number) for number in range(lanes)))


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--rollouts", type=int, default=10_000)
    parser.add_argument("--events", type=float, default=200.0)
    arguments = parser.parse_args()
    logs.configure("error", "json")
    settings = Settings(
        server=ServerSettings(port=0, control_port=0), local=LocalSettings(min_sandbox="none"),
        folder=arguments.folder,
    )  # fmt: skip
    async with running(settings) as server:
        await server.store.write(lambda c: seed(c, arguments.rollouts))
        print(f"{server.listening.control_url} {server.admin_key}", flush=True)
        await happen(server, arguments.events)


if __name__ == "__main__":
    asyncio.run(main())
