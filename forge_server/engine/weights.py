"""The weight swap: the one sequence that vLLM was measured to survive, and its undoing.

    validate files -> every worker checks -> pause (wait, bounded, then abort) -> label "swapping" -> load ->
    reset prefix, multi-modal and encoder caches -> label the new version -> resume -> probe

Up to the pause nothing is touched. From then on any failure loads the previous weights again and
compares the engine with itself before the swap (I9: after either way no cache entry of other weights is
left). The label is changed before the weights are, so that an engine found after a crash never claims a
version it does not hold.
"""

import asyncio
import time
from collections.abc import Awaitable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from forge_server.domain.engine import SwapReport
from forge_server.domain.errors import CheckpointError, EngineError, ForgeError
from forge_server.engine.checkpoint import Checkpoint, Policy, Probe, read
from forge_server.engine.control import EngineControl, largest_gap

T = TypeVar("T")

SWAPPING = "forge-swapping"
FRESH = "default"
"""vLLM's label when nobody has set one."""

FLOAT32_TOLERANCE = 1e-3
OTHER_TOLERANCE = 0.1


class EngineLost(EngineError):
    """The swap failed and so did its undoing: the engine holds no known weights and must be restarted."""


async def swap(
    controls: Sequence[EngineControl],
    policy: Policy,
    previous: Policy,
    *,
    drain_s: float,
    tolerance: float = 0.0,
) -> SwapReport:
    """Make every engine of ``controls`` serve ``policy`` instead of ``previous``.

    ``drain_s`` bounds the wait for running requests; ``tolerance`` 0 means 1e-3 for a float32 engine,
    else 0.1. Raises CheckpointError (the checkpoint is at fault, ``previous`` serves), EngineError
    (``previous`` serves again) or EngineLost.
    """
    started = time.monotonic()
    checkpoint = await asyncio.to_thread(read, policy)
    await _all(_accepts(control, checkpoint) for control in controls)
    limit = tolerance or await _tolerance(controls[0])
    probe = checkpoint.probe
    # without a manifest the engine's own undoing can still be checked, on any ids
    ids = probe.token_ids if probe else list(range(8))
    before = await _all(control.prompt_logprobs(ids) for control in controls)
    validated = time.monotonic()
    aborted = False
    try:
        aborted = any(await _all(_pause(control, drain_s) for control in controls))
        paused = time.monotonic()
        times = await _all(_install(control, checkpoint.weights, policy.label) for control in controls)
        installed = time.monotonic()
        gap = 0.0
        if probe:
            after = await _all(control.prompt_logprobs(ids) for control in controls)
            gap = max(largest_gap(found, probe.logprobs) for found in after)
        if gap > limit:
            raise CheckpointError(
                f"the engine's logprobs differ from the trainer's by {gap:.3g}, allowed is {limit:g}",
                where=str(policy.path),
                mend="the engine must be untied on CPU and of the trainer's precision",
            )
    except ForgeError as error:
        await _undo(controls, previous, ids, before, limit, error)
        raise
    finished = time.monotonic()
    return SwapReport(
        version=policy.version,
        validate_s=validated - started,
        pause_s=paused - validated,
        load_s=max(load_s for load_s, _ in times),
        reset_s=max(reset_s for _, reset_s in times),
        probe_s=finished - installed,
        total_s=finished - started,
        aborted_running=aborted,
        probe_max_gap=gap,
        probe_moved=max(largest_gap(found, probe.logprobs) for found in before) if probe else 0.0,
        probe_tolerance=limit,
        probe_tokens=len(ids) if probe else 0,
    )


