"""``forge-server harness …``"""

import time

import msgspec
import yaml

from forge_server import settings as config_tree
from forge_server.app import load_specs
from forge_server.client.http import ForgeClient
from forge_server.client.schemas import TaskCreate
from forge_server.commands import show as out
from forge_server.commands.rollouts import CALL_COLUMNS
from forge_server.domain.errors import NotFound
from forge_server.harness.spec import Spec


def _specs(config: str | None) -> dict[str, Spec]:
    return load_specs(config_tree.load(config_tree.find_file(config)))


def listing(config: str | None, as_json: bool) -> None:
    columns = ("name", "version", "api", "append_only", "verified", "summary")
    out.rows(list(_specs(config).values()), columns, as_json, empty="no harness specs found")


def show(name: str, config: str | None) -> None:
    specs = _specs(config)
    if name not in specs:
        raise NotFound(f"there is no harness {name!r}", mend=f"known: {', '.join(sorted(specs))}")
    print(yaml.safe_dump(msgspec.to_builtins(specs[name]), sort_keys=False, allow_unicode=True), end="")


def schema() -> None:
    """The JSON schema of a spec, for editors."""
    described = {"$schema": "https://json-schema.org/draft/2020-12/schema"} | msgspec.json.schema(Spec)
    print(msgspec.json.format(msgspec.json.encode(described), indent=2).decode())


TASKSET = "try"
TASK = {
    "name": "hello",
    "instruction": "Write the word hello to the file answer.txt, then stop.",
    "verify": {"answer_file": "answer.txt", "equals": "hello"},
}


def try_(name: str, task: str | None, url: str | None, key: str | None) -> None:
    """A recording run of one rollout, followed to its end."""
    with ForgeClient(url, key) as client:
        found = next((t for t in client.tasks() if task in (t.name, t.id)), None) if task else None
        if task and found is None:
            raise NotFound(f"there is no task {task!r}", mend="`forge-server task list` shows them")
        if found is None:
            client.create_tasks(TaskCreate(taskset=TASKSET, tasks=[TASK]))
        settings = {
            "name": f"try-{name}-{int(time.time())}",
            "kind": "record",
            "taskset": found.taskset if found else TASKSET,
            "split": found.split if found else "train",
            "tasks": [found.name if found else TASK["name"]],
            "harness": name,
            "steps": 1,
            "groups": 1,
            "n": 1,
            "max_attempts": 1,
        }
        run = client.create_run(settings)
        out.console.print(f"run {run.name}")
        seen: set[tuple[str, str | None]] = set()
        while True:
            rollouts = list(client.rollouts(run.id))
            for rollout in rollouts:
                if (rollout.state, rollout.outcome) not in seen:
                    seen.add((rollout.state, rollout.outcome))
                    out.console.print(f"{rollout.id}  {rollout.state}  {out.text(rollout.outcome)}")
            run = client.run(run.id)
            if run.state != "active":
                break
            time.sleep(0.5)
        if run.reason:
            out.console.print(out.text(run.reason))
        for rollout in rollouts:
            out.rows(client.calls(rollout.id), CALL_COLUMNS, False, empty="it made no call")
