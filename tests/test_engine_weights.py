"""The swap against an engine that can be made to fail at every step: what is asked, in which order, and what
serves afterwards."""

import copy
import errno
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from engine_fake import CHAT, FakeEngine, make_checkpoint, until

from forge_server.domain.engine import EngineUnavailable
from forge_server.domain.errors import CheckpointError, EngineError
from forge_server.engine import replica
from forge_server.engine.attach import AttachedHost
from forge_server.engine.checkpoint import Policy
from forge_server.engine.client import EngineClient
from forge_server.engine.control import EngineControl
from forge_server.engine.hosts import Address
from forge_server.engine.pool import EnginePool
from forge_server.engine.probe import preflight
from forge_server.engine.weights import SWAPPING, EngineLost, settle, swap


@pytest.fixture
def policies(tmp_path: Path) -> list[Policy]:
    return [Policy(n, *make_checkpoint(tmp_path, n)) for n in range(3)]


@pytest.fixture
async def fake(policies: list[Policy]) -> AsyncIterator[FakeEngine]:
    async with FakeEngine(policies[0].path).serving() as engine:
        yield engine


@pytest.fixture
async def control(fake: FakeEngine) -> AsyncIterator[EngineControl]:
    client = EngineClient(fake.url, "forge", timeout_s=60)
    yield EngineControl(client)
    await client.close()


INSTALL = [
    f"POST /update_weight_version {SWAPPING}",
    "POST /collective_rpc forge_load_checkpoint",
    "POST /reset_prefix_cache",
    "POST /reset_mm_cache",
    "POST /reset_encoder_cache",
]


async def test_the_sequence_is_the_measured_one(
    fake: FakeEngine, control: EngineControl, policies: list[Policy]
) -> None:
    report = await swap([control], policies[1], policies[0], drain_s=60)
    assert fake.acts() == [
        "POST /collective_rpc forge_check_checkpoint",
        "POST /collective_rpc forge_describe",
        "POST /pause?mode=wait",
        *INSTALL,
        f"POST /update_weight_version {policies[1].label}",
        "POST /resume",
    ]
    assert (fake.loaded, fake.label, fake.paused) == (policies[1].path, policies[1].label, False)
    assert (report.version, report.probe_max_gap, report.probe_moved) == (1, 0.0, 1.0)
    assert report.probe_tolerance == 1e-3 and not report.aborted_running


async def test_a_refusing_worker_leaves_everything_untouched(
    fake: FakeEngine, control: EngineControl, policies: list[Policy]
) -> None:
    fake.fault = "tensor names differ"
    with pytest.raises(CheckpointError, match="tensor names differ"):
        await swap([control], policies[1], policies[0], drain_s=60)
    assert fake.acts() == ["POST /collective_rpc forge_check_checkpoint"]


async def test_a_cache_reset_without_success_fails_the_swap_and_is_undone(
    fake: FakeEngine, control: EngineControl, policies: list[Policy]
) -> None:
    """I9: nothing computed with older weights may be used, so without a reset there is no swap."""
    fake.reset_failures = 1
    with pytest.raises(EngineError, match="prefix cache"):
        await swap([control], policies[1], policies[0], drain_s=60)
    assert (fake.loaded, fake.label, fake.paused) == (policies[0].path, policies[0].label, False)


async def test_a_failed_probe_puts_the_previous_weights_back(
    fake: FakeEngine, control: EngineControl, policies: list[Policy]
) -> None:
    fake.spoil = {"step_00001"}
    with pytest.raises(CheckpointError, match="differ from the trainer's by"):
        await swap([control], policies[1], policies[0], drain_s=60)
    assert (fake.loaded, fake.label, fake.paused) == (policies[0].path, policies[0].label, False)


async def test_a_failed_load_is_undone(
    fake: FakeEngine, control: EngineControl, policies: list[Policy]
) -> None:
    fake.load_failures = 1
    with pytest.raises(EngineError, match="disk on fire") as caught:
        await swap([control], policies[1], policies[0], drain_s=60)
    assert not isinstance(caught.value, EngineLost)
    assert (fake.loaded, fake.label) == (policies[0].path, policies[0].label)


async def test_when_the_undoing_fails_too_the_engine_is_lost(
    fake: FakeEngine, control: EngineControl, policies: list[Policy]
) -> None:
    fake.load_failures = 2
    with pytest.raises(EngineLost, match="could not be put back"):
        await swap([control], policies[1], policies[0], drain_s=60)
    assert fake.label == SWAPPING  # it claims no version that it may not hold


async def test_running_requests_are_aborted_after_the_drain_time(
    fake: FakeEngine, control: EngineControl, policies: list[Policy]
) -> None:
    fake.running.clear()
    report = await swap([control], policies[1], policies[0], drain_s=0.2)
    assert report.aborted_running
    assert [a for a in fake.acts() if "/pause" in a] == ["POST /pause?mode=wait", "POST /pause?mode=abort"]


