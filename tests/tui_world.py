"""A server in this process with a training run in its database, as the dashboard's tests see it; time stands still.

Everything is made up, and the same each time: ids, times, figures. The featured rollout has a sub-agent, a compaction,
an untrained call, tokens of two policy versions, rewards, evidence and logs.
"""

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import sqlalchemy as sa
import zstandard
from api_rig import Rig, rig
from forge_tui.app import ForgeApp
from sqlalchemy import Connection
from textual.pilot import Pilot
from textual.screen import ModalScreen

from forge_server.api import cost, overview
from forge_server.client.http import ForgeClient
from forge_server.domain import ids
from forge_server.domain.call import VersionSpan
from forge_server.settings import EngineSettings
from forge_server.store import messages
from forge_server.store import tables as t
from forge_server.trajectory import codec

NOW = 1_789_041_600.0  # 2026-09-10 12:00:00 UTC
RUN = "ru-demo00000000000"
FEATURED = 36
STEPS = 12


class StoppedClock:
    """Of the dashboard: ``pass_s`` lets time go on, for what is due."""

    def __init__(self) -> None:
        self.at = 1000.0

    def __call__(self) -> float:
        return self.at


def made(prefix: str, n: int, at: float) -> str:
    """An id as ``new_id`` would make it at that time."""
    return f"{ids.first_id(prefix, at)}{n:08d}"


def rollout_id(n: int) -> str:
    return made("ro", n, created(n))


def created(n: int) -> float:
    return NOW - 875 + n * 20


@asynccontextmanager
async def world(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, empty: bool = False, **sections: Any
) -> AsyncIterator[Rig]:
    """The server. What the overview says is as of ``NOW``."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    for module in (overview, cost):
        monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: NOW, monotonic=time.monotonic))
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    (model / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    engine = {} if empty else {"engine": EngineSettings(model=str(model))}
    async with rig(folder / "server", **engine, **sections) as made_rig:
        if not empty:
            await made_rig.server.store.write(seed)
            made_rig.server.engine.ready, made_rig.server.engine.reason = True, ""  # type: ignore[misc]
        yield made_rig


def busy(app: ForgeApp) -> bool:
    """Something is being read, or done for a person who is not being asked about it just now."""
    steering = any(worker.group == "steer" and not worker.is_finished for worker in app.workers)
    return not app.idle or (steering and not isinstance(app.screen, ModalScreen))


async def settled(app: ForgeApp, pilot: Pilot[Any]) -> None:
    """What is due was read and painted."""
    async with asyncio.timeout(150.0):
        for _ in range(2):
            await pilot.pause()
            while busy(app) or app.feed.state == "connecting":  # noqa: ASYNC110 - its threads tell nobody
                await asyncio.sleep(0.01)
            app.flush()
            await pilot.pause()
        while busy(app):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await pilot.pause()


async def press(app: ForgeApp, pilot: Pilot[Any], *keys: str) -> None:
    """One after the other, each with what follows from it."""
    for key in keys:
        await pilot.press(key)
        await settled(app, pilot)


def shown(app: ForgeApp) -> str:
    """The terminal's text, without spaces at the ends of lines."""
    strips = app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in strip).rstrip() for strip in strips) + "\n"


@asynccontextmanager
async def dashboard(world_rig: Rig, **options: Any) -> AsyncIterator[ForgeApp]:
    """An app on that server; not yet running."""
    server = world_rig.server
    with ForgeClient(server.listening.control_url, server.admin_key, timeout_s=120.0) as client:
        yield ForgeApp(client, clock=lambda: NOW, **options)


# --- what is in the database -------------------------------------------------------------------------------

