"""Manifests, rendered from the templates in ``k8s_templates`` or in a folder of the user's. Pure but for reading them.

A template is YAML with Jinja2 in it: a variable that does not exist is an error, every value goes through
``| tojson``, so that none can break out of its place. What makes a pod ours (name, labels) is put in afterwards: no
template can forget it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
import msgspec
import yaml

from forge_server.domain.errors import ConfigError

POD = "pod.yaml.j2"
DOMAIN = "forge-server"
"""Prefix of our labels."""

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in Python it takes 20 ms a pod

Manifest = dict[str, Any]


class Labels(msgspec.Struct, frozen=True, kw_only=True):
    """Whose a pod is."""

    instance: str
    run: str
    rollout: str
    attempt: str
    harness: str

    def as_labels(self) -> dict[str, str]:
        named = msgspec.structs.asdict(self)
        return {"app.kubernetes.io/managed-by": DOMAIN} | {f"{DOMAIN}/{k}": v for k, v in named.items()}


def selector(instance: str) -> str:
    """Picks the pods of one server, never another's."""
    return f"app.kubernetes.io/managed-by={DOMAIN},{DOMAIN}/instance={instance}"


class Templates:
    """Renders templates of ``own`` where it has one of the name, else of ``shipped``."""

    def __init__(self, shipped: Path, own: Path | None = None) -> None:
        self._folders = [str(folder) for folder in (own, shipped) if folder is not None]
        self._jinja = jinja2.Environment(
            loader=jinja2.FileSystemLoader(self._folders),
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            autoescape=False,
        )

    def render(self, name: str, values: Mapping[str, Any]) -> list[Manifest]:
        """The documents of a template. Raises ConfigError that names the template and the line."""
        try:
            template = self._jinja.get_template(name)
            text = template.render(values)
        except jinja2.TemplateNotFound:
            raise ConfigError(
                f"there is no template {name}", where=", ".join(self._folders), mend="put it there"
            ) from None
        except jinja2.TemplateSyntaxError as error:
            where = f"{error.filename or name}:{error.lineno}"
            raise ConfigError(
                f"the template is wrong: {error.message}", where=where, mend="mend it"
            ) from None
        except (jinja2.TemplateError, TypeError) as error:
            where = str(template.filename or name)
            raise ConfigError(
                f"the template cannot be filled: {error}", where=where, mend="mend it"
            ) from None
        try:
            found = [document for document in yaml.load_all(text, _LOADER) if document is not None]
        except yaml.YAMLError as error:
            raise ConfigError(
                f"the filled template is not YAML: {error}", where=str(template.filename), mend="mend it"
            ) from None
        for document in found:
            if not isinstance(document, dict) or "kind" not in document:
                raise ConfigError(
                    "a document of the filled template is no Kubernetes object",
                    where=str(template.filename),
                    mend="give it apiVersion and kind",
                )
        return found

    def pod(self, labels: Labels, annotations: Mapping[str, str], values: Mapping[str, Any]) -> Manifest:
        """The pod of one attempt, named after it. Raises ConfigError."""
        documents = self.render(POD, values)
        if len(documents) != 1 or documents[0]["kind"] != "Pod":
            raise ConfigError(
                f"{POD} must give exactly one Pod", where=", ".join(self._folders), mend="mend it"
            )
        pod = documents[0]
        metadata = pod.setdefault("metadata", {})
        metadata["name"] = labels.attempt
        metadata["labels"] = {**metadata.get("labels", {}), **labels.as_labels()}
        metadata["annotations"] = {**metadata.get("annotations", {}), **annotations}
        return pod
