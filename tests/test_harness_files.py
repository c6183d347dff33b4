"""The configuration files that specs carry are well formed once the placeholders are filled in."""

import json
import tomllib

import pytest
import yaml

from forge_server import assets
from forge_server.harness.load import load_all
from forge_server.harness.plan import PlanLimits, TaskInput, build_plan
from forge_server.harness.spec import PLACEHOLDERS
from forge_server.runner.place import fill

SPECS = load_all([assets.folder("harness_specs")])
READERS = {"json": json.loads, "toml": tomllib.loads, "yaml": yaml.safe_load, "yml": yaml.safe_load}
FILES = [(name, file.path) for name, spec in SPECS.items() for file in spec.files]
VALUES = {name: f"/some/{name}" for name in PLACEHOLDERS}


@pytest.mark.parametrize(
    ("name", "path"), [(name, path) for name, path in FILES if path.rpartition(".")[2] in READERS]
)
def test_it_can_be_read(name: str, path: str) -> None:
    limits = PlanLimits(
        model="forge",
        heartbeat_s=5,
        agent_s=60,
        verify_s=60,
        grace_s=1,
        pids=64,
        memory_mb=512,
        window=32768,
        output=4096,
    )
    plan = build_plan(SPECS[name], TaskInput(instruction="do it"), limits)
    text = next(fill(file.content, VALUES) for file in plan.files if file.path == path)
    assert READERS[path.rpartition(".")[2]](text)
    assert not any(f"{{{placeholder}}}" in text for placeholder in PLACEHOLDERS)
