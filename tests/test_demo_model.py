"""The demo's tokenizer, template and scripted engine, against each other and against real vLLM."""

import contextlib
import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from engine_fixtures import TinyModel, managed_spec

from forge_server import assets
from forge_server.demo.recipe import RECIPE
from forge_server.demo.tasks import draw
from forge_server.demo.teaching import conversation
from forge_server.engine.checkpoint import Policy
from forge_server.engine.managed import ManagedHost
from forge_server.harness.react import SYSTEM, TOOLS

pytestmark = [pytest.mark.vllm, pytest.mark.verl, pytest.mark.timeout(900)]

LOOK = {"role": "user", "content": "Which number is in jar/47?"}
RESULT = {"role": "tool", "tool_call_id": "x", "content": "382"}


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of the demo's programs."""
    folder = assets.stage_package("demo", tmp_path_factory.mktemp("staged"))
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("FORGE_", "PYTHON"))}
    return kept | {"PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def model(trainer_env: Path, staged: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    spec = msgspec.to_builtins(RECIPE.model) | {
        "seed": 1,
        "tools": TOOLS,
        "conversations": [conversation(task, i) for i, task in enumerate(draw("teach", 200, 1))],
    }
    (folder / "spec.json").write_text(json.dumps(spec))
    line = [str(trainer_env / "bin" / "python"), "-m", "forge_server.demo.staged.model"]
    made = subprocess.run(
        [*line, str(folder / "spec.json"), str(folder / "out")],
        env=staged,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    figures = json.loads(made.stdout)
    assert 500_000 < figures["parameters"] < 1_000_000
    assert figures["tokens"] <= RECIPE.model.vocab_size
    return folder / "out"


@pytest.fixture(scope="module")
def teacher(
    engine_env: Path, model: Path, staged: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The URL of a scripted engine that is never hasty."""
    url_file = tmp_path_factory.mktemp("teacher") / "url"
    line = [str(engine_env / "bin" / "python"), "-m", "forge_server.demo.staged.scripted_engine"]
    with subprocess.Popen([*line, str(model), str(url_file), "0.0"], env=staged) as process:
        try:
            end = time.monotonic() + 120
            while not url_file.exists():
                assert process.poll() is None and time.monotonic() < end
                time.sleep(0.05)
            yield url_file.read_text().strip()
        finally:
            process.terminate()


def post(url: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def ask(messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    body = {
        "model": "forge",
        "messages": [{"role": "system", "content": SYSTEM}, *messages],
        "tools": TOOLS,
        "seed": 3,
    }
    return body | {"return_token_ids": True, "logprobs": True} | more


def test_the_scripted_engine_answers_as_vllm_does(teacher: str) -> None:
    """I2 for scripted answers: ids, usage and logprobs agree, and the next prompt goes on where this one ended."""
    status, first = post(teacher, ask([LOOK]))
    assert status == 200
    choice = first["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {
        "command": "cat jar/47"
    }
    for answer in (first,):
        ids = answer["choices"][0]["token_ids"]
        assert len(ids) == answer["usage"]["completion_tokens"] == len(choice["logprobs"]["content"])
        assert answer["usage"]["prompt_tokens"] == len(answer["prompt_token_ids"])
    _, second = post(teacher, ask([LOOK, choice["message"], RESULT]))
    so_far = first["prompt_token_ids"] + choice["token_ids"]
    assert second["prompt_token_ids"][: len(so_far)] == so_far
    whole = second["prompt_token_ids"] + second["choices"][0]["token_ids"]
    assert len(whole) <= 40  # the scaffolding is few tokens
    answer = second["choices"][0]["message"]["tool_calls"][0]["function"]
    assert (answer["name"], json.loads(answer["arguments"])) == ("finish", {"answer": "382"})


def test_the_scripted_engine_refuses_by_name(teacher: str) -> None:
    status, answer = post(teacher, ask([{"role": "user", "content": "Sing."}]))
    assert status == 400
    assert "does not know" in answer["error"]["message"]
    with urllib.request.urlopen(f"{teacher}/v1/models", timeout=30) as models:
        assert json.loads(models.read())["data"][0]["id"] == "forge"
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"{teacher}/weight_info", timeout=30)


async def test_vllm_renders_what_the_scripted_engine_recorded(
    engine_env: Path, model: Path, teacher: str, tmp_path: Path
) -> None:
    """The teacher's traces are, token for token, what record mode would store of the model."""
    host = ManagedHost(managed_spec(engine_env, TinyModel(tmp_path), tmp_path))
    conversations = [[LOOK]]
    _, first = post(teacher, ask([LOOK]))
    conversations.append([LOOK, first["choices"][0]["message"], RESULT])
    missing = RESULT | {"content": "cat: jar/48: No such file or directory\n\n[status 1]"}
    conversations.append([LOOK, first["choices"][0]["message"], missing])
    address = await host.up(Policy(0, model))
    try:
        for messages in conversations:
            _, scripted = post(teacher, ask(messages))
            status, served = post(address.url, ask(messages, max_tokens=4))
            assert status == 200, served
            assert served["prompt_token_ids"] == scripted["prompt_token_ids"]
            assert len(served["choices"][0]["token_ids"]) == served["usage"]["completion_tokens"]
    finally:
        with contextlib.suppress(Exception):
            await host.discard()
