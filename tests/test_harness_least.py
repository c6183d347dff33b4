"""The least number of samples that each harness's own history allows: an oracle over nothing but its raw requests, and
the samples that token-exact forwarding makes of them, with the real Qwen3 tokenizer and chat template."""

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
from harness_lab import WINDOW, Asked, Call, Lab, Policy, Say, harness_lab
from harness_policies import done, script, shell, write
from node_harness import task_of
from sample_oracle import Found, minimum

from forge_server.app import load_specs
from forge_server.environments import ensure_harness
from forge_server.settings import Settings

pytestmark = pytest.mark.sandbox


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with harness_lab(tmp_path_factory.mktemp("least"), forwarding="splice", window=WINDOW) as made:
        yield made


def oddly(policy: Policy) -> Policy:
    """The same as no template and no tokenizer would write it: blank lines around the words, JSON with spaces where
    nobody puts them and escapes that nobody needs, thoughts with lines between them in every other turn, each answer
    with one token in two."""

    def odder(asked: Asked) -> Say:
        say = policy(asked)
        calls = [
            replace(
                call,
                arguments=json.dumps(call.arguments, separators=(" ,  ", " :  ")).replace(
                    "notes", "n\\u006ftes"
                ),
            )
            for call in say.calls
            if isinstance(call.arguments, dict)
        ]
        return replace(
            say,
            text=f"\n{say.text or 'Grüße 🎈, so it goes on.'}\n\n",
            reasoning=f" Turn {asked.turn}.\n\n\nWhy not? " if asked.turn % 2 == 0 else "",
            calls=calls,
            split=True,
        )

    return odder


def work(harness: str) -> Policy:
    """Two calls in one answer, one that fails, a file, and the last word."""

    def both(asked: Asked) -> Say:
        one, two = shell(harness, asked, "cat notes.txt"), shell(harness, asked, "wc -l notes.txt # é")
        return Say(calls=[*one.calls, *two.calls])

    return script(
        harness,
        [
            lambda a: write(harness, a, "notes.txt", 'one "1"\n\ttwo\n'),
            both,
            lambda a: shell(harness, a, "cat no-notes.txt"),
            lambda a: shell(harness, a, "sed 's/two/three/' notes.txt > copy.txt"),
            lambda a: done(harness, a, "Written."),
        ],
    )


COPY = {"description": "a copy", "prompt": "Copy it."}
AGENTS = {
    "claude-code": Call("Agent", COPY | {"subagent_type": "general-purpose", "run_in_background": False}),
    "opencode": Call("task", COPY | {"subagent_type": "general"}),
}


def delegation(harness: str) -> Policy:
    """Another agent makes the copy."""

    def policy(asked: Asked) -> Say:
        if harness == "opencode" and not asked.tools:
            return Say("A title")
        if "Copy it." in task_of(asked):
            steps = [
                lambda a: shell(harness, a, "sed 's/two/three/' notes.txt > copy.txt"),
                lambda a: Say("Done."),
            ]
        else:
            steps = [
                lambda a: write(harness, a, "notes.txt", 'one "1"\n\ttwo\n'),
                lambda a: Say(calls=[AGENTS[harness]]),
                lambda a: Say("It is copied."),
            ]
        return steps[min(asked.turn, len(steps) - 1)](asked)

    return policy


EXPECT = {"notes.txt": 'one "1"\n\ttwo\n', "copy.txt": 'one "1"\n\tthree\n'}


@pytest.mark.parametrize("harness", ["codex", "claude-code", "opencode", "qwen-code", "pi", "gemini-cli"])
def test_no_sample_more_than_the_history_needs(lab: Lab, harness: str) -> None:
    check(lab, harness, work(harness), samples=1)


@pytest.mark.parametrize("harness", AGENTS)
def test_a_sub_agent_is_one_sample_more(lab: Lab, harness: str) -> None:
    check(lab, harness, delegation(harness), samples=2)


def check(lab: Lab, harness: str, policy: Policy, *, samples: int) -> None:
    """``samples``: what the oracle must say."""
    spec = load_specs(Settings())[harness]
    assert spec.install is not None
    ensure_harness(harness, spec.install)
    result = lab.run(harness, oddly(policy), instruction="Write notes, and a copy.", expect=EXPECT)
    assert (result.reward, result.violations) == (1.0, []), result.explain()
    least: Found = minimum(result.askings(), [removal.pattern for removal in spec.normalise.remove])
    breaks = {reason: count for reason, count in result.drift.items() if reason != "first"}
    fallbacks = [reason for call in result.calls if (reason := (call.flags or {}).get("fallback"))]
    print(f"{harness}: {len(result.calls)} calls, {len(result.samples)} samples, at least {least.samples}")
    print(f"  breaks {breaks}, by the oracle {least.breaks}, fallbacks {fallbacks}")
    assert len(result.samples) == least.samples == samples, result.explain()
    assert sum(breaks.values()) == samples - 1 and not fallbacks, result.explain()
    assert {call.mode for call in result.calls} == {"splice"}
    assert result.trained_calls == sum(not call.label for call in result.calls)
