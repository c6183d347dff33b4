"""What the engine answers and how it may fail, as the proxy and the controller see it."""

from typing import Any

import msgspec

from forge_server.domain.call import Ids, Logprobs, VersionSpan
from forge_server.domain.errors import ForgeError


class ChatResult(msgspec.Struct, frozen=True, kw_only=True):
    """One finished chat completion, ids and logprobs as the engine gave them.

    ``prompt_ids`` int32 [P], ``completion_ids`` int32 [C] (end-of-turn token included) and ``logprobs``
    float32 [C] are None when the engine did not send them; a logprob that came as null is NaN.
    ``raw_prompt_ids`` is the text of the prompt ids (``1,2,3``): the result handed back as ``known`` with the
    next call of the same session makes parsing a long prompt cheap. ``message`` holds role, content,
    reasoning and tool_calls. ``stop_reason``: the stop string or token that ended it, None for the end of turn.
    ``versions``: which tokens were sampled under which policy version, in the engine's own word; -1 is a label
    that is none of ours; () when it says nothing.
    """

    prompt_ids: Ids | None
    completion_ids: Ids | None
    logprobs: Logprobs | None
    message: dict[str, object]
    finish_reason: str
    usage_prompt: int
    usage_completion: int
    model: str
    raw_prompt_ids: bytes | None = None
    stop_reason: int | str | None = None
    versions: tuple[VersionSpan, ...] = ()


class Template(msgspec.Struct, frozen=True):
    """What the chat template puts around an answer.

    ``closing``: the token that ends an answer in the history whatever follows, -1 when there is none; ``marker``
    its text; ``closes_calls``: it ends one with tool calls too. ``opening``: what stands before an answer that is
    asked for, and not before the same answer in the history (an opened or an empty think block). ``edges``: (id,
    text) of the last tokens before an answer, with and without the opening: white space there may melt into one
    token with that of the answer. ``guides_tools``: every answer that may call tools is sampled under a grammar.
    """

    closing: int
    marker: str
    closes_calls: bool = True
    opening: tuple[int, ...] = ()
    edges: tuple[tuple[int, str], ...] = ()
    guides_tools: bool = False


class Rendered(msgspec.Struct, frozen=True):
    """The prompt that the chat endpoint would send: int32 ``ids`` [P], their ``text`` (``1,2,3``), and the
    sampling parameters. ``reasoning``: None when the engine has no reasoning parser, else its arguments."""

    ids: Ids
    text: bytes
    sampling: dict[str, Any]
    reasoning_ended: bool | None = None
    reasoning: dict[str, Any] | None = None


class Generated(msgspec.Struct, frozen=True, kw_only=True):
    """What was sampled after given ids; see ``ChatResult``. ``completion_text`` is the text of the ids
    (``1,2,3``), ``text`` what the chat endpoint's parsers would read (None: not told)."""

    completion_ids: Ids | None
    completion_text: bytes
    logprobs: Logprobs | None
    text: str | None
    finish_reason: str
    stop_reason: int | str | None
    usage_prompt: int
    usage_completion: int
    model: str
    versions: tuple[VersionSpan, ...]


class EngineRefused(ForgeError):
    """The engine answered 4xx: the request itself is at fault. Asking again unchanged is useless.

    ``code`` is ``context_length_exceeded`` when prompt and completion do not fit the window, else
    ``invalid_request``; ``http_status`` is what the engine said.
    """

    type, status = "engine-refused", 400

    def __init__(self, http_status: int, message: str, code: str) -> None:
        self.http_status, self.message, self.code = http_status, message, code
        super().__init__(f"the engine refused the request ({http_status} {code}): {message}")


class EngineUnavailable(ForgeError):
    """The engine is away, restarting, failed, or answered something that is no completion.

    ``sent`` tells whether the request may have reached the engine; ``http_status`` is what it answered, 0 for
    no answer.
    """

    type, status = "engine-unavailable", 503

    def __init__(
        self, what: str, *, where: str = "", mend: str = "", sent: bool = False, http_status: int = 0
    ) -> None:
        self.sent, self.http_status = sent, http_status
        super().__init__(what, where=where, mend=mend)


class SwapReport(msgspec.Struct, frozen=True, kw_only=True):
    """How one weight swap went.

    Durations in seconds. ``probe_max_gap`` is the largest absolute difference between the engine's logprobs
    and those in the checkpoint's manifest, over ``probe_tokens`` tokens.
    """

    version: int
    validate_s: float
    pause_s: float
    load_s: float
    reset_s: float
    probe_s: float
    total_s: float
    aborted_running: bool
    probe_max_gap: float
    probe_moved: float
    """Largest difference between the manifest's logprobs and the engine's before the swap: what the probe could
    tell apart. Not above ``probe_tolerance``: the probe could not have noticed that the old weights stayed."""
    probe_tolerance: float
    probe_tokens: int
