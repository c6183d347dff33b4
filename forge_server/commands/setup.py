"""``forge-server init``: a forge.toml in which everything is explained and nothing is set. ``forge-server render``:
what a cluster needs, from a forge.toml."""

from pathlib import Path

from forge_server import settings as config_tree
from forge_server.domain.errors import ConfigError, Conflict

TEMPLATE = """\
# forge-server settings. Everything here is optional: an empty file is valid.
# FORGE_SECTION__KEY environment variables override it, e.g. FORGE_SERVER__PORT=9000.

[server]
# host = "127.0.0.1"        # pod-facing listener: inference and runner lifecycle only
# port = 8400
# control_host = "127.0.0.1" # control listener: API, metrics, trainer link
# control_port = 8401
# data_dir = "forge-data"   # database, checkpoints, keys, logs

[store]
# url = "postgresql+psycopg://user:password@host/forge"   # default: SQLite in the data folder

[engine]
# kind = "managed"          # forge-server starts vLLM itself; "attach": use url
# model = "path/to/model"   # Hugging Face format: the weights of version 0
# url = "http://127.0.0.1:8000"
# max_model_len = 32768
# tool_call_parser = "hermes"

[scheduler]
# backend = "local"         # "kubernetes": every attempt is a pod
# in_flight = 8             # attempts at the same time

[local]
# min_sandbox = "namespaces" # below this level nothing starts: none < user < namespaces

[kubernetes]
# namespace = "forge"       # of its own: who may make pods there can read its Secrets
# pod_url = "http://forge-server:8400" # this server as pods reach it
# runner_image = "registry.example/forge-runner:1" # brings the runner into every pod
# image = "debian:12"       # of tasks that name none

[trainer]
# launcher = "local"        # "kubernetes": a Job; "attach": start the worker yourself
# nproc = 1
# overrides = ["actor_rollout_ref.actor.optim.lr=1e-6"]   # veRL Hydra overrides, verbatim

# A run is known by its name: started again unchanged it resumes, changed it is an error.
# [[run]]
# name = "first"
# taskset = "my-tasks"      # forge-server task import FOLDER --taskset my-tasks
# harness = "react"         # forge-server harness list
# steps = 100
# groups = 16               # tasks per step
# n = 8                     # rollouts per task
# [run.eval]
# split = "test"
# every = 10
"""


def init(folder: str) -> None:
    target = Path(folder) / "forge.toml"
    if target.exists():
        raise Conflict("the file exists already", where=str(target), mend="edit it, or choose another folder")
    _write(target, TEMPLATE)
    print(f"wrote {target}; next: forge-server check, then forge-server up")


def render(folder: str, config: str | None, image: str, secret: str) -> None:
    from forge_server.services import deployment

    file = config_tree.find_file(config)
    if file is None:
        raise ConfigError("there is no forge.toml here", mend="write one, or name it with -c")
    settings = config_tree.load(file, {})  # what the environment says here does not hold there
    found = deployment.render(settings, file, image, secret)
    for name, text in found.items():
        _write(Path(folder) / name, text)
    print(f"wrote {', '.join(sorted(found))}; next: kubectl apply -k {folder}")


def _write(target: Path, text: str) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    except OSError as error:
        raise ConfigError(
            f"cannot be written ({error.strerror})", where=str(target), mend="choose another folder"
        ) from None
