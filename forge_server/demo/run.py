"""The demo, from nothing to a better policy, in the order in which it happens.

    tiny model -> teacher's traces through the proxy -> supervised warm start -> GRPO in the loop -> summary

It uses forge-server as anybody would: ``up`` as a process, the public API, the command line.
"""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from forge_server import environments
from forge_server.client.http import ForgeClient
from forge_server.client.schemas import RolloutView, StepMetrics, TaskCreate
from forge_server.demo import summary
from forge_server.demo.folder import DemoFailed, Folder, wait_for
from forge_server.demo.recipe import RECIPE, Recipe
from forge_server.demo.screen import Screen
from forge_server.demo.tasks import Lookup, draw
from forge_server.demo.teaching import collect, conversation
from forge_server.harness.react import TOOLS

TASKSET = "lookup"
RUN = "demo"
ENGINE_START_S = 600.0
_ACTOR = "actor_rollout_ref.actor"


def run_demo(root: Path, seed: int, recipe: Recipe = RECIPE) -> summary.Gain | None:
    """Run everything in the new folder ``root``; returns the gain on held-out tasks. Raises ForgeError."""
    folder, screen = Folder(root), Screen()
    with screen.phase("environments"):
        engine, trainer = environments.ensure("engine"), environments.ensure("trainer")
    folder.write_settings(recipe)

    with screen.phase("model"):
        build_model(folder, trainer, recipe, seed, screen)
    with screen.phase("traces"):
        gather_traces(folder, engine, recipe, seed, screen)
    with screen.phase("warm start"):
        warm_start(folder, trainer, recipe, seed, screen)
    folder.add_run(run_table(recipe, seed))
    with screen.phase("training"):
        figures, rollouts = train(folder, screen)

    gain = summary.gain_of(rollouts, 0, recipe.learning.versions)
    text = summary.summary(
        gain=gain,
        metrics=figures,
        rollouts=rollouts,
        drift=json.loads(folder.cli("drift", RUN, "--json")),
        counts=json.loads(folder.cli("check", "--data", RUN, "--json"))["counts"],
        phases=screen.phases,
    )
    print(text)
    print(f"\n{folder.root} holds forge.toml and the database: `forge-server up` there starts it again.")
    return gain


def build_model(folder: Folder, trainer: Path, recipe: Recipe, seed: int, screen: Screen) -> None:
    """A random model, and a tokenizer fitted to what conversations look like."""
    examples = [conversation(task, index) for index, task in enumerate(draw("teach", 200, seed))]
    spec = msgspec.to_builtins(recipe.model) | {"seed": seed, "conversations": examples, "tools": TOOLS}
    file = folder.root / "model.json"
    file.write_text(json.dumps(spec))
    command = folder.command(trainer, "forge_server.demo.staged.model", str(file), str(folder.untrained))
    made = json.loads(folder.run("model", command, folder.environ("demo")))
    screen.say("model", f"{made['parameters'] / 1e6:.2f} M parameters, {made['tokens']} tokens, untrained")


def gather_traces(folder: Folder, engine: Path, recipe: Recipe, seed: int, screen: Screen) -> None:
    """Conversations of the scripted teacher, recorded by the proxy, exported as they were recorded."""
    plan = recipe.warm_start
    tasks = draw("teach", plan.traces, seed)
    url_file = folder.root / "teacher.url"
    command = folder.command(
        engine,
        "forge_server.demo.staged.scripted_engine",
        *(str(folder.untrained), str(url_file), str(plan.hasty_share)),
    )
    with folder.background("teacher", command, folder.environ("demo")) as teaching:
        wait_for(lambda: "" if url_file.exists() else "the teacher to listen", teaching, 300.0)
        url = url_file.read_text().strip()
        overlay = {"FORGE_ENGINE__KIND": "attach", "FORGE_ENGINE__URL": url, "FORGE_ENGINE__MODEL": ""}
        with folder.server(300.0, **overlay) as (client, _):
            register_tasks(client, "teach", tasks)
            register_tasks(client, "train", draw("train", recipe.train_tasks, seed))
            register_tasks(client, "heldout", draw("heldout", recipe.heldout_tasks, seed))
            right = collect(
                client,
                tasks,
                plan.threads,
                lambda count: screen.count("traces", f"{count} of {len(tasks)} conversations"),
            )
    folder.cli("export", "external", "--format", "sft", "--out", str(folder.traces))
    screen.say("traces", f"{len(tasks)} conversations of the teacher, {right:.0%} right")


