"""Against real vLLM on CPU, one server for all: what it reports is what it sampled, and swaps are whole."""

import asyncio
import hashlib
import json
import os
import shutil
import signal
import subprocess
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from engine_fake import until
from engine_fixtures import TinyModel, VllmServer, managed_spec

from forge_server.domain.engine import ChatResult, EngineRefused
from forge_server.domain.errors import CheckpointError, EngineError
from forge_server.engine import process
from forge_server.engine.client import EngineClient
from forge_server.engine.control import EngineControl
from forge_server.engine.managed import ManagedHost
from forge_server.engine.pool import EnginePool
from forge_server.engine.weights import EngineLost

pytestmark = pytest.mark.vllm

LIMIT = 1e-3
LONG = " ".join(["the agent reads files and writes patches"] * 20)
TOOLS = [{"type": "function", "function": {"name": "shell", "parameters": {"type": "object"}}}]


def body(text: str = "hello", **more: Any) -> dict[str, Any]:
    plain = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_tokens": 24, "seed": 5}
    return {"messages": [{"role": "user", "content": text}], **plain, **more}


def score(
    engine_env: Path, results: Sequence[ChatResult], models: Sequence[Path], temperatures: Sequence[float]
) -> list[list[float]]:
    """The completions' logprobs by transformers."""
    jobs = []
    for result, model, temperature in zip(results, models, temperatures, strict=True):
        assert result.prompt_ids is not None and result.completion_ids is not None
        prompt, completion = result.prompt_ids.tolist(), result.completion_ids.tolist()
        jobs.append(
            {"model": str(model), "prompt": prompt, "completion": completion, "temperature": temperature}
        )
    done = subprocess.run(
        [str(engine_env / "bin" / "python"), str(Path(__file__).with_name("tiny_score.py"))],
        input=json.dumps(jobs),
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    found: list[list[float]] = json.loads(done.stdout)
    return found


def gaps(results: Sequence[ChatResult], expected: Sequence[Sequence[float]]) -> np.ndarray[Any, Any]:
    parts = [
        np.abs(r.logprobs - np.array(e))
        for r, e in zip(results, expected, strict=True)
        if r.logprobs is not None
    ]
    return np.concatenate(parts)


async def test_ids_usage_and_logprobs_agree(vllm_pool: EnginePool) -> None:
    """I2, for an end by length, by end-of-turn token and with tools in the prompt."""
    for number, more in enumerate(({}, {"max_tokens": 400}, {"tools": TOOLS}, {"temperature": 0.0})):
        result = await vllm_pool.chat(body(**more), request_id=f"count-{number}")
        assert result.prompt_ids is not None and result.prompt_ids.size == result.usage_prompt
        assert result.completion_ids is not None and result.logprobs is not None
        assert result.completion_ids.size == result.usage_completion == result.logprobs.size > 0
        assert result.finish_reason in ("stop", "length") and result.model == "forge"
        assert float(result.logprobs.max()) <= 0


async def test_logprobs_are_those_of_the_sampling_distribution_before_and_after_a_swap(
    vllm_pool: EnginePool, tiny_model: TinyModel, engine_env: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Recomputed by transformers on the same weights at the call's own temperature."""
    results, models, temperatures = [], [], []
    for version in (0, 1):
        if version:
            await vllm_pool.swap(tiny_model.checkpoint(1), 1, tiny_model.sha256(1))
        for temperature in (1.0, 0.7):
            for seed in range(4):
                asked = body(LONG, temperature=temperature, seed=seed, max_tokens=60)
                results.append(await vllm_pool.chat(asked, request_id=f"t-{version}-{temperature}-{seed}"))
                models.append(tiny_model.checkpoint(version) / "huggingface")
                temperatures.append(temperature)
    right = gaps(results, score(engine_env, results, models, temperatures))
    unscaled = gaps(results, score(engine_env, results, models, [1.0] * len(results)))
    with capsys.disabled():
        print(f"\nengine and transformers: mean {right.mean():.2e}, max {right.max():.2e}, n {right.size}")
    assert right.max() < LIMIT
    assert unscaled.max() > 0.1  # at 0.7 the raw logprobs would be far off


async def test_a_swap_changes_the_answers_and_back(vllm_pool: EnginePool, tiny_model: TinyModel) -> None:
    async def greedy() -> list[int]:
        result = await vllm_pool.chat(body(temperature=0.0), request_id="greedy")
        assert result.completion_ids is not None
        return result.completion_ids.tolist()

    first = await greedy()
    report = await vllm_pool.swap(tiny_model.checkpoint(1), 1, tiny_model.sha256(1))
    assert report.probe_max_gap < LIMIT < report.probe_moved and report.probe_tolerance == LIMIT
    assert await vllm_pool.version() == vllm_pool.current == 1
    assert await greedy() != first
    await vllm_pool.swap(tiny_model.checkpoint(0), 2, tiny_model.sha256(0))
    assert await greedy() == first and await vllm_pool.version() == 2


async def test_no_cache_entry_of_older_weights_is_used_after_a_swap(
    vllm_pool: EnginePool, vllm_server: VllmServer, tiny_model: TinyModel, engine_env: Path
) -> None:
    """I9. First without the resets, to see that this test would notice; then by a real swap."""
    client = EngineClient(vllm_server.url, "forge")
    control = EngineControl(client)
    asked = body(LONG, temperature=0.0, max_tokens=8)
    await vllm_pool.chat(asked, request_id="fill")
    await control.load(tiny_model.checkpoint(1) / "huggingface")
    stale = await client.chat(asked, request_id="stale")
    await client.close()
    await vllm_pool.swap(tiny_model.checkpoint(0), 1, tiny_model.sha256(0))
    await vllm_pool.chat(asked, request_id="fill")
    await vllm_pool.swap(tiny_model.checkpoint(1), 2, tiny_model.sha256(1))
    fresh = await vllm_pool.chat(asked, request_id="fresh")
    new = tiny_model.checkpoint(1) / "huggingface"
    expected = score(engine_env, [stale, fresh], [new, new], [1.0, 1.0])
    assert gaps([stale], expected[:1]).max() > 0.01
    assert gaps([fresh], expected[1:]).max() < LIMIT


def restate(folder: Path) -> None:
    """Write the manifest anew, so that it is right about files that are wrong."""
    file = folder / "manifest.json"
    manifest = json.loads(file.read_text())
    weights = folder / "huggingface" / "model.safetensors"
    raw = weights.read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    header.pop("__metadata__", None)
    manifest["tensors"] = {n: {"shape": t["shape"], "dtype": t["dtype"]} for n, t in header.items()}
    manifest["files"]["huggingface/model.safetensors"]["sha256"] = hashlib.sha256(raw).hexdigest()
    file.write_text(json.dumps(manifest))


def flip_a_byte(folder: Path) -> None:
    file = folder / "huggingface" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 255
    file.write_bytes(data)


def lose_the_weights(folder: Path) -> None:
    (folder / "huggingface" / "model.safetensors").unlink()


def edit_header(folder: Path, old: bytes, new: bytes) -> None:
    file = folder / "huggingface" / "model.safetensors"
    raw = file.read_bytes()
    assert raw.count(old) == 1 and len(old) == len(new)
    file.write_bytes(raw.replace(old, new))
    restate(folder)


def rename_a_tensor(folder: Path) -> None:
    edit_header(folder, b'"lm_head.weight"', b'"lm_tail.weight"')


def turn_a_tensor(folder: Path) -> None:
    raw = (folder / "huggingface" / "model.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    rows, columns = header["lm_head.weight"]["shape"]
    start = raw.index(b'"lm_head.weight"')
    old = b'"shape":[%d,%d]' % (rows, columns)
    at = raw.index(old, start)
    new = b'"shape":[%d,%d]' % (columns, rows)
    (folder / "huggingface" / "model.safetensors").write_bytes(raw[:at] + new + raw[at + len(old) :])
    restate(folder)


def other_probe(folder: Path) -> None:
    """Whole files, but the trainer's logprobs are not what these weights give."""
    file = folder / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["probe"]["logprobs"][3] += 0.01
    file.write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("harm", "named"),
    [
        (flip_a_byte, "is corrupt"),
        (lose_the_weights, "cannot be read"),
        (rename_a_tensor, "tensor names differ from the loaded model's .*lm_head.weight"),
        (turn_a_tensor, "tensor lm_head.weight has shape"),
        (other_probe, "differ from the trainer's by 0.01"),
    ],
)
async def test_a_bad_checkpoint_leaves_the_old_policy_serving(
    vllm_pool: EnginePool,
    tiny_model: TinyModel,
    tmp_path: Path,
    harm: Callable[[Path], None],
    named: str,
) -> None:
    asked = body(LONG, temperature=0.0)
    before = await vllm_pool.chat(asked, request_id="before")
    bad = tmp_path / "step_00009"
    shutil.copytree(tiny_model.checkpoint(1), bad)
    harm(bad)
    sha256 = hashlib.sha256((bad / "manifest.json").read_bytes()).hexdigest()
    with pytest.raises(CheckpointError, match=named):
        await vllm_pool.swap(bad, 9, sha256)
    after = await vllm_pool.chat(asked, request_id="after")
    assert before.completion_ids is not None and after.completion_ids is not None
    assert after.completion_ids.tolist() == before.completion_ids.tolist()
    assert await vllm_pool.version() == vllm_pool.current == 0 and vllm_pool.ready


async def test_a_load_that_breaks_off_is_undone(
    vllm_pool: EnginePool, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files vanish after the checks: vLLM is left on meta tensors, and the old weights must come back."""
    asked = body(temperature=0.0)
    before = await vllm_pool.chat(asked, request_id="before")
    load = EngineControl.load
    broken = [True]

    async def once_gone(control: EngineControl, weights: Path) -> None:
        await load(control, Path("/nonexistent") if broken.pop() else weights)

    monkeypatch.setattr(EngineControl, "load", lambda c, w: once_gone(c, w) if broken else load(c, w))
    with pytest.raises(EngineError) as caught:
        await vllm_pool.swap(tiny_model.checkpoint(1), 1, tiny_model.sha256(1))
    assert not isinstance(caught.value, EngineLost)
    after = await vllm_pool.chat(asked, request_id="after")
    assert before.completion_ids is not None and after.completion_ids is not None
    assert after.completion_ids.tolist() == before.completion_ids.tolist()
    assert await vllm_pool.version() == 0


async def metric(url: str, name: str) -> float:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as response:
        lines = (await response.text()).splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}{{"))


async def begin(pool: EnginePool, url: str, tokens: int) -> list[asyncio.Task[ChatResult]]:
    """Four calls of ``tokens`` tokens each, of which the engine is seen to run at least one.

    vLLM's front end answers nobody else while it is behind with a quick engine's tokens: on a busy machine a call may
    be over before anything of it is seen, and others are begun.
    """
    more = {"max_tokens": tokens, "ignore_eos": True}
    async with asyncio.timeout(240):
        while True:
            name = uuid.uuid4().hex[:8]
            calls = [
                asyncio.create_task(pool.chat(body(seed=n, **more), request_id=f"long-{name}-{n}"))
                for n in range(4)
            ]
            while not any(call.done() for call in calls):
                if await metric(url, "num_requests_running") >= 1:
                    return calls
            await asyncio.gather(*calls)


async def test_a_call_that_is_cancelled_is_aborted_in_the_engine(
    vllm_pool: EnginePool, vllm_server: VllmServer
) -> None:
    """Begun again when the front end was behind until all of them were over; see ``begin``."""
    url = vllm_server.url
    async with asyncio.timeout(480):
        while True:
            before = await metric(url, "generation_tokens_total")
            calls = await begin(vllm_pool, url, 3900)
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            while await metric(url, "num_requests_running") > 0:
                pass
            sampled = await metric(url, "generation_tokens_total") - before
            if all(call.cancelled() for call in calls) and sampled < 4 * 3900:
                return


@pytest.mark.parametrize(("tokens", "drain_s", "reason"), [(1000, 120.0, "length"), (3900, 0.05, "abort")])
async def test_a_swap_waits_for_running_calls_and_aborts_them_only_after_its_drain_time(
    vllm_pool: EnginePool,
    vllm_server: VllmServer,
    tiny_model: TinyModel,
    tokens: int,
    drain_s: float,
    reason: str,
) -> None:
    vllm_pool._drain_s = drain_s
    async with asyncio.timeout(240):
        while True:
            calls = await begin(vllm_pool, vllm_server.url, tokens)
            report = await vllm_pool.swap(tiny_model.checkpoint(2), 2, tiny_model.sha256(2))
            results = await asyncio.gather(*calls)
            if reason in {result.finish_reason for result in results}:
                break  # else the front end was behind until all of them were over
    assert report.aborted_running == (reason == "abort")
    for result in results:
        assert result.finish_reason in (reason, "length")
        assert result.completion_ids is not None and result.logprobs is not None
        assert result.completion_ids.size == result.logprobs.size == result.usage_completion
        assert (result.usage_completion == tokens) == (result.finish_reason == "length")


async def test_what_does_not_fit_the_window_is_told_apart(vllm_pool: EnginePool) -> None:
    for number, asked in enumerate((body("files " * 6000), body(max_tokens=6000))):
        with pytest.raises(EngineRefused) as caught:
            await vllm_pool.chat(asked, request_id=f"window-{number}")
        assert caught.value.code == "context_length_exceeded"
    with pytest.raises(EngineRefused) as caught:
        await vllm_pool.chat(body(temperature=-1), request_id="bad")
    assert caught.value.code == "invalid_request"
    assert vllm_pool.ready


async def test_long_seeded_prompts_side_by_side_do_not_kill_the_engine(vllm_pool: EnginePool) -> None:
    """vLLM's CPU worker dies of a seeded request whose prefill is cut in two; our flags never cut one."""
    asked = [body(f"{n} files " * 700, seed=n, max_tokens=4) for n in range(6)]
    calls = [vllm_pool.chat(a, request_id=f"seeded-{n}") for n, a in enumerate(asked)]
    results = await asyncio.gather(*calls)
    assert all(result.usage_prompt > 1400 and result.usage_completion > 0 for result in results)
    assert vllm_pool.ready


async def test_preflight_passes(vllm_pool: EnginePool) -> None:
    checks = await vllm_pool.check()
    assert len(checks) == 6
    assert all(check.ok for check in checks), checks


async def test_a_managed_engine_heals_with_the_current_version_and_is_adopted(
    engine_env: Path, tiny_model: TinyModel, tmp_path: Path
) -> None:
    """SIGKILL of the engine core, then of the server: the current version serves, nothing is left behind."""
    spec = managed_spec(engine_env, tiny_model, tmp_path)
    cwd = tmp_path / "cwd"

    def pool(number: int) -> EnginePool:
        return EnginePool(
            [ManagedHost(spec)], model="forge", policy=tiny_model.policy(number), start_timeout_s=400
        )

    first = pool(0)
    first.start()
    await first.wait_ready(400)
    await first.swap(tiny_model.checkpoint(1), 1, tiny_model.sha256(1))
    asked = body(temperature=0.0)
    before = await first.chat(asked, request_id="before")

    [leader] = process.sessions(cwd, "api_server")
    core = next(pid for pid in process.members(leader, cwd) if "EngineCore" in title(pid))
    os.kill(core, signal.SIGKILL)
    await until(lambda: not first.ready, 240)
    await first.wait_ready(400)
    [second_leader] = process.sessions(cwd, "api_server")
    assert second_leader != leader and process.members(leader, cwd) == []
    assert await first.version() == 1
    healed = await first.chat(asked, request_id="healed")

    await first.close(keep_engine=True)  # as a killed server leaves it
    second = pool(1)
    second.start()
    await second.wait_ready(240)
    assert process.sessions(cwd, "api_server") == {second_leader}
    assert await second.version() == 1
    adopted = await second.chat(asked, request_id="adopted")
    ids = [r.completion_ids.tolist() for r in (before, healed, adopted) if r.completion_ids is not None]
    assert len(ids) == 3 and ids[0] == ids[1] == ids[2]

    await second.close()
    assert process.members(second_leader, cwd) == []


def title(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
