"""The schema of ``harness_specs/NAME/spec.yaml``: how one harness is launched against the proxy, as data.

Placeholders in ``argv``, ``env``, ``stdin`` and file contents are filled in once. ``{window}``, ``{output}`` and
``{prompt}`` are numbers of tokens that the plan holds already (``harness.plan``); the rest is the runner's:
``{base_url}`` (of the relay, without ``/v1``), ``{agent_key}``, ``{model}``, ``{instruction}``,
``{workdir}``, ``{home}``, ``{env}`` (where ``install`` put things), ``{python}`` and ``{forge}`` (our own
packed programs).
"""

import re
from typing import Literal

import msgspec

from forge_server.domain.install import Install

PLACEHOLDERS = (
    "base_url",
    "agent_key",
    "model",
    "instruction",
    "workdir",
    "home",
    "env",
    "python",
    "forge",
    "window",
    "output",
    "prompt",
)
_BRACED = re.compile(r"\{([a-z_]+)\}")


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of every mapping of a spec: unknown keys are errors."""


class FileSpec(Part, frozen=True, kw_only=True):
    """A file in the harness's home folder: ``content`` given here, or in the file ``source`` beside the
    spec."""

    path: str
    content: str = ""
    source: str = ""
    mode: str = "0644"

    def __post_init__(self) -> None:
        if self.path.startswith("/") or ".." in self.path.split("/"):
            raise ValueError(f"file path {self.path!r} leads out of the home folder")
        if not re.fullmatch(r"0?[0-7]{3}", self.mode):
            raise ValueError(f"file mode {self.mode!r} is not octal, such as 0644")
        if self.source and self.content:
            raise ValueError(f"file {self.path!r} has both content and source")


class SideCall(Part, frozen=True, kw_only=True):
    """A call with this label is recorded but never trained: a title, a judge, a summary for a person.

    All that is given must hold: ``system`` is a pattern found in the first system message, ``user`` one found
    in the last user message; ``tools: none`` asks for a request without tools.
    """

    label: str
    system: str = ""
    user: str = ""
    tools: Literal["any", "none"] = "any"

    def __post_init__(self) -> None:
        _check_pattern(self.system)
        _check_pattern(self.user)


class Removal(Part, frozen=True, kw_only=True):
    """Text matching ``pattern`` is taken out of the messages of ``role``."""

    role: str
    pattern: str

    def __post_init__(self) -> None:
        _check_pattern(self.pattern)


class Normalise(Part, frozen=True, kw_only=True):
    """What the harness injects and changes from call to call, and how it is taken out before the engine sees
    it."""

    remove: tuple[Removal, ...] = ()
    drop_keys: tuple[str, ...] = ()  # of messages and content parts, such as cache_control
    join_text: bool = False  # a list of text parts becomes one string


class Limits(Part, frozen=True, kw_only=True):
    """What one attempt of this harness needs at most; 0: the backend's own limit."""

    pids: int = 0
    memory_mb: int = 0


class SubAgents(Part, frozen=True, kw_only=True):
    """Request headers, in lower case, that name the agent that asks and the one that started it."""

    header: str
    parent_header: str = ""

    def __post_init__(self) -> None:
        for name in (self.header, self.parent_header):
            if not re.fullmatch(r"[a-z0-9-]*", name):
                raise ValueError(f"header {name!r} is not written in lower case letters, digits and hyphens")
        if not self.header:
            raise ValueError("header is empty")


class Ends(Part, frozen=True, kw_only=True):
    """Exit codes: of a task that is done, after one 400 that ends the attempt, and when the model server stays
    dead. For people and tests: an exit code alone never decides an outcome."""

    ok: tuple[int, ...] = (0,)
    refused: tuple[int, ...] = (1,)
    model_dead: tuple[int, ...] = (1,)
    note: str = ""


class Spec(Part, frozen=True, kw_only=True):
    """One harness."""

    name: str
    summary: str
    api: Literal["chat", "completions", "responses", "messages", "gemini"]
    argv: tuple[str, ...]
    version: str = ""  # of the harness, pinned
    verified: bool = True  # False: written from its documentation, never run
    install: Install | None = None  # None: it ships with forge-server
    env: dict[str, str] = {}
    files: tuple[FileSpec, ...] = ()
    stdin: str | None = None  # None: an empty one
    window_margin: int = 0  # tokens that {window} stays below the engine's window
    max_hold_s: float = 600.0  # how long a call may be held before the harness gives up on it
    side_calls: tuple[SideCall, ...] = ()
    normalise: Normalise = Normalise()
    limits: Limits = Limits()
    sub_agents: SubAgents | None = None  # None: its requests do not tell
    ends: Ends = Ends()
    append_only: bool = True  # every request of a conversation extends the one before, once normalised
    looks_up: tuple[str, ...] = ()  # hosts that it tries to reach even so
    known_limits: tuple[str, ...] = ()  # sentences

    def __post_init__(self) -> None:
        if not self.argv:
            raise ValueError("argv is empty")
        if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", self.name):
            raise ValueError(f"name {self.name!r} is not made of lower case letters, digits and hyphens")
        for text in (*self.argv, *self.env.values()):
            for name in _BRACED.findall(text):
                if name not in PLACEHOLDERS:
                    raise ValueError(f"unknown placeholder {{{name}}}; known: {', '.join(PLACEHOLDERS)}")
        if not self.append_only and not self.known_limits:
            raise ValueError("append_only is false: say in known_limits what changes from call to call")
        if self.window_margin < 0:
            raise ValueError("window_margin is below 0")
        if self.install is None and any("{env}" in text for text in (*self.argv, *self.env.values())):
            raise ValueError("{env} is used but nothing is installed")


def _check_pattern(pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
