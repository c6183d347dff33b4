"""Harnesses of every API while their model server is in trouble: they go on as if nothing had happened, or end as their
specs say and as an infra failure. All of them in all troubles: ``make prove-2``."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from fault_lab import Seen, Trouble, fault_lab, meet, task_of, troubles
from harness_lab import Asked, Fault, Lab, Say, ScriptedEngine
from harness_outside import run_outside, server_process
from harness_policies import STANDARD, done, script, shell
from python_harness import spec_of

from forge_server.app import load_specs
from forge_server.environments import ensure_harness
from forge_server.settings import Settings

pytestmark = pytest.mark.sandbox
SLOW_S = 1.5
KNOWN = {trouble.name: trouble for trouble in troubles(SLOW_S)}
FINE = Fault()
GEMINI = spec_of("gemini-cli")
IMPATIENT = msgspec.structs.replace(
    GEMINI,
    name="gemini-impatient",
    install=msgspec.structs.replace(GEMINI.install, env=GEMINI.name),
    files=tuple(
        msgspec.structs.replace(file, content=file.content.replace('"3600"', '"15"')) for file in GEMINI.files
    ),
)
"""Gemini CLI that waits fifteen seconds for headers: no answer is ever so slow unless it is made so."""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("faults")
    with fault_lab(folder, keepalive_after_s=0.2, every_s=0.2, specs=(IMPATIENT,)) as made:
        yield made


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Weights do not wait for calls."""
    with fault_lab(
        tmp_path_factory.mktemp("hasty"), keepalive_after_s=60.0, every_s=15.0, drain_s=0.2
    ) as made:
        yield made


def see(lab: Lab, harness: str, trouble: Trouble) -> Seen:
    spec = load_specs(Settings())[harness]
    if spec.install is not None:
        ensure_harness(harness, spec.install)
    seen = meet(lab, spec, trouble)
    assert not seen.wrong, seen.explain()
    return seen


@pytest.mark.parametrize("harness", ["codex", "claude-code-bare", "gemini-cli", "pi"])
def test_one_thing_after_the_other_goes_wrong(lab: Lab, harness: str) -> None:
    """A slow first byte, a 429, a 500, and a dropped connection: one sample, as without them."""
    slow, limited, broken, dropped = (
        KNOWN[name].faults for name in ("slow first byte", "429 once", "500 once", "drop once")
    )
    faults = (*slow, *limited, FINE, *broken, FINE, *dropped)
    seen = see(lab, harness, Trouble("all once", faults=faults))
    assert seen.how == "goes on", seen.explain()
    assert len(seen.result.requests) > len(seen.result.asked)


@pytest.mark.parametrize("harness", ["codex", "claude-code-bare", "pi"])
def test_the_engine_fails_when_the_answer_has_begun(lab: Lab, harness: str) -> None:
    """After keep-alives a failure is an event of the stream, which these take for a reason to ask again."""
    seen = see(lab, harness, KNOWN["slow, then 500"])
    assert seen.how == "goes on", seen.explain()
    assert all(request.status == [200] for request in seen.result.requests)


def test_a_harness_hangs_up_and_asks_again(lab: Lab) -> None:
    """What Gemini CLI would do after a minute, had its spec not set an hour. The engine is told to stop."""
    assert GEMINI.install is not None
    ensure_harness(GEMINI.name, GEMINI.install)
    task, before = task_of(GEMINI.name), lab.engine.aborted
    result = lab.run(
        IMPATIENT.name,
        task.policy(lab),
        instruction=task.instruction,
        expect=task.expect,
        faults={2: Fault(slow_s=90.0)},
        max_seconds=300.0,
        forwarding="splice",
    )
    assert (result.outcome, result.reward, result.violations) == ("completed", 1.0, []), result.explain()
    ends = [call.end for call in result.calls]
    assert ends[2] == "client_gone" and ends.count("ok") == 5, result.explain()
    assert {*ends} == {"ok", "client_gone"} and lab.engine.aborted > before
    assert len(result.samples) == 1 and result.trained_calls == 5, result.explain()


@pytest.mark.parametrize(
    ("harness", "trouble"), [("codex", "500 for good"), ("react", "429 for good"), ("pi", "drop for good")]
)
def test_a_dead_engine_is_nobodys_reward(lab: Lab, harness: str, trouble: str) -> None:
    """pi exits 0 even so."""
    seen = see(lab, harness, KNOWN[trouble])
    assert seen.how.startswith("engine_error"), seen.explain()
    assert seen.result.reward is None


def test_weights_that_wait_for_a_call(lab: Lab) -> None:
    see(lab, "claude-code-bare", KNOWN["swap, drained"])


def test_weights_that_change_within_a_call(hasty: Lab) -> None:
    """Each token knows its version."""
    see(hasty, "codex", KNOWN["swap, spans"])


@pytest.mark.parametrize("harness", ["codex", "pi"])
def test_the_server_is_killed_in_mid_call(tmp_path: Path, harness: str) -> None:
    """The relay asks again until it is back. To the harness that was a slow answer."""
    engine, spec = ScriptedEngine(), spec_of(harness)
    assert spec.install is not None
    ensure_harness(harness, spec.install)
    steps = script(
        harness,
        [
            lambda a: shell(harness, a, "printf 'one\\ntwo\\n' > notes.txt"),
            lambda a: shell(harness, a, "sed -i s/two/three/ notes.txt"),
            lambda a: shell(harness, a, "cp notes.txt copy.txt; cat copy.txt"),
            lambda a: done(harness, a),
        ],
    )
    with engine.serving(), server_process(tmp_path, engine) as served:

        def policy(asked: Asked) -> Say:
            if len(engine.asked) > 2 and engine.asked[2] is asked:
                served.kill()
                served.start()
            return steps(asked)

        engine.policy = policy
        result = run_outside(served, spec, tmp_path / "outside")
    assert result.exit_code in spec.ends.ok, result.log
    assert {name: (result.work / name).read_text() for name in STANDARD} == STANDARD, result.log
    assert [call.end for call in result.calls] == ["ok", "ok", "server_lost", "ok", "ok"], result.calls
    assert [call.untrainable for call in result.calls if call.end == "ok"] == [None] * 4
    assert {call.mode for call in result.calls if call.end == "ok"} == {"splice"}
    assert (result.samples, result.violations) == (1, [])


def test_the_task_is_troubled_in_its_middle() -> None:
    assert task_of("codex").at == 2 and KNOWN["drop for good"].beginning(2).keys() == set(range(2, 500))
