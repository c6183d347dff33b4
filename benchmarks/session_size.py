"""Bytes in the database of one 50-turn session that grows to 60k tokens, messages included.

    python benchmarks/session_size.py

A real proxy records the session into a real SQLite file; only the engine is a stand-in that tokenizes by
words. The texts are Python's own sources as tool results and their documentation strings as answers, so
that they compress as what agents read and write does. DESIGN §12: at most 0.5 MB.
"""

import asyncio
import itertools
import re
import sqlite3
import sys
import sysconfig
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from proxy_rig import Rig

from forge_server.domain.engine import ChatResult
from forge_server.store.database import Store

TURNS, TOTAL, ANSWER = 50, 60_000, 200
REACH = 500_000
_WORD = re.compile(r"\w{1,6}|\s+|[^\w\s]{1,2}")


def tokenize(text: str) -> list[int]:
    """Ids of words and parts of words, spread over a vocabulary of 151k like a real tokenizer's."""
    return [zlib.crc32(word.encode()) % 151_000 for word in _WORD.findall(text)]


def texts() -> Iterator[str]:
    """Endless source code, file after file."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    for file in itertools.cycle(files):
        yield from file.read_text(errors="replace").splitlines(keepends=True)


def take(lines: Iterator[str], tokens: int) -> str:
    """Some ``tokens`` of text."""
    text, count = "", 0
    while count < tokens:
        line = next(lines)
        text, count = text + line, count + len(_WORD.findall(line))
    return text


class Engine:
    """Answers with a sentence and a tool call; renders a prompt as the messages one after the other."""

    def __init__(self, lines: Iterator[str]) -> None:
        self.lines = lines
        self.rng = np.random.default_rng(0)
        self.sampled = self.longest = 0

    async def __call__(self, body: dict[str, Any]) -> ChatResult:
        prompt: list[int] = []
        for raw in body["messages"]:
            message = msgspec.json.decode(raw)
            prompt += [1, *tokenize(message["role"]), *tokenize(self.flat(message)), 2]
        content = take(self.lines, ANSWER // 2)
        command = take(self.lines, ANSWER // 2 - 20)
        call = {"name": "bash", "arguments": msgspec.json.encode({"command": command}).decode()}
        answer = {
            "role": "assistant",
            "content": content,
            "tool_calls": [{"id": f"call_{self.sampled}", "type": "function", "function": call}],
        }
        completion = np.array([*tokenize(self.flat(answer)), 2], np.int32)
        ids = np.array([*prompt, 1, *tokenize("assistant")], np.int32)
        self.sampled += completion.size
        self.longest = ids.size + completion.size
        return ChatResult(
            prompt_ids=ids,
            completion_ids=completion,
            logprobs=-self.rng.exponential(0.4, completion.size).astype(np.float32),
            message=answer,
            finish_reason="tool_calls",
            usage_prompt=ids.size,
            usage_completion=completion.size,
            model="forge",
        )

    @staticmethod
    def flat(message: dict[str, Any]) -> str:
        calls = [call["function"]["arguments"] for call in message.get("tool_calls") or ()]
        return "".join([message.get("content") or "", *calls])


async def session(store: Store) -> tuple[int, int]:
    """Play the session; returns its tokens, and the bytes of what was sent over the wire."""
    rig = Rig(store)
    rig.attempt = await rig.new_attempt()
    lines = texts()
    rig.engine.script = engine = Engine(lines)
    each = (TOTAL - 2000) // TURNS - ANSWER + 80
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": take(lines, 1500)},
        {"role": "user", "content": take(lines, 500)},
    ]
    wire = 0
    async with rig.serving(), rig.client() as client:
        for _ in range(TURNS):
            body = msgspec.json.encode({"model": "forge", "messages": messages})
            wire += len(body)
            reply: httpx.Response = await client.post(f"{rig.base}/chat/completions", content=body)
            reply.raise_for_status()
            answer = reply.json()["choices"][0]["message"]
            messages.append(answer)
            for call in answer["tool_calls"]:
                result = {"role": "tool", "tool_call_id": call["id"], "content": take(lines, each)}
                messages.append(result)
        await rig.seal()
    return engine.longest, wire


def size(file: Path) -> int:
    """Bytes of the database once its journal is folded in."""
    with sqlite3.connect(file) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return file.stat().st_size


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "bench.db"
        Store.open(f"sqlite:///{file}", create=True).close()
        before = size(file)
        store = Store.open(f"sqlite:///{file}")
        try:
            tokens, wire = asyncio.run(session(store))
        finally:
            store.close()
        grown = size(file) - before
        with sqlite3.connect(file) as connection:
            parts = {
                what: connection.execute(f"SELECT sum(length({column})), count(*) FROM {table}").fetchone()
                for what, column, table in (
                    ("token blobs", "data", "call_tokens"),
                    ("message bodies", "body", "messages"),
                    ("requests", "request", "call_messages"),
                )
            }
    print(f"{TURNS} turns, {tokens:,} tokens, {wire / 1e6:.1f} MB over the wire")
    for what, (total, count) in parts.items():
        print(f"  {what}: {total / 1e6:.3f} MB in {count} rows")
    verdict = "reached" if grown <= REACH else f"over by {grown / REACH - 1:.0%}"
    print(f"session in the database, MB: {grown / 1e6:.3f}; to reach: {REACH / 1e6:.1f}: {verdict}")
    return 0 if grown <= REACH else 1


if __name__ == "__main__":
    raise SystemExit(main())
