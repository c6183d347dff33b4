"""The command line: names, options and help; every body is one call into ``commands``, imported when it runs."""

import sys
from typing import Any, Literal

import rich_click as click
from click.exceptions import Exit

from forge_server import __version__

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
_TABLES = ["parquet", "arrow", "jsonl", "sft"]
_TRAINERS = ["verl", "verl-v1", "prime-rl", "skyrl", "slime", "trl", "tinker", "areal"]
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
_config = click.option("-c", "--config", type=click.Path(), help="Settings file (default: ./forge.toml).")


def _url(command: Any) -> Any:
    command = click.option(
        "--url", help="Control URL of the server (default: FORGE_URL, else ./forge.toml)."
    )(command)
    return click.option("--key", help="Admin key (default: FORGE_KEY, else the data folder's admin.key).")(
        command
    )


@click.group(context_settings=CONTEXT)
@click.version_option(__version__, prog_name="forge-server")
def cli() -> None:
    """Train agents by reinforcement learning inside the real harness they will be deployed in."""


@cli.command()
@click.argument("folder", default=".", type=click.Path())
def init(folder: str) -> None:
    """Write a commented forge.toml."""
    from forge_server.commands import setup

    setup.init(folder)


@cli.command()
@click.argument("folder", type=click.Path())
@_config
@click.option("--image", default=f"forge-server:{__version__}", show_default=True, help="The server's image.")
@click.option("--secret", default="", help="A Secret whose FORGE_* keys become the server's environment.")
def render(folder: str, config: str | None, image: str, secret: str) -> None:
    """Write the files with which forge-server is brought into a Kubernetes cluster."""
    from forge_server.commands import setup

    setup.render(folder, config, image, secret)


@cli.command()
@_config
@click.option("--tui", is_flag=True, help="With the dashboard in this terminal; leaving it stops the server.")
def up(config: str | None, tui: bool) -> None:
    """Run the server: proxy, scheduler, controller, store, API."""
    if tui:
        from forge_server.commands import dashboard

        dashboard.up(config)
        return
    from forge_server.commands import serve

    serve.up(config)


@cli.command()
@_url
@click.option("--light", is_flag=True, help="For a light terminal (d changes it).")
def tui(url: str | None, key: str | None, light: bool) -> None:
    """The dashboard of a running server, in this terminal."""
    from forge_server.commands import dashboard

    dashboard.watch(url, key, light)


@cli.command()
@click.option("--folder", default="forge-demo", show_default=True, type=click.Path())
@click.option("--seed", default=1, show_default=True)
@click.option(
    "--versions", type=click.IntRange(1, 100_000), help="Policy versions to train (default: the recipe's)."
)
@click.option("--control", is_flag=True, help="The control experiment: learning rate 0.")
def demo(folder: str, seed: int, versions: int | None, control: bool) -> None:
    """The whole loop on this machine: a tiny model learns to look before it answers."""
    from forge_server.commands import demo as command

    command.demo(folder, seed, versions, control)


@cli.command()
@_config
@click.option(
    "--data", metavar="RUN", help="Check the recorded data of a run against the invariants instead."
)
@click.option(
    "--probe", is_flag=True, help="Kubernetes: also run a pod that tries what an agent could reach."
)
@_json
def check(config: str | None, data: str | None, probe: bool, as_json: bool) -> None:
    """Preflight: one line per check, and the mend."""
    from forge_server.commands import check as command

    command.check(config, data, as_json, probe)


# --- run ---------------------------------------------------------------------------------------------------


@cli.group()
def run() -> None:
    """Training, evaluation and recording runs."""


@run.command("create")
@click.argument("file", type=click.Path(exists=True))
@_url
def run_create(file: str, url: str | None, key: str | None) -> None:
    """Create the runs of FILE (a TOML file with [[run]] tables), or resume those of the same name."""
    from forge_server.commands import runs

    runs.create(file, url, key)


@run.command("list")
@_url
@_json
def run_list(url: str | None, key: str | None, as_json: bool) -> None:
    """All runs, newest first."""
    from forge_server.commands import runs

    runs.listing(url, key, as_json)


