"""Real attempts through the real scheduler, lifecycle, runner routes and sandbox."""

import pytest
from scheduler_rig import rig, solve

pytestmark = pytest.mark.sandbox


async def test_attempts_run_and_are_rewarded(tmp_path):
    async with rig(tmp_path) as it:
        it.model = solve
        await it.group(n=6)
        ended = await it.ended(6)
        assert [row.data["outcome"] for row in ended] == ["completed"] * 6, await it.log("runner")
        assert {row.data["reward"] for row in ended} == {1.0}
        assert await it.log("harness") == "react: 2 calls\n" * 6