TASKS = ("list-files", "fix-typo", "sum-column", "rename-keys", "find-secret", "sort-lines")
HARNESSES = ("react", "claude-code", "codex")
WORDS = (
    "<|im_start|>", "<|im_end|>", "system", "user", "assistant", "tool", "\n", "You", " are", " an", " agent", ".",
    " Find", " the", " secret", " in", " notes", " and", " write", " it", " to", " answer", ".txt", " I", " will",
    " look", " at", " files", " first", "<tool_call>", "</tool_call>", '{"name":', ' "shell",', ' "arguments":',
    ' {"command":', ' "ls', " -la", '"}}', " The", " is", " blue", " whale", " now", " Done", "!", " grep", " cat",
    " summary", ":", " héé", " 鲸",
)  # fmt: skip
TOKENIZER = {
    "model": {"vocab": {}},
    "added_tokens": [{"id": i, "content": word} for i, word in enumerate(WORDS)],
}


def tokens_of(text: str) -> np.ndarray[Any, np.dtype[np.int32]]:
    """The longest words first."""
    found = []
    while text:
        word = max((word for word in WORDS if text.startswith(word)), key=len)
        found.append(WORDS.index(word))
        text = text.removeprefix(word)
    return np.asarray(found, np.int32)


def seed(connection: Connection) -> None:
    c = connection
    c.execute(sa.delete(t.policies))
    c.execute(sa.update(t.events).values(at=NOW - 3600))  # those of the server's start
    settings = {
        "name": "demo", "kind": "train", "taskset": "look", "harness": "react", "n": 4, "groups": 4, "steps": 40,
        "max_sample_tokens": 0,
    }  # fmt: skip
    c.execute(
        sa.insert(t.runs),
        {
            "id": RUN, "name": "demo", "kind": "train", "state": "active", "settings": settings, "step": STEPS,
            "infra_streak": 1, "base_version": 0, "created_at": NOW - 3600,
        },
    )  # fmt: skip
    c.execute(
        sa.insert(t.runs),
        {
            "id": "ru-base00000000000", "name": "baseline", "kind": "eval", "state": "completed",
            "settings": settings | {"name": "baseline", "kind": "eval"}, "step": 1, "created_at": NOW - 9000,
            "ended_at": NOW - 8000,
        },
    )  # fmt: skip
    for i, name in enumerate(TASKS):
        c.execute(
            sa.insert(t.tasks),
            {
                "id": f"ta-{name}", "name": name, "taskset": "look", "digest": str(i), "definition": {},
                "instruction": "Find the secret in the notes and write it to answer.txt.", "created_at": NOW - 3600,
            },
        )  # fmt: skip
    for n in range(43):
        _rollout(c, n)
    _policies(c)
    _figures(c)
    c.execute(
        sa.insert(t.trainer_sessions),
        {
            "run_id": RUN, "fence": 1, "token": "x", "world_size": 1, "resume_step": 0, "phase": "training",
            "lease_until": NOW + 1e9, "created_at": NOW - 3500,
        },
    )  # fmt: skip
    _events(c)


_ENDS = (
    ("completed", "ok", 1.0), ("completed", "ok", 0.0), ("completed", "ok", 1.0),
    ("policy_failure", "agent_timeout", 0.0), ("completed", "ok", 1.0), ("completed", "ok", 0.5),
    ("infra_failure", "startup_timeout", None), ("completed", "ok", 1.0),
    ("policy_failure", "budget_calls", 0.0), ("cancelled", "cancelled", None),
)  # fmt: skip
_LIVE = ("queued", "launching", "running", "running", "running", "verifying")


