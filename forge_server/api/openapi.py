"""The OpenAPI description as it is served: what the handlers say, and what is the same for all of them.

Every route answers errors with a problem document, every route but those of health and schema needs a key; the
bodies that people write by hand have examples, which a test sends.
"""

from typing import Any

import msgspec
from litestar import Request
from litestar.openapi.plugins import JsonRenderPlugin

from forge_server.api.problem import MEDIA_TYPE
from forge_server.client.schemas import Problem

_OPEN = ("/healthz", "/readyz")
_REF = "#/components/schemas/{name}"

EXAMPLES: dict[tuple[str, str], dict[str, Any]] = {
    ("post", "/api/v1/tasks"): {
        "taskset": "greetings",
        "split": "train",
        "tasks": [
            {
                "name": "hello",
                "instruction": "Write the word hello into answer.txt.",
                "verify": {"answer_file": "answer.txt", "equals": "hello"},
            }
        ],
    },
    ("post", "/api/v1/runs"): {
        "settings": {
            "name": "first",
            "kind": "record",
            "taskset": "greetings",
            "harness": "react",
            "steps": 1,
            "groups": 1,
            "n": 2,
        }
    },
    ("patch", "/api/v1/runs/{run}"): {"action": "pause", "harnesses": {"react": 3, "codex": 1}},
    ("post", "/api/v1/rollouts"): {"task": "hello", "harness": "mine", "ttl_s": 60},
}
"""By method and path. In this order each can be sent to a new server, with ``first`` for the run."""


class Described(JsonRenderPlugin):
    """Serves ``described`` as JSON."""

    def render(self, request: Request[Any, Any, Any], openapi_schema: dict[str, Any]) -> bytes:
        return self.render_json(request, described(openapi_schema))


def described(schema: dict[str, Any]) -> dict[str, Any]:
    """``schema`` with what is the same for all routes."""
    _, problems = msgspec.json.schema_components([Problem], ref_template=_REF)
    error = {
        "description": "A problem document (RFC 9457)",
        "content": {MEDIA_TYPE: {"schema": {"$ref": _REF.format(name="Problem")}}},
    }
    paths = {
        path: {method: _operation(path, method, operation, error) for method, operation in item.items()}
        for path, item in schema["paths"].items()
    }
    known = schema.get("components", {})
    components = {
        **known,
        "schemas": {**known.get("schemas", {}), **problems},
        "securitySchemes": {
            "admin": {"type": "http", "scheme": "bearer", "description": "The admin key"},
            "trainer": {"type": "http", "scheme": "bearer", "description": "The trainer key of the run"},
        },
    }
    return {**schema, "paths": paths, "components": components}


def _operation(path: str, method: str, operation: Any, error: dict[str, Any]) -> Any:
    if not isinstance(operation, dict) or "responses" not in operation:
        return operation
    responses = {status: answer for status, answer in operation["responses"].items() if status != "400"}
    found = {**operation, "responses": {**responses, "default": error}}
    if path not in _OPEN:
        found["security"] = [{"trainer" if "/trainer/" in path else "admin": []}]
    if (example := EXAMPLES.get((method, path))) is not None:
        body = operation["requestBody"]
        content = {kind: {**media, "example": example} for kind, media in body["content"].items()}
        found["requestBody"] = {**body, "content": content}
    return found
