"""The official SDKs for Node as clients of the whole proxy: streaming and not, tools, images, errors, counting, models.

What they made of the answers is compared here with what the engine said. Pinned and installed once, with a Node of
their own; without npm this is an error.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from proxy_rig import PATIENCE, Rig, rig
from test_dialect_sdk import CALLS, PIXEL, TEXT, URL, asked, calling, recorded

from forge_server.environments import ensure_harness
from forge_server.harness.spec import Install

SDKS = Install(npm=("openai@7.59.0", "@anthropic-ai/sdk@1.14.0"), node="22.23.3")
SCRIPT = Path(__file__).with_name("node_sdk.mjs")
WANTED = [[call["id"], call["function"]["name"], call["function"]["arguments"]] for call in CALLS]  # type: ignore[index]


@pytest.fixture(scope="module")
def sdks() -> Path:
    return ensure_harness("node-sdks", SDKS)


@pytest.fixture
async def proxy(tmp_path: Path) -> AsyncIterator[Rig]:
    async with rig(f"sqlite:///{tmp_path / 'forge.db'}") as made:
        yield made


async def node(proxy: Rig, sdks: Path, scenario: str) -> Any:
    url = f"{proxy.url}/a/{proxy.attempt}"
    program = await asyncio.create_subprocess_exec(
        str(sdks / "bin" / "node"),
        str(SCRIPT),
        str(sdks),
        url,
        proxy.key,
        scenario,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={"PATH": "/usr/bin:/bin"},
    )
    async with asyncio.timeout(3 * PATIENCE):
        out, err = await program.communicate()
    assert program.returncode == 0, err.decode()
    return msgspec.json.decode(out)


@pytest.mark.parametrize(
    ("scenario", "finish", "reasoning", "dialect"),
    [
        ("chat", "tool_calls", None, "chat"),
        ("responses", "completed", ["hm"], "responses"),
        ("messages", "tool_use", ["hm"], "messages"),
    ],
)
async def test_node_sdks_with_tools_and_an_image(
    proxy: Rig, sdks: Path, scenario: str, finish: str, reasoning: Any, dialect: str
) -> None:
    proxy.engine.script = calling
    made = await node(proxy, sdks, scenario)
    whole, streamed = made["seen"]
    assert whole["text"] == whole["deltas"] == streamed["text"] == streamed["deltas"] == TEXT
    assert whole["finish"] == streamed["finish"] == finish
    assert whole.get("reasoning") == streamed.get("reasoning") == reasoning
    calls = [[id, name, msgspec.json.decode(arguments)] for id, name, arguments in WANTED]
    expected = calls if scenario == "messages" else WANTED
    assert whole["calls"] == streamed["calls"] == expected
    asked_for = {"prompt_tokens", "completion_tokens", "input_tokens", "output_tokens"}
    used = asked_for & whole["usage"].keys()
    assert len(used) == 2 and all(answer["usage"][name] > 0 for answer in made["seen"] for name in used)
    messages = [m for m in asked(proxy) if m["role"] != "system"]
    assert [m["role"] for m in messages] == ["user", *["assistant", "tool", "tool"] * 2]
    assert messages[0]["content"][1] == {"type": "image_url", "image_url": {"url": URL}}
    assert PIXEL in URL
    assert [c["id"] for c in messages[1]["tool_calls"]] == ["call_1", "call_2"]
    if scenario == "chat":
        assert made["indexes"] == [0, 1]
    else:
        assert messages[1]["reasoning_content"] == "hm"
    if scenario == "messages":
        assert made["counted"] > 10
    await recorded(proxy, dialect, 4 if scenario == "chat" else 3)


async def test_the_node_sdk_reads_completions(proxy: Rig, sdks: Path) -> None:
    made = await node(proxy, sdks, "completions")
    assert sorted(made["whole"]) == ["answer 1", "answer 2"]
    assert made["text"] == "answer 3"
    assert made["usage"]["completion_tokens"] == 18


async def test_node_sdks_list_the_one_model(proxy: Rig, sdks: Path) -> None:
    made = await node(proxy, sdks, "models")
    assert made == {"openai": ["forge"], "anthropic": ["forge"], "named": ["x", "y"]}


async def test_node_sdks_read_errors(proxy: Rig, sdks: Path) -> None:
    found = await node(proxy, sdks, "errors")
    kinds = [(one["status"], one["kind"], one["code"]) for one in found]
    assert kinds == [
        (400, "BadRequestError", "invalid_request"),
        (400, "BadRequestError", "previous_response_not_found"),
        (400, "BadRequestError", None),
        (401, "AuthenticationError", "invalid_api_key"),
        (400, "BadRequestError", None),
    ]
    for one, word in zip(found, ["robot", "not stored", "max_tokens", "key", "at least one"], strict=True):
        assert word in one["text"]
    assert await proxy.rows() == []
