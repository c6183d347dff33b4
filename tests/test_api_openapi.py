"""The OpenAPI description is true: what it promises is answered, and nothing that it allows breaks the server."""

import asyncio
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from api_rig import Rig, attached, line, rig
from engine_fake import FakeEngine

from forge_server.api.openapi import EXAMPLES

pytestmark = pytest.mark.timeout(240)

ROUTES = 30
"""At least so many operations are tried."""


async def description(api: Rig) -> dict[str, Any]:
    answer = await api.http.get("/schema/openapi.json", headers={"authorization": ""})
    assert answer.status_code == 200
    return dict(answer.json())


async def test_every_operation_tells_its_key_its_errors_and_what_it_is_for(tmp_path: Path) -> None:
    async with rig(tmp_path) as api:
        found = await description(api)
    operations = [(path, operation) for path, item in found["paths"].items() for operation in item.values()]
    assert len(operations) >= ROUTES
    for path, operation in operations:
        assert operation["summary"], path
        problem = operation["responses"]["default"]["content"]["application/problem+json"]["schema"]
        assert problem == {"$ref": "#/components/schemas/Problem"}
        assert ("security" in operation) == (path not in ("/healthz", "/readyz"))
        assert "400" not in operation["responses"]
    assert set(found["components"]["schemas"]["Problem"]["required"]) == {"type", "title", "status", "detail"}
    assert set(found["components"]["securitySchemes"]) == {"admin", "trainer"}


async def test_the_examples_can_be_sent(tmp_path: Path) -> None:
    async with rig(tmp_path) as api:
        found = await description(api)
        for (method, path), example in EXAMPLES.items():
            body = found["paths"][path][method]["requestBody"]["content"]["application/json"]
            assert body["example"] == example
            answer = await api.http.request(method.upper(), path.replace("{run}", "first"), json=example)
            assert answer.status_code in (200, 201), answer.text


async def test_schemathesis_finds_nothing(tmp_path: Path) -> None:
    """Bounded: the edges of every parameter, and a few bodies of each. The stream of events never ends and is left
    out; the trainer's routes are tried as a stranger."""
    program = shutil.which("schemathesis", path=str(Path(sys.executable).parent))
    assert program is not None
    async with FakeEngine().serving() as engine, rig(tmp_path, **attached(engine.url)) as api:
        await api.ready()
        await api.http.post("/api/v1/tasks", json={"taskset": "set", "tasks": [line("a")]})
        await api.register(task="a")
        command = [
            program,
            "run",
            f"{api.server.listening.control_url}/schema/openapi.json",
            f"--header=Authorization: Bearer {api.server.admin_key}",
            "--checks=not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance",
            "--phases=examples,coverage,fuzzing",
            "--max-examples=3",
            "--workers=2",
            "--exclude-path=/api/v1/events",
            "--request-timeout=30",
            "--generation-deterministic",
            "--continue-on-failure",
            "--no-color",
        ]
        done = await asyncio.to_thread(
            lambda: subprocess.run(
                command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False
            )
        )
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        assert "0 generated" not in done.stdout
        assert (await api.http.get("/readyz")).status_code == 200


async def test_large_answers_are_compressed_for_who_takes_it(tmp_path: Path) -> None:
    async with rig(tmp_path) as api:
        path = "/schema/openapi.json"
        packed = await api.http.get(path, headers={"accept-encoding": "gzip"})
        plain = await api.http.get(path, headers={"accept-encoding": "identity"})
        assert packed.headers["content-encoding"] == "gzip" and "content-encoding" not in plain.headers
        assert packed.content == plain.content
        assert int(packed.headers["content-length"]) < len(plain.content) / 4
        small = await api.http.get("/healthz", headers={"accept-encoding": "gzip"})
        assert "content-encoding" not in small.headers
        async with api.http.stream(
            "GET", "/api/v1/events?since=0", headers={"accept-encoding": "gzip"}
        ) as stream:
            assert stream.status_code == 200 and "content-encoding" not in stream.headers
