"""mini-swe-agent from PyPI, unmodified, in the sandbox and offline, against a scripted model."""

import json

import msgspec
import pytest
from runner_support import PREFIX, FakePod, Lab, verifier_tar

from forge_server import assets
from forge_server.environments import ensure_harness
from forge_server.harness.load import load_all
from forge_server.harness.plan import PlanLimits, TaskFile, TaskInput, build_plan

pytestmark = pytest.mark.sandbox

COMPARE = "cmp -s answer.txt /tests/expected && r=1 || r=0\necho $r > /logs/verifier/reward.txt\n"


@pytest.fixture(scope="module")
def mini():
    """Spec and environment; installing it takes minutes when it is missing."""
    spec = load_all([assets.folder("harness_specs")])["mini-swe-agent"]
    return spec, str(ensure_harness(spec.name, spec.install))


def bash(command):
    call = {"id": "c1", "type": "function", "function": {"name": "bash"}}
    call["function"]["arguments"] = json.dumps({"command": command})
    return {"role": "assistant", "content": "Let me see.", "tool_calls": [call]}


def run(mini, tmp_path, script):
    spec, env = mini
    limits = PlanLimits(
        model="forge",
        heartbeat_s=5,
        agent_s=300,
        verify_s=60,
        grace_s=1,
        pids=256,
        memory_mb=0,
        window=32768,
        output=4096,
    )
    task = TaskInput(instruction="Copy the {word}.", files=(TaskFile(path="word.txt", content=b"plum"),))
    plan = msgspec.to_builtins(build_plan(spec, task, limits))
    lab = Lab(tmp_path)
    try:
        with FakePod(plan, script, verifier_tar(COMPARE, expected="plum")) as pod:
            return lab.run(pod, within=240, env=env, read_only=[PREFIX, env])
    finally:
        lab.close()


def test_it_solves_a_task_and_submits(mini, tmp_path):
    submit = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat word.txt"
    pod = run(mini, tmp_path, [bash("cat word.txt; getent hosts example.com || echo offline"), bash(submit)])
    assert [body["value"] for body in pod.of("reward")] == [1.0], pod.log("harness")
    first, second = pod.calls
    assert first["model"] == "forge" and "Copy the {word}." in first["messages"][1]["content"]
    assert second["messages"][:2] == first["messages"]  # append-only
    seen = second["messages"][-1]["content"]
    assert "plum" in seen and "offline" in seen
    assert {h["authorization"] for h in pod.headers} == {"Bearer agent-key"}


def test_malformed_replies_end_it(mini, tmp_path):
    pod = run(mini, tmp_path, [{"role": "assistant", "content": "I will not call a tool."}])
    assert [body["value"] for body in pod.of("reward")] == [0.0]
    assert len(pod.calls) == 3
