"""``/metrics``: names that are told and drawn, labels that are closed, figures that agree with the rows."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from api_rig import Rig, attached, client, on, rig
from engine_fake import FakeEngine
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from forge_server.domain.histogram import Histogram
from forge_server.store import tables as t

pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).resolve().parents[1]


async def scrape(api: Rig) -> dict[str, Any]:
    """Families by the name that they are told under."""
    answer = await api.http.get("/metrics")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith(
        "text/plain; version=0.0.4"
    )
    return {
        family.name + ("_total" if family.type == "counter" else ""): family
        for family in text_string_to_metric_families(answer.text)
    }


def value(families: dict[str, Any], name: str, sample: str = "", **labels: str) -> float:
    found = [s.value for s in families[name].samples if s.name == (sample or name) and s.labels == labels]
    assert len(found) == 1, (name, labels, families[name].samples)
    return float(found[0])


async def test_every_metric_is_told_and_every_panel_names_one(tmp_path: Path) -> None:
    async with rig(tmp_path) as api:
        families = await scrape(api)
    page = (ROOT / "docs" / "monitoring.md").read_text()
    told = dict(re.findall(r"^\| `(forge_\w+)` \| (\w+) \|", page, re.MULTILINE))
    ours = {name: family.type for name, family in families.items() if name.startswith("forge_")}
    assert told == ours
    samples = set(families)
    for name, family in families.items():
        if family.type == "histogram":
            samples |= {f"{name}_{part}" for part in ("bucket", "sum", "count")}
    board = json.loads((ROOT / "examples" / "grafana.json").read_text())
    drawn = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    named = [set(re.findall(r"\b(?:forge|process)_\w+", expression)) for expression in drawn]
    assert len(drawn) > 40 and all(named)
    assert set().union(*named) <= samples
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    for name, family in families.items():  # by convention
        assert re.fullmatch(r"(forge|process)_[a-z_]+", name) and family.documentation
        assert family.type != "histogram" or name.endswith("_seconds")


async def test_metrics_need_the_admin_key(tmp_path: Path) -> None:
    async with rig(tmp_path) as api, client(api.server, "wrong") as stranger:
        answer = await stranger.get("/metrics")
        assert answer.status_code == 401 and answer.json()["type"] == "unauthorized"


async def call(registered: dict[str, Any], said: str) -> int:
    async with httpx.AsyncClient(trust_env=False, timeout=30) as http:
        answer = await http.post(
            f"{registered['base_url']}/v1/chat/completions",
            json={"model": "forge", "messages": [{"role": "user", "content": said}]},
            headers={"authorization": f"Bearer {registered['agent_key']}"},
        )
        return answer.status_code


async def runner(registered: dict[str, Any], what: str, body: dict[str, Any]) -> None:
    async with httpx.AsyncClient(trust_env=False, timeout=30) as http:
        headers = {"authorization": f"Bearer {registered['runner_key']}"}
        answer = await http.post(f"{registered['base_url']}/{what}", json=body, headers=headers)
        assert answer.status_code == 200, answer.text


async def test_counters_agree_with_the_rows(tmp_path: Path, database_url: str) -> None:
    async with (
        FakeEngine().serving() as engine,
        rig(tmp_path, **on(database_url), **attached(engine.url)) as api,
    ):
        await api.ready()
        before = await scrape(api)
        done, going = await api.register(harness="mine"), await api.register(harness="mine")
        for said in ("one", "two", "three"):
            assert await call(done, said) == 200
        assert await call(going, "one") == 200
        await runner(done, "seal", {})
        await runner(done, "reward", {"value": 1.0, "source": "external"})
        await runner(done, "finish", {"exit_code": 0, "verifier": {"status": "ok"}})
        families = await scrape(api)
        rows = await api.server.store.read(lambda c: list(c.execute(sa.select(t.calls)).all()))
    expected = Counter((row.dialect, row.end) for row in rows)
    found = {tuple(s.labels.values()): s.value for s in families["forge_proxy_calls_total"].samples}
    assert found == expected == {("chat", "ok"): 4}
    for kind in ("prompt", "completion"):
        total = sum(getattr(row, f"{kind}_len") for row in rows)
        assert value(families, f"forge_proxy_{kind}_tokens_total") == total > 0
    seconds = value(families, "forge_proxy_engine_seconds", "forge_proxy_engine_seconds_sum")
    assert seconds == pytest.approx(sum(row.engine_ms for row in rows) / 1000)
    seconds = value(families, "forge_proxy_call_seconds", "forge_proxy_call_seconds_sum")
    assert seconds == pytest.approx(sum(row.ended_at - row.began_at for row in rows))
    assert value(families, "forge_proxy_call_seconds", "forge_proxy_call_seconds_count") == 4
    assert value(families, "forge_scheduler_attempts", state="running") == 1
    assert value(families, "forge_scheduler_rollouts", state="active") == 1
    ended = {"backend": "external", "outcome": "completed", "kind": "ok"}
    assert value(families, "forge_scheduler_attempts_ended_total", **ended) == 1
    assert value(families, "forge_controller_rollouts_ended_total", mode="record", outcome="completed") == 1
    assert value(families, "forge_controller_rollouts_passed_total", mode="record") == 1
    assert value(families, "forge_engine_ready") == 1 and value(families, "forge_engine_replicas_ready") == 1
    assert value(families, "forge_trainer_up") == 0 and not families["forge_trainer_loss"].samples
    for name in ("forge_store_commits_total", "forge_store_units_total"):
        assert value(families, name) > value(before, name)
    assert value(families, "forge_store_size_bytes") > 0
    closed = {"bucket": r"[\d.+Inf]+", "version": r"[\w.]+"}
    for family in families.values():  # nothing that grows with what is done
        for sample in family.samples:
            check_labels(sample, closed)


def check_labels(sample: Sample, closed: dict[str, str]) -> None:
    known = {
        "le",
        "dialect",
        "end",
        "reason",
        "state",
        "backend",
        "outcome",
        "kind",
        "mode",
        "phase",
        "version",
    }
    assert sample.labels.keys() <= known
    for label, text in sample.labels.items():
        assert re.fullmatch(closed.get(label, r"[a-z_]+|[\d.]+|\+Inf"), text), (sample.name, label, text)


async def test_figures_are_those_of_the_training_run(tmp_path: Path, database_url: str) -> None:
    async with rig(tmp_path, **on(database_url)) as api:

        def rows(c: sa.Connection) -> None:
            run = {"kind": "train", "settings": {}, "created_at": 1.0}
            c.execute(sa.insert(t.runs).values(id="ru-1", name="a", state="active", step=7, **run))
            c.execute(
                sa.insert(t.runs).values(id="ru-2", name="b", state="completed", step=9, ended_at=2.0, **run)
            )
            for step, loss in ((6, 0.5), (7, 0.25)):
                figures = {"loss": loss, "grad_norm": None}
                c.execute(
                    sa.insert(t.step_metrics).values(
                        run_id="ru-1", step=step, source="trainer", metrics=figures, at=1.0
                    )
                )
            session = {"run_id": "ru-1", "token": "x", "world_size": 1, "resume_step": 0, "created_at": 1.0}
            c.execute(
                sa.insert(t.trainer_sessions).values(fence=1, phase="training", lease_until=1e12, **session)
            )

        await api.server.store.write(rows)
        families = await scrape(api)
        assert value(families, "forge_controller_step") == 7
        assert value(families, "forge_trainer_loss") == 0.25
        assert not families["forge_trainer_grad_norm"].samples
        assert (
            value(families, "forge_trainer_phase", phase="training")
            == value(families, "forge_trainer_up")
            == 1
        )
        assert value(families, "forge_controller_runs", state="completed") == 1


def test_a_histogram_counts_up_to_its_bounds() -> None:
    histogram = Histogram((1.0, 2.0))
    for seconds in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(seconds)
    assert list(histogram.cumulative()) == [("1", 2), ("2", 3), ("+Inf", 4)] and histogram.sum == 12.0
