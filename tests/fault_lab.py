"""Harnesses in trouble: what goes wrong with the model server while one works, and what must hold afterwards.

Either the run goes on as if nothing had happened, or it ends: then as an infra failure, with an exit code that its
spec names. In both cases what was recorded is right.
"""

import contextlib
import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import msgspec
import yaml
from harness_lab import Asked, Fault, Lab, Policy, Result, Say, harness_lab
from harness_policies import INSTRUCTION, STANDARD, standard

from forge_server.domain.states import CallEnd
from forge_server.harness.spec import Spec
from forge_server.proxy import routes
from forge_server.settings import HarnessSettings, ProxySettings, SchedulerSettings

AT = 2
"""The generation that meets the trouble: in the middle of the standard task."""
LAST = 500
PATIENCE_S = 20.0
"""A harness that is refused has at least so long to end by itself before the runner stops it."""
LIMIT_S = 60.0


@dataclass(frozen=True)
class Trouble:
    """``faults``: of the engine, one generation after the other. ``lasting``: the first one, for ever. ``mode``:
    forwarding. ``may_end``: the answer had begun, so that not every harness can ask again. ``swap``: weights change in
    mid-call, ``drained`` (the call ends before that) or ``spans`` (it does not)."""

    name: str
    mode: str = "splice"
    faults: tuple[Fault, ...] = ()
    lasting: bool = False
    may_end: bool = False
    swap: str = ""

    def beginning(self, first: int) -> dict[int, Fault]:
        """For ``lab.run``: by number of the generation."""
        if self.lasting:
            return dict.fromkeys(range(first, LAST), self.faults[0])
        return dict(enumerate(self.faults, first))


def troubles(slow_s: float) -> tuple[Trouble, ...]:
    """Everything that can go wrong. ``slow_s``: until the first byte, longer than keep-alives wait.

    A dropped connection is dropped twice: had the engine closed a kept one, the client sends again without a word.
    """
    away = {"429": Fault(status=429, retry_after=1), "500": Fault(status=500), "drop": Fault(drop=True)}
    return (
        *(Trouble(f"{name} once", faults=(fault,) * (1 + fault.drop)) for name, fault in away.items()),
        Trouble("slow first byte", faults=(Fault(slow_s=slow_s),)),
        Trouble("slow, then 500", faults=(Fault(slow_s=slow_s, status=500),), may_end=True),
        Trouble("swap, drained", "record", swap="drained"),
        Trouble("swap, spans", swap="spans"),
        *(Trouble(f"{name} for good", "record", (fault,), lasting=True) for name, fault in away.items()),
    )


@dataclass(frozen=True)
class Task:
    """What a harness is given to do; ``policy`` is made for each run. ``at``: the generation to trouble."""

    policy: Callable[[Lab], Policy]
    instruction: str = INSTRUCTION
    expect: Mapping[str, str] = field(default_factory=lambda: STANDARD)
    files: Mapping[str, str] = field(default_factory=dict)
    at: int = AT


def task_of(harness: str) -> Task:
    if harness == "browser-use":
        page = "<html><body><h1>plum</h1><a href='next.html'>on</a></body></html>"
        return Task(_browse, "Say it.", {"answer.txt": "plum"}, {"index.html": page, "next.html": page}, at=1)
    return Task(lambda lab: standard(harness))


def _browse(lab: Lab) -> Policy:
    """Its steps are told by their number: each is a conversation of its own."""

    def policy(asked: Asked) -> Say:
        actions = (
            {"wait": {"seconds": 0}},
            {"navigate": {"url": "http://127.0.0.1:8000/next.html", "new_tab": False}},
            {"done": {"text": "plum", "success": True, "files_to_display": []}},
        )
        action = actions[min(len(lab.engine.asked), 3) - 1]
        step = {"thinking": "so", "evaluation_previous_goal": "Success", "memory": "none", "next_goal": "on"}
        return Say(json.dumps(step | {"action": [action]}))

    return policy


