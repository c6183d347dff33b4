"""The files for ``kubectl apply``, from the settings of the server that is to run: ``forge-server render``.

With ``[kubernetes] kubeconfig`` empty the server runs in the cluster, as its account; with one it runs elsewhere, and
the files give it its rights and attempts their policy.
"""

import ipaddress
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

import sqlalchemy as sa
import yaml

from forge_server.domain.errors import ConfigError
from forge_server.engine.managed import ManagedSpec, command, variables
from forge_server.scheduler.kubernetes.manifests import Manifest
from forge_server.services import cluster
from forge_server.settings import Settings

ACCOUNT = "forge-server"
ENGINE = "forge-engine"
"""Host of ``[engine] url`` for which an engine is rendered."""

KUSTOMIZATION = "kustomization.yaml"


class _Yaml(yaml.SafeDumper):
    """Texts of several lines as blocks, and nothing as an alias."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Yaml.add_representer(str, _text)


def render(settings: Settings, file: Path, image: str, secret: str) -> dict[str, str]:
    """File name -> content. ``file`` holds the settings; ``image`` is the server's, ``secret`` the name of a Secret
    of FORGE_* variables, or empty. Raises ConfigError."""
    documents = _documents(settings, file, image, secret)
    found = {name: dump(each) for name, each in documents.items()}
    listing = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": sorted(found),
    }
    return found | {KUSTOMIZATION: dump([listing])}


def dump(documents: list[Manifest]) -> str:
    return yaml.dump_all(documents, Dumper=_Yaml, sort_keys=False, width=1000, allow_unicode=True)


def _documents(settings: Settings, file: Path, image: str, secret: str) -> dict[str, list[Manifest]]:
    kubernetes, where = settings.kubernetes, str(file)
    if settings.scheduler.backend != "kubernetes":
        raise ConfigError(
            "attempts are not to run in a cluster", where=where, mend='set [scheduler] backend = "kubernetes"'
        )
    if not kubernetes.namespace:
        raise ConfigError("no namespace is named", where=where, mend='add [kubernetes] namespace = "NAME"')
    templates = cluster.templates(settings)
    inside = not kubernetes.kubeconfig
    jobs = settings.trainer.launcher == "kubernetes"
    common: dict[str, Any] = {
        "namespace": kubernetes.namespace,
        "account": ACCOUNT,
        "pull_policy": kubernetes.pull_policy,
        "pull_secrets": cluster.named(kubernetes.pull_secrets),
        "volume": kubernetes.volume,
        "volume_path": kubernetes.volume_path,
        "secret": secret,
    }
    found = {
        "rbac.yaml": templates.render("rbac.yaml.j2", {**common, "jobs": jobs}),
        "network-policy.yaml": templates.render(
            "network-policy.yaml.j2", common | _listener(settings, inside, where)
        ),
        "prepull.yaml": templates.render("prepull.yaml.j2", common | _images(settings)),
    }
    if inside:
        values = common | _server(settings, file, image, jobs)
        found["server.yaml"] = templates.render("server.yaml.j2", values)
    if (name := (urlsplit(settings.engine.url).hostname or "").split(".")[0]) == ENGINE:
        values = common | _engine(settings, name, image, where)
        found["engine.yaml"] = templates.render("engine.yaml.j2", values)
    return found


def _listener(settings: Settings, inside: bool, where: str) -> dict[str, Any]:
    at = urlsplit(settings.kubernetes.pod_url or f"http://{settings.server.host}:{settings.server.port}")
    if inside:
        return {"inside": True, "cidr": "", "port": settings.server.port}
    try:
        address = ipaddress.ip_address(at.hostname or "")
    except ValueError:
        raise ConfigError(
            f"a network policy needs an address, and pod_url names {at.hostname}",
            where=where,
            mend="write the address into [kubernetes] pod_url",
        ) from None
    if not at.port:
        raise ConfigError("the port for pods is not fixed", where=where, mend="set [server] port, or pod_url")
    return {"inside": False, "cidr": f"{address}/{address.max_prefixlen}", "port": at.port}


def _images(settings: Settings) -> dict[str, Any]:
    kubernetes = settings.kubernetes
    images = {kubernetes.image, *kubernetes.harness_images.values()} - {"", kubernetes.runner_image}
    return {
        "runner_image": kubernetes.runner_image,
        "images": sorted(images),
        "node_selector": kubernetes.node_selector,
        "tolerations": kubernetes.tolerations,
    }


def _server(settings: Settings, file: Path, image: str, jobs: bool) -> dict[str, Any]:
    """Raises ConfigError for settings that cannot hold in the cluster."""
    kubernetes, where = settings.kubernetes, str(file)
    shared = PurePosixPath(kubernetes.volume_path)
    for key, path in (
        ("[server] data_dir", settings.server.data_dir),
        ("[engine] model", settings.engine.model),
    ):
        if path and not PurePosixPath(path).is_relative_to(shared):
            raise ConfigError(
                f"{key} is {path}, which is not on the volume", where=where, mend=f"put it below {shared}"
            )
    if settings.engine.kind == "managed":
        raise ConfigError(
            "the server's image has no engine",
            where=where,
            mend=f'set [engine] kind = "attach" and url = "http://{ENGINE}:8000": its Deployment is rendered too',
        )
    _no_secrets(settings, where)
    own = kubernetes.templates
    if own and (PurePosixPath(own).is_absolute() or ".." in PurePosixPath(own).parts):
        raise ConfigError(f"templates is {own}", where=where, mend="name a folder beside the file")
    texts: Mapping[str, str] = {}
    if own:
        texts = {file.name: file.read_text() for file in sorted(settings.path(own).glob("*.j2"))}
    return {
        "image": image,
        "settings": file.read_text(),
        "own_templates": texts,
        "templates_folder": own,
        "pod_port": settings.server.port,
        "control_port": settings.server.control_port,
        "shared": jobs or settings.engine.kind == "attach",
        "trainers": jobs and settings.trainer.nodes > 1,
    }


def _no_secrets(settings: Settings, where: str) -> None:
    """The file becomes a ConfigMap, which many may read."""
    password = settings.store.url and sa.make_url(settings.store.url).password
    for key, variable, value in (
        ("[store] url with a password", "FORGE_STORE__URL", password),
        ("[engine] api_key", "FORGE_ENGINE__API_KEY", settings.engine.api_key),
        ("[security] admin_key", "FORGE_SECURITY__ADMIN_KEY", settings.security.admin_key),
    ):
        if value:
            raise ConfigError(
                f"{key} would be readable in a ConfigMap",
                where=where,
                mend=f"put {variable} into a Secret and name it with --secret",
            )


def _engine(settings: Settings, name: str, image: str, where: str) -> dict[str, Any]:
    engine = settings.engine
    at = urlsplit(engine.url)
    if not engine.model:
        raise ConfigError(
            "the engine needs [engine] model", where=where, mend="name its folder on the volume"
        )
    staged = Path("/staged")
    spec = ManagedSpec(
        python=Path("python3"),
        staged=staged,
        folder=staged,
        served_model=engine.served_model,
        dtype=engine.dtype,
        max_model_len=engine.max_model_len,
        max_num_seqs=engine.max_num_seqs,
        cpu=False,
        tool_call_parser=engine.tool_call_parser,
        reasoning_parser=engine.reasoning_parser,
        flags=engine.flags,
        env=engine.env,
    )
    port = at.port or 80
    words = command(spec, Path(engine.model), port)
    words[words.index("--host") + 1] = "0.0.0.0"
    flags = dict(zip(engine.flags, engine.flags[1:], strict=False))
    return {
        "name": name,
        "port": port,
        "server_image": image,
        "arguments": words,
        "variables": variables(spec),
        "gpus": int(flags.get("--tensor-parallel-size", "1")),
    }
