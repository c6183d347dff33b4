"""Preflight: does this engine give what recording and training need? Asks real questions, one token each."""

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from forge_server.domain.engine import EngineUnavailable
from forge_server.domain.errors import EngineError, ForgeError
from forge_server.engine import scale_out
from forge_server.engine.client import EngineClient
from forge_server.engine.control import EngineControl

Answer = tuple[bool, str, str]
"""Whether it holds, what was found, the mend."""

_MESSAGES = [{"role": "user", "content": "Hello"}]
_PLAIN = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "max_tokens": 1}


class Check(msgspec.Struct, frozen=True):
    """One line of ``forge-server check``: what was asked, whether it holds, what was found, the mend."""

    name: str
    ok: bool
    found: str
    mend: str


async def preflight(client: EngineClient) -> list[Check]:
    """Every check in order; after the engine turns out to be unreachable the rest is left out."""
    try:
        version = (await client.call("GET", "/version", timeout_s=30.0))["version"]
    except (ForgeError, KeyError, TypeError) as error:
        return [Check("engine reachable", False, str(error), "start it, or correct [engine] url")]
    checks = [Check("engine reachable", True, f"vLLM {version} at {client.url}", "")]
    for name, ask in _QUESTIONS:
        try:
            checks.append(Check(name, *await ask(client)))
        except (ForgeError, KeyError, IndexError, TypeError) as error:
            checks.append(Check(name, False, str(error) or repr(error), "see the engine's log"))
    return checks


async def _model(client: EngineClient) -> Answer:
    entries = await client.models()
    for entry in entries:
        if entry["id"] == client.model:
            return True, f"{client.model}, window {entry.get('max_model_len')} tokens", ""
    served = ", ".join(str(entry["id"]) for entry in entries)
    return False, f"serves {served}", "set [engine] served_model to one of these"


async def _ids(client: EngineClient) -> Answer:
    body: dict[str, Any] = {"messages": _MESSAGES, "temperature": 1.0, **_PLAIN}
    result = await client.chat(body, request_id="forge-preflight-ids")
    mend = "use vLLM with return_token_ids (0.10 or newer)"
    if result.completion_ids is None or result.prompt_ids is None:
        return False, "the answer carries no token ids, or not as many as its usage says", mend
    if result.logprobs is None:
        return False, "the answer carries no logprobs", mend
    counts = (result.completion_ids.size, result.logprobs.size, result.usage_completion)
    if counts != (1, 1, 1):
        return False, "ids {}, logprobs {}, usage {}; wanted 1 each".format(*counts), mend
    return True, f"prompt {result.usage_prompt} ids = usage, completion 1 id = 1 logprob = usage", ""


async def _distribution(client: EngineClient) -> Answer:
    """The gap between two tokens' logprobs is (difference of logits) / T: it doubles from T 1 to T 0.5."""
    spread = {t: await _spread(client, t) for t in (1.0, 0.5)}
    common = sorted(spread[1.0].keys() & spread[0.5].keys(), key=lambda token: spread[1.0][token])
    gaps = {t: values[common[-1]] - values[common[0]] for t, values in spread.items()} if common else {}
    if len(common) < 2 or gaps[1.0] < 1e-3:
        return False, "the model is too flat to tell", "use a model that has been trained"
    ratio = gaps[0.5] / gaps[1.0]
    found = f"logprob gap at temperature 0.5 is {ratio:.4f} times that at 1, wanted 2"
    return abs(ratio - 2) < 0.1, found, "start vLLM with --logprobs-mode processed_logprobs"


async def _spread(client: EngineClient, temperature: float) -> dict[str, float]:
    """Token -> logprob of the 20 likeliest first tokens, as sampled at ``temperature``."""
    body = {
        "model": client.model,
        "messages": _MESSAGES,
        "temperature": temperature,
        "logprobs": True,
        "top_logprobs": 20,
        "return_tokens_as_token_ids": True,
        **_PLAIN,
    }
    answer = await client.call("POST", "/v1/chat/completions", body)
    top = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    return {str(entry["token"]): float(entry["logprob"]) for entry in top}


async def _updates(client: EngineClient) -> Answer:
    control = EngineControl(client)
    mend = (
        "start vLLM with VLLM_SERVER_DEV_MODE=1 and --worker-extension-cls "
        "forge_server.engine_ext.worker.ForgeWorkerExtension; needed for training, not for recording"
    )
    if await control.label() is None:
        return False, "the engine offers no weight updates", mend
    try:
        about = await control.describe()
    except (EngineError, EngineUnavailable) as error:
        return False, f"our worker extension does not answer ({error.what})", mend
    return True, f"{about['tensors']} tensors, {about['dtype']}", ""


async def _forwarding(client: EngineClient) -> Answer:
    """Not needed by anything: without it the proxy forwards messages, and records what the engine makes of
    them."""
    template, lacks = await scale_out.probe(client)
    if template is None:
        return True, f"not offered ({lacks}): calls are recorded, not spliced", ""
    return (
        True,
        f"offered; an answer in the history ends with {template.marker or 'no token of its own'!r}",
        "",
    )


_QUESTIONS: tuple[tuple[str, Callable[[EngineClient], Awaitable[Answer]]], ...] = (
    ("engine model", _model),
    ("engine token ids", _ids),
    ("engine logprobs are of the sampling distribution", _distribution),
    ("engine weight updates", _updates),
    ("engine tokens in, tokens out", _forwarding),
)