@run.command("show")
@click.argument("run_name", metavar="RUN")
@click.option("--cost", is_flag=True, help="Also what it has cost, and where its time went.")
@click.option("--plot", is_flag=True, help="Its metrics as curves.")
@_url
@_json
def run_show(run_name: str, cost: bool, plot: bool, url: str | None, key: str | None, as_json: bool) -> None:
    """One run: state, counts, metrics per step."""
    from forge_server.commands import runs

    runs.show(run_name, url, key, as_json=as_json, with_cost=cost, plot=plot)


def _run_action(name: Literal["pause", "resume", "cancel"], text: str) -> None:
    @run.command(name, help=text)
    @click.argument("run_name", metavar="RUN")
    @_url
    def action(run_name: str, url: str | None, key: str | None) -> None:
        from forge_server.commands import runs

        runs.act(run_name, name, url, key)


_run_action("pause", "Launch nothing more; what is in flight goes on.")
_run_action("resume", "Go on with a paused run.")
_run_action("cancel", "End a run and everything in it.")


@run.command("set")
@click.argument("run_name", metavar="RUN")
@click.option(
    "--in-flight",
    type=click.IntRange(0, 100_000),
    help="N, for all runs of the server together.",
)
@click.option(
    "--harness",
    "harnesses",
    metavar="NAME=WEIGHT",
    multiple=True,
    help="Draw groups in this one; repeat it for a mixture.",
)
@_url
def run_set(
    run_name: str, in_flight: int | None, harnesses: tuple[str, ...], url: str | None, key: str | None
) -> None:
    """Change the number of attempts in flight, or the mixture of harnesses, now and for later starts."""
    from forge_server.commands import runs

    runs.change(run_name, in_flight, harnesses, url, key)


@run.command("evaluate")
@click.argument("run_name", metavar="RUN")
@_url
def run_evaluate(run_name: str, url: str | None, key: str | None) -> None:
    """Measure the live policy now, as [run.eval] says."""
    from forge_server.commands import runs

    runs.evaluate(run_name, url, key)


@run.command("checkpoint")
@click.argument("run_name", metavar="RUN")
@_url
def run_checkpoint(run_name: str, url: str | None, key: str | None) -> None:
    """Save the trainer's full state with its next step, whatever save_every says."""
    from forge_server.commands import runs

    runs.checkpoint(run_name, url, key)


# --- rollout -----------------------------------------------------------------------------------------------


@cli.group()
def rollout() -> None:
    """Rollouts: what happened."""


@rollout.command("list")
@click.option("--run", "run_name", metavar="RUN")
@click.option("--state", type=click.Choice(["pending", "active", "ended"]))
@click.option("--limit", default=50, show_default=True, type=click.IntRange(min=1))
@_url
@_json
def rollout_list(
    run_name: str | None, state: str | None, limit: int, url: str | None, key: str | None, as_json: bool
) -> None:
    """Rollouts, newest first."""
    from forge_server.commands import rollouts

    rollouts.listing(run_name, state, limit, url, key, as_json)


@rollout.command("show")
@click.argument("rollout_id")
@_url
@_json
def rollout_show(rollout_id: str, url: str | None, key: str | None, as_json: bool) -> None:
    """One rollout with its attempts, samples and conversation."""
    from forge_server.commands import rollouts

    rollouts.show(rollout_id, url, key, as_json)


@rollout.command("calls")
@click.argument("rollout_id")
@_url
@_json
def rollout_calls(rollout_id: str, url: str | None, key: str | None, as_json: bool) -> None:
    """Its model calls, in order."""
    from forge_server.commands import rollouts

    rollouts.calls(rollout_id, url, key, as_json)


@rollout.command("logs")
@click.argument("rollout_id")
@_url
def rollout_logs(rollout_id: str, url: str | None, key: str | None) -> None:
    """Last lines of its runner, harness and verifier."""
    from forge_server.commands import rollouts

    rollouts.logs(rollout_id, url, key)


