"""What the server needs of a Kubernetes cluster, made from ``[kubernetes]``.

Imported only by servers that have one: the official client takes most of a second to load. Nothing here waits for the
API server: one that is away at the start is met like one that goes away later.
"""

import asyncio
import re
import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from forge_server.assets import folder as asset_folder
from forge_server.controller.kubernetes_trainer import URL, KubernetesLauncher
from forge_server.controller.launcher import WORKER, TrainerJob
from forge_server.domain.errors import ConfigError
from forge_server.scheduler.backend import Launch
from forge_server.scheduler.kubernetes.backend import KubernetesBackend, KubernetesOptions
from forge_server.scheduler.kubernetes.client import Pods
from forge_server.scheduler.kubernetes.jobs import Jobs
from forge_server.scheduler.kubernetes.manifests import Manifest, Templates
from forge_server.scheduler.kubernetes.pod import Limits
from forge_server.settings import Settings

TRAINER = "trainer-job.yaml.j2"


async def connect(settings: Settings) -> Pods:
    """The cluster's pods; no request is made. Raises ConfigError when the kubeconfig is wrong."""
    kubernetes = settings.kubernetes
    kubeconfig = str(settings.path(kubernetes.kubeconfig)) if kubernetes.kubeconfig else ""
    return await Pods.connect(kubeconfig, kubernetes.context, kubernetes.namespace)


def templates(settings: Settings) -> Templates:
    """Ours, and those that go before them. Raises ConfigError."""
    own = settings.kubernetes.templates
    if own and not settings.path(own).is_dir():
        raise ConfigError("there is no such folder", where=str(settings.path(own)), mend="mend templates")
    return Templates(asset_folder("k8s_templates"), settings.path(own) if own else None)


def limits(settings: Settings) -> Limits:
    kubernetes = settings.kubernetes
    return Limits(unschedulable_s=kubernetes.unschedulable_s, image_s=kubernetes.image_s)


async def backend(settings: Settings, pods: Pods, instance: str, pod_url: str) -> KubernetesBackend:
    """Attempts as pods that reach the server at ``pod_url``. Raises ConfigError, also for a template that cannot be
    filled."""
    kubernetes = settings.kubernetes
    options = KubernetesOptions(
        instance=instance,
        url=await by_address(pod_url),
        image=kubernetes.image,
        runner_image=kubernetes.runner_image,
        harness_images=kubernetes.harness_images,
        create_per_s=kubernetes.create_per_s,
        keep_failed_s=kubernetes.keep_failed_s,
        disk_mb=kubernetes.disk_mb,
        image_volumes=kubernetes.image_volumes,
        limits=limits(settings),
        values={
            "cpu": kubernetes.cpu,
            "pull_policy": kubernetes.pull_policy,
            "pull_secrets": named(kubernetes.pull_secrets),
            "runtime_class": kubernetes.runtime_class,
            "priority_class": kubernetes.priority_class,
            "node_selector": kubernetes.node_selector,
            "tolerations": kubernetes.tolerations,
        },
    )
    made = KubernetesBackend(pods, templates(settings), options)
    made.manifest(specimen())
    return made


def specimen(attempt_id: str = "at-specimen") -> Launch:
    """A launch like any other, to try templates on."""
    return Launch(
        attempt_id=attempt_id,
        rollout_id="ro-specimen",
        run_id="ru-specimen",
        harness="react",
        join_token="none",
        memory_mb=256,
        pids=0,
        lifetime_s=300.0,
    )


def launcher(settings: Settings, pods: Pods, instance: str) -> KubernetesLauncher:
    """Trainers as Jobs. Raises ConfigError, also for a template that cannot be filled."""
    return KubernetesLauncher(Jobs(pods, limits(settings)), trainer(settings, instance), staging(settings))


def trainer(settings: Settings, instance: str) -> Callable[[TrainerJob, str], list[Manifest]]:
    """Fills the trainer's template. Raises ConfigError when that cannot be done."""
    filled, kubernetes, train = templates(settings), settings.kubernetes, settings.trainer

    def render(job: TrainerJob, name: str) -> list[Manifest]:
        environment = job.environment(train.device)
        del environment["FORGE_TRAINER_KEY"]  # it goes into the Secret
        values: dict[str, Any] = {
            "name": name,
            "instance": instance,
            "run_id": job.run_id,
            "url": job.url,
            "url_annotation": URL,
            "key": job.key,
            "environment": environment,
            "image": kubernetes.trainer_image,
            "pull_policy": kubernetes.pull_policy,
            "pull_secrets": named(kubernetes.pull_secrets),
            "worker": WORKER,
            "nproc": train.nproc,
            "nodes": train.nodes,
            "threads": train.threads,
            "gpus": train.nproc if train.device == "cuda" else 0,
            "staged": str(staging(settings)),
            "folder": str(job.folder),
            "volume": kubernetes.volume,
            "volume_path": kubernetes.volume_path,
        }
        return filled.render(TRAINER, values)

    render(TrainerJob(run_id="ru-specimen", url="http://server", key="none", folder=Path("/")), "specimen")
    return render


def staging(settings: Settings) -> Path:
    """Where the trainer's program lies on the shared volume."""
    return settings.data_dir / "staged" / "trainer"


def named(names: Iterable[str]) -> list[dict[str, str]]:
    """References to objects, as Kubernetes writes them."""
    return [{"name": name} for name in names]


async def by_address(url: str) -> str:
    """``url`` with the address of its host: pods have no DNS. Raises ConfigError."""
    match = re.fullmatch(r"(http://)(\[[^\]]+\]|[^:/]+)(:\d+)?", url)
    if match is None:
        raise ConfigError(
            f"not a URL for pods: {url!r}", where="[kubernetes]", mend='write "http://HOST:PORT"'
        )
    host = match[2]
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"the name {host} has no address here ({error.strerror}), and pods have no DNS",
            where="[kubernetes] pod_url",
            mend="give an address, or a name that resolves",
        ) from None
    address = str(found[0][4][0])
    return f"{match[1]}{f'[{address}]' if ':' in address else address}{match[3] or ''}"
