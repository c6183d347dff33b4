"""Traces at a collector: an attempt is one of them, whatever becomes of server and collector."""

import asyncio
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from api_rig import attached, eventually, rig
from engine_fake import FakeEngine
from harness_lab import Asked, Call, Fault, Say, harness_lab
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from otlp_collector import Collector, plain
from test_metrics import call, runner

from forge_server.app import running
from forge_server.commands.check import NotReady, check
from forge_server.domain.errors import ConfigError
from forge_server.services.telemetry.outbox import PORTION, Outbox
from forge_server.services.telemetry.spans import span_id, trace_id
from forge_server.services.telemetry.traces import traces_url
from forge_server.settings import Settings, TelemetrySettings, load

pytestmark = pytest.mark.timeout(180)

WAIT = 60.0


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector().serving() as made:
        yield made


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


def to(collector: Collector) -> dict[str, Any]:
    return {"telemetry": TelemetrySettings(otlp_endpoint=collector.url)}


def write_and_read(asked: Asked) -> Say:
    return (
        Say(calls=[Call("shell", {"command": "printf 'hello\\n' > a.txt"})]),
        Say(calls=[Call("shell", {"command": "cat a.txt"})]),
        Say(calls=[Call("finish", {"answer": asked.last.strip()})]),
    )[asked.turn]


