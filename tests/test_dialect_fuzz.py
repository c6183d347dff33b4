"""Requests that nobody should send, over sockets to the whole proxy: no 5xx, no hang, refusals in the dialect's shape.
A few hundred here, on a scripted engine and on real vLLM; as many as one likes with ``python -m tests.prove.fuzz``.
"""

import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from dialect_support import WIRE, said
from engine_fixtures import VllmServer
from fuzzing import SHAPES, corpus

sys.path.insert(0, str(Path(__file__).with_name("prove")))
from fuzz import fuzz, proxy

from forge_server.engine.attach import AttachedHost
from forge_server.engine.pool import EnginePool
from forge_server.proxy.dialects.chat import CHAT


@pytest.mark.parametrize("path", sorted((WIRE / "chat").glob("*.json")), ids=lambda path: path.stem)
def test_every_recorded_chat_is_read(path: Path) -> None:
    body = msgspec.json.decode(path.read_bytes())["body"]
    for message in body["messages"]:  # long strings are cut, images with them
        if isinstance(message["content"], list):
            message["content"] = [part for part in message["content"] if part["type"] == "text"]
    turn = CHAT.read(msgspec.json.encode(body))
    assert [m["role"] for m in said(turn)] == [
        "system" if m["role"] == "developer" else m["role"] for m in body["messages"]
    ]
    assert len(turn.tools) == len(body.get("tools") or ())


def test_the_proxy_answers_or_refuses_whatever_is_sent() -> None:
    with proxy() as under_test:
        seen = fuzz(under_test, 300, 0)
    assert {dialect for dialect, _ in seen} == SHAPES.keys() == {dialect for dialect, _ in corpus()}
    assert {what for _, what in seen} == {"answered", "streamed", "refused"}


@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_real_vllm_breaks_on_nothing_that_the_dialects_let_through(vllm_server: VllmServer) -> None:
    @contextlib.asynccontextmanager
    async def engine() -> AsyncIterator[EnginePool]:
        pool = EnginePool(
            [AttachedHost(vllm_server.url)],
            model=vllm_server.model,
            policy=vllm_server.tiny.policy(0),
            request_timeout_s=25,
            drain_s=60,
            start_timeout_s=120,
        )
        pool.start()
        await pool.wait_ready(120)
        try:
            yield pool
        finally:
            await pool.close()

    with proxy(engine, max_completion_tokens=8) as under_test:
        seen = fuzz(under_test, 150, 1)
    assert {what for _, what in seen} == {"answered", "streamed", "refused"}