def _rollout_action(name: Literal["cancel", "retry"], text: str) -> None:
    @rollout.command(name, help=text)
    @click.argument("rollout_id")
    @_url
    def action(rollout_id: str, url: str | None, key: str | None) -> None:
        from forge_server.commands import rollouts

        rollouts.act(rollout_id, name, url, key)


_rollout_action("cancel", "End it now; it is not trained.")
_rollout_action("retry", "Give up its current attempt and start a new one.")


# --- task --------------------------------------------------------------------------------------------------


@cli.group()
def task() -> None:
    """Tasks: Harbor folders and JSONL lines."""


@task.command("import")
@click.argument("path", type=click.Path(exists=True))
@click.option("--taskset", required=True, help="Name of the set the tasks belong to.")
@click.option("--split", default="train", show_default=True)
@_url
def task_import(path: str, taskset: str, split: str, url: str | None, key: str | None) -> None:
    """Register the tasks of a Harbor folder, a folder of such folders, or a JSONL file."""
    from forge_server.commands import tasks

    tasks.import_(path, taskset, split, url, key)


@task.command("list")
@click.option("--taskset")
@click.option("--limit", default=50, show_default=True, type=click.IntRange(min=1))
@_url
@_json
def task_list(taskset: str | None, limit: int, url: str | None, key: str | None, as_json: bool) -> None:
    """Registered tasks."""
    from forge_server.commands import tasks

    tasks.listing(taskset, limit, url, key, as_json)


@task.command("validate")
@click.argument("path", type=click.Path(exists=True))
@_config
@_json
def task_validate(path: str, config: str | None, as_json: bool) -> None:
    """Run every task's gold solution (must pass) and do nothing (must fail), in the local sandbox."""
    from forge_server.commands import tasks

    tasks.validate(path, config, as_json)


# --- harness, policy, env, db ------------------------------------------------------------------------------


@cli.group()
def harness() -> None:
    """Harness specs: how each harness is launched against the proxy."""


@harness.command("list")
@_config
@_json
def harness_list(config: str | None, as_json: bool) -> None:
    """Known harnesses."""
    from forge_server.commands import harnesses

    harnesses.listing(config, as_json)


@harness.command("show")
@click.argument("name")
@_config
def harness_show(name: str, config: str | None) -> None:
    """Explain one harness spec."""
    from forge_server.commands import harnesses

    harnesses.show(name, config)


@harness.command("schema")
def harness_schema() -> None:
    """Print the JSON schema of a spec, for editors."""
    from forge_server.commands import harnesses

    harnesses.schema()


@harness.command("try")
@click.argument("name")
@click.option("--task", "task_name", help="A registered task (default: write answer.txt).")
@_url
def harness_try(name: str, task_name: str | None, url: str | None, key: str | None) -> None:
    """Run one harness once against the live proxy and show its calls."""
    from forge_server.commands import harnesses

    harnesses.try_(name, task_name, url, key)


@cli.group()
def policy() -> None:
    """Policy versions."""


@policy.command("list")
@_url
@_json
def policy_list(url: str | None, key: str | None, as_json: bool) -> None:
    """Every version, oldest first."""
    from forge_server.commands import policies

    policies.listing(url, key, as_json)


@policy.command("show")
@click.argument("version", type=int)
@_url
@_json
def policy_show(version: int, url: str | None, key: str | None, as_json: bool) -> None:
    """One version."""
    from forge_server.commands import policies

    policies.show(version, url, key, as_json)


@policy.command("activate")
@click.argument("version", type=int)
@_url
def policy_activate(version: int, url: str | None, key: str | None) -> None:
    """Put a kept version live again."""
    from forge_server.commands import policies

    policies.activate(version, url, key)


@cli.group()
def env() -> None:
    """Environments of the engine, the trainer and the harnesses."""


@env.command("create")
@click.argument("name")
@_config
def env_create(name: str, config: str | None) -> None:
    """Make the environment NAME: engine, trainer, or a harness."""
    from forge_server.commands import envs

    envs.create(name, config)