async def test_two_replicas_swap_together_or_not_at_all(
    fake: FakeEngine, control: EngineControl, policies: list[Policy]
) -> None:
    async with FakeEngine(policies[0].path).serving() as second:
        client = EngineClient(second.url, "forge", timeout_s=60)
        controls = [control, EngineControl(client)]
        second.load_failures = 1
        with pytest.raises(EngineError):
            await swap(controls, policies[1], policies[0], drain_s=60)
        assert fake.loaded == second.loaded == policies[0].path
        await swap(controls, policies[1], policies[0], drain_s=60)
        assert fake.loaded == second.loaded == policies[1].path
        await client.close()


@pytest.mark.parametrize("found", ["default", SWAPPING, "forge-9-abc"])
async def test_an_engine_that_claims_anything_else_gets_the_right_weights(
    fake: FakeEngine, control: EngineControl, policies: list[Policy], found: str
) -> None:
    fake.label = found
    await settle(control, policies[2], loaded=None)
    assert (fake.loaded, fake.label, fake.paused) == (policies[2].path, policies[2].label, False)


async def test_an_engine_that_was_left_paused_is_resumed(
    fake: FakeEngine, control: EngineControl, policies: list[Policy]
) -> None:
    fake.label, fake.paused = policies[0].label, True
    await settle(control, policies[0], loaded=None)
    assert not fake.paused and "POST /collective_rpc forge_load_checkpoint" not in fake.acts()


async def test_an_engine_that_lies_about_its_weights_is_found_out(
    fake: FakeEngine, control: EngineControl, policies: list[Policy]
) -> None:
    fake.label = policies[1].label  # but it holds step 0
    with pytest.raises(EngineError, match="differ from those of version 1"):
        await settle(control, policies[1], loaded=None)


async def test_without_weight_updates_only_the_initial_version_is_served(policies: list[Policy]) -> None:
    plain = FakeEngine(policies[0].path)
    plain.dev_mode = False
    async with plain.serving():
        client = EngineClient(plain.url, "forge", timeout_s=60)
        await settle(EngineControl(client), Policy(0, None), loaded=None)
        with pytest.raises(EngineError, match="no weight updates"):
            await settle(EngineControl(client), policies[1], loaded=None)
        checks = {check.name: check for check in await preflight(client)}
        assert not checks["engine weight updates"].ok
        await client.close()


async def test_preflight_stops_at_an_engine_that_is_away() -> None:
    async with FakeEngine().serving() as engine:
        url = engine.url
    client = EngineClient(url, "forge")
    [check] = await preflight(client)
    assert not check.ok and check.mend
    await client.close()


async def test_preflight_names_an_engine_without_ids(fake: FakeEngine) -> None:
    client = EngineClient(fake.url, "forge", timeout_s=60)
    fake.chat_answer = {**fake.chat_answer, "prompt_token_ids": None}  # type: ignore[dict-item]
    checks = {check.name: check for check in await preflight(client)}
    assert "no token ids" in checks["engine token ids"].found and not checks["engine token ids"].ok
    await client.close()


async def test_preflight_names_logprobs_that_ignore_the_temperature(fake: FakeEngine) -> None:
    client = EngineClient(fake.url, "forge", timeout_s=60)
    answer = copy.deepcopy(CHAT)
    top = [{"token": "token_id:1", "logprob": -1.0}, {"token": "token_id:2", "logprob": -3.0}]
    answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"] = top
    fake.chat_answer = answer
    checks = {check.name: check for check in await preflight(client)}
    check = checks["engine logprobs are of the sampling distribution"]
    assert not check.ok and "is 1.0000 times" in check.found and "processed_logprobs" in check.mend
    await client.close()


async def test_preflight_names_another_model(fake: FakeEngine) -> None:
    client = EngineClient(fake.url, "other", timeout_s=60)
    checks = {check.name: check for check in await preflight(client)}
    assert checks["engine model"].found == "serves forge"
    await client.close()


def pool_of(*urls: str, policy: Policy) -> EnginePool:
    return EnginePool(
        [AttachedHost(url) for url in urls],
        model="forge",
        policy=policy,
        request_timeout_s=60,
        drain_s=60,
        start_timeout_s=120,
    )


async def test_the_pool_serves_swaps_and_says_what_it_serves(
    fake: FakeEngine, policies: list[Policy]
) -> None:
    pool = pool_of(fake.url, policy=policies[0])
    assert not pool.ready
    pool.start()
    await pool.wait_ready(120)
    assert (pool.ready, pool.reason, pool.current, await pool.version()) == (True, "", 0, 0)
    assert policies[1].path is not None
    await pool.swap(policies[1].path, 1, policies[1].manifest_sha256)
    assert (pool.current, await pool.version(), fake.loaded) == (1, 1, policies[1].path)
    with pytest.raises(CheckpointError):
        await pool.swap(policies[1].path, 2, "0" * 64)
    assert (pool.current, await pool.version()) == (1, 1)
    await pool.close()