def warm_start(folder: Folder, trainer: Path, recipe: Recipe, seed: int, screen: Screen) -> None:
    """veRL's supervised fine-tuning on the traces: the policy's version 0."""
    plan = recipe.warm_start
    command = folder.command(
        trainer,
        "forge_server.trainer.sft",
        *("--data", str(folder.traces), "--model", str(folder.untrained), "--out", str(folder.warm)),
        *("--epochs", str(plan.epochs), "--batch", str(plan.batch), "--lr", str(plan.lr)),
        *("--max-length", "512", "--seed", str(seed)),
        "optim.lr_scheduler_type=cosine",
        "optim.zero_indexed_step=false",
        f"optim.lr_warmup_steps={plan.warmup_steps}",
        "optim.betas=[0.9,0.95]",
    )
    last: dict[str, Any] = {}

    def line(text: str) -> None:
        if text.startswith('{"step"'):
            last.update(json.loads(text))
            screen.count("warm start", f"step {last['step']} of {last['of']}, loss {last['loss']:.3f}")

    folder.run("sft", command, folder.environ("trainer") | {"FORGE_TRAINER_DEVICE": "cpu"}, line)
    screen.say("warm start", f"{last['step']} steps, loss {last['loss']:.3f}")


def run_table(recipe: Recipe, seed: int) -> dict[str, Any]:
    """The ``[[run]]`` of the demo."""
    plan = recipe.learning
    return {
        "name": RUN,
        "taskset": TASKSET,
        "split": "train",
        "harness": "react",
        "seed": seed,
        "steps": plan.versions,
        "groups": plan.groups,
        "n": plan.n,
        "temperature": 1.0,
        "max_calls": plan.max_calls,
        "max_completion_tokens": plan.max_completion_tokens,
        "max_seconds": plan.max_seconds,
        "max_generation_batches": 1,
        "overrides": [
            f"{_ACTOR}.optim.lr={plan.lr}",
            f"{_ACTOR}.optim.weight_decay={plan.weight_decay}",
            # constant after the warm-up; veRL's "constant" would make the first update with rate 0
            f"{_ACTOR}.optim.lr_scheduler_type=cosine",
            f"{_ACTOR}.optim.min_lr_ratio=1.0",
            f"{_ACTOR}.optim.zero_indexed_step=false",
            f"{_ACTOR}.optim.lr_warmup_steps={plan.warmup_versions}",
            f"{_ACTOR}.ppo_mini_batch_size={plan.groups_per_update}",
            f"{_ACTOR}.clip_ratio_high=0.28",
        ],
        "eval": {"split": "heldout", "k": recipe.heldout_rollouts, "temperature": 1.0},
    }


def train(folder: Folder, screen: Screen) -> tuple[list[StepMetrics], list[RolloutView]]:
    """The real loop, with the warm model in vLLM: watch the run in forge.toml until it has ended."""
    with folder.server(ENGINE_START_S) as (client, check):
        screen.say("engine", "vLLM serves version 0")
        watch(client, check, screen)
        return client.metrics(RUN), list(client.rollouts(RUN))


def watch(client: ForgeClient, check: Callable[[], None], screen: Screen) -> None:
    """Print what happens until the run has completed. Raises DemoFailed when it stops otherwise."""
    told: set[tuple[int, str]] = set()
    while True:
        check()
        view = client.run(RUN)
        for step in client.metrics(RUN):
            if (step.step, step.source) not in told and (line := _line(step)):
                told.add((step.step, step.source))
                screen.say(*line)
        if view.state == "completed":
            return
        if view.state != "active":
            raise DemoFailed(
                f"the run is {view.state}: {view.reason}", mend="see `forge-server run show demo`"
            )
        active = view.rollouts.get("active", 0) + view.rollouts.get("pending", 0)
        held = "; ".join(c.detail for c in client.ready().checks if c.name == "attempts" and not c.ok)
        screen.count(
            f"version {view.step:>3}", held or (f"{active} rollouts to go" if active else "training")
        )
        time.sleep(0.5)


def register_tasks(client: ForgeClient, split: str, tasks: Sequence[Lookup]) -> None:
    for start in range(0, len(tasks), 500):
        lines = [task.line() for task in tasks[start : start + 500]]
        client.create_tasks(TaskCreate(taskset=TASKSET, split=split, tasks=lines))


def _line(step: StepMetrics) -> tuple[str, str] | None:
    """What is told about one row of metrics."""
    found = step.metrics
    reward = found.get("reward/mean")
    if reward is None:
        return None
    if step.source == "eval":
        interval = f"[{found['reward/low95']:.2f}, {found['reward/high95']:.2f}]"
        return f"version {step.step:>3}", f"held-out {reward:.3f} {interval}"
    if step.source == "controller":
        mixed = f"{found.get('groups/trained', 0):.0f} of {found.get('groups/drawn', 0):.0f} groups mixed"
        calls = f"{found.get('calls/per_rollout') or 0:.1f} calls per rollout"
        return f"version {step.step - 1:>3}", f"reward {reward:.3f}, {mixed}, {calls}"
    return None
