"""The test lab itself: a scripted engine and a whole server, shown with the harness that ships with it."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness_lab import Asked, Call, Fault, Lab, Say, harness_lab
from qwen3 import qwen3
from sample_oracle import minimum
from scripted_engine import logprob_size

pytestmark = pytest.mark.sandbox


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("lab")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    with harness_lab(folder, model=folder / "model") as made:
        yield made


def write_and_read(asked: Asked) -> Say:
    return (
        Say(calls=[Call("shell", {"command": "printf 'hello\\n' > a.txt"})]),
        Say(calls=[Call("shell", {"command": "cat a.txt x.txt"})]),
        Say(calls=[Call("finish", {"answer": asked.last.strip()})]),
    )[asked.turn]


def test_a_conversation_without_reasoning_is_one_sample(lab: Lab) -> None:
    result = lab.run(
        "react",
        write_and_read,
        instruction="Write a file",
        files={"x.txt": "there\n"},
        expect={"a.txt": "hello\n", "answer.txt": "hello\nthere"},
    )
    assert (result.outcome, result.reward, result.exit_code) == ("completed", 1.0, 0), result.explain()
    assert result.violations == []
    assert result.drift == {"first": 1} and result.merge_ratio == 3.0
    assert [call.mode for call in result.calls] == ["record"] * 3
    assert [request.path for request in result.requests] == ["/v1/chat/completions"] * 3
    assert len(result.requests[2].json["messages"]) == 6
    assert [asked.turn for asked in result.asked] == [0, 1, 2]
    assert result.asked[0].tool_names == ["shell", "finish"] and result.asked[0].last_user == "Write a file"


def test_reasoning_and_odd_tokens_are_recorded_exactly(lab: Lab) -> None:
    """Whatever the model says, the samples hold it; what the chat template makes of it later is another sample."""

    def policy(asked: Asked) -> Say:
        if asked.turn == 0:
            return Say("Grüße.\n\n", "hm", [Call("shell", '{"command":"echo \\u00fc"}')], split=True)
        return Say("ü it is", "so")

    result = lab.run("react", policy, instruction="Look")
    assert result.outcome == "completed" and result.violations == [], result.explain()
    first, second = result.samples
    said = qwen3().decode(first.tokens[first.loss_mask == 1])
    assert said == (
        '<think>\nhm\n</think>\n\nGrüße.\n\n\n<tool_call>\n{"name": "shell", "arguments": '
        '{"command":"echo \\u00fc"}}\n</tool_call><|im_end|>'
    )
    ids = first.tokens[first.loss_mask == 1].tolist()
    assert ids != qwen3().encode(said)
    at = int(first.prompt_len)
    assert first.logprobs[first.loss_mask == 1].tolist() == [
        -logprob_size(at + k, i) for k, i in enumerate(ids)
    ]
    assert result.asked[1].last == "ü\n"
    assert result.drift == {"first": 1, second.break_reason.value: 1}


def test_the_oracle_sees_one_conversation(lab: Lab) -> None:
    result = lab.run("react", write_and_read, instruction="Write a file")
    found = minimum(result.askings())
    assert found.samples == len(result.samples) == 1 and found.parents == {0: None, 1: 0, 2: 1}


def test_a_wrong_file_gives_nothing(lab: Lab) -> None:
    result = lab.run("react", write_and_read, instruction="Write a file", expect={"a.txt": "hallo\n"})
    assert (result.outcome, result.reward) == ("completed", 0.0), result.explain()
    assert "a.txt differs" in result.logs["verifier"]


@pytest.mark.parametrize(
    "fault", [Fault(status=429, retry_after=0), Fault(status=500), Fault(drop=True), Fault(slow_s=0.3)]
)
def test_trouble_of_the_engine_is_told_and_survived(lab: Lab, fault: Fault) -> None:
    result = lab.run("react", write_and_read, instruction="Write a file", faults={1: fault})
    assert result.outcome == "completed" and result.violations == [], result.explain()
    assert len(result.asked) == 3 and result.trained_calls == 3
    assert minimum(result.askings()).samples == len(result.samples) == 1


@pytest.mark.parametrize("fault", [Fault(status=500), Fault(status=429, retry_after=0), Fault(drop=True)])
def test_trouble_at_the_door_is_told_and_survived(lab: Lab, fault: Fault) -> None:
    """The relay dials again when the connection breaks; what has a status is the harness's business."""
    result = lab.run("react", write_and_read, instruction="Write a file", door_faults={1: fault})
    assert result.outcome == "completed" and result.violations == [], result.explain()
    assert len(result.requests) == 4 and len(result.calls) == 3
    assert minimum(result.askings()).samples == len(result.samples) == 1


