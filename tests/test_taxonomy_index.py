"""The taxonomy's list of cases: what happens between two calls of a harness, and where its right answer is tested.

``pytest -k case_17`` runs the tests of case 17. Three cases are decided where the list leaves it open. 12: an answer
that the harness took, rejected and asked for again is trained like any other; there is no option. 15: what was not
chosen among several answers is trained too, since it was delivered. 17: a cut-off answer is never adopted in part: it
is not trained, and what the harness made of it is context.
"""

import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

CASES = {
    1: "three appended tool turns are one sample, only completions trained",
    2: "one token split differently: two samples, the drifted one context, the sampled one trained once",
    3: "reasoning stripped at every turn: a sample per turn, every completion trained",
    4: "tool arguments in another order: as 2; spliced they stay one sample",
    5: "a nonce in the system prompt: one sample once a rule takes it out, else a root per call and a warning",
    6: "compaction: two samples of one rollout with one advantage",
    7: "the summary that compaction asks for is trained",
    8: "eight sub-agents at once: nine samples",
    9: "a sub-agent forks at a call: shared calls are trained once",
    10: "a fork within a message: context splits at the token",
    11: "a transport retry: what was not delivered is never trained nor continued",
    12: "asked again after a bad answer that was taken: both trained",
    13: "the last call asked twice: what is not known to be delivered is not trained, the attempt is",
    14: "two calls alike in prompt and completion: one trained, the latest is the parent",
    15: "n = 4, one continued: tokens shared in the tree, ownership apart",
    16: "an empty completion and its retry are no chain",
    17: "a stream that broke off, and a harness that goes on with its part",
    18: "an answer cut at its limit: the template's close is context",
    19: "a prefilled answer: the prefill is context",
    20: "an edited answer: a new segment, the edited text never trained",
    21: "answers that were never sampled are context everywhere",
    22: "a title call gives no sample and changes none",
    23: "the same placeholders, another picture: no merge",
    24: "a window of the last screenshots: a segment per call, the right pictures",
    25: "weights updated between calls and within one: one sample, versions per token",
    26: "ids lost by a stream: the call is not trainable, the attempt is not trained",
    27: "logprobs that are none: the call is not trainable, with its reason",
    28: "[1, 0, infra, infra]: advantages on two; [1, infra, infra, infra]: nothing",
    29: "equal rewards: dropped and counted; twelve samples weigh what one does",
    30: "longer than the limit: a suffix is cut; a prompt beyond it: dropped, the baseline unchanged",
    31: "two rollouts in one session: refused",
    32: "a crash between the tokens and the delivery: not delivered",
    33: "a call after the end: 409",
    34: "a required tool: constrained",
    35: "another model in mid-rollout: another forest",
    36: "another chat template between runs: refused",
    37: "a thousand turns: one node, no recursion",
    38: "fifty branches off a long prefix: compared once per call",
}


@cache
def by_number() -> dict[int, list[str]]:
    """Tests by the numbers in their names: ``test_case_17_…``, ``test_cases_6_7_and_8_…``."""
    found: dict[int, list[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        for name in re.findall(r"^\s*(?:async )?def (test_cases?_\w+)\(", path.read_text(), re.MULTILINE):
            numbers = re.match(r"test_cases?_((?:\d+_|and_)+)", name)
            for number in re.findall(r"\d+", numbers[1]) if numbers else ():
                found.setdefault(int(number), []).append(f"{path.stem}.{name}")
    return found


@pytest.mark.parametrize("number", CASES, ids=lambda number: f"case_{number}")
def test_every_case_has_its_test(number: int) -> None:
    assert by_number().get(number), f"no test is named after case {number}: {CASES[number]}"


def test_no_test_is_named_after_a_case_that_is_not_in_the_list() -> None:
    assert by_number().keys() <= CASES.keys()
