"""What the proxy needs of the rest, stated as protocols; ``app`` hands the real things in."""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeVar

import msgspec
import sqlalchemy as sa
from msgspec import Raw

from forge_server.domain.call import Ids
from forge_server.domain.engine import ChatResult, Generated, Rendered, Template
from forge_server.domain.outcome import Kind
from forge_server.domain.run import Forwarding, Mode
from forge_server.domain.states import AttemptState

T = TypeVar("T")
Row = dict[str, Any]


class Engine(Protocol):
    """``body`` is an OpenAI chat body whose messages and tools are ``msgspec.Raw``; cancellation aborts
    upstream. Calls of equal ``affinity`` go to the same replica, which has their history in its prefix cache.

    Raises EngineRefused and EngineUnavailable.
    """

    async def chat(
        self, body: dict[str, Any], *, request_id: str, affinity: str, known: ChatResult | None = None
    ) -> ChatResult: ...

    async def count_tokens(self, messages: Sequence[Raw], tools: Sequence[Raw]) -> int:
        """Tokens of the prompt that these make, the opening of the answer included."""
        ...

    @property
    def template(self) -> Template | None:
        """What surrounds answers in a prompt; None when the engine takes no tokens, and the rest is not to be
        called."""
        ...

    async def render(
        self, body: dict[str, Any], *, request_id: str, affinity: str, known: tuple[bytes, Ids] | None = None
    ) -> Rendered:
        """The prompt that ``chat`` would send. ``known``: text and ids of one that this may continue."""
        ...

    async def generate(
        self, prompt: bytes, rendered: Rendered, max_tokens: int, *, request_id: str, affinity: str
    ) -> Generated:
        """Sample after the ids ``prompt`` (``1,2,3``) with the parameters of ``rendered``."""
        ...

    async def message(
        self,
        found: Generated,
        rendered: Rendered,
        body: dict[str, Any],
        prompt_tail: Ids,
        *,
        request_id: str,
        affinity: str,
    ) -> dict[str, object]:
        """The assistant message that ``chat`` would make of what was sampled."""
        ...

    async def detokenize(self, ids: Sequence[int]) -> str: ...


class Store(Protocol):
    """The part of ``store.Store`` that is used here; every write is durable when it returns."""

    async def write(self, fn: Callable[[sa.Connection], T]) -> T: ...

    async def write_rows(self, rows: Iterable[tuple[sa.Table | sa.Executable, Row]]) -> None: ...

    async def read(self, fn: Callable[[sa.Connection], T]) -> T: ...


class VersionSource(Protocol):
    """The policy version that the engine serves now."""

    @property
    def current(self) -> int: ...


class CallRules(Protocol):
    """The rules of one harness spec; messages and tools are decoded, in OpenAI chat shape."""

    @property
    def looks_inside(self) -> bool:
        """Whether messages must be decoded at all."""
        ...

    def normalise(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages without what the harness injects and changes from call to call."""
        ...

    def label(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> str:
        """The label of a side call, or an empty string."""
        ...

    def agent(self, headers: Mapping[bytes, bytes]) -> dict[str, str]:
        """What the headers of a request, names in lower case, tell about the agent that asks: flags of the
        call."""
        ...


class CallPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How the calls of one attempt are sampled and bounded; fixed for the life of the attempt but for
    ``state``.

    ``max_tokens``: completion tokens of the whole attempt; ``max_completion_tokens``: of one call;
    ``window``: prompt and completion. ``grammar``: ``lift`` drops what would constrain the sampling,
    ``enforce`` passes it on and makes the call untrainable; only training rollouts are lifted.
    ``keep_reasoning``: reasoning that was sampled stays in the prompt although harness or template drops it.
    """

    state: AttemptState
    mode: Mode
    model: str
    temperature: float = 1.0
    max_calls: int = 100
    max_tokens: int = 200_000
    max_completion_tokens: int = 4096
    window: int = 32768
    max_hold_s: float = 600.0
    grammar: Literal["lift", "enforce"] = "lift"
    rules: CallRules | None = None
    forwarding: Forwarding = "auto"
    keep_reasoning: bool = False


PolicyLookup = Callable[[str], Awaitable[CallPolicy | None]]
"""Attempt id -> its policy as the database has it now, or None when there is no such attempt."""

AgentKeys = Callable[[str], str | None]
"""Agent key -> the attempt it belongs to, or None when it is no valid agent key."""

BudgetExceeded = Callable[[str, Kind], Awaitable[None]]
"""Tells the lifecycle that an attempt has used up a budget."""

EngineGaveUp = Callable[[str], Awaitable[None]]
"""Tells the lifecycle that the engine did not answer an attempt's calls, again and again."""