def blind(spec: Spec) -> Spec:
    """browser-use without screenshots, which this engine cannot see."""
    return msgspec.structs.replace(spec, env={**spec.env, "BROWSER_USE_VISION": "off"})


@contextlib.contextmanager
def fault_lab(
    folder: Path,
    *,
    keepalive_after_s: float,
    every_s: float,
    drain_s: float = 300.0,
    specs: Sequence[Spec] = (),
) -> Iterator[Lab]:
    """A lab with weights to swap. ``specs`` count instead of those that ship under their names."""
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text("{}")
    (folder / "specs").mkdir()
    for spec in specs:
        place = folder / "specs" / spec.name
        place.mkdir()
        (place / "spec.yaml").write_text(yaml.safe_dump(msgspec.to_builtins(spec), sort_keys=False))
    with (
        mock.patch.object(routes, "KEEPALIVE_EVERY_S", every_s),
        harness_lab(
            folder,
            model=folder / "model",
            harness=HarnessSettings(paths=(str(folder / "specs"),)),
            proxy=ProxySettings(keepalive_after_s=keepalive_after_s, drain_s=drain_s),
            scheduler=SchedulerSettings(heartbeat_s=PATIENCE_S, grace_s=2.0),
        ) as lab,
    ):
        yield lab


@dataclass(frozen=True)
class Seen:
    """What became of one harness in one trouble. ``wrong``: what should not be, in sentences."""

    harness: str
    trouble: Trouble
    result: Result
    wrong: list[str]
    how: str

    def explain(self) -> str:
        return f"{self.harness}, {self.trouble.name}: {self.how}; {self.wrong}\n{self.result.explain()}"


def meet(
    lab: Lab,
    spec: Spec,
    trouble: Trouble,
    *,
    samples: int = 1,
    max_seconds: float = 180.0,
    task: Task | None = None,
) -> Seen:
    """Have a harness meet a trouble. ``samples``: of the run without it."""
    task = task or task_of(spec.name)
    policy = task.policy(lab)
    swap = _Swap(lab, policy, trouble.swap, task.at) if trouble.swap else None
    result = lab.run(
        spec.name,
        swap or policy,
        instruction=task.instruction,
        files=task.files,
        expect=task.expect,
        max_seconds=max_seconds,
        forwarding=trouble.mode,
        faults=swap.faults if swap else trouble.beginning(task.at),
    )
    went_on = (result.outcome, result.reward) == ("completed", 1.0)
    wrong = _records(result)
    wrong += _going_on(result, spec, trouble, samples) if went_on else _ending(result, spec, trouble)
    if swap is not None:
        wrong += swap.end(result)
    if any(fault.slow_s for fault in trouble.faults):
        wrong += _keepalives(result, spec)
    stopped = f" (stopped: {result.stopped_by})" if result.stopped_by else ""
    how = "goes on" if went_on else f"{result.kind}, rc {result.exit_code}{stopped}"
    if not went_on and result.outcome != "infra_failure":
        how = f"{result.outcome} {how}"
    return Seen(spec.name, trouble, result, wrong, how)


def _records(result: Result) -> list[str]:
    """The log is whole, and no call is trained twice."""
    wrong = [f"violation: {violation}" for violation in result.violations]
    if [call.seq for call in result.calls] != list(range(len(result.calls))):
        wrong.append("the numbering of the calls has a hole")
    wrong += [f"call {call.seq} has no end" for call in result.calls if call.end is None]
    owned = Counter(span.call_id for sample in result.samples for span in sample.spans if span.owned)
    answered = {call.id for call in result.calls if call.end == CallEnd.OK}
    wrong += [f"call {call} is trained {count} times" for call, count in owned.items() if count > 1]
    wrong += [f"call {call} is trained though it was not answered" for call in owned if call not in answered]
    return wrong