async def settle(
    control: EngineControl, policy: Policy, *, loaded: Path | None, tolerance: float = 0.0
) -> None:
    """Make an engine that was just started, adopted or attached serve ``policy``, whatever it served before.

    ``loaded`` is the folder it was started with, None when somebody else started it. Raises EngineError or
    CheckpointError.
    """
    label = await control.label()
    if label is None:
        if policy.version == 0:
            return  # record only: it serves what it was started with, for ever
        raise EngineError(
            f"the engine cannot be given version {policy.version}: it offers no weight updates",
            where=control.client.url,
            mend="start vLLM with VLLM_SERVER_DEV_MODE=1 and our worker extension",
        )
    checkpoint = await asyncio.to_thread(read, policy) if policy.manifest_sha256 else None
    trusted = loaded == policy.weights if loaded is not None else policy.version == 0
    if label == FRESH and trusted:
        await control.set_label(policy.label)
    elif label != policy.label:
        if checkpoint is None:
            checkpoint = await asyncio.to_thread(read, policy)
        await _accepts(control, checkpoint)
        await control.pause("abort")
        await _install(control, checkpoint.weights, policy.label)
    elif await control.is_paused():
        await control.resume()
    if checkpoint and checkpoint.probe:
        await _verify(control, policy, checkpoint.probe, tolerance)


async def _verify(control: EngineControl, policy: Policy, probe: Probe, tolerance: float) -> None:
    limit = tolerance or await _tolerance(control)
    gap = largest_gap(await control.prompt_logprobs(probe.token_ids), probe.logprobs)
    if gap > limit:
        raise EngineError(
            f"the engine's logprobs differ from those of version {policy.version} by {gap:.3g}, "
            f"allowed is {limit:g}",
            where=control.client.url,
            mend="check that the engine has the trainer's precision",
        )


async def _undo(
    controls: Sequence[EngineControl],
    previous: Policy,
    ids: list[int],
    before: list[list[float]],
    limit: float,
    cause: ForgeError,
) -> None:
    weights = previous.weights
    try:
        if weights is None:
            raise EngineError("the folder of the previous weights is not known")
        await _all(control.pause("abort") for control in controls)
        await _all(_install(control, weights, previous.label) for control in controls)
        after = await _all(control.prompt_logprobs(ids) for control in controls)
        gap = max(largest_gap(found, old) for found, old in zip(after, before, strict=True))
        if gap > limit:
            raise EngineError(f"the previous weights came back changed by {gap:.3g}")
    except ForgeError as error:
        raise EngineLost(
            f"{cause.what}; and version {previous.version} could not be put back ({error.what})",
            where=cause.where,
            mend="the engine is restarted",
        ) from cause


async def _accepts(control: EngineControl, checkpoint: Checkpoint) -> None:
    sha256 = checkpoint.policy.manifest_sha256
    if fault := await control.check(checkpoint.weights, checkpoint.manifest_path, sha256):
        raise CheckpointError(
            f"the engine refuses it: {fault}", where=str(checkpoint.policy.path), mend="export it again"
        )


async def _pause(control: EngineControl, drain_s: float) -> bool:
    """Pause; True when running requests had to be aborted."""
    try:
        await control.pause("wait", timeout_s=drain_s)
        return False
    except EngineError:
        await control.pause("abort")
        return True


async def _install(control: EngineControl, weights: Path, label: str) -> tuple[float, float]:
    """Load into a paused engine, forget the caches, label, resume; (load, reset) seconds."""
    await control.set_label(SWAPPING)
    started = time.monotonic()
    await control.load(weights)
    loaded = time.monotonic()
    await control.reset_caches()
    reset = time.monotonic()
    await control.set_label(label)
    await control.resume()
    return loaded - started, reset - loaded


async def _tolerance(control: EngineControl) -> float:
    float32 = (await control.describe())["dtype"] == "float32"
    return FLOAT32_TOLERANCE if float32 else OTHER_TOLERANCE


async def _all(acts: Iterable[Awaitable[T]]) -> list[T]:
    """Run together and wait for all, also when one fails; then raise the first failure."""
    results = await asyncio.gather(*acts, return_exceptions=True)
    done: list[T] = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        done.append(result)
    return done
