"""smolagents from PyPI, unmodified, in the sandbox and offline, against a scripted model."""

from collections.abc import Iterator

import msgspec
import pytest
from harness_lab import Asked, Call, Lab, Say
from python_harness import check_append_only, check_refused, check_solved, spec_lab, spec_of

from forge_server.domain.states import AttemptState
from forge_server.proxy.dialects.chat import read
from forge_server.proxy.ports import CallPolicy
from forge_server.proxy.sampling import pin

pytestmark = pytest.mark.sandbox
SPEC = spec_of("smolagents")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with spec_lab(tmp_path_factory.mktemp("smolagents"), SPEC) as made:
        yield made


def code(text: str, thought: str = "So it is.") -> str:
    return f"Thought: {thought}\n<code>\n{text}\n</code>"


def test_it_writes_code_in_one_sample(lab: Lab) -> None:
    """What it says again behind its code is taken out; what is left is what the model said."""

    def policy(asked: Asked) -> Say:
        return (
            Say(code("print(bash(command='cat word.txt'))")),
            Say(code("import os\nprint(os.listdir('/workspace'), 1 / 0)")),
            Say(code("with_quote = \"it's\"\nprint(bash('echo '[:4] + ' }}]'))")),
            Say(code("final_answer('plum')")),
        )[asked.turn]

    result = lab.run(
        "smolagents",
        policy,
        instruction="Say it.",
        files={"word.txt": "plum\n"},
        expect={"answer.txt": "plum"},
    )
    check_solved(result, SPEC)
    check_append_only(result)
    assert result.drift == {"first": 1} and result.trained_calls == 4, result.explain()
    assert "plum" in result.asked[1].last and "ZeroDivisionError" in result.asked[2].last
    sent = result.requests[1].json["messages"][2]
    assert sent["role"] == "assistant" and "Calling tools:" in sent["content"][0]["text"]
    said = [m["content"] for m in result.asked[3].messages if m["role"] == "assistant"]
    assert len(said) == 3 and all(text.endswith("</code>") for text in said)
    assert result.requests[0].json["stop"] == ["Observation:", "Calling tools:", "</code>"]


def test_its_tool_calls_come_back_as_text(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Its own turn comes back as text. It asks for a grammar, so that a call is not trained; in training runs that is
    lifted."""
    spec = msgspec.structs.replace(SPEC, env={**SPEC.env, "SMOLAGENTS_AGENT": "tools"})

    def policy(asked: Asked) -> Say:
        return (
            Say(calls=[Call("bash", {"command": "cat word.txt"})]),
            Say(calls=[Call("final_answer", {"answer": "plum"})]),
        )[asked.turn]

    with spec_lab(tmp_path_factory.mktemp("tools"), spec) as lab:
        result = lab.run(
            "smolagents",
            policy,
            instruction="Say it.",
            files={"word.txt": "plum"},
            expect={"answer.txt": "plum"},
        )
    check_solved(result, SPEC)
    check_append_only(result)
    assert {request.json["tool_choice"] for request in result.requests} == {"required"}
    assert [call.untrainable for call in result.calls] == ["constrained"] * 2 and not result.samples
    for seq, request in enumerate(result.requests):
        policy_of_training = CallPolicy(state=AttemptState.RUNNING, mode="train", model="forge")
        pinned = pin(read(request.body), policy_of_training, attempt_id="at-1", seq=seq, tokens_left=10_000)
        assert pinned.body["tool_choice"] == "auto" and not pinned.constrained
        assert pinned.flags["lifted"] == ["tool_choice"]
    sent = result.requests[1].json["messages"]
    assert sent[2]["content"][0]["text"].startswith("Calling tools:") and "tool_calls" not in sent[2]
    assert sent[3]["role"] == "user" and "plum" in sent[3]["content"][0]["text"]


def test_one_refusal_ends_it(lab: Lab) -> None:
    result = lab.run(
        "smolagents", lambda asked: Say(code("print(bash('ls'))")), instruction="Go on.", max_calls=1
    )
    check_refused(result, SPEC)
