"""The settings of a run: one ``[[run]]`` table of forge.toml, or the body of ``POST /runs``.

They are frozen when the run is created and stored with it. A run is known by its name: equal settings
resume it, different ones are an error that names the key (``first_change``), because the figures of a run
whose rules changed midway mean nothing. The one thing that a person may change, the mixture, is kept beside them.
"""

import math
import re
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

Mode = Literal["train", "eval", "record"]
"""What a rollout is for. Only ``train`` rollouts are ever trained."""

Forwarding = Literal["auto", "record", "splice"]
"""How calls reach the engine: as messages (``record``), or as the exact tokens that were sampled before
(``splice``); ``auto`` splices where the engine offers it."""

EXTERNAL = "external"
"""The run, and its harness, that rollouts join which a harness registers itself: nothing is drawn for it."""

_MOST_AT_ONCE = 1_000_000  # rollouts, which are built in memory before the first of them is written
_MOST_COUNTED = 2**31 - 1  # what an INTEGER column takes

_NAME = re.compile(r"\w[\w.:@+ -]{0,127}")
"""It stands in URLs."""


class RunEval(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[run.eval]``: the live policy measured on tasks that are not trained on.

    A round runs before the first update, after every ``every`` versions, and after the last one.
    """

    split: str = "test"
    every: int = 0  # versions between two rounds; 0: only before and after training
    k: int = 1  # rollouts per task
    temperature: float = 1.0
    max_tasks: int = 0  # the first so many of the split, by name; 0: all
    at_start: bool = True
    at_end: bool = True

    def __post_init__(self) -> None:
        _at_least("eval.every", self.every, 0)
        _at_least("eval.k", self.k, 1)
        _at_least("eval.temperature", self.temperature, 0)
        _at_least("eval.max_tasks", self.max_tasks, 0)


class RunSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run. Every count is per the word of DESIGN §1: group, rollout, attempt, call."""

    name: str
    kind: Mode = "train"
    policy: str = "default"  # whose versions it uses and, when training, makes

    # what is attempted
    taskset: str
    split: str = "train"
    tasks: tuple[str, ...] = ()  # only these task names; empty: every ready task of the split
    harness: str = ""  # one harness, or
    harnesses: dict[str, float] = {}  # several and their weights: each group is run in one of them
    seed: int = 0

    # how much
    steps: int = 100  # batches trained (train), rounds of groups (record); an eval run is one round
    groups: int = 8  # groups per step
    n: int = 8  # rollouts per group
    oversample: int = 0  # further rollouts per group: n valid ones cancel the rest; favours short ones
    mode: Literal["sync", "async"] = "sync"

    # how each attempt is sampled and bounded
    temperature: float = 1.0
    max_calls: int = 100  # per attempt; beyond it the attempt ends as budget_calls
    max_tokens: int = 200_000  # completion tokens per attempt; beyond it budget_tokens
    max_completion_tokens: int = 4096  # per call: what a harness asks for is clamped to it
    max_seconds: float = 1800.0  # the agent clock, from the harness's start
    max_attempts: int = 3  # per rollout, first one included
    forwarding: Forwarding = (
        "auto"  # of a conversation's history: sampled tokens (splice) or messages (record)
    )
    keep_reasoning: bool = (
        False  # splice only: keep reasoning that harness or template drops from the history
    )

    # what of it is trained, and how
    max_generation_batches: int = 3  # rounds of drawing per step while too few groups have a signal
    max_staleness: int = 1  # batches between the sampling version and the update, async only
    max_sample_tokens: int = 0  # a longer sample loses its suffix; 0: the engine's window
    overrides: tuple[str, ...] = ()  # veRL Hydra overrides, verbatim (learning rate, warm-up, loss, …)
    export_every: int = 1  # batches between two exported policy versions
    save_every: int = 1  # batches between two saves of the trainer's full state

    eval: RunEval | None = None

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(
                f"name {self.name[:40]!r} is not 1 to 128 letters, digits, spaces or any of _.:@+-"
            )
        for key, most in (("taskset", 128), ("split", 32), ("harness", 64)):
            if len(getattr(self, key)) > most:
                raise ValueError(f"{key} is longer than {most} characters")
        if bool(self.harness) == bool(self.harnesses):
            raise ValueError("exactly one of harness and harnesses must be given")
        for harness, weight in self.harnesses.items():
            if not 0 < weight < math.inf:
                raise ValueError(f"harnesses.{harness} must be above 0, not {weight:g}")
        counts = ("groups", "n", "steps", "max_calls", "max_tokens", "max_completion_tokens", "max_attempts")
        for key in (*counts, "max_generation_batches", "export_every", "save_every"):
            _at_least(key, getattr(self, key), 1)
        for key in ("temperature", "max_seconds", "max_staleness", "max_sample_tokens", "oversample"):
            _at_least(key, getattr(self, key), 0)
        if self.keep_reasoning and self.forwarding == "record":
            raise ValueError(
                "keep_reasoning needs forwarding splice or auto: a recorded prompt is the engine's"
            )
        if self.kind == "eval" and self.oversample:
            raise ValueError(
                "an evaluation run takes no oversample: the quick rollouts alone would be measured"
            )
        if self.kind == "train":
            if self.n < 2:
                raise ValueError("n must be at least 2 in a training run: one rollout has no baseline")
            if self.temperature <= 0:
                raise ValueError("temperature must be above 0 in a training run")
            if self.mode == "sync" and self.export_every != 1:
                raise ValueError(
                    "export_every must be 1 in sync mode: a batch is sampled from the last update"
                )
            if self.mode == "async" and self.max_staleness < self.export_every - 1:
                raise ValueError("max_staleness must be at least export_every - 1: so old do versions get")
        elif self.eval is not None:
            raise ValueError(f"a run of kind {self.kind} takes no [run.eval]; set split, n and temperature")

    @property
    def weights(self) -> dict[str, float]:
        """Of the harnesses, as they were given."""
        return dict(self.harnesses) or {self.harness: 1.0}

    @property
    def mixture(self) -> tuple[tuple[str, float], ...]:
        """(harness, share) by name, shares adding up to 1."""
        weights = self.weights
        total = sum(weights.values())
        return tuple((name, weights[name] / total) for name in sorted(weights))

    def mixed(self, weights: Mapping[str, float]) -> "RunSettings":
        """These settings with another mixture. Raises ValueError as for a table that says so."""
        return msgspec.structs.replace(self, harness="", harnesses=dict(weights))

    @property
    def evaluation(self) -> RunEval | None:
        """The rounds of a training run; for a run of kind ``eval`` the one round that it is."""
        if self.kind == "eval":
            return RunEval(split=self.split, k=self.n, temperature=self.temperature)
        return self.eval

    def temperature_of(self, mode: Mode) -> float:
        """The sampling temperature of a rollout with this mode."""
        return self.eval.temperature if mode == "eval" and self.eval is not None else self.temperature


def _at_least(key: str, value: float, least: float) -> None:
    if value < least:
        raise ValueError(f"{key} must be at least {least:g}, not {value:g}")


def check_sizes(given: RunSettings) -> None:
    """Raises ValueError, which names the keys, when the run is larger than can be.

    For settings that a person gives: those of a run that was stored before there was a limit are still read.
    """
    key, at_once = "n", given.n
    if given.kind != "eval":
        key, at_once = "groups * (n + oversample)", given.groups * (given.n + given.oversample)
    if given.kind == "train" and given.mode == "async":
        key, at_once = f"(max_staleness + 1) * {key}", min(given.max_staleness + 1, given.steps) * at_once
    bounds = [
        (key, at_once, _MOST_AT_ONCE),
        ("steps", given.steps, _MOST_COUNTED),
        ("max_attempts", given.max_attempts, _MOST_COUNTED),
    ]
    if given.eval is not None:
        bounds.append(("eval.k", given.eval.k, _MOST_AT_ONCE))
    for key, value, most in bounds:
        if value > most:
            raise ValueError(f"{key} must be at most {most:,}, not {value:,}")


def first_change(stored: dict[str, Any], given: RunSettings) -> str | None:
    """The dotted name of the first key whose stored value differs from the given one, or None.

    A key that was added to the schema after the run was stored compares as its default.
    """
    before = msgspec.to_builtins(msgspec.convert(stored, RunSettings, strict=False))
    return _first_difference(before, msgspec.to_builtins(given), "")


def _first_difference(a: Any, b: Any, path: str) -> str | None:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in sorted(a.keys() | b.keys()):
            found = _first_difference(a.get(key), b.get(key), f"{path}.{key}" if path else str(key))
            if found:
                return found
        return None
    return None if a == b else path