async def test_an_attached_engine_that_restarted_gets_the_current_weights_again(
    policies: list[Policy],
) -> None:
    async with FakeEngine(policies[0].path).serving() as first:
        pool = pool_of(first.url, policy=policies[0])
        pool.start()
        await pool.wait_ready(120)
        assert policies[1].path is not None
        await pool.swap(policies[1].path, 1, policies[1].manifest_sha256)
        port = first.port
    with pytest.raises(EngineUnavailable):
        await pool.chat({"messages": []}, request_id="r")
    async with FakeEngine(policies[0].path).serving(port) as second:  # initial weights, label "default"
        await pool.wait_ready(120)
        await until(lambda: pool.ready and second.loaded == policies[1].path)
        assert second.label == policies[1].label
        await pool.chat({"messages": []}, request_id="r")
        await pool.close()


async def test_weights_that_were_written_again_are_read_where_they_are(
    policies: list[Policy], tmp_path: Path
) -> None:
    """By what undoes a swap, and by what brings up an engine."""
    old = policies[1].path
    assert old is not None and policies[2].path is not None
    sound = shutil.copytree(old, tmp_path / "again")
    async with FakeEngine(policies[0].path).serving() as first:
        pool = pool_of(first.url, policy=policies[0])
        pool.start()
        await pool.wait_ready(120)
        await pool.swap(old, 1, policies[1].manifest_sha256)
        for file in old.glob("huggingface/*"):
            file.write_bytes(b"damaged")
        pool.moved(1, sound)
        pool.moved(0, tmp_path / "another's")
        first.spoil.add(policies[2].path.name)
        with pytest.raises(CheckpointError):
            await pool.swap(policies[2].path, 2, policies[2].manifest_sha256)
        assert (pool.current, first.loaded) == (1, sound)
        port = first.port
    with pytest.raises(EngineUnavailable):
        await pool.chat({"messages": []}, request_id="r")
    async with FakeEngine(policies[0].path).serving(port) as second:
        await until(lambda: pool.ready and second.loaded == sound)
        assert second.label == policies[1].label
        await pool.close()


async def test_an_attached_engine_without_weight_updates_never_passes_for_a_later_version(
    fake: FakeEngine, policies: list[Policy]
) -> None:
    """Another engine at the same address, with no moment in between at which nothing listened."""
    pool = pool_of(fake.url, policy=policies[0])
    pool.start()
    await pool.wait_ready(120)
    assert policies[1].path is not None
    await pool.swap(policies[1].path, 1, policies[1].manifest_sha256)
    fake.hidden = True
    await until(lambda: not pool.ready and "offers no weight updates" in pool.reason)
    await pool.close()


async def test_an_attached_engine_without_weight_updates_keeps_its_initial_weights(
    policies: list[Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica, "_WATCH_S", 0.01)
    plain = FakeEngine(policies[0].path)
    plain.dev_mode = False
    async with plain.serving():
        pool = pool_of(plain.url, policy=policies[0])
        pool.start()
        await pool.wait_ready(120)
        await until(lambda: plain.log.count("GET /weight_info") > 5)
        assert pool.ready and plain.log.count("GET /openapi.json") == 1  # settled once
        await pool.close()


async def test_an_address_without_vllm_is_never_ready(policies: list[Policy]) -> None:
    """To settling, every path that is not there looks like an engine without weight updates."""
    async with FakeEngine(policies[0].path).serving() as engine:
        pool = pool_of(f"{engine.url}/elsewhere", policy=policies[0])
        seen: list[bool] = []
        pool._replicas[0]._changed = lambda: seen.append(pool.ready)
        pool.start()
        await until(lambda: len(seen) > 1)
        assert seen == [False] * len(seen)
        assert "answered 404" in pool.reason and "check [engine] url" in pool.reason
        await pool.close()


async def test_calls_of_one_attempt_stay_on_one_replica(fake: FakeEngine, policies: list[Policy]) -> None:
    async with FakeEngine(policies[0].path).serving() as second:
        pool = pool_of(fake.url, second.url, policy=policies[0])
        pool.start()
        await until(lambda: len(pool._clients()) == 2)
        counts = []
        for attempt in range(8):
            before = [sum("chat" in e for e in f.log) for f in (fake, second)]
            for call in range(3):
                await pool.chat({"messages": []}, request_id=f"{attempt}.{call}", affinity=f"at-{attempt}")
            after = [sum("chat" in e for e in f.log) for f in (fake, second)]
            counts.append(tuple(b - a for a, b in zip(before, after, strict=True)))
        assert set(counts) == {(3, 0), (0, 3)}  # each attempt on one; both are used
        await pool.close()


class FullDiskOnce(AttachedHost):
    """Fails as a managed host does that cannot write its record."""

    failed = False

    async def up(self, policy: Policy) -> Address:
        if not self.failed:
            self.failed = True
            raise OSError(errno.ENOSPC, "No space left on device")
        return await super().up(policy)


async def test_supervision_outlives_what_nobody_expected(fake: FakeEngine, policies: list[Policy]) -> None:
    host = FullDiskOnce(fake.url)
    pool = EnginePool([host], model="forge", policy=policies[0], start_timeout_s=120)
    pool.start()
    await until(lambda: "No space left" in pool.reason)
    await pool.wait_ready(120)
    assert host.failed and pool.reason == ""
    await pool.close()