def _going_on(result: Result, spec: Spec, trouble: Trouble, samples: int) -> list[str]:
    wrong = []
    if trouble.lasting:
        wrong.append("it went on although the engine was dead")
    if result.exit_code not in spec.ends.ok:
        wrong.append(f"exit code {result.exit_code}, not one of {spec.ends.ok}")
    answered = [call for call in result.calls if call.end == CallEnd.OK and call.retry_of is None]
    failed = sum(call.end == CallEnd.UPSTREAM_ERROR for call in result.calls)
    statuses = sum(bool(fault.status) for fault in trouble.faults)
    drops = sum(fault.drop for fault in trouble.faults)
    if not statuses <= failed <= statuses + drops:
        wrong.append(f"{failed} calls failed where {statuses} to {statuses + drops} should")
    if len(answered) != len(result.asked) or len(answered) + failed != len(result.calls):
        wrong.append(
            f"{len(result.asked)} answers of the engine, {len(result.calls)} calls, {failed} of them failed"
        )
    wanted = sum(not call.label for call in answered)
    if result.trained_calls != wanted:
        wrong.append(f"{result.trained_calls} of {wanted} calls are trained")
    if len(result.samples) != samples:
        wrong.append(f"{len(result.samples)} samples, without the trouble {samples}: {result.drift}")
    return wrong


def _ending(result: Result, spec: Spec, trouble: Trouble) -> list[str]:
    wrong = []
    if not (trouble.lasting or trouble.may_end):
        wrong.append("it did not survive")
    if (result.outcome, result.kind) != ("infra_failure", "engine_error"):
        wrong.append(f"the engine's failure became {result.outcome}/{result.kind}")
    if not result.stopped_by and result.exit_code not in (*spec.ends.model_dead, *spec.ends.refused):
        wrong.append(f"exit code {result.exit_code} is none of its spec's")
    return wrong


def _keepalives(result: Result, spec: Spec) -> list[str]:
    """A stream has shown that it lives, unless its API has no way to."""
    shown = [len(request.pieces) > 2 for request in result.requests]
    streams = [request.json.get("stream") for request in result.requests if request.method == "POST"]
    wanted = spec.api != "gemini" and any(streams)
    return [] if any(shown) == wanted else [f"keep-alives: {any(shown)}, should be {wanted}"]


class _Swap:
    """The policy that has its weights swapped while it samples."""

    def __init__(self, lab: Lab, policy: Policy, how: str, at: int) -> None:
        self._lab, self._policy, self._how, self._at = lab, policy, how, at
        self._before, self._label = lab.server.policies.current, lab.engine.label
        folder = Path(lab.settings.folder) / f"weights-{self._before + 1}"
        self._version = lab.export(folder)
        (manifest,) = folder.rglob("manifest.json")
        new = f"forge-{self._version}-{hashlib.sha256(manifest.read_bytes()).hexdigest()[:12]}"
        self.faults = {at: Fault(swap=new)} if how == "spans" else {}
        self._thread = threading.Thread(target=lab.swap, args=(self._version,), daemon=True)

    def __call__(self, asked: Asked) -> Say:
        engine, server = self._lab.engine, self._lab.server
        if len(engine.asked) > self._at and engine.asked[self._at] is asked:
            self._thread.start()
            self._wait(lambda: server.gate.held)
            if self._how == "spans":  # until it has happened, and then half of what is said was said before
                self._wait(lambda: server.policies.current == self._version and not server.gate.held)
                engine.sampled = self._label
        return self._policy(asked)

    def _wait(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not holds():
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def end(self, result: Result) -> list[str]:
        """What is wrong with the versions of the calls."""
        if self._thread.ident is None:
            return ["the weights were not swapped"]
        self._thread.join(LIMIT_S)
        found = versions(result)
        old, new = {self._before}, {self._version}
        first = [old] * self._at + [old | new if self._how == "spans" else old]
        wanted = first + [new] * (len(found) - len(first))
        return [] if found == wanted else [f"the calls were sampled by {found}"]


def versions(result: Result) -> list[set[int]]:
    """The versions that sampled each call, in the order of the calls."""
    found = {
        span.call_id: set(sample.versions[span.prompt_end : span.end].tolist())
        for sample in result.samples
        for span in sample.spans
        if span.owned
    }
    return [found.get(call.id, {call.policy_version}) for call in result.calls if call.end == CallEnd.OK]
