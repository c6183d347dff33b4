"""Real attempts through the real scheduler, lifecycle, runner routes and sandbox."""

import pytest
from scheduler_rig import rig, solve

from forge_server.harness.plan import PlanLimits
from forge_server.scheduler.trials import LocalTrials
from forge_server.tasks.lines import read_line
from forge_server.tasks.validate import validate

pytestmark = pytest.mark.sandbox


async def test_attempts_run_and_are_rewarded(tmp_path):
    async with rig(tmp_path) as it:
        it.model = solve
        await it.group(n=6)
        ended = await it.ended(6)
        assert [row.data["outcome"] for row in ended] == ["completed"] * 6, await it.log("runner")
        assert {row.data["reward"] for row in ended} == {1.0}
        assert await it.log("harness") == "react: 2 calls\n" * 6


async def test_a_task_is_validated_in_the_sandbox(tmp_path):
    line = {
        "name": "a",
        "instruction": "Write plum.",
        "verify": {"answer_file": "answer.txt", "equals": "plum"},
    }
    limits = PlanLimits(model="m", heartbeat_s=1, agent_s=60, verify_s=20, grace_s=1, pids=64, memory_mb=256)
    async with rig(tmp_path) as it:
        found = await validate(read_line(line, "line 1"), LocalTrials(it.backend, limits))
    assert (found.gold_reward, found.idle_reward, found.faults) == (1.0, 0.0, ())
