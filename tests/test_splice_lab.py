"""Token-exact forwarding in a whole server: a sandboxed harness, vLLM's interface on a socket, the drift report."""

from collections.abc import Iterator

import pytest
from harness_lab import Asked, Call, Fault, Lab, Result, Say, harness_lab

from forge_server.export import reports
from forge_server.export.records import find_run
from forge_server.trajectory.drift import DriftReport

pytestmark = pytest.mark.sandbox


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with harness_lab(tmp_path_factory.mktemp("lab"), forwarding="auto") as made:
        yield made


def rough(asked: Asked) -> Say:
    """As a model speaks: JSON in its own way, odd tokens, blank lines."""
    return (
        Say(
            reasoning="I write. ",
            calls=[Call("shell", '{"command":"printf \'hello\\\\n\' > a.txt"}')],
            split=True,
        ),
        Say(text="I look.\n\n", calls=[Call("shell", '{"command": "cat a.txt x.t\\u0078t"}')]),
        Say(calls=[Call("finish", {"answer": asked.last.strip()})], split=True),
    )[asked.turn]


def run(lab: Lab, **more: object) -> tuple[Result, DriftReport]:
    result = lab.run(
        "react",
        rough,
        instruction="Write a file",
        files={"x.txt": "there\n"},
        expect={"a.txt": "hello\n", "answer.txt": "hello\nthere"},
        **more,  # type: ignore[arg-type]
    )
    assert (result.outcome, result.reward, result.violations) == ("completed", 1.0, []), result.explain()
    store = lab.server.store
    run_id = lab.client.rollout(result.rollout_id).rollout.run_id
    name = lab.client.run(run_id).name
    return result, reports.drift(store, find_run(store, name, lab.settings.engine.max_model_len))


def test_one_sample_where_recording_has_three(lab: Lab) -> None:
    result, report = run(lab)
    assert [call.mode for call in result.calls] == ["splice"] * 3
    assert result.drift == {"first": 1}
    assert (report.spliced, report.fallbacks) == (3, {})
    recorded, report = run(lab, forwarding="record")
    assert [call.mode for call in recorded.calls] == ["record"] * 3
    assert recorded.drift == {"first": 1, "template": 2}
    assert (report.spliced, report.fallbacks) == (0, {})


def test_an_engine_that_stumbles_costs_nothing_but_a_retry(lab: Lab) -> None:
    """A 500 and a lost connection while it generates: the harness asks again and goes on from the same tokens."""
    result, report = run(lab, faults={1: Fault(status=500), 3: Fault(drop=True)})
    assert [call.mode for call in result.calls if call.end == "ok"] == ["splice"] * 3
    assert result.drift == {"first": 1}
    assert report.fallbacks == {}