@pytest.mark.sandbox
def test_a_rollout_is_one_trace(
    tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20abc")
    with harness_lab(tmp_path, **to(collector)) as lab:
        result = lab.run(
            "react",
            write_and_read,
            instruction="Write a file",
            expect={"a.txt": "hello\n"},
            faults={1: Fault(status=500)},
        )
        instance = lab.server.instance.id
    assert (result.outcome, result.reward) == ("completed", 1.0), result.explain()
    assert len(result.calls) == 4 and len(collector.spans) == 5  # one of them failed and was asked again
    assert len({span.trace_id for span in collector.spans}) == 1
    assert len({span.span_id for span in collector.spans}) == 5
    (root,) = collector.roots
    assert {span.parent_span_id for span in collector.calls} == {root.span_id}
    told = plain(root.attributes)
    assert root.name == "invoke_agent react" and root.kind == Span.SPAN_KIND_INTERNAL
    assert told["gen_ai.operation.name"] == "invoke_agent" and told["gen_ai.agent.name"] == "react"
    assert told["forge.rollout.id"] == result.rollout_id and told["forge.run.name"] == "react-1"
    assert told["forge.attempt.outcome"] == "completed" and told["forge.attempt.reward"] == 1.0
    assert told["forge.attempt.exit_code"] == 0 and told["forge.task.name"] == "react-1"
    assert root.status.code == Status.STATUS_CODE_UNSET
    assert [event.name for event in root.events] == ["launched", "started", "running", "sealed"]
    check_calls(result.calls, collector, root)
    for span in collector.spans:
        for name in plain(span.attributes):
            assert not name.startswith("gen_ai.") or name in vars(gen_ai_attributes).values(), name
            assert "prompt" not in name and "message" not in name
    assert {resource["service.instance.id"] for resource in collector.resources} == {instance}
    assert {path for path, _ in collector.requests} == {"/v1/traces"}
    assert all(headers["authorization"] == "Bearer abc" for _, headers in collector.requests)


def check_calls(rows: list[Any], collector: Collector, root: Span) -> None:
    spans = sorted(collector.calls, key=lambda span: plain(span.attributes)["forge.call.seq"])
    for row, span in zip(rows, spans, strict=True):
        told = plain(span.attributes)
        assert span.name == "chat forge" and span.kind == Span.SPAN_KIND_CLIENT
        assert told["gen_ai.request.model"] == "forge" and told["gen_ai.operation.name"] == "chat"
        assert told["forge.call.id"] == row.id and told["forge.attempt.id"] == row.attempt_id
        assert told.get("gen_ai.usage.input_tokens") == row.prompt_len
        assert told.get("gen_ai.usage.output_tokens") == row.completion_len
        assert told["http.response.status_code"] == row.status
        assert (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9 == pytest.approx(
            row.ended_at - row.began_at, abs=1e-5
        )
        assert root.start_time_unix_nano <= span.start_time_unix_nano
        assert span.end_time_unix_nano <= root.end_time_unix_nano
        assert int.from_bytes(span.trace_id, "big") == trace_id(row.attempt_id)
        assert int.from_bytes(span.span_id, "big") == span_id(f"{row.attempt_id} {row.id}")
        if row.end == "ok":
            assert told["gen_ai.response.finish_reasons"] == [row.finish_reason]
            assert span.status.code == Status.STATUS_CODE_UNSET
        else:
            assert told["error.type"] == "upstream_error" and span.status.code == Status.STATUS_CODE_ERROR
            assert span.status.message == row.error


@pytest.mark.sandbox
def test_a_collector_that_hangs_keeps_nobody(
    tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its exporter would wait for a day."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "86400")
    collector.answer.clear()
    with harness_lab(tmp_path, **to(collector)) as lab:
        result = lab.run("react", write_and_read, instruction="Write a file", expect={"a.txt": "hello\n"})
        assert (result.outcome, result.reward) == ("completed", 1.0), result.explain()
        assert collector.asked.wait(WAIT)
        again = lab.run("react", write_and_read, instruction="Write a file", expect={"a.txt": "hello\n"})
        assert (again.outcome, again.reward) == ("completed", 1.0), again.explain()
    assert lab.server.spans["sent"] == 0 and lab.server.spans["refused"] > 0
    assert collector.spans == [] and not collector.answer.is_set()  # the server has ended all the same


async def end(registered: dict[str, Any]) -> None:
    await runner(registered, "seal", {})
    await runner(registered, "reward", {"value": 0.5, "source": "external"})
    await runner(registered, "finish", {"exit_code": 0, "verifier": {"status": "ok"}})


async def test_the_next_server_goes_on_with_the_trace(tmp_path: Path, collector: Collector) -> None:
    """Calls are told while the attempt runs, each by the server that saw it end, and none twice."""
    sections = to(collector)
    async with FakeEngine().serving() as engine:
        sections |= attached(engine.url)
        async with rig(tmp_path, **sections) as api:
            await api.ready()
            registered = await api.register(harness="mine")
            assert await call(registered, "one") == 200
            traces = api.server.traces
            assert traces is not None
            await traces.look()
            await eventually(lambda: api.server.spans["sent"] == 1)
            assert len(collector.calls) == 1 and not collector.roots
            assert await call(registered, "two") == 200
        assert len(collector.calls) == 2
        async with rig(tmp_path, **sections) as api:
            await api.ready()
            registered["base_url"] = f"{api.server.listening.pod_url}/a/{registered['attempt_id']}"
            assert await call(registered, "three") == 200
            await end(registered)
            text = (await api.http.get("/metrics")).text
    assert [plain(span.attributes)["forge.call.seq"] for span in collector.calls] == [0, 1, 2]
    (root,) = collector.roots
    assert {span.trace_id for span in collector.spans} == {root.trace_id}
    assert plain(root.attributes)["forge.attempt.reward"] == 0.5
    assert "forge_telemetry_spans" in text


async def test_what_cannot_be_read_is_told_at_the_next_look(
    tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        FakeEngine().serving() as engine,
        rig(tmp_path, **to(collector), **attached(engine.url)) as api,
    ):
        await api.ready()
        registered = await api.register(harness="mine")
        assert await call(registered, "one") == 200
        await end(registered)
        traces, store = api.server.traces, api.server.store
        assert traces is not None
        with monkeypatch.context() as broken:
            broken.setattr(store, "read", None)
            await traces.look()
        await traces.look()
        await eventually(lambda: api.server.spans["sent"] == 2)
    assert (len(collector.roots), len(collector.calls)) == (1, 1)


async def test_a_collector_that_refuses_costs_traces(tmp_path: Path, collector: Collector) -> None:
    async with (
        FakeEngine().serving() as engine,
        rig(tmp_path, **to(collector), **attached(engine.url)) as api,
    ):
        await api.ready()
        registered, traces = await api.register(harness="mine"), api.server.traces
        assert traces is not None
        collector.status = 400
        assert await call(registered, "one") == 200
        await traces.look()
        await eventually(lambda: api.server.spans["refused"] == 1)
        collector.status = 200
        assert await call(registered, "two") == 200
        await end(registered)
    assert dict(api.server.spans) == {"sent": 2, "refused": 1, "full": 0}
    assert [plain(span.attributes)["forge.call.seq"] for span in collector.calls] == [1]
    assert len(collector.roots) == 1


def test_nothing_is_loaded_unless_it_is_wanted(tmp_path: Path) -> None:
    script = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from api_rig import rig

async def main():
    async with rig(Path(sys.argv[2])) as api:
        assert api.server.traces is None

asyncio.run(main())
loaded = {name for name in sys.modules if name.startswith("opentelemetry.")}
assert not {name for name in loaded if not name.startswith("opentelemetry.semconv")}, loaded  # Litestar looks for those
"""
    here = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", script, here, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


async def test_without_the_extra_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "opentelemetry"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    settings = Settings(telemetry=TelemetrySettings(otlp_endpoint="http://x:4318"), folder=str(tmp_path))
    with pytest.raises(ConfigError, match=r"otlp_endpoint needs opentelemetry.*forge-server\[otel\]"):
        async with running(settings):
            raise AssertionError("it starts")
    assert not settings.data_dir.exists()
    (tmp_path / "forge.toml").write_text('[telemetry]\notlp_endpoint = "http://x:4318"\n')
    with pytest.raises(NotReady, match="telemetry"):
        await asyncio.to_thread(check, str(tmp_path / "forge.toml"), None, False, False)
    assert "pip install 'forge-server[otel]'" in capsys.readouterr().out


def test_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "forge.toml"
    file.write_text('[telemetry]\notlp_endpoint = "collector:4318"\n')
    with pytest.raises(ConfigError, match="otlp_endpoint is 'collector:4318'"):
        load(file)
    assert load(None, {}).telemetry.otlp_endpoint == ""
    for given in ("http://c:4318", "http://c:4318/", "http://c:4318/v1/traces"):
        assert traces_url(given) == "http://c:4318/v1/traces"
    assert traces_url("https://c/otlp") == "https://c/otlp/v1/traces"


def test_what_finds_no_room_is_counted() -> None:
    going, sent = threading.Event(), []
    counts: Counter[str] = Counter()

    def send(spans: Any) -> bool:
        assert going.wait(WAIT)
        sent.extend(spans)
        return True

    outbox = Outbox(send, lambda: None, counts, kept=3)
    outbox.put(range(2))
    outbox.put(range(2, 10))
    assert counts["full"] in (5, 7)  # whether the first two were under way by then
    going.set()
    outbox.close(WAIT)
    assert counts["sent"] == len(sent) == 10 - counts["full"] and sent == sorted(sent)
    assert counts["refused"] == 0


def test_what_is_refused_is_counted() -> None:
    counts: Counter[str] = Counter()
    answers = iter([True, False, True])
    aborted = threading.Event()

    def send(spans: Any) -> bool:
        if (answer := next(answers, None)) is None:
            raise OSError("no such host")
        return answer

    outbox = Outbox(send, aborted.set, counts)
    outbox.put(range(PORTION * 3 + 7))
    outbox.close(WAIT)
    assert counts == {"full": 0, "sent": 2 * PORTION, "refused": PORTION + 7} and aborted.is_set()


def test_the_end_waits_for_nobody() -> None:
    counts: Counter[str] = Counter()
    started, never = threading.Event(), threading.Event()

    def send(spans: Any) -> bool:
        started.set()
        return never.wait(WAIT)

    outbox = Outbox(send, lambda: None, counts)
    outbox.put(range(PORTION + 5))
    assert started.wait(WAIT)
    outbox.close(0.01)
    assert counts["refused"] == 5 and counts["sent"] == 0  # the portion that is under way is neither yet
    never.set()
