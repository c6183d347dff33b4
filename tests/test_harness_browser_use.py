"""browser-use from PyPI, unmodified, with Debian's Chromium in the sandbox and offline, against a scripted model:
screenshots are recorded by hash, told apart, exported; a model that sees is not trained."""

import base64
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
import pytest
import sqlalchemy as sa
from harness_lab import Asked, Lab, Result, Say, ScriptedEngine
from python_harness import check_refused, check_solved, spec_lab, spec_of

from forge_server.client.http import ApiError
from forge_server.export.records import find_run
from forge_server.export.write import export_run
from forge_server.store import tables as t
from forge_server.store.messages import request_of

pytestmark = pytest.mark.sandbox
SPEC = spec_of("browser-use")
PAD, OPEN, CLOSE = 151655, 151652, 151653  # of Qwen's tokenizer
PAGE = """<html><head><title>Plums</title></head><body style="background: {colour}"><h1>{text}</h1>
<a href="next.html">further</a></body></html>"""


def act(*actions: dict[str, Any]) -> Say:
    """A step of the agent, as it wants it said."""
    step = {
        "thinking": "so",
        "evaluation_previous_goal": "Success",
        "memory": "none",
        "next_goal": "on",
        "action": list(actions),
    }
    return Say(json.dumps(step))


def done(text: str) -> Say:
    return act({"done": {"text": text, "success": True, "files_to_display": []}})


FILES = {
    "index.html": PAGE.format(colour="#fdd", text="plum"),
    "next.html": PAGE.format(colour="#dfd", text="pear"),
}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """The engine has a vision model, and the server was given its folder."""
    folder = tmp_path_factory.mktemp("browser-use")
    config = {"vision_config": {"depth": 2}, "image_token_id": PAD}
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(config))
    engine = ScriptedEngine(vision=True)
    with spec_lab(folder / "lab", SPEC, engine=engine, model=folder / "model") as made:
        yield made


@pytest.fixture(scope="module")
def looked(lab: Lab) -> Result:
    """Three steps: from the first page, of which it sees twice the same, to the second one."""

    def policy(asked: Asked) -> Say:
        return (
            act({"wait": {"seconds": 0}}),
            act({"navigate": {"url": "http://127.0.0.1:8000/next.html", "new_tab": False}}),
            done("pear"),
        )[len(lab.engine.asked) - 1]

    return lab.run(
        "browser-use",
        policy,
        instruction="Say which fruit comes next.",
        files=FILES,
        expect={"answer.txt": "pear"},
    )


def test_it_sees_pages_of_the_task_and_every_screenshot_is_recorded_by_hash(lab: Lab, looked: Result) -> None:
    check_solved(looked, SPEC)
    assert "further" in looked.asked[0].last_user and "next.html" in looked.asked[2].last_user
    sent = [shown(request.json) for request in looked.requests]
    assert [len(files) for files in sent] == [1, 1, 1] and sent[1] != sent[2]
    assert all(file.startswith(b"\x89PNG") for (file,) in sent)
    stored = lab.server.store.read_now(lambda c: c.execute(sa.select(t.media)).all())
    assert {bytes(row.sha256): bytes(row.data) for row in stored} == {
        hashlib.sha256(file).digest(): file for files in sent for file in files
    }
    for call, (file,), request in zip(looked.calls, sent, looked.requests, strict=True):
        assert call.flags["images"] == 1 and call.untrainable is None
        name = hashlib.sha256(file).hexdigest()
        kept = lab.server.store.read_now(lambda c, id=call.id: request_of(c, id))
        assert kept is not None and f"sha256:{name}" in json.dumps(kept) and "base64," not in json.dumps(kept)
        assert "response_format" not in request.json


def test_each_step_is_a_sample_that_knows_its_screenshot(looked: Result) -> None:
    """It is not append-only, as its spec says; nothing merges though placeholders are equal."""
    assert not SPEC.append_only
    assert looked.trained_calls == len(looked.samples) == 3
    assert looked.drift == {"first": 1, "history_edited": 2}
    for sample, request in zip(looked.samples, looked.requests, strict=True):
        (file,) = shown(request.json)
        (span,) = sample.media
        assert span.sha256 == hashlib.sha256(file).hexdigest()
        assert sample.tokens[span.offset - 1] == OPEN and sample.tokens[span.end] == CLOSE
        assert set(sample.tokens[span.offset : span.end].tolist()) == {PAD}


def test_rows_are_exported_with_their_screenshots(lab: Lab, looked: Result, tmp_path: Path) -> None:
    run = find_run(lab.server.store, "browser-use-1", 131_072)
    report = export_run(lab.server.store, run, "parquet", tmp_path / "rows.parquet")
    rows = pq.read_table(tmp_path / "rows.parquet").to_pylist()
    assert (report.rows, len(rows)) == (3, 3) and report.images == len(list((tmp_path / "media").iterdir()))
    for row, request in zip(rows, looked.requests, strict=True):
        (file,) = shown(request.json)
        (named,) = row["mm"]
        assert (tmp_path / "media" / named["sha256"]).read_bytes() == file
        assert row["tokens"][named["offset"] : named["offset"] + named["length"]] == [PAD] * named["length"]
    blind = export_run(lab.server.store, run, "sft", tmp_path / "sft.parquet")
    assert blind.rows == 0 and blind.left_out == {"media": 1}


def test_training_a_model_that_sees_is_refused_by_name(lab: Lab, looked: Result) -> None:
    settings = {"name": "blindly", "kind": "train", "taskset": "lab", "harness": "browser-use", "n": 2}
    with pytest.raises(ApiError, match=r"multimodal \(vision_config\).*not trained"):
        lab.client.create_run(settings)
    assert lab.client.create_run({**settings, "name": "measured", "kind": "eval", "tasks": ["none"]}).id


def test_one_refusal_ends_it(lab: Lab) -> None:
    """It asks six times, which are six refusals."""
    result = lab.run(
        "browser-use",
        lambda asked: act({"wait": {"seconds": 0}}),
        instruction="Go on.",
        files=FILES,
        max_calls=1,
    )
    check_refused(result, SPEC)
    assert len(result.requests) <= 7


def test_its_judge_is_a_side_call_and_without_vision_it_sends_no_screenshot(tmp_path: Path) -> None:
    env = {**SPEC.env, "BROWSER_USE_VISION": "off", "BROWSER_USE_JUDGE": "on"}
    verdict = {"reasoning": "so", "verdict": True, "failure_reason": "", "reached_captcha": False}

    def policy(asked: Asked) -> Say:
        if "expert judge" in asked.system:
            return Say(json.dumps({**verdict, "impossible_task": False}))
        return done("plum")

    with spec_lab(tmp_path, msgspec.structs.replace(SPEC, env=env)) as lab:
        result = lab.run(
            "browser-use", policy, instruction="Say it.", files=FILES, expect={"answer.txt": "plum"}
        )
    check_solved(result, SPEC)
    assert [(call.label, call.untrainable) for call in result.calls] == [("", None), ("judge", "side_call")]
    assert [shown(request.json) for request in result.requests] == [[], []]
    (sample,) = result.samples
    assert sample.media == () and [span.call_id for span in sample.spans] == [result.calls[0].id]


def shown(body: dict[str, Any]) -> list[bytes]:
    """The images of a request."""
    parts = [p for m in body["messages"] if isinstance(m["content"], list) for p in m["content"]]
    urls = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
    return [base64.b64decode(url.partition(",")[2]) for url in urls]
