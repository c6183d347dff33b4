"""The control API refuses what is wrong, by name: keys, routes, bodies, parameters. Nothing is a 5xx."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from api_rig import Rig, client, on, problem, rig, run_table
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forge_server.store import keys

pytestmark = pytest.mark.asyncio(loop_scope="module")

ADMIN = [
    ("GET", "/api/v1/runs"),
    ("POST", "/api/v1/runs"),
    ("GET", "/api/v1/runs/x"),
    ("PATCH", "/api/v1/runs/x"),
    ("POST", "/api/v1/runs/x/evaluate"),
    ("POST", "/api/v1/runs/x/checkpoint"),
    ("GET", "/metrics"),
    ("GET", "/api/v1/runs/x/metrics"),
    ("GET", "/api/v1/runs/x/cost"),
    ("GET", "/api/v1/runs/x/compare"),
    ("GET", "/api/v1/overview"),
    ("GET", "/api/v1/tasks"),
    ("POST", "/api/v1/tasks"),
    ("GET", "/api/v1/rollouts"),
    ("POST", "/api/v1/rollouts"),
    ("GET", "/api/v1/rollouts/x"),
    ("GET", "/api/v1/rollouts/x/calls"),
    ("GET", "/api/v1/rollouts/x/samples"),
    ("GET", "/api/v1/rollouts/x/logs"),
    ("GET", "/api/v1/rollouts/x/turns"),
    ("GET", "/api/v1/rollouts/x/segments"),
    ("GET", "/api/v1/rollouts/x/segments/0/tokens"),
    ("POST", "/api/v1/rollouts/x/cancel"),
    ("POST", "/api/v1/rollouts/x/retry"),
    ("GET", "/api/v1/events"),
    ("GET", "/api/v1/events/history"),
    ("GET", "/api/v1/policies"),
    ("POST", "/api/v1/policies/0/activate"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    async with rig(tmp_path_factory.mktemp("api")) as made:
        yield made


def described(api: Rig) -> dict[str, dict[str, Any]]:
    return api.server.control_app().openapi_schema.to_schema()["paths"]


async def test_i10_no_other_key_opens_the_control_api(api: Rig) -> None:
    registered = await api.register()
    run = await api.create_run("i10")
    secret = api.server.instance.secret
    others = [
        "",
        "wrong",
        "fk-admin-" + "0" * 48,
        api.server.admin_key[:-1],
        api.server.admin_key + "0",
        registered["agent_key"],
        registered["runner_key"],
        keys.attempt_key(secret, registered["attempt_id"], "join"),
        keys.trainer_key(secret, run["id"]),
    ]
    for key in others:
        async with client(api.server, key) as stranger:
            for method, path in ADMIN:
                body = {"json": {}} if method in ("POST", "PATCH") else {}
                problem(await stranger.request(method, path, **body), 401, "unauthorized")
    for header in ("", "Basic x", f"Token {api.server.admin_key}"):
        answer = await api.http.get("/api/v1/runs", headers={"authorization": header})
        assert "DATA_DIR/admin.key" in problem(answer, 401, "unauthorized").detail


async def test_every_route_of_the_admin_key_is_in_the_list_above(api: Rig) -> None:
    inner = ("/healthz", "/readyz", "/api/v1/runs/{run_id}/trainer")
    routes = {
        (method.upper(), path)
        for path, methods in described(api).items()
        for method in methods
        if not path.startswith(inner)
    }
    named = {("run", "x"), ("rollout_id", "x"), ("version", "0"), ("index", "0")}
    for name, value in named:
        routes = {(method, path.replace(f"{{{name}}}", value)) for method, path in routes}
    assert routes == set(ADMIN)


async def test_i10_the_admin_key_opens_no_trainer_link(api: Rig) -> None:
    run = await api.create_run("i10-trainer")
    path = f"/api/v1/runs/{run['id']}/trainer/sessions"
    await api.refused(401, "unauthorized", "POST", path, json={"world_size": 1, "resume_step": 0})


async def test_unknown_routes_and_methods(api: Rig) -> None:
    for path in ("/", "/nope", "/api/v1", "/api/v1/nope", "/api/v2/runs", "/metrics/x"):
        await api.refused(404, "not-found", "GET", path)
    for method, path in (("PUT", "/api/v1/runs"), ("DELETE", "/api/v1/runs/x"), ("POST", "/healthz")):
        await api.refused(405, "method-not-allowed", method, path)


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("/api/v1/runs", b"", "JSON body"),
        ("/api/v1/runs", b"{", "truncated"),
        ("/api/v1/runs", b"\xff\xfe\x00", "malformed"),
        ("/api/v1/runs", b"[]", "array"),
        ("/api/v1/runs", b"null", "null"),
        ("/api/v1/runs", b'{"settings": {}, "x": 1}', "`x`"),
        ("/api/v1/runs", b'{"settings": 3}', "settings"),
        ("/api/v1/tasks", b'{"taskset": 3}', "taskset"),
        ("/api/v1/tasks", b'{"taskset": ""}', "taskset"),
        ("/api/v1/tasks", b'{"taskset": "a\\u0000b", "path": "/x"}', "taskset"),
        ("/api/v1/tasks", b'{"split": "train"}', "taskset"),
        ("/api/v1/tasks", b'{"taskset": "a", "tasks": [3]}', "tasks"),
        ("/api/v1/rollouts", b'{"mode": "practice"}', "mode"),
        ("/api/v1/rollouts", b'{"harness": ""}', "harness"),
        ("/api/v1/rollouts", b'{"task": 3}', "task"),
        ("/api/v1/rollouts", b'{"unknown": 3}', "`unknown`"),
    ],
)
async def test_wrong_bodies(api: Rig, path: str, body: bytes, told: str) -> None:
    headers = {"content-type": "application/json"}
    found = await api.refused(400, "invalid-request", "POST", path, content=body, headers=headers)
    assert told in found.detail
    assert "Validation failed" not in found.detail  # ours, not the framework's


async def test_a_task_with_a_file_that_is_none(api: Rig) -> None:
    task = {
        "name": "a",
        "instruction": "x",
        "verify": {"script": "true"},
        "files": {"x": {"base64": "YWJjé"}},
    }
    body = {"taskset": "wrong", "tasks": [task]}
    found = await api.refused(400, "bad-task", "POST", "/api/v1/tasks", json=body)
    assert "not base64" in found.detail


async def test_a_large_body_is_refused(api: Rig) -> None:
    body = b'{"taskset": "' + b"x" * (65 << 20) + b'"}'
    await api.refused(413, "too-large", "POST", "/api/v1/tasks", content=body)


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/api/v1/runs?limit=x", "limit"),
        ("/api/v1/runs?limit=0", "limit"),
        ("/api/v1/runs?limit=1001", "limit"),
        ("/api/v1/runs?limit=-1", "limit"),
        ("/api/v1/runs?cursor=x", "cursor"),
        ("/api/v1/runs?cursor=MTIz", "cursor"),  # 123
        ("/api/v1/runs?cursor=W10=", "cursor"),  # []
        ("/api/v1/runs?cursor=%C3%A9", "cursor"),
        ("/api/v1/tasks?cursor=" + "A" * 600, "cursor"),
        ("/api/v1/rollouts?cursor=!!!!", "cursor"),
        ("/api/v1/rollouts?state=done", "state"),
        ("/api/v1/rollouts?state=", "state"),
        ("/api/v1/rollouts?stat=ended", "did you mean 'state'?"),
        ("/api/v1/tasks?set=a", "unknown parameter 'set'"),
        ("/api/v1/policies?x=1", "known: none"),
        ("/api/v1/rollouts/x/calls?messages=perhaps", "messages"),
        (f"/api/v1/runs/x/metrics?since={10**25}", "since"),
        (f"/api/v1/rollouts/x/turns?since={2**31}", "since"),
        ("/api/v1/events?since=x", "since"),
        ("/api/v1/events?since=-1", "since"),
        ("/api/v1/events?since=99999999999999999999", "since"),
    ],
)
async def test_wrong_parameters(api: Rig, path: str, told: str) -> None:
    found = await api.refused(400, "invalid-request", "GET", path)
    assert told in found.detail and "in_state" not in found.detail


@pytest.mark.parametrize("path", ["tasks", "runs", "rollouts"])
async def test_a_body_that_is_nested_too_deeply(api: Rig, path: str) -> None:
    body = b'{"settings": ' + b"[" * 5000 + b"]" * 5000 + b"}"
    headers = {"content-type": "application/json"}
    found = await api.refused(
        400, "invalid-request", "POST", f"/api/v1/{path}", content=body, headers=headers
    )
    assert "nested too deeply" in found.detail


@pytest.mark.parametrize("header", ["x", "-1", "1.5", "9" * 20, "9" * 5000, "\u00b2"])
async def test_a_last_event_id_that_is_no_number(api: Rig, header: str) -> None:
    headers = {"last-event-id": header.encode("latin-1")}
    await api.refused(400, "invalid-request", "GET", "/api/v1/events", headers=headers)


async def test_what_is_not_there(api: Rig) -> None:
    for path in ("/runs/x", "/runs/x/metrics", "/rollouts/x", "/rollouts/x/calls", "/rollouts/x/samples"):
        await api.refused(404, "not-found", "GET", f"/api/v1{path}")
    await api.refused(404, "not-found", "GET", "/api/v1/rollouts/x/logs")
    await api.refused(404, "not-found", "GET", "/api/v1/rollouts", params={"run": "x"})
    await api.refused(404, "not-found", "PATCH", "/api/v1/runs/x", json={"action": "pause"})
    for action in ("cancel", "retry"):
        await api.refused(404, "not-found", "POST", f"/api/v1/rollouts/x/{action}")
    for action in ("evaluate", "checkpoint"):
        await api.refused(404, "not-found", "POST", f"/api/v1/runs/x/{action}")
    await api.refused(404, "not-found", "POST", "/api/v1/rollouts", json={"run": "x"})
    await api.refused(404, "not-found", "POST", "/api/v1/rollouts", json={"task": "x"})
    await api.refused(404, "not-found", "POST", f"/api/v1/policies/{10**30}/activate")


async def test_readiness_tells_what_is_missing(api: Rig) -> None:
    answer = await api.http.get("/readyz", headers={"authorization": ""})
    assert answer.status_code == 503
    lines = {check["name"]: check for check in answer.json()["checks"]}
    assert lines["database"]["ok"] and not lines["engine"]["ok"]
    assert '[engine] kind = "managed"' in lines["engine"]["detail"]
    assert (await api.http.get("/healthz", headers={"authorization": ""})).json() == {"status": "ok"}


async def test_openapi_is_served_and_loads_nothing_from_elsewhere(api: Rig) -> None:
    answer = await api.http.get("/schema/openapi.json", headers={"authorization": ""})
    assert answer.status_code == 200
    assert set(answer.json()["paths"]) == set(described(api))
    page = await api.http.get("/schema")
    assert "text/html" not in page.headers["content-type"]


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.just("\0"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
WORDS = st.sampled_from(["", "0", "x", "-1", "%00", "..%2f", "ru-1", "9" * 40, "\u00e9", " ", "a?b"])


def value_of(schema: dict[str, Any], components: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values that fit the schema in part: the right shape with some wrong leaves."""
    if "$ref" in schema:
        return value_of(components[schema["$ref"].rpartition("/")[2]], components)
    for key in ("oneOf", "anyOf"):
        if key in schema:
            return st.one_of([value_of(each, components) for each in schema[key]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"]) | JSON
    if schema.get("type") == "object" and "properties" in schema:
        fields = {name: value_of(each, components) for name, each in schema["properties"].items()}
        required = {name: fields.pop(name) for name in schema.get("required", [])}
        return st.fixed_dictionaries(required, optional=fields) | JSON
    return JSON | st.text(max_size=5) | st.just("a\0b") | st.integers(-1, 5)


async def test_no_request_is_a_server_error(tmp_path: Path, database_url: str) -> None:
    """Requests drawn from the OpenAPI document, right in shape and wrong in detail, are answered below 500."""
    async with rig(tmp_path, **on(database_url)) as api:
        await bombard(api)


async def bombard(api: Rig) -> None:
    document = api.server.control_app().openapi_schema.to_schema()
    components = document["components"]["schemas"]
    operations = [
        (method.upper(), path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
        if path not in ("/readyz", "/api/v1/events")
    ]

    @st.composite
    def requests(draw: st.DrawFn) -> tuple[str, str, dict[str, str], Any]:
        method, path, operation = draw(st.sampled_from(operations))
        query = {}
        for parameter in operation.get("parameters", []):
            if parameter["in"] == "path":
                path = path.replace(f"{{{parameter['name']}}}", draw(WORDS))
            elif parameter["in"] == "query" and draw(st.booleans()):
                query[parameter["name"]] = draw(WORDS)
        body = None
        if "requestBody" in operation:
            schema = operation["requestBody"]["content"]["application/json"]["schema"]
            body = draw(value_of(schema, components))
        return method, path, query, body

    drawn: list[tuple[str, str, dict[str, str], Any]] = []

    @settings(max_examples=150, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(requests())
    def draw(request: tuple[str, str, dict[str, str], Any]) -> None:
        drawn.append(request)

    draw()
    for method, path, query, body in drawn:
        answer = await api.http.request(method, path, params=query, json=body)
        assert answer.status_code < 500, (method, path, query, body, answer.text)
        if answer.status_code >= 400:
            assert answer.headers["content-type"] == "application/problem+json"


async def test_run_settings_that_are_wrong(api: Rig) -> None:
    for changes, told in (
        ({"nn": 3}, "did you mean 'n'?"),
        ({"kind": "practice"}, "one of: train, eval, record"),
        ({"n": 0}, "n must be at least 1"),
        ({"n": 10**12}, "groups * (n + oversample) must be at most 1,000,000"),
        ({"name": "a/b"}, "name"),
        ({"name": ""}, "name"),
        ({"policy": "other"}, "policy"),
    ):
        found = await api.refused(
            400, "config-invalid", "POST", "/api/v1/runs", json={"settings": run_table("w", **changes)}
        )
        assert told in found.detail
    found = await api.refused(
        400, "bad-spec", "POST", "/api/v1/runs", json={"settings": run_table("w", harness="reac")}
    )
    assert "react" in found.detail
    assert not [run for run in await api.items("/api/v1/runs") if run["name"] == "w"]
