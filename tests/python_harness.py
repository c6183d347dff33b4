"""What the tests of the Python harnesses share: a lab for a spec, and what has to hold of every run."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import yaml
from harness_lab import Lab, Result, harness_lab

from forge_server import assets
from forge_server.environments import ensure_harness
from forge_server.harness.load import load
from forge_server.harness.spec import Spec
from forge_server.settings import HarnessSettings, SchedulerSettings

PATHS = {
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages?beta=true",
    "gemini": "/v1beta/models/forge:streamGenerateContent?alt=sse",
}


def spec_of(harness: str) -> Spec:
    return load(assets.folder("harness_specs") / harness / "spec.yaml")


@contextmanager
def spec_lab(
    folder: Path, spec: Spec, *, patience_s: float = 30.0, window: int = 32_768, **more: Any
) -> Iterator[Lab]:
    """A lab in which ``spec`` counts, whatever ships under its name; its harness is installed. One that is refused has
    ``patience_s`` to end by itself before it is stopped."""
    assert spec.install is not None
    ensure_harness(spec.name, spec.install)
    place = folder / "specs" / spec.name
    place.mkdir(parents=True)
    (place / "spec.yaml").write_text(yaml.safe_dump(msgspec.to_builtins(spec), sort_keys=False))
    paths, scheduler = (str(place.parent),), SchedulerSettings(heartbeat_s=patience_s, grace_s=1.0)
    harness = HarnessSettings(paths=paths)
    with harness_lab(folder, window=window, harness=harness, scheduler=scheduler, **more) as lab:
        yield lab


def check_solved(result: Result, spec: Spec) -> None:
    """The task is done, everything is recorded, no host was looked up that should not be."""
    assert (result.outcome, result.reward) == ("completed", 1.0), result.explain()
    assert result.exit_code in spec.ends.ok, result.explain()
    assert result.violations == []
    sent = [request for request in result.requests if request.method == "POST"]
    assert len(sent) == len(result.calls) == len(result.asked), result.explain()
    assert {request.path for request in result.requests} == {PATHS[spec.api]}
    assert {call.end for call in result.calls} == {"ok"}, result.explain()
    assert set(result.looked_up) <= set(spec.looks_up)


def check_append_only(result: Result) -> None:
    """Every request of the one conversation extends the one before, as the harness sent it."""
    for earlier, later in zip(result.requests, result.requests[1:], strict=False):
        before = earlier.json["messages"]
        assert later.json["messages"][: len(before)] == before
        assert later.json.get("tools") == earlier.json.get("tools")


def check_refused(result: Result, spec: Spec) -> None:
    """The budget was used up after one call: the harness was told so by a 400, and ended or was stopped."""
    assert result.exit_code in spec.ends.refused, result.explain()
    assert result.requests[0].status == [200] and result.requests[1].status == [400], result.explain()
    assert result.violations == []
    assert len(result.asked) == 1
