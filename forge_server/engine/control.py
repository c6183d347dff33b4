"""vLLM's control endpoints (``VLLM_SERVER_DEV_MODE=1``) and our worker extension, one method each."""

import math
from pathlib import Path
from typing import Any

from forge_server.domain.engine import EngineRefused, EngineUnavailable
from forge_server.domain.errors import EngineError
from forge_server.engine.client import EngineClient

_LOAD_S = 1800.0


class EngineControl:
    """Steers the engine behind ``client``. Methods raise EngineError when it fails to obey."""

    def __init__(self, client: EngineClient) -> None:
        self.client = client

    async def label(self) -> str | None:
        """What the engine was last told it serves; None when it offers no weight updates."""
        try:
            answer = await self.client.call("GET", "/weight_info")
        except EngineUnavailable as error:
            if error.http_status == 404:
                return None
            raise
        return str(answer["weight_version"])

    async def set_label(self, label: str) -> None:
        await self._order("POST", "/update_weight_version", {"new_version": label})

    async def pause(self, mode: str, timeout_s: float = 60.0) -> None:
        """``wait``: returns once every running request has finished; ``abort``: ends them now."""
        await self._order("POST", "/pause", query={"mode": mode}, timeout_s=timeout_s)

    async def resume(self) -> None:
        await self._order("POST", "/resume")

    async def is_paused(self) -> bool:
        return bool((await self._order("GET", "/is_paused"))["is_paused"])

    async def describe(self) -> dict[str, Any]:
        """Folder, dtype and tensor count of the loaded model (first worker)."""
        answer: dict[str, Any] = (await self._rpc("forge_describe"))[0]
        return answer

    async def check(self, weights: Path, manifest: Path | None, manifest_sha256: str) -> str:
        """The first worker's fault with the checkpoint, in words; empty when all would load it."""
        answers = await self._rpc(
            "forge_check_checkpoint", str(weights), str(manifest) if manifest else "", manifest_sha256
        )
        return next((str(a["fault"]) for a in answers if a["fault"]), "")

    async def load(self, weights: Path) -> None:
        """Replace the weights in place. After an error the engine holds no usable weights."""
        await self._rpc("forge_load_checkpoint", str(weights))

    async def reset_caches(self) -> None:
        """Forget everything computed with older weights (I9); a reset that does not succeed is an error."""
        answer = await self._order("POST", "/reset_prefix_cache")
        if not (answer or {}).get("success"):
            raise EngineError(
                "the engine could not reset its prefix cache",
                where=self.client.url,
                mend="the swap is undone",
            )
        await self._order("POST", "/reset_mm_cache")
        await self._order("POST", "/reset_encoder_cache")

    async def prompt_logprobs(self, ids: list[int]) -> list[float]:
        """log p(token | tokens before) at temperature 1 for each of ``ids``; the first is 0."""
        body = {
            "model": self.client.model,
            "prompt": ids,
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": 0,
        }
        answer = await self._order("POST", "/v1/completions", body, timeout_s=300.0)
        try:
            entries = answer["choices"][0]["prompt_logprobs"]
            found = [float(e[str(i)]["logprob"]) for e, i in zip(entries[1:], ids[1:], strict=True)]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise EngineError(
                f"the engine gave no prompt logprobs ({error!r})", where=self.client.url
            ) from error
        return [0.0, *found]

    async def _rpc(self, method: str, *arguments: str) -> list[Any]:
        body = {"method": method, "args": list(arguments)}
        answer = await self._order("POST", "/collective_rpc", body, timeout_s=_LOAD_S)
        results: list[Any] = (answer or {}).get("results") or []
        if not results:
            raise EngineError(f"{method} was answered by no worker", where=self.client.url)
        return results

    async def _order(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        query: dict[str, str] | None = None,
        timeout_s: float = 60.0,
    ) -> Any:
        try:
            return await self.client.call(method, path, body, query=query, timeout_s=timeout_s)
        except EngineRefused as error:
            raise EngineError(f"{path}: {error.message}", where=self.client.url) from error
        except EngineUnavailable as error:
            raise EngineError(f"{path}: {error.what}", where=self.client.url, mend=error.mend) from error


def largest_gap(found: list[float], expected: list[float]) -> float:
    """Largest absolute difference; infinite when a value is not finite."""
    gaps = [abs(a - b) for a, b in zip(found, expected, strict=True)]
    return max((gap if math.isfinite(gap) else math.inf for gap in gaps), default=0.0)
