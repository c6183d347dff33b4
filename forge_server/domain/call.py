"""A call as the engine saw it: the unit that the token forest is built from."""

import msgspec
import numpy as np
import numpy.typing as npt

from forge_server.domain.media import Media
from forge_server.domain.states import Delivery, Untrainable

Ids = npt.NDArray[np.int32]
Logprobs = npt.NDArray[np.float32]


class VersionSpan(msgspec.Struct, frozen=True):
    """Completion tokens ``[start, end)`` were sampled under policy version ``version``."""

    version: int
    start: int
    end: int


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One recorded model call.

    ``prompt`` int32 [P] and ``completion`` int32 [C] are the engine's own ids, end-of-turn token included;
    ``logprobs`` float32 [C] are those of the sampling distribution. ``untrainable`` is None for a call whose
    completion is to be trained, else the stored reason. ``media``: the images of the prompt, as far as their
    places are known.
    """

    id: int
    seq: int
    prompt: Ids
    completion: Ids
    logprobs: Logprobs
    versions: tuple[VersionSpan, ...]
    delivered: Delivery
    untrainable: Untrainable | None
    temperature: float
    finish_reason: str
    forest_key: str = ""
    label: str = ""
    media: Media = ()


def count_fault(
    completion: Ids, logprobs: Logprobs | None, usage_completion_tokens: int
) -> Untrainable | None:
    """Invariant I2: ``len(ids) == usage.completion_tokens == len(logprobs)``, all logprobs finite and <= 0.

    Returns the reason why the call may not be trained, or None.
    """
    if completion.size == 0:
        return Untrainable.EMPTY
    if logprobs is None:
        return Untrainable.NO_LOGPROBS
    if not (completion.size == usage_completion_tokens == logprobs.size):
        return Untrainable.COUNT_MISMATCH
    if not np.isfinite(logprobs).all() or float(logprobs.max()) > 1e-4 or float(logprobs.min()) <= -9000.0:
        return Untrainable.BAD_LOGPROBS
    return None