def _rollout(c: Connection, n: int) -> None:
    at, id = created(n), rollout_id(n)
    featured = n == FEATURED
    outcome, kind, reward = _ENDS[n % len(_ENDS)] if not featured else ("completed", "ok", 1.0)
    live = _LIVE[n - 37] if 37 <= n < 43 else None
    group = f"gr-{n // 4:04d}"
    if n % 4 == 0:
        c.execute(
            sa.insert(t.groups),
            {
                "id": group, "run_id": RUN, "task_id": f"ta-{TASKS[n // 4 % 6]}", "step": n // 4 + 2, "mode": "train",
                "size": 4, "batch_k": n // 4 + 2 if n < 36 and n // 4 != 3 else None,
                "dropped": "equal_rewards" if n // 4 == 3 else "", "created_at": at,
            },
        )  # fmt: skip
    row = {
        "id": id, "run_id": RUN, "group_id": group, "task_id": f"ta-{TASKS[n // 4 % 6]}", "slot": n % 4,
        "harness": "claude-code" if featured else HARNESSES[n % 3], "mode": "train", "state": "ended", "epoch": 3,
        "attempts": 1, "outcome": outcome, "kind": kind, "reward": reward, "policy_version": min(11, n // 4 + 2),
        "created_at": at, "ended_at": at + 12 + n % 7,
    }  # fmt: skip
    attempt = made("at", n, at)
    if live is not None:
        row |= {"state": "active", "outcome": None, "kind": None, "reward": None, "ended_at": None}
    elif n in (6, 16, 26):
        row["attempts"] = 3
    row["final_attempt_id"] = attempt if live is None else None
    c.execute(sa.insert(t.rollouts), row)
    c.execute(
        sa.insert(t.attempts),
        {
            "id": attempt, "rollout_id": id, "number": row["attempts"], "state": live or "ended", "backend": "external",
            "outcome": row["outcome"], "kind": row["kind"], "reward": row["reward"],
            "exit_code": 0 if row["outcome"] == "completed" else None,
            "evidence": {"trigger": "finish", "finish": {"exit_code": 0, "verifier": "ok"}, "calls_ok": 5}
            if row["outcome"] == "completed"
            else {"trigger": "deadline", "clock": "startup"} if row["outcome"] else None,
            "created_at": at, "started_at": at + 1,
            "running_at": at + 2 if live not in ("queued", "launching") else None,
            "sealed_at": at + 10 if live in (None, "verifying") else None,
            "ended_at": row["ended_at"],
        },
    )  # fmt: skip
    if featured:
        _featured(c, attempt, at)
    elif live not in ("queued", "launching"):
        for seq in range(3 + n % 4):
            _call(c, attempt, seq, at + 2 + seq, prompt=200 + 90 * seq, completion=30 + n % 9)


def _call(c: Connection, attempt: str, seq: int, at: float, **changes: Any) -> int:
    id = ids.first_call_id(at) + seq
    row = {
        "id": id, "attempt_id": attempt, "seq": seq, "dialect": "chat", "mode": "record", "request_digest": bytes(16),
        "began_at": at, "ended_at": at + 0.8, "end": "ok", "status": 200, "delivered": "yes", "finish_reason": "stop",
        "prompt_len": changes.pop("prompt", None), "completion_len": changes.pop("completion", None),
        "policy_version": 11, "temperature": 1.0, "engine_ms": 740.0, "held_ms": 0.0,
    }  # fmt: skip
    c.execute(sa.insert(t.calls), row | changes)
    return id


SYSTEM = "<|im_start|>system\nYou are an agent.<|im_end|>\n"
USER = "<|im_start|>user\n Find the secret in notes.<|im_end|>\n<|im_start|>assistant\n"
SAY = ' I will look.<tool_call>{"name": "shell", "arguments": {"command": "ls -la"}}</tool_call><|im_end|>'
BACK = "\n<|im_start|>tool\n notes.txt\n<|im_end|>\n<|im_start|>assistant\n"
DONE = " The secret is blue whale. Done!<|im_end|>"


def _featured(c: Connection, attempt: str, at: float) -> None:
    """main: look, look on (two versions), done; a sub-agent of two calls; a title call aside; a compaction."""
    system = {"role": "system", "content": "You are an agent. Write what you find to answer.txt."}
    task = {"role": "user", "content": "Find the secret in the notes and write it to answer.txt."}
    tools = [{"type": "function", "function": {"name": name}} for name in ("shell", "Task")]
    look = _says("I will look at the files first.", "shell", command="ls -la")
    listing = {"role": "tool", "content": "\n".join(f"-rw-r--r-- notes-{i}.txt" for i in range(14))}
    send = _says("", "Task", prompt="grep the notes for the secret", agent="searcher")
    brief = {"role": "user", "content": "grep the notes for the secret"}
    grep = _says("", "shell", command="grep -rn secret .")
    hit = {"role": "tool", "content": "notes-3.txt:7: the secret is: blue whale \x1b[31m(red?)\x1b[0m 鲸 héé"}
    told = {"role": "assistant", "content": "It is in notes-3.txt, line 7: blue whale."}
    heard = {"role": "tool", "content": "It is in notes-3.txt, line 7: blue whale."}
    done = {
        "role": "assistant",
        "content": "The secret is blue whale. Done!",
        "reasoning": "Nothing is left to do.",
    }
    sub = {"agent": "searcher", "parent_agent": ""}
    first = tokens_of(SYSTEM + USER)
    say, back, end = tokens_of(SAY), tokens_of(BACK), tokens_of(DONE)
    second = np.concatenate((first, say, back))
    third = np.concatenate((second, say, back))
    other = tokens_of("<|im_start|>user\n grep the notes<|im_end|>\n<|im_start|>assistant\n")
    other2 = np.concatenate((other, say, back))
    plan: list[tuple[Any, ...]] = [
        ([task], {"role": "assistant", "content": "Secret hunt"}, tokens_of(USER), end[:3], {"label": "title",
          "untrainable": "side_call"}),
        ([system, task], look, first, say, {}),
        ([system, task, look, listing], send, second, say, {}),
        ([brief], grep, other, say, {"flags": sub}),
        ([brief, grep, hit], told, other2, end, {"flags": sub, "delivered": "unknown", "untrainable":
          "delivery_unknown"}),
        ([system, task, look, listing, send, heard], done, third, end, {"held_ms": 2300.0}),
    ]  # fmt: skip
    for seq, (said, answer, prompt, completion, changes) in enumerate(plan):
        moment = at + 2 + 1.2 * seq
        id = _call(
            c, attempt, seq, moment, prompt=int(prompt.size), completion=int(completion.size), forest_key="f",
            prefix_len=0, **changes,
        )  # fmt: skip
        half = completion.size // 2
        versions = [VersionSpan(11, 0, int(completion.size))]
        if seq == 5:
            versions = [VersionSpan(10, 0, half), VersionSpan(11, half, int(completion.size))]
        chances = -(np.abs(np.sin(np.arange(completion.size) * 1.7 + seq)).astype(np.float32) ** 3) * 4
        c.execute(
            sa.insert(t.call_tokens),
            {
                "call_id": id, "data": codec.encode(prompt, 0, completion, chances, versions),
                "prompt_digest": codec.digest(prompt),
            },
        )  # fmt: skip
        offered = tools if seq in (1, 2, 5) else []
        bodies = [msgspec.json.encode(each) for each in (*offered, *said)]
        answer_body = msgspec.json.encode(answer)
        for body in {*bodies, answer_body}:
            c.execute(messages.INTERN, messages.row(body, messages.digest(body)))
        c.execute(
            sa.insert(t.call_messages),
            {
                "call_id": id, "request": messages.pack(0, 0, len(offered), [messages.digest(b) for b in bodies]),
                "response": messages.digest(answer_body),
            },
        )  # fmt: skip
    c.execute(
        sa.insert(t.rewards),
        {
            "attempt_id": attempt, "source": "verifier", "value": 1.0, "at": at + 12,
            "detail": {"tests": 3, "passed": 3, "file": "answer.txt"},
        },
    )  # fmt: skip
    for stream, text in (
        ("runner", "joined\nharness started\nsealed\nverifier: ok, 1.0\n"),
        ("harness", "> Find the secret\n\x1b[2J\x1b[31mreading notes-3.txt\x1b[0m\ndone\n"),
        ("verifier", "3 passed in 0.02s\n"),
    ):
        c.execute(
            sa.insert(t.attempt_logs),
            {"attempt_id": attempt, "stream": stream, "tail": zstandard.compress(text.encode())},
        )


def _says(text: str, name: str, **arguments: str) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
    return {"role": "assistant", "content": text, "tool_calls": [call]}


def _policies(c: Connection) -> None:
    for version in range(13):
        state = "live" if version == 11 else "rejected" if version == 12 else "retired"
        c.execute(
            sa.insert(t.policies),
            {
                "name": "default", "version": version, "run_id": RUN if version else None,
                "step": version or None, "parent_version": None if not version else 3 if version == 5 else version - 1,
                "state": state, "reason": "probe differs by 0.4" if state == "rejected" else "", "path": "p",
                "created_at": NOW - 3600 + 250 * version,
                "live_at": NOW - 3590 + 250 * version if version < 12 else None,
            },
        )  # fmt: skip


def _figures(c: Connection) -> None:
    for step in range(1, STEPS + 1):
        x = step / STEPS
        controller = {
            "reward/mean": 0.15 + 0.6 * x + 0.08 * math.sin(step * 2.1), "pass_rate": 0.1 + 0.55 * x,
            "groups/mixed_share": 0.5 + 0.2 * math.sin(step), "staleness/mean": 0.5 + 0.4 * (step % 3),
            "calls/per_rollout": 4.2 + 0.1 * step, "samples/per_rollout": 1.2 + 0.05 * (step % 4),
            "tokens/trained": 2400.0 + 130 * step, "seconds/generate": 140.0 + 9 * (step % 4),
            "seconds/assemble": 1.5, "seconds/wait_trainer": 4.0, "seconds/train": 55.0 + 3 * (step % 3),
            "seconds/swap": 8.0,
        }  # fmt: skip
        trainer = {
            "loss": 0.02 * math.cos(step), "ppo_kl": 0.002 + 0.001 * (step % 5), "entropy": 1.9 - 0.9 * x,
            "grad_norm": 0.6 + 0.2 * math.sin(step * 1.3), "clip_fraction": 0.01 * (step % 4), "is_mean": 1.0 + 0.002 *
            (step % 3), "is_effective_sample_size": 0.93 - 0.01 * (step % 3), "logprob_gap_mean": 2e-4,
        }  # fmt: skip
        rows = [("controller", controller), ("trainer", trainer)]
        if step in (1, 6, 12):
            rows.append(
                ("eval", {"reward/mean": 0.2 + 0.5 * x, "pass@1": 0.2 + 0.4 * x, "version": float(step - 1)})
            )
        for source, metrics in rows:
            c.execute(
                sa.insert(t.step_metrics),
                {
                    "run_id": RUN,
                    "step": step,
                    "source": source,
                    "metrics": metrics,
                    "at": NOW - 3600 + 250 * step,
                },
            )


def _events(c: Connection) -> None:
    for n in range(60):
        kinds: tuple[tuple[str, dict[str, Any]], ...] = (
            ("attempt_queued", {"backend": "local", "number": 1}), ("attempt_running", {}),
            ("attempt_ended", {"outcome": "completed", "kind": "ok", "reward": 1.0}),
            ("rollout_ended", {"outcome": "completed", "kind": "ok", "reward": 1.0}),
            ("rollout_ended", {"outcome": "infra_failure", "kind": "startup_timeout"}),
            ("policy_live", {"policy": "default", "version": 11, "step": 11}),
        )  # fmt: skip
        kind, data = kinds[n % len(kinds)]
        about = None if kind == "policy_live" else rollout_id(n % 43)
        c.execute(
            sa.insert(t.events),
            {"at": NOW - 300 + 5 * n, "kind": kind, "run_id": RUN, "rollout_id": about, "data": data},
        )
