"""``forge-server rollout …``"""

from typing import Literal

import msgspec

from forge_server.client.http import ForgeClient
from forge_server.commands import show as out
from forge_server.commands.source import reading

COLUMNS = ("id", "harness", "mode", "state", "outcome", "kind", "reward", "attempts", "policy_version")
CALL_COLUMNS = (
    "id",
    "seq",
    "dialect",
    "end",
    "status",
    "delivered",
    "untrainable",
    "prompt_len",
    "completion_len",
    "finish_reason",
    "policy_version",
    "engine_ms",
)


def listing(
    run: str | None, state: str | None, limit: int, url: str | None, key: str | None, as_json: bool
) -> None:
    with reading(url, key) as source:
        out.rows(list(source.rollouts(run, state, limit)), COLUMNS, as_json, empty="no rollouts yet")


def show(rollout_id: str, url: str | None, key: str | None, as_json: bool) -> None:
    with reading(url, key) as source:
        detail = source.rollout(rollout_id)
        samples = source.samples(rollout_id)
        calls = source.calls(rollout_id, messages=True)
    if as_json:
        out.one({"detail": detail, "samples": samples, "calls": calls}, True)
        return
    out.one(detail.rollout, False)
    for attempt in detail.attempts:
        out.console.rule(f"attempt {attempt.number}")
        out.one(attempt, False)
    for sample in samples:
        out.console.rule(f"sample {sample.index}")
        out.one(sample, False)
    seen = 0
    for call in calls:
        out.console.rule(f"call {call.seq} ({call.end or 'in flight'})")
        request = call.request or []
        for message in request[seen:] if len(request) >= seen else request:
            out.console.print(msgspec.json.encode(message).decode(), markup=False, soft_wrap=True)
        seen = len(request) + 1
        out.console.print(
            msgspec.json.encode(call.response).decode(), markup=False, style="green", soft_wrap=True
        )


def calls(rollout_id: str, url: str | None, key: str | None, as_json: bool) -> None:
    with reading(url, key) as source:
        out.rows(source.calls(rollout_id), CALL_COLUMNS, as_json, empty="it made no call")


def logs(rollout_id: str, url: str | None, key: str | None) -> None:
    with reading(url, key) as source:
        for log in source.logs(rollout_id):
            out.console.rule(f"{log.attempt_id} {log.stream}")
            out.console.print(log.text, markup=False, soft_wrap=True)


def act(rollout_id: str, action: Literal["cancel", "retry"], url: str | None, key: str | None) -> None:
    with ForgeClient(url, key) as client:
        view = client.rollout_action(rollout_id, action).rollout
        out.console.print(f"{view.id}  {view.state}  {out.text(view.outcome)}")
