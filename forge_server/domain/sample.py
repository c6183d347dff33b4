"""A sample: one contiguous token sequence with a loss mask, cut from one attempt's calls."""

from enum import StrEnum

import msgspec
import numpy as np
import numpy.typing as npt

from forge_server.domain.media import Media


class BreakReason(StrEnum):
    """Why a sample starts where it does instead of continuing an earlier one."""

    FIRST = "first"  # the first call of the attempt
    ROOT = "root"  # a new conversation: shares less than half of its prompt with anything before
    FORK = "fork"  # continues a call that another sample already continues
    TEMPLATE = "template"  # text equal, tokens differ: the chat template or tokenizer re-rendered the history
    REASONING_STRIPPED = "reasoning_stripped"
    HISTORY_EDITED = "history_edited"  # the harness changed an earlier turn
    COMPACTION = "compaction"
    RETRY = "retry"  # the same prompt asked again
    MODEL = "model"  # another model, tokenizer or template: another forest
    UNDELIVERED_PARENT = "undelivered_parent"
    OTHER = "other"


class CallSpan(msgspec.Struct, frozen=True):
    """Call ``call_id`` inside a sample: prompt ``[0, prompt_end)``, completion ``[prompt_end, end)``.

    ``owned``: the completion is trained in this sample (and in no other). ``version``: the oldest of the policy
    versions that sampled it.
    """

    call_id: int
    prompt_end: int
    end: int
    owned: bool
    version: int
    temperature: float
    finish_reason: str


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """``tokens`` int32 [n], ``loss_mask`` uint8 [n], ``logprobs`` float32 [n] (0 where the mask is 0),
    ``versions`` int32 [n] (-1 where the mask is 0). ``prompt_len`` is the index of the first trained token.
    ``media``: the images that stand in ``tokens``.
    """

    index: int
    tokens: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]
    prompt_len: int
    spans: tuple[CallSpan, ...]
    break_reason: BreakReason
    forest_key: str = ""
    truncated: bool = False
    media: Media = ()

    @property
    def min_version(self) -> int:
        return int(self.versions[self.loss_mask == 1].min())

    @property
    def max_version(self) -> int:
        return int(self.versions.max())
