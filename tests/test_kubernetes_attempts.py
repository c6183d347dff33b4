"""Attempts as real pods of a real cluster: real runner, real lifecycle, a scripted model."""

import pytest
from kube_rig import kube_rig
from scheduler_rig import solve

pytestmark = pytest.mark.kubernetes


async def test_attempts_run_in_busybox_alone(cluster, tmp_path):
    async with kube_rig(cluster, tmp_path) as kube:
        it = kube.it
        it.model = solve
        await it.group(n=4)
        ended = await it.ended(4, within=240)
        assert [row.data["outcome"] for row in ended] == ["completed"] * 4, await it.log("runner")
        assert {row.data["reward"] for row in ended} == {1.0}
        assert await it.log("harness") == "react: 2 calls\n" * 4
        await kube.until_pods(lambda pods: pods == [])