def test_a_policy_that_fails_is_a_refusal(lab: Lab) -> None:
    def policy(asked: Asked) -> Say:
        raise RuntimeError("no idea")

    result = lab.run("react", policy, instruction="Write a file")
    assert result.calls[0].status == 400 and "no idea" in result.log, result.explain()


def test_hosts_that_are_looked_up_are_noted(lab: Lab) -> None:
    """Nothing answers in a sandbox, but whoever asks is seen."""
    hosts = ("Telemetry.example.com", "localhost", "a.example")
    ask = f"for h in {hosts}:\n try: socket.getaddrinfo(h, 443)\n except OSError as e: print(e)"

    def policy(asked: Asked) -> Say:
        command = f"python3 - <<'PY'\nimport socket\n{ask}\nPY"
        return Say("done") if asked.turn else Say(calls=[Call("shell", {"command": command})])

    result = lab.run("react", policy, instruction="Look")
    assert result.looked_up == ("a.example", "telemetry.example.com"), result.asked[1].last
    assert result.asked[1].last.count("not known") == 2
    assert lab.run("react", write_and_read, instruction="Write a file").looked_up == ()


@pytest.mark.parametrize("forwarding", ["record", "splice"])
def test_weights_are_swapped_while_a_call_runs(lab: Lab, tmp_path: Path, forwarding: str) -> None:
    """The call ends with the weights that it began with, the next one waits and has the new ones."""
    before = lab.server.policies.current
    version = lab.export(tmp_path)
    swapping = threading.Thread(target=lab.swap, args=(version,))

    def loading() -> bool:
        return any(row.version == version and row.state == "loading" for row in lab.client.policies())

    def policy(asked: Asked) -> Say:
        if asked.turn == 1:
            swapping.start()
            deadline = time.monotonic() + 60
            while not loading():
                assert time.monotonic() < deadline
                time.sleep(0.01)
        return write_and_read(asked)

    result = lab.run("react", policy, instruction="Write a file", forwarding=forwarding)
    swapping.join(60)
    assert (result.outcome, result.violations) == ("completed", []), result.explain()
    assert [call.policy_version for call in result.calls] == [before, before, version]
    (sample,) = result.samples
    assert sorted(set(sample.versions[sample.loss_mask == 1].tolist())) == [before, version]
    assert lab.engine.label.startswith(f"forge-{version}-")


def test_weights_that_nobody_announced_train_nothing(lab: Lab) -> None:
    now = lab.server.policies.current
    faults = {1: Fault(swap=f"forge-{now + 7}-x", at=0.5)}
    result = lab.run("react", write_and_read, instruction="Write a file", faults=faults, forwarding="splice")
    lab.engine.sampled = lab.engine.label
    assert (result.outcome, result.violations) == ("completed", []), result.explain()
    assert {call.mode for call in result.calls} == {"splice"}
    assert [call.untrainable for call in result.calls] == [None, "unknown_version", "unknown_version"]
    assert [call.policy_version for call in result.calls] == [now, now, now + 7]
    assert result.trained_calls == 1