@env.command("list")
@_json
def env_list(as_json: bool) -> None:
    """What is installed, where, and how large."""
    from forge_server.commands import envs

    envs.listing(as_json)


@env.command("remove")
@click.argument("name")
def env_remove(name: str) -> None:
    """Delete the environment NAME."""
    from forge_server.commands import envs

    envs.remove(name)


@cli.group()
def db() -> None:
    """The database schema."""


@db.command("upgrade")
@_config
def db_upgrade(config: str | None) -> None:
    """Bring the schema to the newest revision."""
    from forge_server.commands import database

    database.upgrade(config)


@db.command("current")
@_config
def db_current(config: str | None) -> None:
    """Show the schema's revision."""
    from forge_server.commands import database

    database.current(config)


@db.command("downgrade")
@click.argument("revision")
@_config
def db_downgrade(revision: str, config: str | None) -> None:
    """Take the schema back to REVISION."""
    from forge_server.commands import database

    database.downgrade(revision, config)


# --- data --------------------------------------------------------------------------------------------------


@cli.command()
@click.argument("run_name", metavar="RUN")
@click.option(
    "--format",
    "kind",
    type=click.Choice([*_TABLES, *_TRAINERS, "tensorboard", "wandb"]),
    default="parquet",
    show_default=True,
    help="The canonical table, rows for fine-tuning (sft), the rows of another trainer, as JSON lines, or the figures "
    "of every step for TensorBoard or Weights & Biases.",
)
@click.option("--out", type=click.Path(), help="File to write (default: RUN.FORMAT).")
@click.option("--min-reward", type=float, help="Only rollouts with at least this reward.")
@_config
def export(run_name: str, kind: str, out: str | None, min_reward: float | None, config: str | None) -> None:
    """Write a run's samples as a file.

    The canonical table has every sample of valid rollouts. Rows for other trainers are those of complete groups
    whose rewards differ, as our own trainer would get them.
    """
    from forge_server.commands import data

    data.export(run_name, kind, out, min_reward, config)


@cli.command()
@click.argument("run_name", metavar="RUN")
@_config
@_json
def drift(run_name: str, config: str | None, as_json: bool) -> None:
    """How a run's calls were cut into samples, and why."""
    from forge_server.commands import data

    data.drift(run_name, config, as_json)


@cli.command("eval")
@click.argument("run_name", metavar="RUN")
@click.option("--k", type=click.IntRange(1, 1000), help="Of pass@k and pass^k (default: the run's n).")
@click.option("--mode", type=click.Choice(["train", "eval", "record"]), help="Only rollouts of this mode.")
@click.option("--by", type=click.Choice(["harness", "task"]), default="harness", show_default=True)
@_url
@_json
def evaluate(
    run_name: str, k: int | None, mode: str | None, by: str, url: str | None, key: str | None, as_json: bool
) -> None:
    """How often a run's rollouts pass: reward, pass@k (one of k passes), pass^k (all do)."""
    from forge_server.commands import evaluate as command

    command.evaluate(run_name, k, mode, by, url, key, as_json)


@cli.command()
@click.argument("run_name", metavar="RUN")
@click.option("--html", metavar="FILE", type=click.Path(), help="Write it as one HTML page.")
@click.option("--k", type=click.IntRange(min=1), help="Of pass@k and pass^k (default: the run's n).")
@_config
@_json
def analyze(run_name: str, html: str | None, k: int | None, config: str | None, as_json: bool) -> None:
    """A run as a report: tasks and harnesses compared, cost, samples; as HTML with curves and conversations too."""
    from forge_server.commands import analyze as command

    command.analyze(run_name, html, k, config, as_json)


def main() -> None:
    """Entry point: expected errors are one line on stderr; exit codes 0 ok, 1 failed, 2 usage."""
    from forge_server.domain.errors import ForgeError

    try:
        cli.main(prog_name="forge-server", standalone_mode=False)
    except click.Abort:
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except Exit as error:
        sys.exit(error.exit_code)
    except ForgeError as error:
        click.echo(f"forge-server: {error}", err=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
